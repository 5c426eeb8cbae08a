"""The engine on io_uring: whole batches in one system call, completions through an eventfd that wakes the loop.

No thread waits for an operation: many batches share one ring, in which up to ``QUEUE_DEPTH`` operations are at the
device at once. What is in the page cache is read beforehand, by threads that wait for nothing. An operation that moves
less than asked is handed over again where it stopped. The kernel owns the buffers until it has answered, so a batch
ends only when all of its operations have, whatever becomes of the task that awaits it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import numpy as np

from strideweave.io.cached_reads import may_be_cached, read_at_once, read_what_is_cached
from strideweave.io.positioned import (
    INLINE_CACHED_BYTES,
    INLINE_SPANS,
    FileSpan,
    SpanBatch,
    read_cached_spans,
)
from strideweave.io.read_ahead import read_no_further
from strideweave.io.statistics import EngineTally
from strideweave.io.uring import Ring
from strideweave.io.uring_batch import SLOT_BITS, Batch, RefusedError
from strideweave.runtime.workers import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strideweave.io.engine import Engine
    from strideweave.io.files import OpenFile
    from strideweave.io.statistics import EngineStatistics

__all__ = ["QUEUE_DEPTH", "UringEngine"]

QUEUE_DEPTH = 128
"""Entries of the ring. More gained nothing on the disks that were tried, and count against locked memory."""

TURN_BYTES = 4 << 20
"""Bytes that may be copied inside system calls before the loop's other tasks get a turn."""

FIRST_OPERATIONS = 16
"""Operations that a ring with nothing under way is given by a system call of their own: the kernel would show the
device the first of many small ones only once it has collected 32, and the device would have nothing to do meanwhile."""

FEW_BATCHES = 4
"""With more under way, answers are taken as they come: some batch has all of its own before long."""

_NAME = np.dtype([("place", np.uint32), ("slot", np.uint32)])  # of an operation, as it lies in memory
_RETRY_SECONDS = 0.001  # after the kernel was short of memory, with nothing under way that could tell of more


