"""What is in the page cache never sees the ring, and what is not there is left to it."""

from __future__ import annotations

import asyncio
import os
import threading

import anyio
import numpy as np
import pytest

from strideweave.io import uring
from strideweave.io.cached_reads import MOST_MISSES, may_be_cached, read_at_once, read_what_is_cached
from strideweave.io.files import OpenFile
from strideweave.io.positioned import (
    INLINE_CACHED_BYTES,
    INLINE_SPANS,
    FileSpan,
    ShortFileError,
    SpanBatch,
    SpanBlock,
    read_spans,
)
from strideweave.io.statistics import EngineStatistics, EngineTally
from strideweave.io.thread_engine import ThreadEngine
from strideweave.io.uring import why_unavailable
from strideweave.io.uring_engine import UringEngine
from strideweave.runtime.workers import WorkerPool

MIB = 1 << 20
CONTENT = np.random.default_rng(14).integers(0, 256, 8 * MIB, dtype=np.uint8)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "content.bin"
    path.write_bytes(CONTENT.tobytes())
    return path


@pytest.fixture
def file(path):
    return OpenFile.open(path)


@pytest.fixture
def pool():
    made = WorkerPool()
    yield made
    made.close()


def batch_of(file, nbytes, count):
    """Every second piece of the file, in blocks."""
    starts = np.arange(count) * nbytes
    return SpanBatch([SpanBlock(file, 2 * starts, np.zeros(count * nbytes, np.uint8), starts, nbytes)])


def check(batch):
    for file, offset, buffer in batch:
        assert np.array_equal(buffer, CONTENT[offset : offset + buffer.nbytes]), (file, offset)


def cached_but(missing, reading=lambda: None):
    """Read spans up to one at one of these offsets."""

    def read(spans):
        reading()
        for count, span in enumerate(spans):
            if span.offset in missing:
                return count
            read_spans([span])
        return len(spans)

    return read


SHAPES = [(4096, 700), (64 << 10, 60), (256 << 10, 16), (4 * MIB, 1)]


@pytest.mark.parametrize(("nbytes", "count"), SHAPES)
def test_what_is_there_is_read_and_nothing_is_left(file, pool, nbytes, count):
    batch, readers = batch_of(file, nbytes, count), set()
    read = cached_but((), lambda: readers.add(threading.current_thread()))
    assert not asyncio.run(read_what_is_cached(batch, batch.total, pool, read))
    check(batch)
    assert threading.main_thread() not in readers


@pytest.mark.parametrize(("nbytes", "count"), SHAPES[:3])
@pytest.mark.parametrize("missing", [{0}, {3}, {1, 2, 5}, set(range(1, 16, 2))])
def test_what_is_missing_is_left_and_the_rest_is_read(file, pool, nbytes, count, missing):
    batch = batch_of(file, nbytes, count)
    offsets = {2 * nbytes * place for place in missing}
    left = asyncio.run(read_what_is_cached(batch, batch.total, pool, cached_but(offsets)))
    if len(missing) < MOST_MISSES:
        assert {span.offset for span in left} == offsets
    else:
        assert offsets <= {span.offset for span in left}
    read_spans(left)
    check(batch)


def test_a_batch_of_which_nothing_is_there_is_tried_a_few_times(file, pool):
    batch, tries = batch_of(file, 4096, 700), []
    read = cached_but(set(range(0, 8 * MIB, 8192)), lambda: tries.append(1))
    assert asyncio.run(read_what_is_cached(batch, batch.total, pool, read)) is batch
    assert len(tries) <= 2 * MOST_MISSES


def test_an_error_is_the_batchs(file, pool):
    spans = [*batch_of(file, 64 << 10, 60), FileSpan(file, 8 * MIB - 10, np.zeros(100, np.uint8))]
    total = sum(span.buffer.nbytes for span in spans)
    with pytest.raises(ShortFileError):
        asyncio.run(read_what_is_cached(spans, total, pool, cached_but(())))


def test_cancelled_or_not_it_returns_when_no_worker_has_the_buffers(file, pool):
    begun, gate = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert gate.wait(10)

    batch = batch_of(file, 64 << 10, 60)

    async def main():
        reading = asyncio.ensure_future(read_what_is_cached(batch, batch.total, pool, cached_but((), wait)))
        await anyio.to_thread.run_sync(begun.wait)
        reading.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
            assert not reading.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(main())
    check(batch)


def test_files_past_the_cache_are_not_tried(path, file):
    direct = OpenFile.open(path, direct=True)
    assert may_be_cached(batch_of(file, 4096, 4))
    assert may_be_cached(list(batch_of(file, 4096, 4)))
    if direct.is_direct:
        assert not may_be_cached([*batch_of(file, 4096, 4), *batch_of(direct, 4096, 4)])
        assert not may_be_cached(batch_of(direct, 4096, 4))


