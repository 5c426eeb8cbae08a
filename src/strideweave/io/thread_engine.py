"""The engine of worker threads: whole batches of positioned system calls, on any system.

A hop to a thread and back costs about as much as reading 256 KiB that are in the page cache. A batch
therefore makes at most one hop per worker, whatever the number of its spans; the workers take pieces of
1-4 MiB from one queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from strideweave.io.files import OpenFile
from strideweave.io.positioned import (
    INLINE_SPANS,
    FileSpan,
    raise_first,
    read_cached_spans,
    write_spans,
)
from strideweave.io.read_ahead import read_spans_ahead
from strideweave.io.statistics import EngineTally
from strideweave.runtime.workers import INLINE_BYTES, WorkerPool, worker_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strideweave.io.statistics import EngineStatistics

__all__ = ["ThreadEngine"]

P = TypeVar("P")

SMALLEST_PIECE = 1 << 20
"""Bytes: what a worker takes from a batch at once, at least; less is not worth a second worker."""

LARGEST_PIECE = 4 << 20
"""Bytes: what a worker takes from a batch at once, at most."""

SMALLEST_SHARED_SPAN = 32 << 10
"""Bytes: where calls move less than this on average, one worker makes them all. Each call ends by taking the
interpreter's lock again, and two workers that do little else are slower than one."""


class ThreadEngine:
    """Reads and writes batches of spans with positioned system calls in threads of its own.

    Made without arguments, as a service of the runtime. ``read`` and ``write`` return when no thread touches
    the buffers any more, cancelled or not.

    Attributes:
        name: ``"threads"``.
    """

    name = "threads"

    def __init__(self) -> None:
        # Its own threads: a slow disk must not hold up the copies that the runtime's workers make.
        self._pool = WorkerPool()
        self._tally = EngineTally()

    async def read(self, spans: Sequence[FileSpan]) -> None:
        """Fill the buffers of all spans; see :class:`strideweave.io.engine.Engine`."""
        await self._run(spans, read_spans_ahead, writing=False)

    async def write(self, spans: Sequence[FileSpan]) -> None:
        """Write the buffers of all spans; see :class:`strideweave.io.engine.Engine`."""
        await self._run(spans, write_spans, writing=True)

    async def persist(self, file: OpenFile) -> None:
        """Make what was written to a file durable; see :class:`strideweave.io.engine.Engine`."""
        failed = True
        try:
            await self._work_off(_Batch(deque([file]), OpenFile.persist))
            failed = False
        finally:
            self._tally.persisted(failed=failed)

    def statistics(self) -> EngineStatistics:
        """Return what was done and what is under way."""
        return self._tally.now

    def close(self) -> None:
        """Let the threads end after the batches they have. Idempotent."""
        self._pool.close()

    async def _run(
        self, spans: Sequence[FileSpan], move: Callable[[Sequence[FileSpan]], None], *, writing: bool
    ) -> None:
        spans = list(spans)  # a batch in blocks makes its spans anew at each look
        total = sum([span.buffer.nbytes for span in spans])
        if not total:
            return
        failed = True
        self._tally.begin(total)
        try:
            left, left_bytes = spans, total
            if not writing and total <= INLINE_BYTES and len(spans) <= INLINE_SPANS:
                left = spans[read_cached_spans(spans) :]
                left_bytes = sum([span.buffer.nbytes for span in left])
            if left_bytes:
                await self._work_off(_Batch(_pieces(left, left_bytes, worker_count()), move))
            failed = False
        finally:
            self._tally.end(total, len(spans), writing=writing, failed=failed)

    async def _work_off(self, batch: _Batch[Any]) -> None:
        """Have workers move all pieces of a batch, and return when the last of them has stopped."""
        hops = min(worker_count(), len(batch.pieces))
        workers = [self._hop(batch.work) for _ in range(hops)]
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
        batch.raise_first_error()

    def _hop(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Have a worker call ``work``."""
        return asyncio.wrap_future(self._pool.submit(work))


class _Batch(Generic[P]):
    """Pieces that workers take one at a time, and what went wrong with them."""

    def __init__(self, pieces: deque[P], move: Callable[[P], None]) -> None:
        self.pieces = pieces
        self._move = move
        self._errors: list[BaseException] = []

    def work(self) -> None:
        """Move pieces until none is left or one has failed; never raises."""
        while not self._errors:
            try:
                piece = self.pieces.popleft()
            except IndexError:  # the other workers have the rest
                return
            try:
                self._move(piece)
            except BaseException as error:  # whatever it is goes to the awaiting task, once no worker runs
                self._errors.append(error)

    def raise_first_error(self) -> None:
        """Raise what went wrong first, with a note on what else did."""
        raise_first(self._errors)


def _pieces(spans: Sequence[FileSpan], total: int, workers: int) -> deque[Sequence[FileSpan]]:
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
