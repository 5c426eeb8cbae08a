"""What every engine promises: the same tests for all of them, on a real file system."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strideweave.io.engine import ENGINES, Engine, EngineStatistics, make_engine
from strideweave.io.files import ALIGNMENT, OpenFile
from strideweave.io.positioned import FileSpan, ShortFileError, SpanBatch, SpanBlock
from strideweave.io.uring import why_unavailable
from waiting import until

MIB = 1 << 20
CONTENT = np.random.default_rng(11).integers(0, 256, 8 * MIB, dtype=np.uint8)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> OpenFile:
    path = tmp_path_factory.mktemp("engine") / "big.bin"
    path.write_bytes(CONTENT.tobytes())
    return OpenFile.open(path)


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "uring" and (obstacle := why_unavailable()):
        pytest.skip(obstacle)
    engine = make_engine(request.param)
    assert engine.name == request.param
    yield engine
    engine.close()


def spans_of(file: OpenFile, ranges: list[tuple[int, int]]) -> list[FileSpan]:
    return [FileSpan(file, start, np.zeros(stop - start, np.uint8)) for start, stop in ranges]


def tiles_of(file: OpenFile, order: list[int], nbytes: int) -> list[FileSpan]:
    return spans_of(file, [(k * nbytes, (k + 1) * nbytes) for k in order])


@pytest.mark.parametrize(
    ("order", "nbytes"),
    [
        ([0], 10),
        ([5, 1, 3], 4096),
        (list(range(512)), 16384),
        (list(range(511, -1, -1)), 16384),
        ([1, 0], 4 * MIB),
        (list(range(2048)), 512),
    ],
)
def test_a_batch_of_reads_fills_every_buffer(
    big: OpenFile, engine: Engine, order: list[int], nbytes: int
) -> None:
    spans = tiles_of(big, order, nbytes)
    asyncio.run(engine.read(spans))
    for k, span in zip(order, spans, strict=True):
        assert np.array_equal(span.buffer, CONTENT[k * nbytes : (k + 1) * nbytes])
    assert engine.statistics() == EngineStatistics(1, len(order), nbytes * len(order), 0, 0, 0)


def is_cached(file: OpenFile, start: int) -> bool:
    """Whether the page at an offset can be read without waiting; to ask does not bring it in."""
    try:
        return os.preadv(file.fd, [bytearray(4096)], start, os.RWF_NOWAIT) == 4096
    except BlockingIOError:
        return False


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="cannot tell what is in the page cache")
def test_nothing_is_read_behind_large_spans(disk_path: Path, engine: Engine) -> None:
    path = disk_path / "large.bin"
    path.write_bytes(CONTENT.tobytes() * 4)
    file, other = OpenFile.open(path), OpenFile.open(path)
    os.fsync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(other, 0):
        pytest.skip("this file system keeps what it was told to drop")
    spans = spans_of(file, [(start * MIB, (start + 2) * MIB) for start in (17, 4, 26)])
    asyncio.run(engine.read(spans))
    for span in spans:
        start = span.offset % len(CONTENT)
        assert np.array_equal(span.buffer, np.resize(np.roll(CONTENT, -start), 2 * MIB))
    behind = [span.offset + 2 * MIB for span in spans]
    assert [is_cached(other, start - 4096) for start in behind] == [True] * 3
    assert [is_cached(other, start) for start in behind] == [False] * 3


def test_a_batch_of_writes_lands_in_several_files(tmp_path: Path, engine: Engine) -> None:
    files = [OpenFile.create(tmp_path / name) for name in "ab"]
    starts = range(0, 8 * MIB, MIB)
    spans = [FileSpan(files[k % 2], start, CONTENT[start : start + MIB]) for k, start in enumerate(starts)]
    asyncio.run(engine.write(spans))
    for parity, file in enumerate(files):
        back = np.fromfile(file.path, np.uint8)
        for k, start in enumerate(starts):
            if k % 2 == parity:
                assert np.array_equal(back[start : start + MIB], CONTENT[start : start + MIB])
    assert engine.statistics() == EngineStatistics(1, 8, 0, 8 * MIB, 0, 0)


def test_an_empty_batch_does_nothing(big: OpenFile, engine: Engine) -> None:
    asyncio.run(engine.read([]))
    asyncio.run(engine.write(spans_of(big, [(0, 0)])))
    assert engine.statistics() == EngineStatistics()


def test_the_first_error_of_a_batch_is_raised_bare_with_a_note_on_the_others(
    tmp_path: Path, engine: Engine
) -> None:
    file = OpenFile.create(tmp_path / "short", size=3 * MIB)
    with pytest.raises(ShortFileError) as caught:
        asyncio.run(engine.read(tiles_of(file, list(range(8)), MIB)))
    assert caught.value.path == file.path
    assert caught.value.offset >= 3 * MIB
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) <= 8
    assert all("ShortFileError" in note for note in notes)
    statistics = engine.statistics()
    assert (statistics.errors, statistics.bytes_read, statistics.bytes_in_flight) == (1, 0, 0)


def test_a_failed_engine_goes_on_working(big: OpenFile, tmp_path: Path, engine: Engine) -> None:
    short = OpenFile.create(tmp_path / "short", size=1)
    with pytest.raises(ShortFileError):
        asyncio.run(engine.read(spans_of(short, [(0, 2)])))
    spans = spans_of(big, [(3, 9)])
    asyncio.run(engine.read(spans))
    assert np.array_equal(spans[0].buffer, CONTENT[3:9])


def test_a_full_disk_reaches_the_awaiting_task_with_its_path(engine: Engine) -> None:
    file = OpenFile.open("/dev/full", writable=True, any_kind=True)
    with pytest.raises(OSError, match="No space left") as caught:
        asyncio.run(engine.write([FileSpan(file, 0, CONTENT[:4096])]))
    assert caught.value.filename == "/dev/full"
    assert engine.statistics().errors == 1


def test_concurrent_batches_do_not_mix(big: OpenFile, engine: Engine) -> None:
    batches = [tiles_of(big, [k, k + 64, k + 128], 16384) for k in range(64)]

    async def main() -> None:
        await asyncio.gather(*(engine.read(batch) for batch in batches))

    asyncio.run(main())
    for batch in batches:
        for span in batch:
            assert np.array_equal(span.buffer, CONTENT[span.offset : span.offset + 16384])
    assert engine.statistics() == EngineStatistics(64, 192, 192 * 16384, 0, 0, 0)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_buffers_are_let_go_without_the_cycle_collector(
    big: OpenFile, engine: Engine, monkeypatch: pytest.MonkeyPatch, no_collector: None, how: str, cached: bool
) -> None:
    if not cached and engine.name == "uring":
        monkeypatch.setattr(engine, "_read_cached", lambda spans: 0)  # so that it goes to the ring
    memories: list[weakref.ref[object]] = []

    async def main() -> None:
        memory = np.zeros(4 * MIB, np.uint8)
        memories.append(weakref.ref(memory))
        start = 5 * MIB if how == "failed" else 4 * MIB
        task = asyncio.ensure_future(engine.read([FileSpan(big, start, memory)]))
        del memory
        await asyncio.sleep(0)
        if how == "cancelled":
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() if how == "cancelled" else isinstance(task.exception(), ShortFileError)

    asyncio.run(main())
    until(lambda: memories[0]() is None)  # the worker lets go a moment after it has reported


def test_a_closed_engine_refuses_batches(big: OpenFile, engine: Engine) -> None:
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(engine.read(tiles_of(big, list(range(512)), 16384)))
    assert engine.statistics().bytes_in_flight == 0


def test_files_count_what_was_moved(big: OpenFile, tmp_path: Path, engine: Engine) -> None:
    before = big.statistics()
    asyncio.run(engine.read(tiles_of(big, list(range(0, 512, 2)), 8192)))
    after = big.statistics()
    assert after.bytes_read - before.bytes_read == 256 * 8192
    assert after.reads > before.reads
    file = OpenFile.create(tmp_path / "new")
    asyncio.run(engine.write([FileSpan(file, 4096, CONTENT[: 2 * MIB])]))
    assert file.statistics().bytes_written == 2 * MIB


def test_spans_that_follow_each_other_anywhere_are_read_right(big: OpenFile, engine: Engine) -> None:
    memory = np.zeros(8 * MIB, np.uint8)
    cuts = [0, 1, 5, 4096, 4097, MIB, 3 * MIB + 7, 8 * MIB]
    spans = [FileSpan(big, start, memory[start:stop]) for start, stop in itertools.pairwise(cuts)]
    asyncio.run(engine.read(spans))
    assert np.array_equal(memory, CONTENT)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_batch_moves_exactly_its_bytes(big: OpenFile, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 200_000), max_size=12))
    starts = [data.draw(st.integers(0, 8 * MIB - size)) for size in sizes]
    for name in sorted(ENGINES):
        if name == "uring" and why_unavailable():
            continue
        engine = make_engine(name)
        spans = [
            FileSpan(big, start, np.zeros(size, np.uint8)) for start, size in zip(starts, sizes, strict=True)
        ]
        asyncio.run(engine.read(spans))
        engine.close()
        for span in spans:
            assert np.array_equal(span.buffer, CONTENT[span.offset : span.offset + span.buffer.nbytes])


def test_a_closed_file_is_refused_before_anything_moves(
    big: OpenFile, tmp_path: Path, engine: Engine
) -> None:
    file = OpenFile.create(tmp_path / "gone", size=MIB)
    file.close()
    spans = [*tiles_of(big, [0], MIB), *tiles_of(file, [0], MIB)]
    with pytest.raises(ValueError, match="closed"):
        asyncio.run(engine.read(spans))
    assert engine.statistics().bytes_in_flight == 0


def test_a_file_that_may_not_be_written_is_refused(big: OpenFile, engine: Engine) -> None:
    with pytest.raises(PermissionError):
        asyncio.run(engine.write([FileSpan(big, 0, CONTENT[:10])]))
    assert np.array_equal(np.fromfile(big.path, np.uint8), CONTENT)


def test_a_file_may_be_closed_while_it_is_read(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "copy"
    path.write_bytes(CONTENT.tobytes())
    file = OpenFile.open(path)
    spans = tiles_of(file, list(range(512)), 16384)

    async def main() -> None:
        task = asyncio.ensure_future(engine.read(spans))
        await asyncio.sleep(0)
        file.close()
        await task

    try:
        asyncio.run(main())
    except ValueError as error:  # an engine may refuse what it had not begun
        assert "closed" in str(error)
    else:
        assert np.array_equal(np.concatenate([span.buffer for span in spans]), CONTENT)
    assert engine.statistics().bytes_in_flight == 0


@pytest.mark.parametrize("how", ["task.cancel", "anyio scope"])
def test_a_cancelled_read_ends_with_its_buffers_at_rest(engine: Engine, how: str) -> None:
    """The read hangs in a pipe, so that it is under way for certain; what is written then still arrives."""
    if engine.name != "uring":
        pytest.skip("a pipe takes no positioned reads; the threads have tests of their own")
    read_end, write_end = os.pipe()
    file = OpenFile("a pipe", read_end, writable=False)
    span = FileSpan(file, 0, np.zeros(8, np.uint8))
    engine._read_cached = lambda spans: 0  # type: ignore[attr-defined]

    async def main() -> None:
        scope = anyio.CancelScope()

        async def reading() -> None:
            with scope:
                await engine.read([span])

        task = asyncio.ensure_future(reading())
        for _ in range(3):
            await asyncio.sleep(0)
            (scope.cancel if how == "anyio scope" else task.cancel)()
        assert not task.done()
        assert engine.statistics().bytes_in_flight == 8
        os.write(write_end, b"abcd")
        (batch,) = engine._batches.values()  # type: ignore[attr-defined]
        while batch._lengths[0] == 8:  # noqa: ASYNC110 - until the short read has come back, and goes on
            await asyncio.sleep(0)
        assert not task.done()
        os.write(write_end, b"efgh")
        await asyncio.wait([task])
        assert task.cancelled() == (how == "task.cancel")

    asyncio.run(main())
    os.close(write_end)
    assert span.buffer.tobytes() == b"abcdefgh"
    assert engine.statistics().bytes_in_flight == 0


def test_several_loops_in_several_threads_have_engines_of_their_own(big: OpenFile) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            engine = make_engine(name)
            for _ in range(20):
                spans = tiles_of(big, list(range(64)), 16384)
                asyncio.run(engine.read(spans))
                assert np.array_equal(np.concatenate([span.buffer for span in spans]), CONTENT[:MIB])
            engine.close()
        except BaseException as error:
            failures.append(error)

    names = [name for name in ENGINES if name != "uring" or not why_unavailable()] * 2
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# Batches in blocks


@pytest.mark.parametrize(("count", "nbytes"), [(3, 100), (500, 4096), (1, 5 * MIB), (0, 4096), (4, 0)])
def test_a_batch_in_blocks_moves_what_its_spans_say(
    big: OpenFile, tmp_path: Path, engine: Engine, count: int, nbytes: int
) -> None:
    rng = np.random.default_rng(count)
    offsets = rng.integers(0, 8 * MIB - max(nbytes, 1), count)
    memory = np.zeros(count * nbytes + 10, np.uint8)
    starts = 5 + rng.permutation(count) * nbytes
    other = np.zeros(10, np.uint8)
    blocks = [
        SpanBlock(big, offsets, memory, starts, nbytes),
        SpanBlock(big, np.array([7, 3]), other, np.array([0, 5]), 5),
    ]
    batch = SpanBatch(blocks)
    assert (len(batch), batch.total) == (count + 2, count * nbytes + 10)
    asyncio.run(engine.read(batch))
    for offset, start in zip(offsets.tolist(), starts.tolist(), strict=True):
        assert np.array_equal(memory[start : start + nbytes], CONTENT[offset : offset + nbytes])
    assert np.array_equal(other, np.concatenate([CONTENT[7:12], CONTENT[3:8]]))
    assert not memory[:5].any()
    assert not memory[-5:].any()
    for span, offset in zip(batch, offsets.tolist(), strict=False):
        assert (span.file, span.offset, span.buffer.nbytes) == (big, offset, nbytes)

    file = OpenFile.create(tmp_path / "out", size=len(memory))
    write = SpanBatch([SpanBlock(file, starts, memory, starts, nbytes)])
    asyncio.run(engine.write(write))
    memory[:5] = memory[-5:] = 0
    assert np.array_equal(np.fromfile(file.path, np.uint8), memory)


# Past the page cache


def aligned(nbytes: int, shift: int = 0) -> np.ndarray:
    memory = np.zeros(nbytes + 2 * ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT + shift
    return memory[start : start + nbytes]


@pytest.fixture
def direct(big: OpenFile) -> OpenFile:
    file = OpenFile.open(big.path, direct=True)
    if file.direct_obstacle:
        pytest.skip(file.direct_obstacle)
    return file


@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, 4096), (8192, 3 * MIB), (4097, 4096), (0, 100), (4096, 5000)]
)
def test_what_is_aligned_is_read_past_the_page_cache_and_the_rest_through_it(
    direct: OpenFile, engine: Engine, start: int, nbytes: int, shift: int
) -> None:
    span = FileSpan(direct, start, aligned(nbytes, shift))
    asyncio.run(engine.read([span, FileSpan(direct, 0, aligned(8192))]))
    assert np.array_equal(span.buffer, CONTENT[start : start + nbytes])


def test_a_direct_file_that_ends_inside_a_block_is_read_to_its_end(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "odd"
    path.write_bytes(CONTENT[:10_000].tobytes())
    file = OpenFile.open(path, direct=True)
    span = FileSpan(file, 0, aligned(10_000))
    asyncio.run(engine.read([span]))
    assert np.array_equal(span.buffer, CONTENT[:10_000])
    with pytest.raises(ShortFileError) as caught:
        asyncio.run(engine.read([FileSpan(file, 8192, aligned(4096))]))
    assert (caught.value.wanted, caught.value.got) == (4096, 10_000 - 8192)


def test_writes_past_and_through_the_page_cache_see_each_other(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "both"
    path.write_bytes(bytes(64 * 4096))
    file = OpenFile.open(path, writable=True, direct=True)
    expected = np.zeros(64 * 4096, np.uint8)
    rng = np.random.default_rng(5)
    for turn in range(40):
        start, nbytes = int(rng.integers(0, 60)) * 4096, 4096 * int(rng.integers(1, 5))
        if turn % 2:
            start, nbytes = start + int(rng.integers(1, 4000)), int(rng.integers(1, 9000))
        buffer = aligned(nbytes)
        buffer[:] = rng.integers(0, 256, nbytes)
        asyncio.run(engine.write([FileSpan(file, start, buffer)]))
        expected[start : start + nbytes] = buffer
        whole = FileSpan(file, 0, aligned(64 * 4096))
        asyncio.run(engine.read([whole]))
        assert np.array_equal(whole.buffer, expected)
    assert np.array_equal(np.fromfile(path, np.uint8), expected)
