"""The engine of worker threads: whole batches of positioned system calls, on any system."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from strideweave.io.cached_reads import read_at_once
from strideweave.io.piecework import cut_in_pieces
from strideweave.io.positioned import (
    INLINE_CACHED_BYTES,
    INLINE_SPANS,
    FileSpan,
    SpanBatch,
    read_cached_spans,
    write_spans,
)
from strideweave.io.read_ahead import read_no_further, read_spans_ahead
from strideweave.io.statistics import EngineTally
from strideweave.runtime.workers import WorkerPool, run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strideweave.io.files import OpenFile
    from strideweave.io.statistics import EngineStatistics

__all__ = ["ThreadEngine"]


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

    def read_at_once(self, batch: SpanBatch) -> bool:
        """Read what is small and in the page cache; see :class:`strideweave.io.engine.Engine`."""
        return read_at_once(batch, self._tally)

    async def write(self, spans: Sequence[FileSpan]) -> None:
        """Write the buffers of all spans; see :class:`strideweave.io.engine.Engine`."""
        await self._run(spans, write_spans, writing=True)

    async def persist(self, file: OpenFile) -> None:
        """Make what was written to a file durable; see :class:`strideweave.io.engine.Engine`."""
        failed = True
        try:
            await self._have_done([file.persist])
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
            if not writing and total <= INLINE_CACHED_BYTES and len(spans) <= INLINE_SPANS:
                left = spans[read_cached_spans(spans) :]
                left_bytes = sum([span.buffer.nbytes for span in left])
            if left_bytes:
                if not writing:
                    read_no_further(left)
                pieces = cut_in_pieces(left, left_bytes, self._pool.size)
                await self._have_done([partial(move, piece) for piece in pieces])
            failed = False
        finally:
            self._tally.end(total, len(spans), writing=writing, failed=failed)

    async def _have_done(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Have the threads do jobs, as ``run_jobs``."""
        await run_jobs(jobs, self._pool)
