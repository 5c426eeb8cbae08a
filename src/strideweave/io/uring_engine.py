"""The engine on io_uring: whole batches in one system call, completions through an eventfd that wakes the loop.

No thread waits for an operation and none is started: many batches share one ring, in which up to ``QUEUE_DEPTH``
operations are at the device at once. An operation that moves less than asked is handed over again where it stopped.
The kernel owns the buffers until it has answered, so a batch ends only when all of its operations have, whatever
becomes of the task that awaits it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from strideweave.io.files import ALIGNMENT
from strideweave.io.positioned import (
    INLINE_SPANS,
    FileSpan,
    SpanBatch,
    failure,
    raise_first,
    read_cached_spans,
    stuck,
)
from strideweave.io.statistics import EngineTally
from strideweave.io.uring import ASYNC, READ, SUBMISSION, WRITE, Ring
from strideweave.runtime.workers import INLINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from strideweave.io.files import OpenFile
    from strideweave.io.statistics import EngineStatistics

    Columns: TypeAlias = "NDArray[np.int64]"
    """A row for each operation: descriptor, offset, address and length."""

__all__ = ["QUEUE_DEPTH", "UringEngine"]

QUEUE_DEPTH = 128
"""Entries of the ring. More gained nothing on the disks that were tried, and count against locked memory."""

PIECE_BYTES = 1 << 20
"""Bytes that one operation moves, at most: so that several are at work on a large span, and far below the limit of
2 GiB that one has."""

ASYNC_BYTES = 1 << 20
"""Bytes from which on an operation through the page cache goes to a kernel thread at once, so that several processors
copy. Smaller ones are copied inside the system call: a thread's wake-up and its own event would take longer."""

TURN_BYTES = 4 << 20
"""Bytes that may be copied inside system calls before the loop's other tasks get a turn."""

_RETRY_SECONDS = 0.001  # after the kernel was short of memory, with nothing under way that could tell of more
_MOST_NOTES = 8  # an error mentions so many others of its batch
_SLOT_BITS = np.uint64(32)
_AGAIN = frozenset({errno.EINTR, errno.EAGAIN})


