"""Reading and writing single slots of a tiled carrier, wherever their tile is.

Contract: a read takes any valid tile where it is; a write makes its tile primary and dirty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.carriers.tiled_evictable.store import note_change
from strideweave.carriers.tiled_evictable.traffic import Changes
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.thread_role import waiting_is_forbidden
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.plan import RequestPlan
from strideweave.tiles.residency import Location

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.tiles.ledger import LedgerEntry

    Ordinals = npt.NDArray[np.int64]

__all__ = ["read_slot", "read_slots", "write_slot"]


def read_slot(carrier: TiledEvictable, slot: int) -> bool | int | float:
    """Read one slot without moving its tile.

    Raises:
        InvalidTileError: the tile has no value yet.
        TileConflictError: the tile is in transit.
    """
    traffic = carrier._traffic
    ordinal, within = divmod(slot, traffic.grid.tile_size)
    at = np.array([ordinal], np.int64)
    dtype = carrier.dtype()
    with traffic.lock:
        traffic.require_valid("a read", at)
        traffic.ledger.check_still("a read", ordinal)
        location = traffic.table.location(ordinal)
        if location is Location.SECONDARY:
            tier, start = next(traffic.secondary.places(at))
        else:
            bits = np.zeros((), f"u{dtype.itemsize}")
            if location is Location.PRIMARY:
                bits[...] = traffic.rows_locked(at)[0][within]
            return dtype.to_python(bits.view(dtype.numpy))
    return tier._load_slot(start + within)


def write_slot(carrier: TiledEvictable, slot: int, value: npt.NDArray[Any]) -> None:
    """Write one slot; a tile that is not primary is fetched first, which blocks the calling thread.

    Raises:
        InvalidTileError: the tile has no value yet.
        TileConflictError: unfinished work needs the tile.
        RuntimeError: called inside the runtime, and the tile would have to be fetched.
    """
    traffic = carrier._traffic
    ordinal, within = divmod(slot, traffic.grid.tile_size)
    at = np.array([ordinal], np.int64)
    bits = value.view(f"u{carrier.dtype().itemsize}")

    def store() -> None:
        row, holder = traffic.rows_locked(at)[0], next(iter(traffic.primary.places(at)))[0]
        # First: no interruption may leave a new value in a tile that counts as clean.
        traffic.table.commit_write(ordinal)
        try:
            row[within] = bits
        finally:
            note_change(holder)
        traffic.touch(at)

    with traffic.lock:
        traffic.require_valid("a write", at)
        traffic.ledger.check_idle("a write", ordinal)
        if traffic.table.location(ordinal) is Location.PRIMARY:
            store()
            return
    if waiting_is_forbidden():
        raise RuntimeError(
            "a write to a tile that is not primary waits for it, which would deadlock inside the runtime; "
            "promote the tile first"
        )

    def enter(entry: LedgerEntry) -> None:
        traffic.ledger.check_idle("a write", ordinal)
        traffic.ledger.enter_residency(entry, at, np.ones(1, np.bool_))

    async def fetch_and_store(entry: LedgerEntry) -> None:
        await traffic.bring_all(entry, at)
        with traffic.lock:
            store()

    carrier._start_work(AwaitResult(), "write", enter, fetch_and_store).wait()


def read_slots(carrier: TiledEvictable, start: int, slots: int) -> npt.NDArray[Any]:
    """Copy a run of slots, tile by tile, leaving residency as it is; blocks the calling thread.

    Raises:
        InvalidTileError: one of the tiles has no value yet.
        TileConflictError: an unfinished residency request covers one of the tiles.
    """
    traffic = carrier._traffic
    size = traffic.grid.tile_size
    if not slots:
        return np.empty(0, carrier.dtype().numpy)
    whole = not start % size and not slots % size
    target = traffic.prototype._allocate_result(slots)  # of the class that tiles are read to
    values: npt.NDArray[Any] = target._bytes().view(carrier.dtype().numpy)
    flat = values.view(f"u{carrier.dtype().itemsize}")
    tiles = np.arange(start // size, (start + slots - 1) // size + 1)
    plan = RequestPlan(tiles, passing=tiles)
    staging = traffic.check_plan("a read", plan, in_place=whole)

    def landing(wave: Ordinals) -> tuple[Carrier, Ordinals]:
        return target, wave * size - start

    async def consume(wave: Ordinals, rows: list[npt.NDArray[np.unsignedinteger]]) -> None:
        pairs = []
        for ordinal, row in zip(wave.tolist(), rows, strict=True):
            first, last = max(start, ordinal * size), min(start + slots, (ordinal + 1) * size)
            pairs.append(
                (flat[first - start : last - start], row[first - ordinal * size : last - ordinal * size])
            )
        await traffic.copy(pairs)

    async def read(entry: LedgerEntry) -> None:
        changes, complete = Changes(), False
        try:
            await traffic.reserve_plan(entry, plan, staging, changes)
            await traffic.stream(tiles, consume, landing if whole else None, entry=entry)
            complete = True
        finally:
            if not complete:
                await traffic.undo(entry, changes)
        await traffic.finish_with(entry, NO_ORDINALS)

    carrier._start_work(AwaitResult(), "read", lambda entry: traffic.enter_data(entry, plan), read).wait()
    return values
