"""Memory that can be given back: page-aligned private mappings, and a bounded pool that recycles them.

Page faults decide how fast a large gather is: a copy into memory that was touched before runs several times
faster than one into fresh pages. So result buffers are recycled, up to a bound that ``statistics()`` shows.
"""

from __future__ import annotations

import mmap
import operator
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strideweave.runtime.locks import short_lock

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

__all__ = [
    "ALIGNMENT",
    "Buffer",
    "BufferPool",
    "BufferPoolStatistics",
    "HUGE_BYTES",
    "MAPPED_BYTES",
    "aligned_array",
    "scratch_array",
]

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""

MAPPED_BYTES = 64 * 1024
"""Bytes: from here on an allocation is a mapping of its own, so that freeing it returns it to the system."""

HUGE_BYTES = 4 * 1024 * 1024
"""Bytes: from here on a mapping asks for huge pages, as NumPy's own arrays do. One page fault then brings 2 MiB
instead of 4 KiB, and a first write runs three to five times faster."""

_LARGEST_SCRATCH_BYTES = 32 * 1024 * 1024  # the allocator keeps nothing larger for later, and frees it slowly


def _byte_count(nbytes: int) -> int:
    count = operator.index(nbytes)
    if count < 0:
        raise ValueError(f"a buffer of {count} bytes was asked for; its size must be 0 or more")
    return count


def _address(array: NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]  # half the price of array.ctypes.data
    return address


def _map(nbytes: int) -> mmap.mmap:
    # Private: a shared anonymous mapping is shared with forked children and does not shrink through madvise.
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def aligned_array(nbytes: int) -> NDArray[np.uint8]:
    """Return fresh zeroed memory as a one-dimensional array of ``nbytes`` bytes.

    The first byte is aligned to 64 bytes, or to a page from 64 KiB on; such an array is a private anonymous
    mapping that goes back to the system when its last view dies.

    Args:
        nbytes: size in bytes, 0 or more.

    Raises:
        TypeError: ``nbytes`` is not an integer.
        ValueError: ``nbytes`` is negative.
        MemoryError: the system has no such memory.
    """
    count = _byte_count(nbytes)
    if count >= MAPPED_BYTES:
        return Buffer(count).array
    padded = np.zeros(count + ALIGNMENT - 1, dtype=np.uint8)
    start = -_address(padded) % ALIGNMENT
    return padded[start : start + count]


def scratch_array(nbytes: int) -> NDArray[np.uint8]:
    """Return memory of unspecified values, for results that live a while and for staging.

    Up to 32 MiB it comes from NumPy's allocator, which keeps what was freed for the next array: the page faults
    of a new mapping take several times as long as a copy into it. Larger memory is what ``aligned_array`` gives.

    From 64 KiB on it begins with a page, as the system's copies from a file like it: to NumPy's own arrays, which
    begin 16 bytes after a page, they take three to four times as long on some CPUs.

    Args:
        nbytes: size in bytes, 0 or more.

    Raises:
        TypeError: ``nbytes`` is not an integer.
        ValueError: ``nbytes`` is negative.
        MemoryError: the system has no such memory.
    """
    count = _byte_count(nbytes)
    if count < MAPPED_BYTES:
        return np.empty(count, np.uint8)
    if count > _LARGEST_SCRATCH_BYTES:
        return aligned_array(count)
    padded = np.empty(count + mmap.PAGESIZE - 1, np.uint8)
    start = -_address(padded) % mmap.PAGESIZE
    return padded[start : start + count]


