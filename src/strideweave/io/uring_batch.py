"""One call's operations on an io_uring: what is still to be handed over, what the kernel has, what went wrong."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

import numpy as np

from strideweave.io.buffers import address_of
from strideweave.io.files import ALIGNMENT
from strideweave.io.positioned import FileSpan, SpanBatch, failure, files_of, raise_first, stuck
from strideweave.io.uring import ASYNC, DATA_ONLY, PERSIST, READ, SUBMISSION, WRITE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self, TypeAlias

    from numpy.typing import NDArray

    from strideweave.io.descriptors import HeldDescriptor
    from strideweave.io.files import OpenFile
    from strideweave.io.uring import Ring

    Columns: TypeAlias = "NDArray[np.int64]"
    """A row for each operation, which is its entry of a ring: descriptor (times 2**32), offset, address, length and
    what is zero at first."""

__all__ = ["SLOT_BITS", "Batch", "RefusedError"]

PIECE_BYTES = 1 << 20
"""Bytes that one operation moves, at most: so that several are at work on a large span, and far below the limit of
2 GiB that one has."""

ASYNC_BYTES = 1 << 20
"""Bytes from which on an operation through the page cache goes to a kernel thread at once, so that several processors
copy. Smaller ones are copied inside the system call: a thread's wake-up and its own event would take longer."""

COLLECTED_BYTES = 128 << 10
"""Smaller requests the kernel keeps back until it has 32 of them, or the system call ends that handed them over."""

SLOT_BITS = 32
"""Where the name of an operation has its batch; below that is its place in the batch."""

_NUMBER_BITS = 32
"""Where a column has the descriptor's number; below that are operation code and flags."""

_WORDS = SUBMISSION.itemsize // 8

_LEAST_JOINED = 16
"""Where no more than one in so many spans follows the one before, to join them takes longer than to move them apart."""

_MOST_NOTES = 8  # an error mentions so many others of its batch
_AGAIN = frozenset({errno.EINTR, errno.EAGAIN})


class RefusedError(OSError):
    """The kernel took no more of an io_uring that had worked before."""