class UringEngine:
    """Reads and writes batches of spans through one io_uring; for tasks of one loop at a time.

    Made without arguments, as a service of the runtime. ``read`` and ``write`` return when the kernel no longer
    touches the buffers, cancelled or not.

    Attributes:
        name: ``"uring"``.

    Raises:
        OSError: the system refuses an io_uring; see ``uring.why_unavailable``.
    """

    name = "uring"

    def __init__(self) -> None:
        self._ring = Ring(QUEUE_DEPTH)
        self._pid = os.getpid()
        self._tally = EngineTally()
        self._batches: dict[int, _Batch] = {}
        self._waiting: deque[_Batch] = deque()  # those with operations that the ring had no room for
        self._next_slot = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._goes_on = False  # the loop has been asked to call again
        self._closed = False
        self._read_cached = read_cached_spans

    async def read(self, spans: Sequence[FileSpan]) -> None:
        """Fill the buffers of all spans; see :class:`strideweave.io.engine.Engine`."""
        await self._run(spans, writing=False)

    async def write(self, spans: Sequence[FileSpan]) -> None:
        """Write the buffers of all spans; see :class:`strideweave.io.engine.Engine`."""
        await self._run(spans, writing=True)

    def statistics(self) -> EngineStatistics:
        """Return what was done and what is under way."""
        return self._tally.now

    def close(self) -> None:
        """Close the ring. Idempotent.

        With operations under way, at the end of the interpreter, the ring and the buffers are left to the kernel.
        """
        self._closed = True
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
        if self._closed or os.getpid() != self._pid:
            raise RuntimeError("the engine is closed, or belongs to the parent of this process")
        failed = True
        self._tally.begin(total)
        try:
            left = spans
            if not writing and total <= INLINE_BYTES and len(spans) <= INLINE_SPANS:
                left = list(spans)
                if not left[0].file.is_direct:
                    left = left[self._read_cached(left) :]
            if left:
                await self._work_off(_Batch(left, writing=writing))
            failed = False
        finally:
            self._tally.end(total, len(spans), writing=writing, failed=failed)

    async def _work_off(self, batch: _Batch) -> None:
        """Submit a batch and return when the kernel has answered for all of it."""
        self._attach()
        slot = self._next_slot
        self._next_slot = (slot + 1) & 0xFFFFFFFF
        batch.slot = slot
        self._batches[slot] = batch
        self._waiting.append(batch)
        self._submit()
        interrupted: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while batch.left:
                try:
                    await batch.wait()
                except asyncio.CancelledError as cancellation:  # past anyio's shield; the kernel goes on
                    interrupted = cancellation
        del self._batches[slot]
        batch.count()
        if interrupted is not None:
            raise interrupted
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
        while len(found := self._ring.reap()):
            slots = (found["user_data"] >> _SLOT_BITS).astype(np.int64)
            places = (found["user_data"] & np.uint64(0xFFFFFFFF)).astype(np.int64)
            results = found["result"].astype(np.int64)
            first = int(slots[0])
            if (slots == first).all():
                self._answer(first, places, results)
            else:
                for slot in np.unique(slots).tolist():
                    mine = slots == slot
                    self._answer(slot, places[mine], results[mine])

    def _answer(self, slot: int, places: NDArray[np.int64], results: NDArray[np.int64]) -> None:
        batch = self._batches[slot]
        waiting = batch.is_ready
        batch.answer(places, results)
        if batch.is_ready and not waiting:
            self._waiting.append(batch)

    def _submit(self) -> None:
        """Hand over as much as the ring has room for, batch by batch."""
        ring, turn = self._ring, TURN_BYTES
        try:
            while self._waiting and (room := ring.room):
                if turn <= 0:
                    self._go_on_soon()
                    return
                batch = self._waiting[0]
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
        refusals: dict[_Batch, OSError] = {}  # each batch has one of its own: its task raises it
        for name in self._ring.withdraw().tolist():
            batch = self._batches[name >> 32]
            batch.give_up(refusals.setdefault(batch, batch.refusal(error)), 1)
        while self._waiting:
            batch = self._waiting.popleft()
            batch.abandon(refusals.setdefault(batch, batch.refusal(error)))


