"""Buffers: alignment, giving pages back, recycling within a bound."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.io.buffers import ALIGNMENT, MAPPED_BYTES, Buffer, BufferPool, aligned_array

PAGE = mmap.PAGESIZE


def resident_pages(array: np.ndarray) -> int:
    """How many pages of the mapping below `array` are in memory, as the kernel counts them."""
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        first = array.ctypes.data // PAGE
        pagemap.seek(first * 8)
        count = -(-array.nbytes // PAGE)
        entries = np.frombuffer(pagemap.read(count * 8), dtype="<u8")
    return int((entries >> np.uint64(63)).sum())


@pytest.mark.parametrize(
    "nbytes", [0, 1, 64, 4096, MAPPED_BYTES - 1, MAPPED_BYTES, MAPPED_BYTES + 1, 1 << 20]
)
def test_an_aligned_array_is_zero_writable_and_aligned(nbytes: int) -> None:
    array = aligned_array(nbytes)
    assert (array.shape, array.dtype) == ((nbytes,), np.dtype(np.uint8))
    assert not array.any()
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert nbytes == 0 or array.ctypes.data % (PAGE if nbytes >= MAPPED_BYTES else ALIGNMENT) == 0
    array[:] = 255


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1.5, TypeError), ("8", TypeError)])
def test_a_size_that_is_no_byte_count_is_refused(bad: object, error: type[Exception]) -> None:
    pool = BufferPool(PAGE)
    for make in (aligned_array, Buffer, pool.take, BufferPool):
        with pytest.raises(error):
            make(bad)  # type: ignore[operator]
    assert pool.statistics().taken == 0


def test_memory_that_the_system_does_not_have_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=str(1 << 60)):
        Buffer(1 << 60)


def test_a_view_keeps_the_memory_of_a_dropped_buffer_alive() -> None:
    view = Buffer(4 * PAGE).array[PAGE:]
    view[:] = 7
    assert (view == 7).all()


@given(
    pages=st.integers(1, 8),
    tail=st.integers(0, PAGE - 1),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_discard_frees_exactly_the_whole_pages_inside(
    pages: int, tail: int, ends: tuple[float, float]
) -> None:
    buffer = Buffer(pages * PAGE + tail)
    start, stop = sorted(int(part * buffer.nbytes) for part in ends)
    buffer.array[:] = 1
    before = resident_pages(buffer.array)
    freed = buffer.discard(start, stop)
    kept = buffer.array
    assert (kept[:start] == 1).all()
    assert (kept[stop:] == 1).all()
    assert int((kept == 0).sum()) == freed
    assert freed <= stop - start
    assert freed > stop - start - 2 * PAGE
    assert before == -(-buffer.nbytes // PAGE)


def test_discard_returns_pages_to_the_system() -> None:
    buffer = Buffer(64 * PAGE)
    buffer.array[:] = 1
    assert resident_pages(buffer.array) == 64
    assert buffer.discard(PAGE + 1, 33 * PAGE) == 31 * PAGE
    assert resident_pages(buffer.array) == 33
    assert buffer.discard(0, buffer.nbytes) == buffer.nbytes
    assert resident_pages(buffer.array) == 0


def test_discard_frees_the_last_page_of_an_odd_size() -> None:
    buffer = Buffer(PAGE + 5)
    buffer.array[:] = 1
    assert buffer.discard(PAGE, PAGE + 5) == 5
    assert resident_pages(buffer.array) == 1


@pytest.mark.parametrize(("start", "stop"), [(-1, 0), (2, 1), (0, PAGE + 1), (PAGE + 1, PAGE + 1)])
def test_discard_outside_of_the_buffer_is_refused(start: int, stop: int) -> None:
    buffer = Buffer(PAGE)
    buffer.array[:] = 1
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\).*{PAGE} bytes"):
        buffer.discard(start, stop)
    assert buffer.array.all()


def test_the_pool_recycles_exact_sizes_only() -> None:
    pool = BufferPool(1 << 20)
    first = pool.take(3 * PAGE)
    address = first.array.ctypes.data
    pool.give(first)
    assert pool.statistics().recycled_bytes == 3 * PAGE
    other = pool.take(2 * PAGE)
    assert pool.statistics().reused == 0
    again = pool.take(3 * PAGE)
    assert again.array.ctypes.data == address
    statistics = pool.statistics()
    assert (statistics.recycled_bytes, statistics.taken, statistics.reused) == (0, 3, 1)
    assert other.nbytes == 2 * PAGE


def test_the_pool_never_holds_more_than_its_bound_and_drops_the_oldest_size() -> None:
    pool = BufferPool(4 * PAGE)
    old = [pool.take(PAGE) for _ in range(3)]
    for buffer in old:
        pool.give(buffer)
    pool.give(pool.take(3 * PAGE))
    assert pool.statistics().recycled_bytes == 4 * PAGE
    pool.take(PAGE)
    pool.take(PAGE)
    assert pool.statistics().reused == 1
    pool.give(pool.take(5 * PAGE))
    assert pool.statistics().recycled_bytes == 3 * PAGE


def test_a_pool_bounded_to_zero_recycles_nothing() -> None:
    pool = BufferPool(0)
    pool.give(pool.take(PAGE))
    pool.give(pool.take(0))
    assert pool.statistics().recycled_bytes == 0
    assert pool.take(0).array.shape == (0,)


def test_memory_with_a_living_view_is_never_handed_out_again() -> None:
    pool = BufferPool(1 << 20)
    buffer = pool.take(PAGE)
    view = buffer.array[8:16].view(np.float64)
    view[0] = 1.5
    pool.give(buffer)
    assert (pool.statistics().recycled_bytes, pool.statistics().still_viewed) == (0, 1)
    pool.take(PAGE).array[:] = 0
    assert view[0] == 1.5


def test_a_buffer_that_was_given_back_cannot_be_used() -> None:
    pool = BufferPool(1 << 20)
    buffer = pool.take(PAGE)
    pool.give(buffer)
    for use in (lambda: buffer.array, lambda: buffer.discard(0, PAGE), lambda: pool.give(buffer)):
        with pytest.raises(ValueError, match="given back"):
            use()
    assert pool.statistics().recycled_bytes == PAGE


def test_the_pool_serves_many_threads() -> None:
    pool = BufferPool(16 * PAGE)
    failures: list[str] = []

    def work(mark: int) -> None:
        for _ in range(200):
            buffer = pool.take(PAGE)
            buffer.array[:] = mark
            if not (buffer.array == mark).all():
                failures.append("another thread wrote into a taken buffer")
            pool.give(buffer)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statistics = pool.statistics()
    assert failures == []
    assert statistics.taken == 800
    assert statistics.recycled_bytes <= 4 * PAGE


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_uses_the_pool_while_the_parents_threads_do() -> None:
    pool = BufferPool(16 * PAGE)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            pool.give(pool.take(PAGE))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    pool.give(pool.take(2 * PAGE))
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()
    assert pool.statistics().recycled_bytes == PAGE