class Batch:
    """The operations of one call; for the engine's loop only.

    Args:
        files: the files, each once.
        held: the descriptor of each.
        columns: the operations.
        opcode: ``READ``, ``WRITE`` or ``PERSIST``.

    Attributes:
        left: operations that have neither succeeded nor failed.
    """

    def __init__(
        self, files: Sequence[OpenFile], held: Sequence[HeldDescriptor], columns: Columns, opcode: int
    ) -> None:
        self._opcode = opcode
        self._files = files
        self._held = held  # keeps the descriptors open
        self._spans: Sequence[FileSpan] = ()  # keeps the buffers alive
        self._columns = columns  # as asked for; what is left of each operation stands in its entry
        self.left = count = len(columns)
        self._entries = columns.copy().view(SUBMISSION).reshape(-1)
        self._entries["opcode"] = opcode
        self._lengths = self._entries["length"]
        self._is_direct = np.zeros(count, np.bool_)
        self._largest = int(columns[:, 3].max(initial=0))
        self._largest_copy = 0  # bytes of an operation through the page cache, at most
        self._calls = 0
        self._under_way = 0
        depths = [file.queue_depth for file in files if file.queue_depth is not None]
        self._most = min([count, *depths])  # operations under way at once
        self._fresh = 0  # the first operation that was never handed over
        self._again: list[int] = []
        self._errors: list[BaseException] = []
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    def moving(cls, spans: Sequence[FileSpan], *, writing: bool) -> Self:
        """The operations that fill the buffers of spans, or write them."""
        files = files_of(spans)
        if writing:
            for file in files:
                file.require_writable()
        held = [file.descriptor() for file in files]
        numbers = {file: one.number for file, one in zip(files, held, strict=True)}
        columns = _block_columns(spans, numbers) if isinstance(spans, SpanBatch) else _columns(spans, numbers)
        batch = cls(files, held, _cut(_merged(columns)), WRITE if writing else READ)
        batch._spans = spans
        batch._choose_ways()
        return batch

    @classmethod
    def persisting(cls, file: OpenFile) -> Self:
        """The operation that makes what was written to a file durable; it moves no bytes, so all of them at once."""
        held = file.descriptor()
        batch = cls([file], [held], _empty_columns(1, held.number), PERSIST)
        batch._entries["rw_flags"] = DATA_ONLY
        return batch

    def _choose_ways(self) -> None:
        """Send past the page cache what is aligned, of files that allow it, and large copies to kernel threads."""
        entries = self._entries
        alike = (
            len(self._files) == 1 and not np.bitwise_or.reduce(self._columns[:, 1:4], axis=None) % ALIGNMENT
        )
        for file, held in zip(self._files, self._held, strict=True):
            direct = file.direct_number(held, writing=self._opcode == WRITE)
            if direct >= 0 and alike:  # nearly always; then nothing goes through the page cache
                entries["fd"] = direct
                self._is_direct.fill(True)
                return
            if direct >= 0:
                fds, offsets, addresses, lengths = self._columns[:, :4].T
                aligned = (fds >> _NUMBER_BITS == held.number) & (
                    (offsets | addresses | lengths) % ALIGNMENT == 0
                )
                entries["fd"][aligned] = direct
                self._is_direct |= aligned
        cached = self._lengths[~self._is_direct]
        self._largest_copy = int(cached.max(initial=0))
        if self._largest_copy >= ASYNC_BYTES:
            entries["flags"] = np.where(~self._is_direct & (self._lengths >= ASYNC_BYTES), ASYNC, 0)

    def begin(self, slot: int) -> None:
        """Take a name in the ring; before anything is handed over."""
        first = slot << SLOT_BITS
        self._entries["user_data"] = np.arange(first, first + self.left, dtype=np.uint64)

    @property
    def is_ready(self) -> bool:
        """Whether operations are to be handed over now, for the first time or again."""
        return self._under_way < self._most and (self._fresh < len(self._lengths) or bool(self._again))

    @property
    def is_small(self) -> bool:
        """Whether its operations are such that the kernel collects several before it tells the device of them."""
        return self._opcode != PERSIST and self._largest < COLLECTED_BYTES

    @property
    def awaited(self) -> int:
        """After how many answers there is something to do for it: to end it, or to hand over more."""
        more = self._fresh < len(self._lengths)
        return max(1, self._under_way // 4) if more else self._under_way

    def prepare(self, ring: Ring, room: int, most_bytes: int) -> int:
        """Put up to ``room`` operations of up to ``most_bytes``, but one at least, into the ring.

        Returns:
            How many bytes the system call that hands them over may copy.
        """
        room = min(room, self._most - self._under_way)
        if self._again:
            places = np.array(self._again[:room], np.int64)
            del self._again[:room]
            entries = self._entries[places]
            # What is tried again costs a turn in any case: an operation may be answered EAGAIN for long.
            copied = int(self._lengths[places].sum())
        else:
            entries = self._entries[self._fresh : self._fresh + room]
            if len(entries) * self._largest > most_bytes:
                sizes = np.cumsum(entries["length"])
                entries = entries[: max(1, int(np.searchsorted(sizes, most_bytes, "right")))]
            copied = self._copied(self._fresh, self._fresh + len(entries)) if self._largest_copy else 0
            self._fresh += len(entries)
        self._calls += len(entries)
        self._under_way += len(entries)
        ring.prepare(entries)
        return copied

    def _copied(self, start: int, stop: int) -> int:
        """Bytes that the system call copies which hands over a run of operations."""
        lengths = self._lengths[start:stop]
        elsewhere = self._is_direct[start:stop] | (lengths >= ASYNC_BYTES)
        return int(lengths[~elsewhere].sum())

    def answer(self, places: NDArray[np.integer], results: NDArray[np.int32]) -> None:
        """Note what became of operations: bytes moved, or a negative error number."""
        self._under_way -= len(places)
        done = results == self._lengths[places]
        whole = int(np.count_nonzero(done))
        self.left -= whole
        if whole == len(places):
            self._lengths[places] = 0
        else:
            self._lengths[places[done]] = 0
            for place, result in zip(places[~done].tolist(), results[~done].tolist(), strict=True):
                self._resume(place, result)
        self._wake()

    def _resume(self, place: int, result: int) -> None:
        """Go on where an operation stopped, unless it cannot or another one has failed."""
        entry = self._entries[place]
        direct = bool(self._is_direct[place])
        if direct:  # the rest may be aligned no longer, or this device wants more than others
            entry["fd"] = next(held.number for held in self._held if held.direct == entry["fd"])
            self._is_direct[place] = False
            self._largest_copy = max(self._largest_copy, int(entry["length"]))
        if result > 0:
            entry["offset"] += np.uint64(result)
            entry["address"] += np.uint64(result)
            entry["length"] -= np.uint32(result)
        elif -result not in _AGAIN and not (direct and result == -errno.EINVAL):
            self.give_up(self._failure(place, result), 1)
            return
        entry["flags"] = ASYNC if entry["length"] >= ASYNC_BYTES else 0
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

    def take_back(self, error: BaseException) -> None:
        """End an operation that was handed over and that the kernel has not taken."""
        self._under_way -= 1
        self.give_up(error, 1)

    def abandon(self, error: BaseException) -> None:
        """End everything that was not handed over."""
        self.give_up(error, 0)

    def refusal(self, error: OSError) -> RefusedError:
        """What to say where the kernel took no more of this batch."""
        reason = error.strerror or str(error)
        message = (
            f"{reason}; the kernel takes no more of this io_uring, and STRIDEWEAVE_IO=threads does without it"
        )
        return RefusedError(error.errno, message, self._files[0].path)

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
        if len(self._files) == 1:
            moved = int(self._columns[:, 3].sum())
            if self._errors:
                moved -= int(self._lengths.sum())
            self._count(self._files[0], self._calls, moved)
            return
        moved_by = self._columns[:, 3] - self._lengths
        for file, held in zip(self._files, self._held, strict=True):
            mine = np.isin(self._entries["fd"], (held.number, held.direct))
            self._count(file, int(np.count_nonzero(mine)), int(moved_by[mine].sum()))

    def _count(self, file: OpenFile, calls: int, moved: int) -> None:
        if self._opcode == PERSIST:
            file.count(persists=len(self._lengths) - len(self._errors))
        elif self._opcode == WRITE:
            file.count(writes=calls, bytes_written=moved)
        else:
            file.count(reads=calls, bytes_read=moved)

    def raise_first_error(self) -> None:
        """Raise what went wrong first, with a note on what else did."""
        raise_first(self._errors)

    def _failure(self, place: int, result: int) -> BaseException:
        number, offset, _, wanted = self._columns[place, :4].tolist()
        got = wanted - int(self._lengths[place])
        holders = zip(self._files, self._held, strict=True)
        file = next(file for file, held in holders if held.number == number >> _NUMBER_BITS)
        if self._opcode == PERSIST:
            return file.not_persistent(-result)
        writing = self._opcode == WRITE
        if result == 0:
            return stuck(file.path, offset, wanted, got, writing=writing)
        return failure(-result, file.path, offset, wanted, got, writing=writing)


def _empty_columns(count: int, number: int = 0) -> Columns:
    columns = np.zeros((count, _WORDS), np.int64)
    columns[:, 0] = number << _NUMBER_BITS
    return columns


def _columns(spans: Sequence[FileSpan], numbers: Mapping[OpenFile, int]) -> Columns:
    """The columns of each span that is not empty."""
    rows = [
        (numbers[file] << _NUMBER_BITS, offset, address_of(buffer), buffer.nbytes)
        for file, offset, buffer in spans
        if buffer.nbytes
    ]
    columns = _empty_columns(len(rows))
    columns[:, :4] = np.array(rows, np.int64).reshape(-1, 4)
    return columns


def _block_columns(batch: SpanBatch, numbers: Mapping[OpenFile, int]) -> Columns:
    """The same for a batch in blocks, by a few assignments for each block."""
    columns = _empty_columns(len(batch))
    filled = 0
    for block in batch.blocks:
        rows = columns[filled : filled + len(block.offsets)]
        rows[:, 0] = numbers[block.file] << _NUMBER_BITS
        rows[:, 1] = block.offsets
        rows[:, 2] = block.starts
        rows[:, 2] += address_of(block.memory)
        rows[:, 3] = block.nbytes
        filled += len(rows)
    return columns[columns[:, 3] > 0] if any(not block.nbytes for block in batch.blocks) else columns


def _merged(columns: Columns) -> Columns:
    """Join spans that follow each other in the file and in memory, where enough of them do."""
    fds, offsets, addresses, lengths = columns[:, :4].T
    follows = offsets[1:] == offsets[:-1] + lengths[:-1]
    if np.count_nonzero(follows) * _LEAST_JOINED <= len(columns):
        return columns
    follows &= (fds[1:] == fds[:-1]) & (addresses[1:] == addresses[:-1] + lengths[:-1])
    first = np.flatnonzero(np.append(True, ~follows))
    merged = columns[first]
    merged[:, 3] = np.add.reduceat(lengths, first)
    return merged


def _cut(columns: Columns) -> Columns:
    """Cut operations into pieces of ``PIECE_BYTES``."""
    lengths = columns[:, 3]
    if lengths.max(initial=0) <= PIECE_BYTES:
        return columns
    pieces = -(-lengths // PIECE_BYTES)
    cut = np.repeat(columns, pieces, axis=0)
    ends = np.cumsum(pieces)
    skipped = (np.arange(ends[-1]) - np.repeat(ends - pieces, pieces)) * PIECE_BYTES
    cut[:, 1] += skipped
    cut[:, 2] += skipped
    cut[:, 3] = np.minimum(PIECE_BYTES, cut[:, 3] - skipped)
    return cut
