"""Moves from and to a store: whole tiles where the batch has them, each with its checksum and by the journal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from strideweave.carriers.block_device import BlockDeviceCarrier
from strideweave.carriers.cpu import CPU
from strideweave.carriers.evictable import Evictable
from strideweave.carriers.extension import CarrierDefinition, TransferRoute, register_carrier
from strideweave.carriers.file_backed import FileBacked
from strideweave.carriers.generic import Generic
from strideweave.carriers.metal import Metal
from strideweave.carriers.move.operations import MoveOperation, Transfer, run_transfers, writable_bytes
from strideweave.carriers.move.planning import TransferBatch, checked_blocks, checked_runs
from strideweave.carriers.move.registry import dispatch_move
from strideweave.carriers.move.through import MoveThroughTiers
from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
from strideweave.carriers.tiled_evictable.moving import MoveFromTiles, MoveToTiles
from strideweave.io.buffers import aligned_array
from strideweave.io.engine import default_engine
from strideweave.io.positioned import FileSpan
from strideweave.store.carrier import StoreBacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.move.planning import TransferBlock
    from strideweave.store.tile_files import TilePlaces

    Slots = NDArray[np.int64]

__all__ = ["StoreMove"]

STAGING_BYTES = 8 << 20
"""Bytes of memory, or one tile, that a move between a store and a file passes through, at most."""


class StoreMove(MoveOperation):
    """Copies spans between carriers of which one is a store.

    A tier beside a store, such as the spill of one that is open for reading, is handed on to the move of its class.
    """

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans; see :meth:`MoveOperation.transfer`.

        Raises:
            DamagedTileError: a tile of the store is not what its checksum says.
            PermissionError: the store is open for reading.
        """
        if isinstance(transfers, TransferBatch):
            blocks = checked_blocks(transfers)
            for block in blocks:
                _require_writable(block.destination)
            await _copy_blocks(blocks)
            return
        runs = checked_runs(transfers)
        for destination in {run.destination for run in runs}:
            _require_writable(destination)
        for touches, group in groupby(runs, key=_touches_store):
            if touches:
                for run in group:
                    await _copy_run(run)
            else:
                await _hand_on(list(group))


async def _copy_blocks(blocks: Sequence[TransferBlock]) -> None:
    """Copy whole tiles between a store and memory as one batch for each store, and the rest block by block."""
    reads: dict[StoreBacked, list[TilePlaces]] = {}
    writes: dict[StoreBacked, list[TilePlaces]] = {}
    for block in blocks:
        source, destination = block.source, block.destination
        if isinstance(source, StoreBacked):
            places = _places(source, block.source_starts, destination, block.destination_starts, block.slots)
            batch = reads.setdefault(source, [])
        elif isinstance(destination, StoreBacked):
            places = _places(destination, block.destination_starts, source, block.source_starts, block.slots)
            batch = writes.setdefault(destination, [])
        else:
            await _hand_on(TransferBatch([block]))
            continue
        if places is not None:
            batch.append(places)
            continue
        for run in checked_runs(list(TransferBatch([block]))):
            await _copy_run(run)
    for store, tiles in reads.items():
        if tiles:
            await store._files.read(tiles)
    for store, tiles in writes.items():
        if tiles:
            await store._files.write(tiles)


def _places(
    store: StoreBacked, starts: Slots, other: Carrier, others: Slots, slots: int
) -> TilePlaces | None:
    """Where whole tiles of a store are in memory; None where the other end is no memory, or parts are asked for.

    Args:
        store: one end.
        starts: the first slots there.
        other: the other end.
        others: the first slots there.
        slots: slots of each transfer.
    """
    memory = _memory(other)
    if memory is None or slots != store._tile_size or (starts % slots).any():
        return None
    return store._places(starts, memory, others * other.dtype().itemsize)


async def _hand_on(transfers: Sequence[Transfer]) -> None:
    """Run transfers of one pair of classes that are not a store's, or of several, through their own moves."""
    if isinstance(transfers, TransferBatch):
        block = transfers.blocks[0]
        await run_transfers(dispatch_move(type(block.source), type(block.destination)), transfers)
        return
    for pair, group in groupby(transfers, key=lambda run: (type(run.source), type(run.destination))):
        await run_transfers(dispatch_move(*pair), list(group))


async def _copy_run(run: Transfer) -> None:
    source, start, destination, at, slots = run
    width = source.dtype().itemsize
    memory = _memory(destination)
    if memory is not None:
        await _read(source, start, memory[at * width : (at + slots) * width])
        return
    memory = _memory(source)
    if memory is not None:
        await _write(destination, at, memory[start * width : (start + slots) * width])
        return
    step = max(STAGING_BYTES // width, *(one._tile_size for one in run if isinstance(one, StoreBacked)))
    if isinstance(destination, StoreBacked):  # whole tiles of it where there are any
        step -= step % destination._tile_size
    staging = aligned_array(min(step, slots) * width)
    pieces = list(_cut(start, at, slots, step, destination))
    if source is destination and start < at:
        pieces.reverse()  # else it would write over what it has still to read
    for begin, place, count in pieces:
        part = staging[: count * width]
        await _read(source, begin, part)
        await _write(destination, place, part)


def _cut(start: int, at: int, slots: int, step: int, destination: Carrier) -> list[tuple[int, int, int]]:
    """Cut a run into steps, the first one up to a border of a tile of the destination."""
    size = destination._tile_size if isinstance(destination, StoreBacked) else 1
    pieces, done = [], 0
    while done < slots:
        count = min(step - (at + done) % size, slots - done)
        pieces.append((start + done, at + done, count))
        done += count
    return pieces


async def _read(carrier: Carrier, start: int, memory: NDArray[np.uint8]) -> None:
    if isinstance(carrier, StoreBacked):
        await carrier._read_span(start, memory)
    else:
        file, base = carrier._file()
        await default_engine().read([FileSpan(file, base + start * carrier.dtype().itemsize, memory)])


async def _write(carrier: Carrier, start: int, memory: NDArray[np.uint8]) -> None:
    if isinstance(carrier, StoreBacked):
        await carrier._write_span(start, memory)
    else:
        file, base = carrier._file()
        await default_engine().write([FileSpan(file, base + start * carrier.dtype().itemsize, memory)])


def _touches_store(run: Transfer) -> bool:
    return isinstance(run.source, StoreBacked) or isinstance(run.destination, StoreBacked)


def _memory(carrier: Carrier) -> NDArray[np.uint8] | None:
    try:
        return carrier._bytes()
    except NotImplementedError:
        return None


def _require_writable(carrier: Carrier) -> None:
    """Refuse what is read-only before anything moves."""
    if isinstance(carrier, StoreBacked):
        carrier._files.require_writable()
    elif _memory(carrier) is not None:
        writable_bytes(carrier)
    else:
        carrier._file()[0].require_writable()


_PLAIN = (BlockDeviceCarrier, CPU, FileBacked, Generic, Metal)

register_carrier(
    CarrierDefinition(
        StoreBacked,
        routes=(
            *(TransferRoute(StoreBacked, other, StoreMove) for other in (*_PLAIN, StoreBacked)),
            *(TransferRoute(other, StoreBacked, StoreMove) for other in _PLAIN),
            TransferRoute(Evictable, StoreBacked, MoveThroughTiers),
            TransferRoute(StoreBacked, Evictable, MoveThroughTiers),
            TransferRoute(TiledEvictable, StoreBacked, MoveFromTiles),
            TransferRoute(StoreBacked, TiledEvictable, MoveToTiles),
        ),
    )
)
