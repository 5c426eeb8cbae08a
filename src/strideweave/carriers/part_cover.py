"""Small pieces of a file that lie close together, read as one range and copied to where they belong."""

from __future__ import annotations

import os
import weakref
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from strideweave.io.buffers import aligned_array
from strideweave.io.positioned import SpanBlock
from strideweave.runtime.workers import INLINE_BYTES, run_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import TypeAlias

    from numpy.typing import NDArray

    from strideweave.io.files import OpenFile

    Integers: TypeAlias = NDArray[np.int64]

__all__ = ["SMALL_PIECE", "Cover", "StagingArea", "find_covers"]

SMALL_PIECE = 1024
"""Bytes: pieces shorter than this that lie close together are read as one range, into memory beside, and copied."""

SPREAD_BYTES = 256 << 10
"""Bytes that such pieces are copied by at once."""

FEWEST_PIECES = 4
"""Such pieces to a range, at least, on average: for fewer the copy is not worth it."""

STAGING_BYTES = 8 << 20
"""Bytes that one carrier reads such ranges into at any instant, at most."""

LOADS_AT_ONCE = 2
"""Ranges are read so many loads at a time, so that one is copied out while the next one is read."""


class StagingArea:
    """The bounded memory that the ranges of one carrier are read into; all but its figures belongs to the loop.

    A load is read when there is room for it, in the order of asking. Who has room waits for nothing but reads.

    Args:
        capacity: bytes, at most. What is too little for a range of the fewest pieces is as good as none: pieces are
            then read one by one.
    """

    def __init__(self, capacity: int = STAGING_BYTES) -> None:
        self.capacity = capacity
        self.peak = 0
        self._in_use = 0
        self._process = 0
        self._room: anyio.Semaphore
        self._note: weakref.WeakMethod[Callable[[int], object]] | None = None

    @property
    def load_bytes(self) -> int:
        """Bytes of one load, at most."""
        return self.capacity // LOADS_AT_ONCE

    @property
    def in_use(self) -> int:
        """Bytes that loads take now."""
        return self._in_use if self._process == os.getpid() else 0

    def report_to(self, note: Callable[[int], object], capacity: int | None) -> None:
        """Have somebody count what is taken and, negative, given back, and bound it further; before the first load.

        Args:
            note: a method that is called with bytes, in the runtime's loop, as long as its object lives.
            capacity: bytes; None leaves it.
        """
        self._note = weakref.WeakMethod(note)
        if capacity is not None:
            self.capacity = min(capacity, self.capacity)

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[NDArray[np.uint8]]:
        """Have memory for one load for the length of an ``async with`` block.

        Args:
            nbytes: at most ``load_bytes``.

        Raises:
            MemoryError: the system has no such memory.
        """
        if self._process != os.getpid():  # what a forked child inherits is its parent's
            self._process, self._in_use, self._room = os.getpid(), 0, anyio.Semaphore(LOADS_AT_ONCE)
        async with self._room:
            self._count(nbytes)
            try:
                yield aligned_array(nbytes)
            finally:
                self._count(-nbytes)

    def _count(self, nbytes: int) -> None:
        self._in_use += nbytes
        self.peak = max(self.peak, self._in_use)
        note = None if self._note is None else self._note()
        if note is not None:
            note(nbytes)


class Cover(NamedTuple):
    """Ranges of a file that small pieces lie in close together, read instead of the pieces.

    Attributes:
        starts: first byte of each range.
        lengths: bytes of each.
        sources: for each piece its first byte in the ranges, one after the other.
        piece: bytes of every piece.
    """

    starts: Integers
    lengths: Integers
    sources: Integers
    piece: int

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return int(self.lengths.sum())

    def blocks(self, file: OpenFile, staging: NDArray[np.uint8]) -> list[SpanBlock]:
        """What reads the ranges one after the other into memory."""
        places = np.cumsum(self.lengths) - self.lengths
        found = []
        for length in np.unique(self.lengths).tolist():
            which = np.flatnonzero(self.lengths == length)
            found.append(SpanBlock(file, self.starts[which], staging, places[which], length))
        return found

    async def spread(self, staging: NDArray[np.uint8], memory: NDArray[np.uint8], places: Integers) -> None:
        """Copy the pieces out of what was read to their places."""
        work = partial(self._spread, staging, memory, places)
        if len(places) * self.piece <= INLINE_BYTES:
            work()
        else:
            await run_jobs([work])

    def _spread(self, staging: NDArray[np.uint8], memory: NDArray[np.uint8], places: Integers) -> None:
        # Every run of so many bytes, as a row: fancy indexing then copies rows, a few at a time by way of the cache.
        from_ = sliding_window_view(staging, self.piece)
        to = sliding_window_view(memory, self.piece, writeable=True)
        step = max(1, SPREAD_BYTES // self.piece)
        for first in range(0, len(places), step):
            some = slice(first, first + step)
            to[places[some]] = from_[self.sources[some]]


def find_covers(offsets: Integers, nbytes: int, most: int) -> Iterator[tuple[slice, Cover | None]]:
    """``find_cover`` for as many pieces at a time as certainly have ranges of at most so many bytes.

    Args:
        offsets: ascending.
        nbytes: of every piece.
        most: bytes of the ranges of one cover.
    """
    step = most // (2 * nbytes)  # a range has less than twice the bytes of its pieces
    if nbytes >= SMALL_PIECE or step < FEWEST_PIECES:
        yield slice(None), None
        return
    for first in range(0, len(offsets), step):
        part = slice(first, first + step)
        yield part, find_cover(offsets[part], nbytes)


def find_cover(offsets: Integers, nbytes: int) -> Cover | None:
    """The ranges that sorted pieces of one length lie in, where reading these is worth a copy; else None.

    A range goes on where the next piece is no further away than a piece is long, so less than twice the bytes of the
    pieces are read.
    """
    if nbytes >= SMALL_PIECE or len(offsets) < FEWEST_PIECES:
        return None
    begins = np.flatnonzero(np.append(True, np.diff(offsets) > 2 * nbytes))
    if len(begins) * FEWEST_PIECES > len(offsets):
        return None
    ends = np.append(begins[1:], len(offsets)) - 1
    starts = offsets[begins]
    lengths = offsets[ends] + nbytes - starts
    before = np.cumsum(lengths) - lengths
    counts = ends - begins + 1
    return Cover(starts, lengths, offsets - np.repeat(starts - before, counts), nbytes)
