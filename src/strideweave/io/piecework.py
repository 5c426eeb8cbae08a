"""A batch cut into pieces that worker threads take one at a time.

A hop to a thread and back costs about as much as reading 256 KiB that are in the page cache. A batch therefore makes
at most one hop per worker, whatever the number of its spans; the workers take pieces of 1-4 MiB from one queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strideweave.io.positioned import FileSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cut_in_pieces"]

SMALLEST_PIECE = 1 << 20
"""Bytes: what a worker takes from a batch at once, at least; less is not worth a second worker."""

LARGEST_PIECE = 4 << 20
"""Bytes: what a worker takes from a batch at once, at most."""

SMALLEST_SHARED_SPAN = 32 << 10
"""Bytes: where calls move less than this on average, one worker makes them all. Each call ends by taking the
interpreter's lock again, and two workers that do little else are slower than one."""


def cut_in_pieces(spans: Sequence[FileSpan], total: int, workers: int) -> list[Sequence[FileSpan]]:
    """Cut a batch of ``total`` bytes into what a worker takes at once.

    Spans stay in order and whole, save those larger than a piece.
    """
    shared = total >= 2 * SMALLEST_PIECE and total >= SMALLEST_SHARED_SPAN * len(spans)
    if workers == 1 or not shared:
        return [spans]
    # About four pieces per worker, so that the last one finds the others nearly done.
    size = total // (4 * workers) // SMALLEST_PIECE * SMALLEST_PIECE
    size = min(max(size, SMALLEST_PIECE), LARGEST_PIECE)
    pieces: list[Sequence[FileSpan]] = []
    piece: list[FileSpan] = []
    filled = 0
    for span in spans:
        nbytes = span.buffer.nbytes
        if filled and filled + nbytes > size:
            pieces.append(piece)
            piece, filled = [], 0
        if nbytes > size:
            pieces.extend([cut] for cut in _cuts(span, size))
            continue
        piece.append(span)
        filled += nbytes
    if piece:
        pieces.append(piece)
    return pieces


def _cuts(span: FileSpan, size: int) -> list[FileSpan]:
    file, offset, buffer = span
    return [FileSpan(file, offset + at, buffer[at : at + size]) for at in range(0, buffer.nbytes, size)]
