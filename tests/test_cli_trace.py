"""``strideweave trace``: policies scored side by side on a recorded run."""

from __future__ import annotations

import json

import pytest

typer = pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner  # noqa: E402

from strideweave import (  # noqa: E402
    LRU,
    S3FIFO,
    KeepResident,
    Streaming,
    TileSet,
    Trace,
    TraceRequest,
    cli,
    replay,
)

HOT = [0, 1, 2]


def trace(*options):
    return CliRunner().invoke(cli.app, ["trace", *map(str, options)])


@pytest.fixture
def recorded(tmp_path):
    """A hot set, a scan of everything, and the hot set again."""
    requests = [HOT] * 4 + [[tile] for tile in range(40)] + [HOT]
    path = tmp_path / "run.trace"
    Trace(
        (40,),
        (256,),
        1024,
        [TraceRequest("projection", TileSet([(tile,) for tile in some])) for some in requests],
    ).save(path)
    return path


def rows(result):
    return [line.split() for line in result.stdout.splitlines()[4:]]


def test_all_policies_are_scored_by_default(recorded):
    result = trace(recorded, "--max-tiles", 4)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:3] == [
        "trace      45 requests for 55 tiles, of 40 tiles with 1,024 bytes",
        "bound      4 tiles for lru and s3fifo",
        "",
    ]
    assert [row[0] for row in rows(result)] == ["lru", "s3fifo", "keep", "streaming"]
    loaded = Trace.load(recorded)
    policies = (LRU(max_tiles=4), S3FIFO(max_tiles=4), KeepResident(), Streaming())
    for row, policy in zip(rows(result), policies, strict=True):
        report = replay(loaded, policy)
        assert row[1:] == [
            f"{report.hit_rate:.2%}",
            *map(str, (report.hits, report.misses, report.streamed, report.evictions, report.peak_resident)),
            f"{report.bytes_read / (1 << 20):.2f}",
        ]
    assert int(rows(result)[1][2]) == int(rows(result)[0][2]) + 3  # the scan flushed the LRU
    assert result.stderr == ""


def test_chosen_policies_in_the_order_of_the_choice(recorded):
    result = trace(
        recorded, "--policy", "s3fifo", "--policy", "lru", "--policy", "lru", "--max-bytes", "4.5KiB"
    )
    assert result.exit_code == 0, result.output
    assert [row[0] for row in rows(result)] == ["s3fifo", "lru"]
    assert "bound      4 tiles" in result.stdout


def test_the_bound_has_a_default(recorded):
    assert "bound      8,192 tiles for lru and s3fifo" in trace(recorded).stdout


def test_json_is_the_scores_and_nothing_else(recorded):
    result = trace(recorded, "--max-tiles", 4, "--json", "--policy", "lru")
    found = json.loads(result.stdout)
    report = replay(Trace.load(recorded), LRU(max_tiles=4))
    assert (found["tiles"], found["tile_bytes"], found["max_tiles"]) == (40, 1024, 4)
    assert found["policies"].keys() == {"lru"}
    scored = found["policies"]["lru"]
    assert scored["hit_rate"] == report.hit_rate
    assert (scored["hits"], scored["misses"], scored["bytes_read"]) == (
        report.hits,
        report.misses,
        report.bytes_read,
    )
    assert result.stderr == ""


def test_a_file_that_is_no_trace_is_said_in_one_line(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello\n", "utf-8")
    result = trace(path)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"strideweave trace: {path}, line 1: expected the header of a trace")
    assert trace(tmp_path / "missing").exit_code == 2


@pytest.mark.parametrize(
    "options",
    [
        ("--max-tiles", "1", "--max-bytes", "1MiB"),
        ("--max-tiles", "-1"),
        ("--max-bytes", "lots"),
        ("--policy", "fifo"),
        ("--what",),
    ],
)
def test_arguments_that_make_no_sense(recorded, options):
    result = trace(recorded, *options)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_a_grid_beyond_all_memory_is_said_in_one_line(tmp_path):
    path = tmp_path / "vast.trace"
    Trace((2**60,), (1,), 4, [TraceRequest("projection", TileSet([(1,)]))]).save(path)
    result = trace(path)
    assert result.exit_code == 2
    assert result.stderr.startswith("strideweave trace: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_trace_to_score_is_needed():
    assert trace().exit_code == 2
