"""How spans of slots get from one carrier to another: the hook, and what ships for memory and files.

A batch is checked as a whole before any byte moves; then all of it is one I/O batch, or one round of worker
threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.move.planning import (
    Transfer,
    TransferBatch,
    TransferBlock,
    checked_blocks,
    checked_runs,
    cut_runs,
)
from strideweave.errors import ImmutableError
from strideweave.io.buffers import aligned_array
from strideweave.io.engine import default_engine
from strideweave.io.positioned import FileSpan, SpanBatch, SpanBlock
from strideweave.runtime.workers import INLINE_BYTES, run_jobs, worker_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from strideweave.carriers.base import Carrier
    from strideweave.io.files import OpenFile

__all__ = [
    "ElementwiseMoveOperation",
    "FileToFile",
    "FileToMemory",
    "MemoryToFile",
    "MemoryToMemory",
    "MoveOperation",
    "Transfer",
    "may_move_at_once",
    "moved_at_once",
    "run_transfers",
    "writable_bytes",
]

SMALLEST_JOB = 1 << 20
"""Bytes that a worker copies at once, at least."""

LARGEST_JOB = 4 << 20
"""Bytes that a worker copies at once, at most."""

SMALLEST_SHARED_RUN = 128 << 10
"""Bytes: where runs are shorter than this on average, one worker copies them all. Each copy ends by taking the
interpreter's lock again, and two workers that do little else are up to three times slower than one."""

STAGING_BYTES = 8 << 20
"""Bytes of memory that a move between files passes through, at most."""


class MoveOperation(ABC):
    """Copies spans of slots between carriers of two exact classes; made without arguments for each use.

    Whoever asks for a transfer has checked that it is allowed: an operation reads and writes the carriers it
    is given whether or not they are owned or mutable, and advances no version.
    """

    @abstractmethod
    async def transfer(self, transfers: Sequence[Transfer]) -> Sequence[Carrier] | None:
        """Copy all spans, as one batch where the storage has such a thing.

        Called in the runtime's loop; what blocks or copies much belongs into worker threads. When it returns
        or raises, nothing may touch the carriers' storage any more.

        Args:
            transfers: spans that lie within their carriers; those read and those written do not overlap.

        Returns:
            None: the destinations are filled. Or the carriers that hold the values, which must be the
            destinations.

        Raises:
            TypeError: the dtypes of a pair differ.
            ValueError: a span does not lie within its carrier, or spans read and written overlap.
            OSError, EOFError: storage failed; the destinations' contents are unspecified.
        """


class MemoryToMemory(MoveOperation):
    """Copies between carriers in memory: small batches at once, larger ones in worker threads."""

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans; see :meth:`MoveOperation.transfer`."""
        runs = checked_runs(transfers)
        sources, destinations = _memory(run.source for run in runs), _writable_memory(runs)
        _set_aside_shared(runs, sources, destinations)
        total = _bytes_of(runs)
        if total <= INLINE_BYTES:
            _copy(runs, sources, destinations)
            return
        size = min(max(total // (4 * worker_count()), SMALLEST_JOB), LARGEST_JOB)
        groups = cut_runs(runs, size) if total >= SMALLEST_SHARED_RUN * len(runs) else [runs]
        await run_jobs([partial(_copy, group, sources, destinations) for group in groups])


class MemoryToFile(MoveOperation):
    """Writes slots in memory to a file, all spans in one I/O batch."""

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans; see :meth:`MoveOperation.transfer`."""
        if isinstance(transfers, TransferBatch):
            blocks = checked_blocks(transfers)
            memory, files = _memory(block.source for block in blocks), _writable_files(blocks)
            await default_engine().write(_span_batch(blocks, files, memory, reading=False))
            return
        runs = checked_runs(transfers)
        memory, files = _memory(run.source for run in runs), _writable_files(runs)
        await default_engine().write(_spans(runs, files, memory, reading=False))


