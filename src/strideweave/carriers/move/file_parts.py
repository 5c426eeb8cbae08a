"""How slots get out of files in place: batches as arrays, whatever the number of parts that they lie in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.file_parts import FileParts
from strideweave.carriers.move.operations import (
    STAGING_BYTES,
    FileToFile,
    FileToMemory,
    MoveOperation,
    writable_bytes,
)
from strideweave.carriers.move.planning import (
    Transfer,
    TransferBatch,
    TransferBlock,
    checked_blocks,
    checked_runs,
    cut_runs,
)
from strideweave.carriers.part_reading import SlotSpans
from strideweave.io.buffers import aligned_array
from strideweave.io.engine import default_engine
from strideweave.io.positioned import FileSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FilePartsToFile", "FilePartsToMemory"]


class FilePartsToMemory(MoveOperation):
    """Reads slots out of files in place, or of the spill beside them, into memory."""

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans; see :meth:`MoveOperation.transfer`."""
        spilled: list[TransferBlock] = []
        in_place: dict[FileParts, list[SlotSpans]] = {}
        for block in _blocks(transfers):
            source = block.source
            if isinstance(source, FileParts):
                memory = writable_bytes(block.destination)
                places = block.destination_starts * source.dtype().itemsize
                spans = SlotSpans(block.source_starts, block.slots, memory, places)
                in_place.setdefault(source, []).append(spans)
            else:
                spilled.append(block)
        for source, wanted in in_place.items():
            await source._read_into(wanted)
        if spilled:
            await FileToMemory().transfer(TransferBatch(spilled))


class FilePartsToFile(MoveOperation):
    """Copies slots out of files in place to a file, through a bounded piece of memory."""

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans; see :meth:`MoveOperation.transfer`."""
        runs = checked_runs(transfers)
        spilled = [run for run in runs if not isinstance(run.source, FileParts)]
        if spilled:
            await FileToFile().transfer(spilled)
            runs = [run for run in runs if isinstance(run.source, FileParts)]
        total = sum([run.slots * run.source.dtype().itemsize for run in runs])
        for run in runs:
            run.destination._file()[0].require_writable()
        staging = aligned_array(min(total, STAGING_BYTES))
        for group in cut_runs(runs, STAGING_BYTES):
            writes, filled = [], 0
            for source, start, destination, at, slots in group:
                width = source.dtype().itemsize
                file, base = destination._file()
                first, place = np.array([start], np.int64), np.array([filled], np.int64)
                await source._read_into([SlotSpans(first, slots, staging, place)])  # type: ignore[attr-defined]
                part = staging[filled : filled + slots * width]
                writes.append(FileSpan(file, base + at * width, part))
                filled += part.nbytes
            await default_engine().write(writes)


def _blocks(transfers: Sequence[Transfer]) -> Sequence[TransferBlock]:
    if isinstance(transfers, TransferBatch):
        return checked_blocks(transfers)
    return [
        TransferBlock(
            run.source,
            np.array([run.source_start], np.int64),
            run.destination,
            np.array([run.destination_start], np.int64),
            run.slots,
        )
        for run in checked_runs(transfers)
    ]
