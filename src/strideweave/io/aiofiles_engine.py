"""The engine of aiofiles: that of worker threads, with aiofiles to carry a call to them and back."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import aiofiles.os
import anyio

from strideweave.io.thread_engine import ThreadEngine
from strideweave.runtime.workers import JobBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["AiofilesEngine"]


class AiofilesEngine(ThreadEngine):
    """Reads and writes batches of spans in threads; see ``ThreadEngine``.

    Attributes:
        name: ``"aiofiles"``.
    """

    name = "aiofiles"

    async def _have_done(self, jobs: Sequence[Callable[[], None]]) -> None:
        batch = JobBatch(jobs)
        hops = [self._hop(batch) for _ in range(min(len(jobs), self._pool.size))]
        try:
            await batch.end()
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(hops)  # they are about to end, too
            del batch, jobs, hops  # as in `run_jobs`

    def _hop(self, batch: JobBatch) -> asyncio.Future[None]:
        hop: asyncio.Future[None] = asyncio.ensure_future(_call([batch], executor=self._pool))
        hop.add_done_callback(partial(_account_for, batch))
        return hop


def _account_for(batch: JobBatch, hop: asyncio.Future[None]) -> None:
    """Have the batch end with what kept a hop from its jobs."""
    if hop.cancelled():
        batch.fail(RuntimeError("the task that was to carry the reads or writes to a thread was cancelled"))
    elif (error := hop.exception()) is not None:  # the pool is closed
        batch.fail(error)


def _run(batches: list[JobBatch]) -> None:
    # Taken out: a failed job's frame leads back to this one, and to who called it, which must not lead to the batch.
    batches.pop().work()


_call = aiofiles.os.wrap(_run)
