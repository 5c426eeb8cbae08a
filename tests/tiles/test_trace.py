"""Traces as values and as files, the recorder between carrier and policy, and the replayer's books."""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.tiles.grid import TileGrid
from strideweave.tiles.policy import LRU, KeepResident, ResidencyPlan, ResidencyPolicy, Streaming
from strideweave.tiles.s3fifo import S3FIFO
from strideweave.tiles.selection import TileSet
from strideweave.tiles.trace import Trace, TraceRequest
from strideweave.tiles.trace_recorder import TraceRecorder
from strideweave.tiles.trace_replay import ReplayReport, replay

GRID = TileGrid((4, 3), (2, 2))
HEADER = '{"format": "strideweave-trace", "version": 1, "grid_shape": [4, 3], "tile_shape": [2, 2], "tile_bytes": 16}'


def tiles(*numbers):
    return TileSet._from_ordinals(GRID, numbers)


def trace_of(*requests, purpose="projection"):
    return Trace((4, 3), (2, 2), 16, tuple([TraceRequest(purpose, tiles(*numbers)) for numbers in requests]))


class Scripted:
    """Answers with the plans that the test put in, one for each request."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def plan(self, required, purpose):
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


# --- Trace ---------------------------------------------------------------------------------------------


def test_a_trace_is_saved_as_lines_and_loaded_again(tmp_path):
    trace = Trace(
        (4, 3),
        (2, 2),
        16,
        (
            TraceRequest("projection", tiles(0, 1, 2, 5, 7, 8)),
            TraceRequest("scatter", TileSet()),
            TraceRequest("backward", TileSet([(3, 2)])),
        ),
    )
    path = tmp_path / "run.trace"
    trace.save(path)
    assert path.read_text("utf-8").splitlines() == [
        HEADER,
        '{"purpose": "projection", "tiles": [[0, 2], 5, [7, 8]]}',
        '{"purpose": "scatter", "tiles": []}',
        '{"purpose": "backward", "tiles": [11]}',
    ]
    assert Trace.load(path) == trace
    assert list(tmp_path.iterdir()) == [path]


@given(st.lists(st.tuples(st.sampled_from(["projection", "operation"]), st.sets(st.integers(0, 11)))))
def test_every_trace_survives_its_file(tmp_path_factory, requests):
    trace = Trace((4, 3), (2, 2), 16, tuple([TraceRequest(why, tiles(*which)) for why, which in requests]))
    path = tmp_path_factory.mktemp("traces") / "one"
    trace.save(path)
    assert Trace.load(str(path)) == trace


def test_numbers_of_numpy_are_numbers(tmp_path):
    extents = np.array([4, 3]), np.array([2, 2])
    trace = Trace(*extents, np.int64(16), [TraceRequest("scatter", tiles(1))])
    assert trace == trace_of([1], purpose="scatter")
    trace.save(tmp_path / "run.trace")
    assert Trace.load(tmp_path / "run.trace") == trace


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "run.trace"
    trace_of([0]).save(path)
    before = path.read_text("utf-8")

    def lines(self):
        yield "half"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trace, "_lines", lines)
    with pytest.raises(OSError, match="No space left"):
        trace_of([1]).save(path)
    assert path.read_text("utf-8") == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("run.trace")
    for start in (0, 1):
        trace_of([start]).save(link)  # first to a file that is not there yet
        assert link.is_symlink()
        assert Trace.load(tmp_path / "run.trace") == trace_of([start])

    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        trace_of([1]).save(pipe)
        assert pipe.is_fifo()
        assert os.read(reader, 1 << 16) == (tmp_path / "run.trace").read_bytes()
    finally:
        os.close(reader)

    with pytest.raises(IsADirectoryError, match=f"{tmp_path.name}'$"):
        trace_of([1]).save(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (((4, 3), (2,), 16), ValueError, "one extent each per axis"),
        (((4, 3), (2, 2), 0), ValueError, "at least one byte, got tile_bytes=0"),
        (((4, 3), (2, 2), 1.5), TypeError, "tile_bytes must be an integer, got 1.5"),
        (((4, 2.5), (2, 2), 16), TypeError, "2.5"),
        (((4, 3), (2, 2), 16, [TraceRequest("scatter", TileSet([(4, 0)]))]), ValueError, "outside the grid"),
        (((4, 3), (2, 2), 16, [TraceRequest("scatter", TileSet([(1,)]))]), ValueError, "rank"),
        (((4, 3), (2, 2), 16, "abc"), TypeError, "requests must be TraceRequests, found str"),
        (((4, 3), (2, 2), 16, [TileSet()]), TypeError, "requests must be TraceRequests, found TileSet"),
    ],
)
def test_what_is_no_trace_is_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        Trace(*arguments)


@pytest.mark.parametrize(
    ("purpose", "required", "error", "said"),
    [
        (None, TileSet(), TypeError, "purpose of a TraceRequest must be a str, found NoneType"),
        (b"scatter", TileSet(), TypeError, "purpose of a TraceRequest must be a str, found bytes"),
        ("", TileSet(), ValueError, "purpose of a TraceRequest must not be empty"),
        ("scatter", [(0, 0)], TypeError, "tiles of a TraceRequest must be a TileSet, found list"),
    ],
)
def test_a_request_that_no_file_could_keep_is_refused(purpose, required, error, said):
    with pytest.raises(error, match=said):
        TraceRequest(purpose, required)


REQUEST = '{"purpose": "projection", "tiles": [1]}'


@pytest.mark.parametrize(
    ("lines", "number", "said"),
    [
        ([], 1, "expected the header of a trace, found no JSON"),
        (["strideweave"], 1, "found no JSON"),
        (["[" * 100_000], 1, "found no JSON"),
        ([b"\xff\xfe"], 1, "found no JSON"),
        (["[]"], 1, r"expected the header of a trace, an object with format, version, .*, found \[\]"),
        ([REQUEST], 1, "expected the header"),
        ([HEADER.replace("-trace", "-other")], 1, "found 'strideweave-other' version 1"),
        (
            [HEADER.replace('"version": 1', '"version": 2')],
            1,
            "expected format 'strideweave-trace' version 1",
        ),
        ([HEADER.replace("[4, 3]", "4")], 1, "grid_shape must be a list of integers, found 4"),
        ([HEADER.replace("[4, 3]", "[4, 0]")], 1, "0"),
        ([HEADER.replace("[4, 3]", '[4, "3"]')], 1, "3"),
        ([HEADER.replace("[4, 3]", "[4]")], 1, "one extent each per axis"),
        ([HEADER.replace("16", "0")], 1, "tile_bytes must be a positive integer, found 0"),
        ([HEADER.replace("16", "true")], 1, "tile_bytes must be a positive integer, found True"),
        ([HEADER, REQUEST, REQUEST[:-4]], 3, "expected a request, found no JSON"),
        ([HEADER, "", REQUEST], 2, "expected a request, found no JSON"),
        ([HEADER, HEADER], 2, "expected a request, an object with purpose, tiles"),
        ([HEADER, '{"purpose": 1, "tiles": []}'], 2, "purpose must be a text, found 1"),
        ([HEADER, '{"purpose": "x", "tiles": 1}'], 2, "tiles must be a list, found 1"),
        ([HEADER, REQUEST, REQUEST.replace("1", "12")], 3, r"tile 12 is outside the grid \(4, 3\)"),
        ([HEADER, REQUEST.replace("1", "[0, 99999999999999999999]")], 2, "outside the grid"),
        ([HEADER, REQUEST.replace("1", "-1")], 2, r"expected a tile or a pair \[first, last\], found -1"),
        ([HEADER, REQUEST.replace("1", "true")], 2, "found True"),
        ([HEADER, REQUEST.replace("1", "1.0")], 2, "found 1.0"),
        ([HEADER, REQUEST.replace("1", "[3, 1]")], 2, r"found \[3, 1\]"),
        ([HEADER, REQUEST.replace("1", "[1, 2, 3]")], 2, r"found \[1, 2, 3\]"),
        ([HEADER, REQUEST.replace("1", "[1, 4], 4")], 2, "tiles must ascend, found 4 after tile 4"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, number, said):
    path = tmp_path / "run.trace"
    path.write_bytes(b"".join([line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines]))
    with pytest.raises(ValueError, match=rf"run\.trace, line {number}: .*{said}"):
        Trace.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.trace"):
        Trace.load(tmp_path / "nothing.trace")


# --- TraceRecorder -------------------------------------------------------------------------------------


def test_the_recorder_passes_on_and_records():
    policy, twin = LRU(max_tiles=2), LRU(max_tiles=2)
    recorder = TraceRecorder(policy)
    assert isinstance(recorder, ResidencyPolicy)
    assert recorder.policy is policy
    assert repr(recorder) == "TraceRecorder(LRU(max_tiles=2))"
    recorder.bind(GRID, 16)
    twin.bind(GRID, 16)
    asked = [(tiles(0, 1), "projection"), (tiles(1, 2), "scatter"), (tiles(5), "backward")]
    for required, purpose in asked:
        assert recorder.plan(required, purpose) == twin.plan(required, purpose)
    assert recorder.statistics() == twin.statistics()
    assert recorder.trace == Trace(
        (4, 3), (2, 2), 16, tuple([TraceRequest(purpose, required) for required, purpose in asked])
    )


def test_without_a_policy_it_promotes_what_is_required():
    recorder = TraceRecorder()
    recorder.bind(GRID, 16)
    assert recorder.plan(tiles(3, 4), "operation") == ResidencyPlan(promote=tiles(3, 4))
    assert recorder.statistics() is None
    assert repr(recorder) == "TraceRecorder()"
    assert recorder.trace == trace_of([3, 4], purpose="operation")


def test_what_the_policy_refuses_is_not_recorded():
    recorder = TraceRecorder(Scripted(KeyError("mine"), ResidencyPlan()))
    recorder.bind(GRID, 16)
    with pytest.raises(KeyError, match="mine"):
        recorder.plan(tiles(1), "projection")
    with pytest.raises(TypeError, match="required must be a TileSet, not list"):
        recorder.plan([(0, 0)], "projection")
    with pytest.raises(ValueError, match="outside the grid"):
        recorder.plan(TileSet([(9, 0)]), "projection")
    recorder.plan(tiles(2), "projection")
    assert recorder.trace == trace_of([2])


def test_a_recorder_needs_a_carrier_first(tmp_path):
    recorder = TraceRecorder(LRU(max_tiles=1), tmp_path / "run.trace")
    with pytest.raises(RuntimeError, match="give it to a tiled carrier first"):
        recorder.plan(tiles(0), "projection")
    with pytest.raises(RuntimeError, match="give it to a tiled carrier first"):
        recorder.save()
    with pytest.raises(RuntimeError, match="give it to a tiled carrier first"), recorder:
        pass
    with pytest.raises(ZeroDivisionError), recorder:
        raise ZeroDivisionError  # which matters more than that there is nothing to save
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_serves_one_carrier():
    policy = KeepResident()
    recorder = TraceRecorder(policy)
    recorder.bind(GRID, 16)
    recorder.bind(GRID, 16)  # the construction of a carrier failed, and another is made
    recorder.plan(tiles(0), "projection")
    with pytest.raises(ValueError, match="has recorded 1 requests of another carrier"):
        recorder.bind(GRID, 16)
    assert policy.statistics().resident == 1


def test_a_geometry_that_the_policy_refuses_is_not_taken_over():
    policy = KeepResident()
    policy.bind(GRID, 32)
    recorder = TraceRecorder(policy)
    with pytest.raises(ValueError, match="make one policy for each carrier"):
        recorder.bind(GRID, 16)
    with pytest.raises(RuntimeError, match="does not know the tiles yet"):
        _ = recorder.trace


@pytest.mark.parametrize("policy", [object(), LRU, "lru"])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(TypeError, match="policy must"):
        TraceRecorder(policy)
    with pytest.raises(TypeError, match="policy must"):
        replay(trace_of([0]), policy)


def test_the_trace_is_saved_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "run.trace"
    with TraceRecorder(path=path) as recorder:
        recorder.bind(GRID, 16)
        recorder.plan(tiles(1), "projection")
        assert not path.exists()
    assert Trace.load(path) == trace_of([1])
    with pytest.raises(ZeroDivisionError), recorder:
        recorder.plan(tiles(2), "projection")
        raise ZeroDivisionError
    assert Trace.load(path) == trace_of([1], [2])
    recorder.save(tmp_path / "other")
    assert Trace.load(tmp_path / "other") == recorder.trace


def test_where_to_save_has_to_be_said(tmp_path):
    with pytest.raises(ValueError, match="where to"):
        TraceRecorder().save()
    with TraceRecorder() as recorder:
        assert recorder.policy is None
    with pytest.raises(FileNotFoundError, match=r"the folder of .*run\.trace does not exist"):
        TraceRecorder(path=tmp_path / "missing" / "run.trace")


def test_the_recorder_counts_right_under_threads():
    recorder = TraceRecorder(LRU(max_tiles=5))
    recorder.bind(GRID, 16)
    go = threading.Barrier(4)

    def work(number):
        go.wait()
        for _ in range(200):
            recorder.plan(tiles(number, number + 4), "projection")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [request.tiles.coordinates[0][0] for request in recorder.trace.requests]
    assert [found.count(number) for number in range(4)] == [200] * 4


# --- replay --------------------------------------------------------------------------------------------


def test_the_books_of_a_replay():
    report = replay(trace_of([0, 1, 2], [0], [3, 4, 5, 6], [0]), LRU(max_tiles=3))
    assert report == ReplayReport(
        requests=4,
        required=9,
        hits=1,
        misses=8,
        streamed=1,
        extra=0,
        evictions=4,
        peak_resident=3,
        resident=3,
        bytes_read=8 * 16,
    )
    assert report.hit_rate == 1 / 9


@pytest.mark.parametrize("policy", [None, KeepResident()])
def test_what_keeps_everything_reads_each_tile_once(policy):
    report = replay(trace_of([0, 1], [1, 2], [0, 2]), policy)
    assert (report.hits, report.misses, report.evictions, report.peak_resident) == (3, 3, 0, 3)
    assert report.bytes_read == 3 * 16


def test_streaming_reads_everything_every_time():
    report = replay(trace_of([0, 1], [1, 2]), Streaming())
    assert (report.hits, report.misses, report.streamed, report.peak_resident) == (0, 4, 4, 0)


def test_a_trace_of_nothing():
    report = replay(trace_of([], []), S3FIFO(max_bytes=64))
    assert (report.requests, report.required, report.hit_rate, report.bytes_read) == (2, 0, 0.0, 0)


def test_a_plan_is_carried_out_as_a_carrier_would():
    """Unneeded tiles leave first, unrequired ones may come too, and what passes is gone afterwards."""
    policy = Scripted(
        ResidencyPlan(promote=tiles(1, 7)),  # 0 is required and not mentioned: promoted, and stays
        ResidencyPlan(promote=tiles(3), retain=tiles(7), evict=tiles(0, 2)),
        ResidencyPlan(evict=tiles(1, 9)),
    )
    report = replay(trace_of([0, 1], [2, 3], [1, 7]), policy)
    assert report == ReplayReport(
        requests=3,
        required=6,
        hits=2,
        misses=4,
        streamed=1,
        extra=1,
        evictions=2,
        peak_resident=3,
        resident=2,
        bytes_read=5 * 16,
    )


def test_a_resident_tile_that_passes_is_there_while_others_come():
    policy = Scripted(ResidencyPlan(), ResidencyPlan(promote=tiles(2), evict=tiles(1)))
    report = replay(trace_of([1], [1, 2]), policy)
    assert (report.hits, report.evictions, report.peak_resident, report.resident) == (1, 1, 2, 1)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (None, TypeError, "a policy returns a ResidencyPlan"),
        (ResidencyPlan(evict=TileSet([(9, 0)])), ValueError, "outside the grid"),
        (KeyError("mine"), KeyError, "mine"),
    ],
)
def test_a_wrong_plan_is_an_error_that_names_the_request(answer, error, said):
    with pytest.raises(error, match=said) as caught:
        replay(trace_of([0], [1, 2], [3]), Scripted(ResidencyPlan(), answer))
    assert caught.value.__notes__ == ["request 2 of the trace, projection of 2 tiles"]


@pytest.mark.parametrize("trace", [None, "run.trace", [], Trace])
def test_only_a_trace_is_replayed(trace):
    with pytest.raises(TypeError, match=r"trace must be a Trace, found \w+; Trace.load"):
        replay(trace, LRU(max_tiles=2))


def test_a_policy_of_other_tiles_is_refused():
    policy = LRU(max_tiles=2)
    policy.bind(TileGrid((5,), (4,)), 16)
    with pytest.raises(ValueError, match="make one policy for each carrier"):
        replay(trace_of([0]), policy)


@given(
    st.lists(st.lists(st.integers(0, 11), unique=True, max_size=8), max_size=20),
    st.integers(0, 8),
    st.sampled_from([LRU, S3FIFO]),
)
def test_a_replay_agrees_with_what_the_policy_believes(requests, size, kind):
    policy = kind(max_tiles=size)
    report, counted = replay(trace_of(*requests), policy), policy.statistics()
    assert (report.hits, report.misses, report.streamed) == (counted.hits, counted.misses, counted.streamed)
    assert (report.evictions, report.resident) == (counted.evictions, counted.resident)
    assert report.peak_resident <= size
    assert report.extra == 0


def test_the_header_is_what_the_documentation_of_the_format_says():
    assert list(json.loads(HEADER)) == ["format", "version", "grid_shape", "tile_shape", "tile_bytes"]