class Buffer:
    """The owner of ``nbytes`` bytes of page-aligned, private, initially zero memory.

    Views of :attr:`array` keep the memory alive for as long as they live, also after the buffer is gone.

    Attributes:
        nbytes: size in bytes.

    Raises:
        TypeError: ``nbytes`` is not an integer.
        ValueError: ``nbytes`` is negative.
        MemoryError: the system has no such memory.
    """

    __slots__ = ("__weakref__", "_array", "_mapping", "nbytes")

    def __init__(self, nbytes: int) -> None:
        count = _byte_count(nbytes)
        try:
            mapping = _map(count)
        except OSError as error:
            raise MemoryError(f"the system refused {count} bytes of memory: {error.strerror}") from error
        self._hold(mapping, count)

    @classmethod
    def _around(cls, mapping: mmap.mmap, nbytes: int) -> Self:
        buffer = cls.__new__(cls)
        buffer._hold(mapping, nbytes)
        return buffer

    def _hold(self, mapping: mmap.mmap, nbytes: int) -> None:
        self.nbytes = nbytes
        self._mapping: mmap.mmap | None = mapping
        # The one root array: every view of the memory keeps it alive, which is how `_surrender` sees them.
        self._array: NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)

    @property
    def array(self) -> NDArray[np.uint8]:
        """All bytes, one-dimensional and writable.

        Raises:
            ValueError: the buffer was given back to a pool.
        """
        if self._array is None:
            raise self._given_back()
        return self._array

    def discard(self, start: int, stop: int) -> int:
        """Give the whole pages inside ``[start, stop)`` back to the system.

        The contents of that range are undefined afterwards; bytes outside keep their values, and touching the
        range again brings zeroed pages back.

        Args:
            start: first byte.
            stop: byte after the last one.

        Returns:
            How many bytes were given back, 0 when the range holds no whole page.

        Raises:
            ValueError: the range does not lie within the buffer, or the buffer was given back to a pool.
        """
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"bytes [{start}, {stop}) do not lie within a buffer of {self.nbytes} bytes")
        if self._mapping is None:
            raise self._given_back()
        page = mmap.PAGESIZE
        first = -(-start // page) * page
        # The last page belongs to this buffer alone, also when the buffer ends inside it.
        last = stop if stop == self.nbytes else stop // page * page
        if first >= last:
            return 0
        if self.nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_NOHUGEPAGE"):
            with suppress(OSError):  # as in _map
                # Else the kernel would, some day, fill up the huge page that the rest lies in.
                self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
        return last - first

    def _given_back(self) -> ValueError:
        return ValueError(f"this buffer of {self.nbytes} bytes was given back to its pool; take another one")

    def _surrender(self) -> mmap.mmap | None:
        """Give up the memory; ``None`` when a view of it still lives, so that nobody else may have it."""
        mapping, array = self._mapping, self.array
        self._mapping = self._array = None
        root = weakref.ref(array)
        del array
        return mapping if root() is None else None


@dataclass(frozen=True, slots=True)
class BufferPoolStatistics:
    """What a :class:`BufferPool` holds and has done.

    Attributes:
        recycled_bytes: bytes held for reuse now, never above ``limit_bytes``.
        limit_bytes: the bound.
        taken: buffers handed out.
        reused: how many of these were recycled, not new.
        still_viewed: buffers that were given back while a view of them lived, and therefore not recycled.
    """

    recycled_bytes: int
    limit_bytes: int
    taken: int
    reused: int
    still_viewed: int


class BufferPool:
    """Recycles buffers of exactly equal size, up to ``limit_bytes`` held.

    Safe to use from any thread and in a request's ``cleanup``. When the bound is reached, the sizes that were
    given back longest ago make room.

    Raises:
        TypeError: ``limit_bytes`` is not an integer.
        ValueError: ``limit_bytes`` is negative.
    """

    def __init__(self, limit_bytes: int) -> None:
        limit = operator.index(limit_bytes)
        if limit < 0:
            raise ValueError(f"a pool bounded to {limit} bytes was asked for; the bound must be 0 or more")
        self._limit = limit
        self._taken = self._reused = self._still_viewed = 0
        self._held = 0
        self._free: OrderedDict[int, list[mmap.mmap]] = OrderedDict()

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of ``nbytes`` bytes whose contents are undefined.

        Raises:
            TypeError: ``nbytes`` is not an integer.
            ValueError: ``nbytes`` is negative.
            MemoryError: the system has no such memory.
        """
        count = _byte_count(nbytes)
        with short_lock:
            self._taken += 1
            stack = self._free.get(count)
            if stack:
                mapping = stack.pop()
                self._held -= count
                self._reused += 1
                if not stack:
                    del self._free[count]
                return Buffer._around(mapping, count)
        return Buffer(count)

    def give(self, buffer: Buffer) -> None:
        """Take ``buffer`` back; it cannot be used afterwards.

        Memory of which a view still lives is left to that view and not recycled.

        Raises:
            ValueError: the buffer was given back before.
        """
        nbytes = buffer.nbytes
        mapping = buffer._surrender()
        dropped: list[mmap.mmap] = []  # unmapped after the lock is let go: it takes the kernel a while
        with short_lock:
            if mapping is None:
                self._still_viewed += 1
            elif 0 < nbytes <= self._limit:
                while self._held + nbytes > self._limit:
                    dropped.append(self._drop_oldest())
                self._free.setdefault(nbytes, []).append(mapping)
                self._free.move_to_end(nbytes)
                self._held += nbytes

    def _drop_oldest(self) -> mmap.mmap:
        size, stack = next(iter(self._free.items()))
        mapping = stack.pop()
        self._held -= size
        if not stack:
            del self._free[size]
        return mapping

    def statistics(self) -> BufferPoolStatistics:
        """Return what the pool holds and has done, as one consistent record."""
        with short_lock:
            return BufferPoolStatistics(
                recycled_bytes=self._held,
                limit_bytes=self._limit,
                taken=self._taken,
                reused=self._reused,
                still_viewed=self._still_viewed,
            )
