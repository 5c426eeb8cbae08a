"""One call's operations on an io_uring: what is still to be handed over, what the kernel has, what went wrong."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

import numpy as np

from strideweave.io.files import ALIGNMENT
from strideweave.io.positioned import FileSpan, SpanBatch, failure, raise_first, stuck
from strideweave.io.uring import ASYNC, DATA_ONLY, PERSIST, READ, SUBMISSION, WRITE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self, TypeAlias

    from numpy.typing import NDArray

    from strideweave.io.files import HeldDescriptor, OpenFile
    from strideweave.io.uring import Ring

    Columns: TypeAlias = "NDArray[np.int64]"
    """A row for each operation: descriptor, offset, address and length."""

__all__ = ["SLOT_BITS", "Batch", "RefusedError"]

PIECE_BYTES = 1 << 20
"""Bytes that one operation moves, at most: so that several are at work on a large span, and far below the limit of
2 GiB that one has."""

ASYNC_BYTES = 1 << 20
"""Bytes from which on an operation through the page cache goes to a kernel thread at once, so that several processors
copy. Smaller ones are copied inside the system call: a thread's wake-up and its own event would take longer."""

SLOT_BITS = np.uint64(32)
"""Where the name of an operation has its batch; below that is its place in the batch."""

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
        slot: the name of the batch in the ring.
        left: operations that have neither succeeded nor failed.
    """

    def __init__(
        self, files: Sequence[OpenFile], held: Sequence[HeldDescriptor], columns: Columns, opcode: int
    ) -> None:
        self.slot = 0
        self._opcode = opcode
        self._files = files
        self._held = held  # keeps the descriptors open
        self._spans: Sequence[FileSpan] = ()  # keeps the buffers alive
        self._fds, self._offsets, self._addresses, self._lengths = columns.T.copy()
        self._is_direct: NDArray[np.bool_] = np.zeros(len(columns), np.bool_)
        self._starts = self._offsets.copy()
        self._wanted = self._lengths.copy()
        self._calls = 0
        self._under_way = 0
        depths = [file.queue_depth for file in files if file.queue_depth is not None]
        self._most = min([len(self._lengths), *depths])  # operations under way at once
        self.left = len(self._lengths)
        self._fresh = 0  # the first operation that was never handed over
        self._again: list[int] = []
        self._errors: list[BaseException] = []
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    def moving(cls, spans: Sequence[FileSpan], *, writing: bool) -> Self:
        """The operations that fill the buffers of spans, or write them."""
        files = _files(spans)
        if writing:
            for file in files:
                file.require_writable()
        held = [file.descriptor() for file in files]
        numbers = {file: one.number for file, one in zip(files, held, strict=True)}
        columns = _block_columns(spans, numbers) if isinstance(spans, SpanBatch) else _columns(spans, numbers)
        batch = cls(files, held, _cut(_merged(columns)), WRITE if writing else READ)
        batch._spans = spans
        batch._choose_direct()
        return batch

    @classmethod
    def persisting(cls, file: OpenFile) -> Self:
        """The operation that makes what was written to a file durable; it moves no bytes, so all of them at once."""
        held = file.descriptor()
        return cls([file], [held], np.array([[held.number, 0, 0, 0]], np.int64), PERSIST)

    def _choose_direct(self) -> None:
        """Send past the page cache what is aligned, of files that allow it."""
        for file, held in zip(self._files, self._held, strict=True):
            direct = file.direct_number(held, writing=self._opcode == WRITE)
            if direct >= 0:
                places = self._offsets | self._addresses | self._lengths
                aligned = (self._fds == held.number) & (places % ALIGNMENT == 0)
                self._fds[aligned] = direct
                self._is_direct |= aligned

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
        entries["rw_flags"] = DATA_ONLY if self._opcode == PERSIST else 0
        entries["user_data"] = (np.uint64(self.slot) << SLOT_BITS) | places.astype(np.uint64)
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
        moved = self._wanted - self._lengths
        for file, held in zip(self._files, self._held, strict=True):
            if len(self._files) == 1:
                self._count(file, self._calls, int(moved.sum()))
                return
            mine = np.isin(self._fds, (held.number, held.direct))
            self._count(file, int(np.count_nonzero(mine)), int(moved[mine].sum()))

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
        number = int(self._fds[place])
        offset = int(self._starts[place])
        wanted, got = int(self._wanted[place]), int(self._wanted[place] - self._lengths[place])
        file = next(
            file
            for file, held in zip(self._files, self._held, strict=True)
            if number in (held.number, held.direct)
        )
        if self._opcode == PERSIST:
            return file.not_persistent(-result)
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