class FileToMemory(MoveOperation):
    """Reads slots from a file into memory, all spans in one I/O batch."""

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans; see :meth:`MoveOperation.transfer`."""
        if isinstance(transfers, TransferBatch):
            blocks = checked_blocks(transfers)
            files, memory = _files(block.source for block in blocks), _writable_memory(blocks)
            await default_engine().read(_span_batch(blocks, files, memory, reading=True))
            return
        runs = checked_runs(transfers)
        files, memory = _files(run.source for run in runs), _writable_memory(runs)
        await default_engine().read(_spans(runs, files, memory, reading=True))


class FileToFile(MoveOperation):
    """Copies slots between files through a bounded piece of memory."""

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans; see :meth:`MoveOperation.transfer`."""
        runs = checked_runs(transfers)
        sources, destinations = _files(run.source for run in runs), _writable_files(runs)
        groups = cut_runs(runs, STAGING_BYTES)
        if any(_goes_up_in_one_file(run, sources, destinations) for run in runs):
            groups = reversed(list(groups))  # else it would write over what it has still to read
        staging = aligned_array(min(_bytes_of(runs), STAGING_BYTES))
        engine = default_engine()
        for group in groups:
            reads, writes, filled = [], [], 0
            for source, start, destination, at, slots in group:
                width = source.dtype().itemsize
                part = staging[filled : filled + slots * width]
                (file, base), (target, target_base) = sources[source], destinations[destination]
                reads.append(FileSpan(file, base + start * width, part))
                writes.append(FileSpan(target, target_base + at * width, part))
                filled += part.nbytes
            await engine.read(reads)
            await engine.write(writes)


