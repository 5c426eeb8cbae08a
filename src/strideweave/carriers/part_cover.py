"""Small pieces of a file that lie close together, read as one range and copied to where they belong."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from strideweave.io.positioned import SpanBlock
from strideweave.runtime.workers import INLINE_BYTES, run_jobs

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from strideweave.io.files import OpenFile

    Integers: TypeAlias = NDArray[np.int64]

__all__ = ["Cover", "find_cover"]

SMALL_PIECE = 1024
"""Bytes: pieces shorter than this that lie close together are read as one range, into memory beside, and copied."""

SPREAD_BYTES = 256 << 10
"""Bytes that such pieces are copied by at once."""

FEWEST_PIECES = 4
"""Such pieces to a range, at least, on average: for fewer the copy is not worth it."""


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
