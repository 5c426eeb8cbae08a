"""The bench still runs, checks what it times, and leaves what it says; nothing here is about speed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the repository, not of the wheel
try:
    from benchmarks import figures, options, report, targets
    from benchmarks.dataset import Dataset, cached_share, drop_cache
    from benchmarks.harness import order
    from benchmarks.method import Method, OverlappingMethod, WrongResultError
    from benchmarks.peers import TWO_UNDER_WAY
    from benchmarks.processes import PeerError, PeerProcess
    from benchmarks.task import Task
finally:
    sys.path.remove(str(ROOT))

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="drops pages from Linux's page cache")

TASK = Task("hot", "hot", 4096, 2, 8, folder="", rounds=2, budget=1.0)


@pytest.mark.slow
@on_linux
def test_a_smoke_run_leaves_every_sample_and_a_page(disk_path: Path):
    """Our own peer and NumPy, in turns and verified; a peer that is missing is named."""
    pytest.importorskip("xxhash")
    asked = ["hot", "cold", "write", "clients", "call", "grid", "memory", "files"]
    output = disk_path / "report"
    command = [sys.executable, "-W", "error", "-m", "benchmarks", "--quick", "--output", str(output)]
    command += ["--peers", "fio", "numpy", "memmap", "strideweave", "--cases", *asked]
    environment = {**os.environ, "PATH": str(disk_path)}  # where no fio is
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr

    run = json.loads((output / "samples.json").read_text("utf-8"))
    assert run["options"]["repetitions"] == 2
    assert "fio is not on the path" in run["skipped"]["fio"]
    assert run["peers"]["strideweave"]["engine"] in {"uring", "threads", "aiofiles"}
    assert run["peers"]["strideweave"]["reason"]
    assert {"processor", "processors", "system", "file system", "python"} <= run["machine"].keys()

    by_case = {result["case"]: result for result in run["results"]}
    assert list(by_case) == [*asked[:-1], "open_warm", "open_cold", "save", "first"]
    assert {row["peer"] for row in by_case["hot"]["rows"]} == {"strideweave", "numpy"}
    for result in run["results"]:
        assert result["failures"] == []
        for row in result["rows"]:
            assert len(row["turns"]) == 2
            assert all(seconds > 0 for turn in row["turns"] for seconds in turn["seconds"])
    assert all(turn["late_ms"] for row in by_case["clients"]["rows"] for turn in row["turns"])
    assert all("cached" in row for row in by_case["cold"]["rows"])

    first = {row["peer"]: row["turns"] for row in by_case["first"]["rows"]}
    assert by_case["first"]["count"] * by_case["first"]["spread"] * by_case["first"]["tile_bytes"] == 10 << 30
    for turn in first["strideweave"]:
        assert turn["projected_kib"] == [1024]
        assert turn["device_kib"][0] < 16 << 10  # of ten gibibytes
    assert {row["peer"] for row in by_case["save"]["rows"]} == {"strideweave", "numpy"}

    page = (output / "report.md").read_text("utf-8")
    assert page == done.stdout.removesuffix("\n")
    assert "A smoke run" in page
    for result in run["results"]:
        for row in result["rows"]:
            assert f"| {row['peer']}: {row['name']} | {row['destination']} |" in page
    assert "hot projection to a fresh tensor beside a[idx]" in page
    assert not list(output.glob("tiles-*/"))  # the files that were measured are gone


def test_everybody_starts_once_and_neighbours_change():
    turns = [order(4, turn) for turn in range(4)]
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in turns)
    assert turns == [[0, 1, 2, 3], [0, 3, 2, 1], [2, 3, 0, 1], [2, 1, 0, 3]]
    assert order(0, 3) == []


@pytest.mark.parametrize("kind", ["a bit", "a value less", "nothing wrong"])
def test_a_result_is_compared_bit_for_bit(kind: str):
    expected = np.array([[np.nan, -0.0], [1.0, 2.0]], np.float32)
    found = expected.copy()
    if kind == "a bit":
        found.view(np.uint32)[0, 1] ^= 1 << 31  # 0.0 instead of -0.0, which NumPy takes for equal
    if kind == "a value less":
        found = found.ravel()[:3]
    method = Method("copy", "fresh", lambda _: found)
    if kind == "nothing wrong":
        method.verify(np.arange(2), expected)
        return
    with pytest.raises(WrongResultError):
        method.verify(np.arange(2), expected)


def overlapping(order: list[str], rows: np.ndarray) -> OverlappingMethod:
    """Notes what is begun and what is waited for; the results are rows of an array."""

    def begin(picks, number):
        order.append(f"begin {number}")

        def wait():
            order.append(f"wait {number}")
            return rows[picks]

        return wait

    return OverlappingMethod("rows", "given", lambda picks: begin(picks, 0)(), begin=begin)


def test_requests_overlap_and_the_figure_is_that_of_one():
    order = []
    method = overlapping(order, np.arange(8, dtype=np.float32).reshape(4, 2))
    (seconds,) = method.sample([np.arange(2)] * 3, budget=60)["seconds"]
    assert order == ["begin 0", "begin 1", "wait 0", "begin 0", "wait 1", "wait 0"]
    assert seconds > 0
    assert len(method.sample([np.arange(2)], budget=60)["seconds"]) == 1


def test_each_of_the_requests_that_overlap_is_verified():
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    method = overlapping([], rows)
    picks = np.array([2, 0, 3])
    method.verify(picks, rows[picks])
    begin = method.begin

    def wrong_second(picks, number):
        wait = begin(picks, number)
        return lambda: wait() + number

    method.begin = wrong_second
    with pytest.raises(WrongResultError, match="request 1 of 2"):
        method.verify(picks, rows[picks])


def test_one_cold_request_at_a_time_is_not_judged_by_two():
    run = a_run(16 << 10)
    (result,) = run["results"]
    result.update(group="cold", case="cold")
    result["rows"] = [
        row("strideweave", "BlockDevice, streaming", "given", 2.0, 2.0),
        row("strideweave", f"BlockDevice, streaming, {TWO_UNDER_WAY}", "given", 1.0, 1.0),
        row("fio", "io_uring randread, depth 64", "given", 1.0, 1.0),
    ]
    one, two = targets.verdicts(run["results"])
    assert (one.found.median, one.is_met, two.found.median, two.is_met) == (0.5, False, 1.0, True)
    assert TWO_UNDER_WAY in two.what
    assert TWO_UNDER_WAY in two.ours


def test_every_process_gets_the_same_tiles_and_every_round_others():
    again = Task.from_json(TASK.to_json())
    first, second = (list(task.requests(3)) for task in (TASK, again))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(first) == TASK.rounds
    whole = replace(TASK, tiles=8)
    assert sorted(whole.picks(0)) == list(range(8))
    assert not np.array_equal(whole.picks(0), whole.picks(1))


@pytest.mark.parametrize("spread", [1, 5])
def test_the_data_set_is_read_back(tmp_path: Path, spread: int):
    data = Dataset(replace(TASK, folder=str(tmp_path), spread=spread))
    data.create()
    assert data.offset % 4096 == 0
    assert data.path.stat().st_size == data.offset + data.nbytes
    rows = data.load()
    assert np.array_equal(data.read([5, 0]).view(np.uint32), rows[[5, 0]].view(np.uint32))
    assert len({row.tobytes() for row in rows}) == TASK.count
    changed = data.changed(np.array([5, 0]))
    assert changed[:, 0].tolist() == [6.0, 1.0]
    assert np.array_equal(changed[:, 1:].view(np.uint32), rows[[5, 0], 1:].view(np.uint32))


@on_linux
def test_what_is_dropped_is_not_cached(disk_path: Path):
    data = Dataset(replace(TASK, folder=str(disk_path), count=256))
    data.create()
    data.load()
    assert cached_share([data.path]) > 0.9
    drop_cache([data.path])
    assert cached_share([data.path]) < 0.1


def test_a_peer_that_fails_says_why():
    with PeerProcess("numpy") as process:
        assert process.ask("hello") == {"obstacle": None}
        with pytest.raises(PeerError, match="no task is open"):
            process.ask("run", method=0, turn=0)
        assert process.ask("hello") == {"obstacle": None}  # and goes on
    with PeerProcess("nobody") as process, pytest.raises(PeerError, match="ended with 1: KeyError"):
        process.ask("hello")


def row(peer: str, name: str, destination: str, *seconds: float) -> figures.Row:
    turns = [{"seconds": [value]} for value in seconds]
    return {"peer": peer, "name": name, "destination": destination, "reference": False, "turns": turns}


def a_run(*sizes: int) -> dict:
    rows = [row("strideweave", "project", "fresh", 1.0, 1.0), row("numpy", "a[idx]", "fresh", 1.5, 3.0)]
    results = [
        {
            "group": "hot",
            "case": "hot",
            "tile_bytes": size,
            "tiles": 2,
            "count": 8,
            "spread": 1,
            "brief": False,
            "payload": 2 * size,
            "title": f"hot, {size}",
            "rows": rows,
            "failures": [{"peer": "zarr", "name": "open", "reason": "it did not open"}],
        }
        for size in sizes
    ]
    return {
        "machine": {"processors": "2"},
        "options": {"repetitions": 9, "quick": False},
        "peers": {"numpy": {"numpy": "2"}},
        "skipped": {"torch": "torch is not installed"},
        "results": results,
    }


def test_ratios_are_formed_within_turns():
    ours, theirs = row("strideweave", "x", "", 1.0, 2.0, 4.0), row("numpy", "y", "", 2.0, 4.0, 2.0)
    assert figures.speed(ours, theirs).median == 2.0
    assert figures.seconds(ours) == (1.5, 2.0, 3.0)
    several = row("numpy", "z", "")
    several["turns"] = [{"seconds": [1.0, 3.0], "late_ms": [1.0, 3.0]}]
    assert figures.turns(several) == [2.0]
    assert figures.turns(several, "late_ms") == [3.0]


def test_a_target_depends_on_the_size_of_a_tile():
    small, large = targets.verdicts(a_run(16 << 10, 4 << 20)["results"])
    assert small.found.median == large.found.median == 2.25
    assert (small.must, small.is_met) == (1.0, True)
    assert (large.must, large.is_met) == (3.0, False)


def test_a_grid_a_thousand_times_as_large_must_cost_the_same():
    def grid(title: str, seconds: float) -> dict:
        rows = [
            row("strideweave", name, "", seconds, seconds) for name in ("construct", "select", "evict, dirty")
        ]
        return {"group": "grid", "case": "grid", "tile_bytes": 4096, "title": title, "rows": rows}

    assert targets.verdicts([grid("small", 1.0)]) == []
    judged = targets.verdicts([grid("small", 1.0), grid("middling", 9.0), grid("large", 1.25)])
    assert [verdict.ours for verdict in judged] == ["strideweave: select", "strideweave: evict, dirty"]
    assert all(
        (v.found.median, v.title, v.reference, v.is_met) == (1.25, "large", "small", True) for v in judged
    )
    assert not any(v.is_met for v in targets.verdicts([grid("small", 1.0), grid("large", 2.0)]))


def test_the_report_names_what_is_missing_and_draws_what_has_two_places(tmp_path: Path):
    page = report.write(a_run(16 << 10, 4 << 20), tmp_path)
    assert "- torch: torch is not installed" in page
    assert "- zarr: open is left out: it did not open" in page
    assert "A smoke run" not in page
    drawn = tmp_path / "hot.svg"
    if importlib.util.find_spec("matplotlib") is None:
        assert "matplotlib is not installed" in page
    else:
        assert "![hot.svg](hot.svg)" in page
        assert "<svg" in drawn.read_text("utf-8")


def test_options_are_read_and_refused(capsys: pytest.CaptureFixture[str]):
    found = options.parse(["--cases", "cold", "hot", "--sizes", "4M", "16K", "--peers", "zarr"])
    assert (found.groups, found.sizes, found.peers) == (("hot", "cold"), (16 << 10, 4 << 20), ("zarr",))
    for wrong in (["--sizes", "5000"], ["--cases", "lukewarm"], ["--repetitions", "0"]):
        with pytest.raises(SystemExit):
            options.parse(wrong)
        assert "usage" in capsys.readouterr().err