class ElementwiseMoveOperation(MoveOperation):
    """Copies one slot after the other through Python numbers, for carriers that are neither memory nor file.

    It works between any two carriers, slowly; register it for the pairs of a carrier class of your own.
    Values pass as ``int``, ``bool`` or ``float``, so a NaN stays a NaN but its payload may change.
    """

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans, in one worker thread; see :meth:`MoveOperation.transfer`."""
        runs = checked_runs(transfers)
        await run_jobs([partial(_copy_slots, runs)])


async def run_transfers(operation_class: type[MoveOperation], transfers: Sequence[Transfer]) -> None:
    """Run one batch through a fresh operation, and check its answer.

    Raises:
        RuntimeError: the operation returned carriers that are not the given destinations, in their order.
    """
    operation = operation_class()
    filled = await operation.transfer(transfers)
    if filled is None:
        return
    wanted = [transfer.destination for transfer in transfers]
    if len(filled) != len(wanted) or any(one is not other for one, other in zip(filled, wanted, strict=True)):
        raise RuntimeError(
            f"{operation_class.__name__}.transfer returned carriers that are not the destinations it was given; "
            "return None, or the destinations in their order"
        )


def may_move_at_once(operation_class: type[MoveOperation], sources: Iterable[Carrier]) -> bool:
    """Tell whether what an operation reads from these carriers may be in the page cache: else no need to try."""
    if operation_class.transfer is not FileToMemory.transfer:  # it has a way of its own, and goes it
        return False
    return not any(source._file()[0].is_direct for source in sources)


def moved_at_once(transfers: TransferBatch) -> bool:
    """Copy a small batch from the page cache to memory without waiting for anything, where that is what there is to do.

    Args:
        transfers: from carriers of which ``may_move_at_once`` says so.

    Returns:
        Whether the destinations are filled; else ``run_transfers`` is the way.

    Raises:
        TypeError, ReleasedError, ValueError, ImmutableError: as a transfer.
    """
    blocks = checked_blocks(transfers)
    files, memory = _files(block.source for block in blocks), _writable_memory(blocks)
    return default_engine().read_at_once(_span_batch(blocks, files, memory, reading=True))


def _memory(carriers: Iterable[Carrier]) -> dict[Carrier, NDArray[np.uint8]]:
    return {carrier: carrier._bytes() for carrier in set(carriers)}


def _writable_memory(runs: Sequence[Transfer | TransferBlock]) -> dict[Carrier, NDArray[np.uint8]]:
    return {carrier: writable_bytes(carrier) for carrier in {run.destination for run in runs}}


def writable_bytes(carrier: Carrier) -> NDArray[np.uint8]:
    """The memory of a carrier that is to be written.

    Raises:
        ImmutableError: it is read-only.
        NotImplementedError: the carrier does not live in memory.
    """
    slots = carrier._bytes()
    if not slots.flags.writeable:
        raise ImmutableError(
            f"the destination {type(carrier).__name__} stands on read-only memory; copy the array first"
        )
    return slots


def _set_aside_shared(
    runs: Sequence[Transfer],
    sources: dict[Carrier, NDArray[np.uint8]],
    destinations: dict[Carrier, NDArray[np.uint8]],
) -> None:
    """Replace the memory of every source that shares some with the other carrier it goes to by a copy.

    A caller's memory may have several carriers; what one worker writes another would then still have to read.
    """
    for source, destination in {(run.source, run.destination) for run in runs}:
        if source is not destination and np.may_share_memory(sources[source], destinations[destination]):
            sources[source] = sources[source].copy()


def _files(carriers: Iterable[Carrier]) -> dict[Carrier, tuple[OpenFile, int]]:
    return {carrier: carrier._file() for carrier in set(carriers)}


def _writable_files(runs: Sequence[Transfer | TransferBlock]) -> dict[Carrier, tuple[OpenFile, int]]:
    files = _files(run.destination for run in runs)
    for file, _ in files.values():
        file.require_writable()
    return files


def _goes_up_in_one_file(
    run: Transfer,
    sources: dict[Carrier, tuple[OpenFile, int]],
    destinations: dict[Carrier, tuple[OpenFile, int]],
) -> bool:
    """Whether a run goes to a higher place of the file it comes from, which two carriers may have opened."""
    (file, base), (target, target_base) = sources[run.source], destinations[run.destination]
    width = run.source.dtype().itemsize
    upwards = base + run.source_start * width < target_base + run.destination_start * width
    return upwards and run.source is not run.destination and file.is_same_file(target)


def _spans(
    runs: Sequence[Transfer],
    files: dict[Carrier, tuple[OpenFile, int]],
    memory: dict[Carrier, NDArray[np.uint8]],
    *,
    reading: bool,
) -> list[FileSpan]:
    """Give each run its place in the file and in memory; ``reading`` says that the file is the source."""
    spans: list[FileSpan] = []
    source: Carrier | None = None
    destination: Carrier | None = None
    for from_, start, to, at, slots in runs:
        if from_ is not source or to is not destination:
            source, destination = from_, to
            width = from_.dtype().itemsize
            file, base = files[from_ if reading else to]
            bytes_ = memory[to if reading else from_]
        in_file, in_memory = (start, at) if reading else (at, start)
        part = bytes_[in_memory * width : (in_memory + slots) * width]
        spans.append(FileSpan(file, base + in_file * width, part))
    return spans


def _span_batch(
    blocks: Sequence[TransferBlock],
    files: dict[Carrier, tuple[OpenFile, int]],
    memory: dict[Carrier, NDArray[np.uint8]],
    *,
    reading: bool,
) -> SpanBatch:
    """As ``_spans``, for blocks."""
    batch = []
    for block in blocks:
        width = block.source.dtype().itemsize
        ends = (block.source, block.source_starts), (block.destination, block.destination_starts)
        (there, in_file), (here, in_memory) = ends if reading else reversed(ends)
        file, base = files[there]
        batch.append(
            SpanBlock(file, base + in_file * width, memory[here], in_memory * width, block.slots * width)
        )
    return SpanBatch(batch)


def _bytes_of(runs: Sequence[Transfer]) -> int:
    return sum([run.slots * run.source.dtype().itemsize for run in runs])


def _copy(
    runs: Sequence[Transfer],
    sources: dict[Carrier, NDArray[np.uint8]],
    destinations: dict[Carrier, NDArray[np.uint8]],
) -> None:
    for source, start, destination, at, slots in runs:
        width = source.dtype().itemsize
        part = sources[source][start * width : (start + slots) * width]
        destinations[destination][at * width : (at + slots) * width] = part  # np.copyto begins later


def _copy_slots(runs: Sequence[Transfer]) -> None:
    for source, start, destination, at, slots in runs:
        for i in range(slots):
            value = source._load_slot(start + i)
            destination._store_slot(at + i, destination._convert(value))
