"""What a move holds of a tiled carrier: its tiles in the ledger, and room under a memory limit.

Contract, the conflict table: a move covers its tiles as a residency request does, so it meets no other work.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.move.registry import dispatch_move
from strideweave.carriers.tiled_evictable.streaming import STAGING_BYTES
from strideweave.carriers.tiled_evictable.traffic import Changes
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.ledger import LedgerEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic

    Ordinals = npt.NDArray[np.int64]

__all__ = ["TileMove", "admitted", "begin_move"]


@dataclass(slots=True, eq=False)
class TileMove:
    """What one move holds of a tiled carrier.

    Attributes:
        entry: covers the tiles in the ledger.
        staging_bytes: what was reserved for staging; None before.
        changes: the tiles that made room for it.
    """

    entry: LedgerEntry
    staging_bytes: int | None = None
    changes: Changes = field(default_factory=Changes)

    async def reserve(self, traffic: TileTraffic, staying: Ordinals = NO_ORDINALS) -> int:
        """Take room under a memory limit, once: for tiles that become primary, or else for staging.

        Returns:
            How many tiles may be staged at once.
        """
        if self.staging_bytes is None:
            most = max(STAGING_BYTES, traffic.tile_bytes)
            staging = 0 if len(staying) else traffic.staging_room(most)
            await traffic.reserve(self.entry, staying, staging, changes=self.changes)
            self.staging_bytes = staging
        return max(1, self.staging_bytes // traffic.tile_bytes)

    async def undo(self, traffic: TileTraffic) -> None:
        """After a failure, make primary again what made room."""
        if self.changes.dropped:
            await traffic.restore(self.entry, self.changes.dropped)


def begin_move(carrier: TiledEvictable, move: TileMove, other: type[Carrier], *, reads: bool) -> None:
    """Cover every tile of a carrier for a move of all its slots, or raise; under the lock.

    Args:
        carrier: the source or the destination.
        move: a new one.
        other: the exact class at the other end.
        reads: whether the carrier is the source.

    Raises:
        InvalidTileError: a source has tiles without a value.
        TileConflictError: unfinished work needs, moves or covers one of the tiles.
        NotImplementedError: no move is registered between the other class and the compute class.
    """
    compute = carrier._compute_class
    if not reads:
        dispatch_move(other, compute)
    elif other is not type(carrier):
        dispatch_move(compute, other)
    _cover(carrier, move.entry, np.arange(carrier._traffic.grid.tile_count), reads=reads)


def _cover(carrier: TiledEvictable, entry: LedgerEntry, tiles: Ordinals, *, reads: bool) -> None:
    traffic = carrier._traffic
    with traffic.lock:
        if reads:
            traffic.require_valid(entry.kind, tiles)
        traffic.cover(entry, tiles)


@asynccontextmanager
async def admitted(carrier: TiledEvictable, tiles: Ordinals, *, reads: bool) -> AsyncIterator[TileMove]:
    """The move that covers all tiles already, or one of its own for these."""
    if carrier._moving is not None:
        yield carrier._moving
        return
    move, complete = TileMove(LedgerEntry("move")), False
    _cover(carrier, move.entry, tiles, reads=reads)
    try:
        yield move
        complete = True
    finally:
        try:
            if not complete:
                await move.undo(carrier._traffic)
        finally:
            carrier._traffic.leave(move.entry)
