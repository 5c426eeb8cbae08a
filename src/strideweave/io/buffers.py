"""Memory that can be given back: aligned arrays, from 64 KiB on in page-aligned private mappings of their own."""

from __future__ import annotations

import mmap
import operator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ALIGNMENT",
    "HUGE_BYTES",
    "MAPPED_BYTES",
    "PrivateMapping",
    "address_of",
    "advise_huge",
    "aligned_array",
    "byte_count",
    "map_memory",
    "page_aligned",
]

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""

MAPPED_BYTES = 64 * 1024
"""Bytes: from here on an allocation is a mapping of its own, so that freeing it returns it to the system."""

HUGE_BYTES = 4 * 1024 * 1024
"""Bytes: from here on a mapping asks for huge pages, as NumPy's own arrays do. One page fault then brings 2 MiB
instead of 4 KiB, and a first write runs three to five times faster."""


def byte_count(nbytes: int) -> int:
    """Check a size in bytes.

    Raises:
        TypeError: ``nbytes`` is not an integer.
        ValueError: ``nbytes`` is negative.
    """
    count = operator.index(nbytes)
    if count < 0:
        raise ValueError(f"a buffer of {count} bytes was asked for; its size must be 0 or more")
    return count


class PrivateMapping(mmap.mmap):
    """Memory of this process alone, which nothing else is kept in."""


def map_memory(nbytes: int) -> PrivateMapping:
    """Map zeroed memory of this process alone, with huge pages where it is large.

    Args:
        nbytes: size in bytes, at least 1.

    Raises:
        MemoryError: the system has no such memory.
    """
    # Private: a shared anonymous mapping is shared with forked children and does not shrink through madvise.
    try:
        mapping = PrivateMapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refused {nbytes} bytes of memory: {error.strerror}") from error
    except OverflowError:
        raise MemoryError(f"no system has {nbytes} bytes of memory") from None
    advise_huge(mapping)
    return mapping


def advise_huge(mapping: mmap.mmap) -> None:
    """Ask for huge pages in a mapping that is large enough for them."""
    if len(mapping) >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)


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
    count = byte_count(nbytes)
    if count >= MAPPED_BYTES:
        return np.frombuffer(map_memory(count), np.uint8)
    padded = np.zeros(count + ALIGNMENT - 1, np.uint8)
    return _from_multiple(padded, ALIGNMENT, count)


def page_aligned(nbytes: int) -> NDArray[np.uint8]:
    """Return memory of NumPy's allocator, of unspecified values, that begins with a page.

    Raises:
        MemoryError: the system has no such memory.
    """
    return _from_multiple(np.empty(nbytes + mmap.PAGESIZE - 1, np.uint8), mmap.PAGESIZE, nbytes)


def address_of(array: NDArray[Any]) -> int:
    """Say where an array begins in memory."""
    address: int = array.__array_interface__["data"][0]  # half the price of array.ctypes.data
    return address


def _from_multiple(padded: NDArray[np.uint8], alignment: int, nbytes: int) -> NDArray[np.uint8]:
    """View so many bytes of an array, from the first address on that is a multiple of ``alignment``."""
    start = -address_of(padded) % alignment
    return padded[start : start + nbytes]