class _Batch:
    """The operations of one call: what is still to be handed over, what the kernel has, what went wrong."""

    def __init__(self, spans: Sequence[FileSpan], *, writing: bool) -> None:
        self.slot = 0
        self._spans = spans  # keeps the buffers alive
        self._opcode = WRITE if writing else READ
        files = _files(spans)
        if writing:
            for file in files:
                file.require_writable()
        self._files = files
        self._held = [file.descriptor() for file in files]  # keeps the descriptors open
        numbers = {file: held.number for file, held in zip(files, self._held, strict=True)}
        columns = _block_columns(spans, numbers) if isinstance(spans, SpanBatch) else _columns(spans, numbers)
        columns = _cut(_merged(columns))
        self._fds, self._offsets, self._addresses, self._lengths = columns.T.copy()
        self._is_direct = self._choose_direct()
        self._starts = self._offsets.copy()
        self._wanted = self._lengths.copy()
        self._calls = 0
        self._under_way = 0
        depths = [file.queue_depth for file in files if file.queue_depth is not None]
        self._most = min([len(self._lengths), *depths])  # operations under way at once
        self.left = len(self._lengths)  # operations that have neither succeeded nor failed
        self._fresh = 0  # the first operation that was never handed over
        self._again: list[int] = []
        self._errors: list[BaseException] = []
        self._waiter: asyncio.Future[None] | None = None

    def _choose_direct(self) -> NDArray[np.bool_]:
        """Send past the page cache what is aligned, of files that allow it; tells which operations these are."""
        is_direct: NDArray[np.bool_] = np.zeros(len(self._fds), np.bool_)
        for held in self._held:
            if held.direct >= 0:
                places = self._offsets | self._addresses | self._lengths
                aligned = (self._fds == held.number) & (places % ALIGNMENT == 0)
                self._fds[aligned] = held.direct
                is_direct |= aligned
        return is_direct

    @property
    def is_ready(self) -> bool:
        """Whether operations are to be handed over now, for the first time or again."""
        return self._under_way < self._most and (self._fresh < len(self._lengths) or bool(self._again))

    def prepare(self, ring: Ring, room: int, most_bytes: int) -> int:
        """Put up to ``room`` operations of up to ``most_bytes``, but one at least, into the ring.

        Returns:
            How many bytes the system call that hands them over may copy.
        """
        room = min(room, self._most - self._under_way)
        repeats = bool(self._again)
        if repeats:
            places = np.array(self._again[:room], np.int64)
            del self._again[:room]
        else:
            sizes = np.cumsum(self._lengths[self._fresh : self._fresh + room])
            count = max(1, int(np.searchsorted(sizes, most_bytes, "right")))
            places = np.arange(self._fresh, min(self._fresh + count, len(self._lengths)))
            self._fresh += len(places)
        self._calls += len(places)
        self._under_way += len(places)
        lengths = self._lengths[places]
        entries = np.zeros(len(places), SUBMISSION)
        entries["opcode"] = self._opcode
        direct, large = self._is_direct[places], lengths >= ASYNC_BYTES
        entries["flags"] = np.where(large & ~direct, ASYNC, 0)
        entries["fd"] = self._fds[places]
        entries["offset"] = self._offsets[places]
        entries["address"] = self._addresses[places]
        entries["length"] = lengths
        entries["user_data"] = (np.uint64(self.slot) << _SLOT_BITS) | places.astype(np.uint64)
        ring.prepare(entries)
        # What is tried again costs a turn in any case: an operation may be answered EAGAIN for long.
        return int(lengths.sum() if repeats else lengths[~(direct | large)].sum())

    def answer(self, places: NDArray[np.int64], results: NDArray[np.int64]) -> None:
        """Note what became of operations: bytes moved, or a negative error number."""
        self._under_way -= len(places)
        done = results == self._lengths[places]
        self.left -= int(np.count_nonzero(done))
        self._lengths[places[done]] = 0
        if not done.all():
            for place, result in zip(places[~done].tolist(), results[~done].tolist(), strict=True):
                self._resume(place, result)
        self._wake()

    def _resume(self, place: int, result: int) -> None:
        """Go on where an operation stopped, unless it cannot or another one has failed."""
        direct = bool(self._is_direct[place])
        if direct:  # the rest may be aligned no longer, or this device wants more than others
            number = next(held.number for held in self._held if held.direct == self._fds[place])
            self._fds[place], self._is_direct[place] = number, False
        if result > 0:
            self._offsets[place] += result
            self._addresses[place] += result
            self._lengths[place] -= result
        elif -result not in _AGAIN and not (direct and result == -errno.EINVAL):
            self.give_up(self._failure(place, result), 1)
            return
        if self._errors:
            self.left -= 1
        else:
            self._again.append(place)

    def give_up(self, error: BaseException, count: int) -> None:
        """End ``count`` operations with an error, and those that were not handed over yet with them."""
        if not self._errors or (len(self._errors) <= _MOST_NOTES and error is not self._errors[0]):
            self._errors.append(error)  # a thousand notes of one kind would tell no more
        self.left -= count
        self.left -= len(self._lengths) - self._fresh + len(self._again)
        self._fresh = len(self._lengths)
        self._again.clear()
        self._wake()

    def abandon(self, error: BaseException) -> None:
        """End everything that was not handed over."""
        self.give_up(error, 0)

    def refusal(self, error: OSError) -> OSError:
        """What to say where the kernel took no more of this batch."""
        reason = error.strerror or str(error)
        message = (
            f"{reason}; the kernel takes no more of this io_uring, and STRIDEWEAVE_IO=threads does without it"
        )
        return OSError(error.errno, message, self._files[0].path)

    async def wait(self) -> None:
        """Return when something has been answered."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and not self.left:
            self._waiter.set_result(None)

    def count(self) -> None:
        """Add the system's work to the statistics of the files."""
        moved = self._wanted - self._lengths
        for file, held in zip(self._files, self._held, strict=True):
            if len(self._files) == 1:
                self._count(file, self._calls, int(moved.sum()))
                return
            mine = np.isin(self._fds, (held.number, held.direct))
            self._count(file, int(np.count_nonzero(mine)), int(moved[mine].sum()))

    def _count(self, file: Any, calls: int, moved: int) -> None:
        if self._opcode == WRITE:
            file.count(writes=calls, bytes_written=moved)
        else:
            file.count(reads=calls, bytes_read=moved)

    def raise_first_error(self) -> None:
        """Raise what went wrong first, with a note on what else did."""
        raise_first(self._errors)

    def _failure(self, place: int, result: int) -> BaseException:
        number = int(self._fds[place])
        offset = int(self._starts[place])
        wanted, got = int(self._wanted[place]), int(self._wanted[place] - self._lengths[place])
        file = next(
            file
            for file, held in zip(self._files, self._held, strict=True)
            if number in (held.number, held.direct)
        )
        writing = self._opcode == WRITE
        if result == 0:
            return stuck(file.path, offset, wanted, got, writing=writing)
        return failure(-result, file.path, offset, wanted, got, writing=writing)


