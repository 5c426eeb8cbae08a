"""Memory of results that is used again: what this process takes from its pool of it, and gives back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strideweave.io.buffers import MAPPED_BYTES, aligned_array, byte_count, page_aligned
from strideweave.io.recycling_pool import SMALLEST_BYTES, RecyclingPool, RecyclingStatistics
from strideweave.runtime.event_loop import process

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.runtime.event_loop import EventLoop

__all__ = [
    "RecyclingPool",
    "RecyclingStatistics",
    "exchange",
    "give_way",
    "has_room",
    "scratch_array",
    "statistics",
    "trim",
]

_LARGEST_ALLOCATED = 32 << 20  # the allocator keeps nothing larger for later, and frees it slowly


def scratch_array(nbytes: int) -> NDArray[np.uint8]:
    """Return memory of unspecified values, for results that live a while and for staging.

    From 1 MiB on it is recycled where the runtime is up: the page faults of a new mapping take several times as long
    as a copy into it. What has no room in the pool comes from NumPy's allocator up to 32 MiB, and is what
    ``aligned_array`` gives beyond.

    From 64 KiB on it begins with a page, as the system's copies from a file like it: to NumPy's own arrays, which
    begin 16 bytes after a page, they take three to four times as long on some CPUs.

    Args:
        nbytes: size in bytes, 0 or more.

    Raises:
        TypeError: ``nbytes`` is not an integer.
        ValueError: ``nbytes`` is negative.
        MemoryError: the system has no such memory.
    """
    count = byte_count(nbytes)
    if count < MAPPED_BYTES:
        return np.empty(count, np.uint8)
    if count >= SMALLEST_BYTES:
        pool = _pool_of(process.runtime)
        array = None if pool is None else pool.take(count)
        if array is not None:
            return array
    return aligned_array(count) if count > _LARGEST_ALLOCATED else page_aligned(count)


def has_room(nbytes: int) -> bool:
    """Tell whether ``scratch_array`` would give recycled memory of that size, which goes back when it dies."""
    pool = _pool_of(process.runtime)
    return pool is not None and nbytes >= SMALLEST_BYTES and pool.has_room(nbytes)


def exchange(kept: NDArray[np.uint8], given: NDArray[np.uint8]) -> None:
    """Have the memory of one array recycled instead of that of another, which comes from ``scratch_array`` and stays.

    Whoever writes to new memory and then puts it in the place of old has the old for the next time, and not none
    of both.

    Args:
        kept: the root array of memory that stays in use.
        given: the root array of memory that is used no more; other views of it may live on for a while.
    """
    pool = process.find_service(RecyclingPool)
    if pool is not None:
        pool.exchange(kept, given)


def give_way(array: NDArray[np.uint8]) -> None:
    """Recycle memory of ``scratch_array`` only as long as no result needs its room: it may be in use for long.

    Args:
        array: its root array.
    """
    pool = process.find_service(RecyclingPool)
    if pool is not None:
        pool.give_way(array)


def statistics() -> RecyclingStatistics:
    """Return what this process holds of the memory of former results; starts nothing."""
    pool = process.find_service(RecyclingPool)
    return RecyclingStatistics() if pool is None else pool.statistics()


def trim() -> int:
    """Give the memory that is held for the next results back to the system; says how many bytes that was."""
    pool = process.find_service(RecyclingPool)
    return 0 if pool is None else pool.trim()


def _pool_of(runtime: EventLoop | None) -> RecyclingPool | None:
    """The pool of a runtime that is up."""
    if runtime is None or not runtime.is_open:
        return None
    try:
        return runtime.find_service(RecyclingPool) or runtime.service(RecyclingPool)
    except RuntimeError:  # it has just ended
        return None