@pytest.mark.skipif(why_unavailable() is not None, reason=f"no io_uring: {why_unavailable()}")
@pytest.mark.parametrize(("nbytes", "count"), [(16384, 3), (16384, 64), (256 << 10, 16)])
def test_the_ring_has_what_is_missing_and_nothing_else(file, monkeypatch, nbytes, count):
    """Of one loop's batch, small or large."""
    engine, handed = UringEngine(), []
    real = uring.system_call

    def call(number, *arguments):
        if number == 426:
            handed.append(arguments[1])
        return real(number, *arguments)

    monkeypatch.setattr(uring, "system_call", call)
    engine._read_cached = cached_but(())
    batch = batch_of(file, nbytes, count)
    asyncio.run(engine.read(batch))
    check(batch)
    assert sum(handed) == 0
    engine._read_cached = cached_but({2 * nbytes * (count - 1)})
    batch = batch_of(file, nbytes, count)
    asyncio.run(engine.read(batch))
    check(batch)
    assert sum(handed) == 1
    engine.close()


@pytest.mark.parametrize("make", [ThreadEngine, UringEngine])
def test_a_small_batch_that_is_there_is_read_at_once_and_counted(file, make):
    if make is UringEngine and why_unavailable() is not None:
        pytest.skip(f"no io_uring: {why_unavailable()}")
    engine, batch = make(), batch_of(file, 16384, 60)
    read_spans(batch_of(file, 16384, 60))  # it is in the page cache
    assert engine.read_at_once(batch)
    check(batch)
    now = engine.statistics()
    assert (now.batches, now.spans, now.bytes_read, now.bytes_in_flight) == (1, 60, 60 * 16384, 0)
    engine.close()


def refusing(*offsets):
    """The system call, of which what lies at some offsets is not in the page cache."""

    def preadv(number, buffers, offset):
        if offset in offsets:
            raise BlockingIOError
        return os.preadv(number, buffers, offset)

    return preadv


def test_what_would_have_to_wait_or_is_large_or_is_wrong_is_not_read_at_once(file, path):
    tally, direct, closed = EngineTally(), OpenFile.open(path, direct=True), OpenFile.open(path)
    beyond = SpanBlock(file, np.array([8 * MIB - 10]), np.zeros(100, np.uint8), np.array([0]), 100)
    batches = [
        batch_of(file, 4096, INLINE_SPANS + 1),
        batch_of(file, INLINE_CACHED_BYTES // 2 + 1, 2),
        batch_of(file, 4096, 0),
        SpanBatch([beyond]),  # ends early
        batch_of(closed, 4096, 4),
        *([batch_of(direct, 4096, 4)] if direct.is_direct else []),
    ]
    closed.close()
    for batch in batches:
        assert not read_at_once(batch, tally, os.preadv)
    for missing in (0, 3 * 8192):
        assert not read_at_once(batch_of(file, 4096, 4), tally, refusing(missing))
    assert tally.now == EngineStatistics()


def test_a_block_that_is_there_only_in_part_is_counted_as_far_as_it_was_read(file):
    assert not read_at_once(batch_of(file, 4096, 4), EngineTally(), refusing(3 * 8192))
    now = file.statistics()
    assert (now.reads, now.bytes_read) == (3, 3 * 4096)


@pytest.mark.parametrize(
    ("offsets", "starts", "calls"),
    [
        ([0, 10, 20], [0, 10, 20], 1),  # neighbours on both sides
        ([0, 10, 20], [20, 10, 0], 3),  # in the file only
        ([20, 10, 0], [0, 10, 20], 3),  # in memory only
        ([40, 50, 0, 10, 90], [0, 10, 20, 30, 40], 3),
        ([7], [3], 1),
    ],
)
def test_neighbours_are_read_together(file, offsets, starts, calls):
    memory, made = np.zeros(64, np.uint8), []

    def preadv(*arguments):
        made.append(arguments)
        return os.preadv(*arguments)

    tally = EngineTally()
    assert read_at_once(
        SpanBatch([SpanBlock(file, np.array(offsets), memory, np.array(starts), 10)]), tally, preadv
    )
    assert len(made) == calls == file.statistics().reads
    wanted = np.zeros(64, np.uint8)
    for offset, start in zip(offsets, starts, strict=True):
        wanted[start : start + 10] = CONTENT[offset : offset + 10]
    assert np.array_equal(memory, wanted)
    assert tally.now == EngineStatistics(batches=1, spans=len(offsets), bytes_read=10 * len(offsets))


def test_what_was_dropped_from_the_page_cache_is_left_or_read_whole(file):
    """By the system's own call: some file systems drop nothing, and some systems have no such call."""
    read_spans(batch_of(file, 4096, 16))
    assert read_at_once(batch_of(file, 4096, 16), EngineTally()) == hasattr(os, "RWF_NOWAIT")
    if hasattr(os, "posix_fadvise"):
        os.fsync(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    batch, tally = batch_of(file, 4096, 16), EngineTally()
    if read_at_once(batch, tally):
        check(batch)
        assert tally.now.bytes_read == 16 * 4096
    else:
        assert tally.now == EngineStatistics()