def _files(spans: Sequence[FileSpan]) -> list[OpenFile]:
    """The files of a batch, each once."""
    owners = spans.blocks if isinstance(spans, SpanBatch) else spans
    return list(dict.fromkeys([owner.file for owner in owners]))


def _columns(spans: Sequence[FileSpan], numbers: Mapping[OpenFile, int]) -> Columns:
    """Descriptor, offset, address and length of each span that is not empty."""
    rows = [
        (numbers[file], offset, buffer.__array_interface__["data"][0], buffer.nbytes)
        for file, offset, buffer in spans
        if buffer.nbytes
    ]
    return np.array(rows, np.int64).reshape(-1, 4)


def _block_columns(batch: SpanBatch, numbers: Mapping[OpenFile, int]) -> Columns:
    """The same for a batch in blocks, by a few assignments for each block."""
    columns = np.empty((len(batch), 4), np.int64)
    filled = 0
    for block in batch.blocks:
        rows = columns[filled : filled + len(block.offsets)]
        rows[:, 0] = numbers[block.file]
        rows[:, 1] = block.offsets
        rows[:, 2] = block.starts + block.memory.__array_interface__["data"][0]
        rows[:, 3] = block.nbytes
        filled += len(rows)
    return columns[columns[:, 3] > 0] if any(not block.nbytes for block in batch.blocks) else columns


def _merged(columns: Columns) -> Columns:
    """Join spans that follow each other in the file and in memory."""
    fds, offsets, addresses, lengths = columns.T
    breaks = (
        (fds[1:] != fds[:-1])
        | (offsets[1:] != offsets[:-1] + lengths[:-1])
        | (addresses[1:] != addresses[:-1] + lengths[:-1])
    )
    first = np.flatnonzero(np.append(True, breaks))
    if len(first) == len(columns):
        return columns
    merged = columns[first]
    merged[:, 3] = np.add.reduceat(lengths, first)
    return merged


def _cut(columns: Columns) -> Columns:
    """Cut operations into pieces of ``PIECE_BYTES``."""
    lengths = columns[:, 3]
    pieces = -(-lengths // PIECE_BYTES)
    if not len(columns) or pieces.max() == 1:
        return columns
    cut = np.repeat(columns, pieces, axis=0)
    ends = np.cumsum(pieces)
    skipped = (np.arange(ends[-1]) - np.repeat(ends - pieces, pieces)) * PIECE_BYTES
    cut[:, 1] += skipped
    cut[:, 2] += skipped
    cut[:, 3] = np.minimum(PIECE_BYTES, cut[:, 3] - skipped)
    return cut