class UringEngine:
    """Reads and writes batches of spans through one io_uring; for tasks of one loop at a time.

    ``read`` and ``write`` return when the kernel no longer touches the buffers, cancelled or not.

    Args:
        fallback: does the batches that the kernel refuses to take once the ring works, as under a seccomp filter that
            comes later or where memory is short; each tries the ring first. It is closed with this engine. None makes
            the refusal an error of the batch.

    Attributes:
        name: ``"uring"``.

    Raises:
        OSError: the system refuses an io_uring; see ``uring.why_unavailable``.
    """

    name = "uring"

    def __init__(self, fallback: Engine | None = None) -> None:
        self._ring = Ring(QUEUE_DEPTH)
        self._fallback = fallback
        self._pid = os.getpid()
        self._tally = EngineTally()
        self._batches: dict[int, Batch] = {}
        self._waiting: deque[Batch] = deque()  # those with operations that the ring had no room for
        self._next_slot = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._goes_on = False  # the loop has been asked to call again
        self._closed = False
        self._pool = WorkerPool()  # reads what is in the page cache, and never waits for a device
        self._read_cached = read_cached_spans

    async def read(self, spans: Sequence[FileSpan]) -> None:
        """Fill the buffers of all spans; see :class:`strideweave.io.engine.Engine`."""
        await self._run(spans, writing=False)

    def read_at_once(self, batch: SpanBatch) -> bool:
        """Read what is small and in the page cache; see :class:`strideweave.io.engine.Engine`."""
        self._require_open()
        return read_at_once(batch, self._tally)

    async def write(self, spans: Sequence[FileSpan]) -> None:
        """Write the buffers of all spans; see :class:`strideweave.io.engine.Engine`."""
        await self._run(spans, writing=True)

    async def persist(self, file: OpenFile) -> None:
        """Make what was written to a file durable; see :class:`strideweave.io.engine.Engine`."""
        self._require_open()
        failed = True
        try:
            try:
                await self._work_off(Batch.persisting(file))
            except RefusedError as refusal:
                await self._fall_back(refusal).persist(file)
            failed = False
        finally:
            self._tally.persisted(failed=failed)

    def statistics(self) -> EngineStatistics:
        """Return what was done and what is under way."""
        return self._tally.now

    def close(self) -> None:
        """Close the ring. Idempotent.

        With operations under way, at the end of the interpreter, the ring and the buffers are left to the kernel.
        """
        self._closed = True
        self._pool.close()
        if self._fallback is not None:
            self._fallback.close()
        if self._batches:
            # The kernel may still write to these buffers: nothing that leads to them is to be freed any more.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        self._detach()
        self._ring.close()

    async def _run(self, spans: Sequence[FileSpan], *, writing: bool) -> None:
        total = spans.total if isinstance(spans, SpanBatch) else sum([span.buffer.nbytes for span in spans])
        if not total:
            return
        self._require_open()
        failed = True
        self._tally.begin(total)
        try:
            left = spans
            if not writing and may_be_cached(spans):
                if total <= INLINE_CACHED_BYTES and len(spans) <= INLINE_SPANS:
                    found = list(spans)
                    if filled := self._read_cached(found):
                        left = found[filled:]  # else as they were: a batch in blocks takes less work
                else:
                    read_no_further(spans)
                    left = await read_what_is_cached(spans, total, self._pool, self._read_cached)
            if left:
                try:
                    await self._work_off(Batch.moving(left, writing=writing))
                except RefusedError as refusal:
                    # All of it once more: what the kernel has taken of it, it has answered by now.
                    fallback = self._fall_back(refusal)
                    await (fallback.write if writing else fallback.read)(left)
            failed = False
        finally:
            self._tally.end(total, len(spans), writing=writing, failed=failed)

    def _require_open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise RuntimeError("the engine is closed, or belongs to the parent of this process")

    def _fall_back(self, refusal: RefusedError) -> Engine:
        """The engine that takes over a batch which the kernel has refused; the refusal itself where there is none."""
        if self._fallback is None:
            raise refusal
        reason = f"{errno.errorcode.get(refusal.errno or 0, 'an error')}, {os.strerror(refusal.errno or 0)}"
        self._tally.fail_over(f"the kernel took no more of the ring: {reason}")
        return self._fallback

    async def _work_off(self, batch: Batch) -> None:
        """Submit a batch and return when the kernel has answered for all of it."""
        self._require_open()  # again: it may have been closed while workers read what was cached
        self._attach()
        slot = self._next_slot
        self._next_slot = (slot + 1) & 0xFFFFFFFF
        batch.begin(slot)
        self._batches[slot] = batch
        self._waiting.append(batch)
        self._submit()
        interrupted: asyncio.CancelledError | None = None
        if batch.left:
            try:
                await batch.wait()
            except asyncio.CancelledError as cancellation:  # the kernel goes on
                interrupted = cancellation
        if batch.left:
            # Not before: a scope takes its time, and few requests are cancelled.
            with anyio.CancelScope(shield=True):
                while batch.left:
                    with suppress(asyncio.CancelledError):  # one past anyio's shield
                        await batch.wait()
        del self._batches[slot]
        batch.count()
        if interrupted is not None:
            try:
                raise interrupted
            finally:
                del interrupted  # no cycle exception -> frame -> exception, which would keep the buffers
        batch.raise_first_error()

    # The ring: loop thread only

    def _attach(self) -> None:
        """Have the running loop call ``_on_event`` at completions."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._detach()
            # For good, unlike anyio.wait_readable, which adds and removes the descriptor at every wait.
            loop.add_reader(self._ring.event_fd, self._on_event)
            self._loop = loop
            self._goes_on = False

    def _detach(self) -> None:
        loop, self._loop = self._loop, None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._ring.event_fd)

    def _on_event(self) -> None:
        self._ring.clear_event()
        self._reap()
        if self._waiting or self._ring.queued:
            self._submit()

    def _reap(self) -> None:
        """Take the answers that have come, once they are enough for something to be done."""
        while self._is_enough(self._ring.answered):
            found = self._ring.reap()
            if not len(found):
                return
            places, slots = found["user_data"].view(_NAME)["place"], found["user_data"].view(_NAME)["slot"]
            first = int(slots[0])
            if np.count_nonzero(slots == first) == len(slots):
                self._answer(first, places, found["result"])
            else:
                for slot in sorted(set(slots.tolist())):
                    mine = slots == slot
                    self._answer(slot, places[mine], found["result"][mine])

    def _is_enough(self, answered: int) -> bool:
        """Whether some batch may have all the answers that it waits for.

        Each completion wakes the loop, and most of one batch alone would find that nothing can be done yet.
        """
        if not answered:
            return self._ring.is_overflown
        # What the kernel was too short of memory to take is queued, and has no answer to come.
        at_kernel = self._ring.in_flight - self._ring.queued
        if self._waiting or len(self._batches) > FEW_BATCHES or answered == at_kernel:
            return True
        return any(batch.awaited <= answered for batch in self._batches.values()) or self._ring.is_overflown

    def _answer(self, slot: int, places: NDArray[np.uint32], results: NDArray[np.int32]) -> None:
        batch = self._batches[slot]
        waiting = batch.is_ready
        batch.answer(places, results)
        if batch.is_ready and not waiting:
            self._waiting.append(batch)

    def _submit(self) -> None:
        """Hand over as much as the ring has room for, batch by batch."""
        ring, turn = self._ring, TURN_BYTES
        idle = not ring.in_flight
        try:
            while self._waiting and (room := ring.room):
                if turn <= 0:
                    self._go_on_soon()
                    return
                batch = self._waiting[0]
                if idle and batch.is_small:
                    room = min(room, FIRST_OPERATIONS)
                idle = False
                turn -= batch.prepare(ring, room, turn)
                if not batch.is_ready:
                    self._waiting.popleft()
                if not ring.enter():
                    break
                self._reap()  # what was in the page cache is done already
            if ring.queued:
                ring.enter()
        except OSError as error:
            self._fail(error)
            return
        if ring.queued and ring.in_flight == ring.queued and self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(_RETRY_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._on_event()

    def _go_on_soon(self) -> None:
        if not self._goes_on:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        if not self._closed:
            self._on_event()

    def _fail(self, error: OSError) -> None:
        """The kernel takes no more: end what it has not taken with that error; what it has taken, it answers."""
        refusals: dict[Batch, OSError] = {}  # each batch has one of its own: its task raises it
        for name in self._ring.withdraw().tolist():
            batch = self._batches[name >> SLOT_BITS]
            batch.take_back(refusals.setdefault(batch, batch.refusal(error)))
        while self._waiting:
            batch = self._waiting.popleft()
            batch.abandon(refusals.setdefault(batch, batch.refusal(error)))
