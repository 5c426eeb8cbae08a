"""A batch cut into pieces that worker threads take one at a time.

A hop to a thread and back costs about as much as reading 256 KiB that are in the page cache. A batch therefore makes
at most one hop per worker, whatever the number of its spans; the workers take pieces of 1-4 MiB from one queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from strideweave.io.positioned import FileSpan, raise_first
from strideweave.runtime.workers import worker_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Piecework", "cut_in_pieces"]

P = TypeVar("P")

SMALLEST_PIECE = 1 << 20
"""Bytes: what a worker takes from a batch at once, at least; less is not worth a second worker."""

LARGEST_PIECE = 4 << 20
"""Bytes: what a worker takes from a batch at once, at most."""

SMALLEST_SHARED_SPAN = 32 << 10
"""Bytes: where calls move less than this on average, one worker makes them all. Each call ends by taking the
interpreter's lock again, and two workers that do little else are slower than one."""


class Piecework(Generic[P]):
    """Pieces that workers take one at a time, and what went wrong with them.

    Args:
        pieces: the pieces, in the order in which they are taken.
        move: does one; what it raises ends the batch.
    """

    def __init__(self, pieces: deque[P], move: Callable[[P], None]) -> None:
        self._pieces = pieces
        self._move = move
        self._errors: list[BaseException] = []

    async def run(self, hop: Callable[[Callable[[], None]], asyncio.Future[None]]) -> None:
        """Have workers do all pieces, and return when the last worker has stopped, cancelled or not.

        Args:
            hop: has a worker call a function.

        Raises:
            BaseException: what went wrong first, with a note on what else did.
        """
        hops = min(worker_count(), len(self._pieces))
        workers = [hop(self._work) for _ in range(hops)]
        interrupted: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            # asyncio.wait leaves the workers alone when the awaiting task is cancelled past anyio's shield.
            while any(not worker.done() for worker in workers):
                try:
                    await asyncio.wait(workers)
                except asyncio.CancelledError as cancellation:
                    interrupted = cancellation
        for worker in workers:
            worker.result()
        if interrupted is not None:
            raise interrupted
        raise_first(self._errors)

    def _work(self) -> None:
        """Move pieces until none is left or one has failed; never raises."""
        while not self._errors:
            try:
                piece = self._pieces.popleft()
            except IndexError:  # the other workers have the rest
                return
            try:
                self._move(piece)
            except BaseException as error:  # whatever it is goes to the awaiting task, once no worker runs
                self._errors.append(error)


def cut_in_pieces(spans: Sequence[FileSpan], total: int, workers: int) -> deque[Sequence[FileSpan]]:
    """Cut a batch of ``total`` bytes into what a worker takes at once.

    Spans stay in order and whole, save those larger than a piece.
    """
    shared = total >= 2 * SMALLEST_PIECE and total >= SMALLEST_SHARED_SPAN * len(spans)
    if workers == 1 or not shared:
        return deque([spans])
    # About four pieces per worker, so that the last one finds the others nearly done.
    size = total // (4 * workers) // SMALLEST_PIECE * SMALLEST_PIECE
    size = min(max(size, SMALLEST_PIECE), LARGEST_PIECE)
    pieces: deque[Sequence[FileSpan]] = deque()
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
