"""Explicit residency: promote and evict sets of tiles, blocking or not.

Spec: *Residency transitions have asynchronous and blocking forms*. Each request moves its whole set or, when
anything fails, leaves it as it was. These transitions are not differentiable and change no version.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.tiled_evictable.flushing import start_flush
from strideweave.flags import as_flag
from strideweave.runtime.await_result import AwaitResult
from strideweave.tiles.selection import TileSelection, TileSet

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.tiles.ledger import LedgerEntry

    Ordinals = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["AwaitResidency", "TiledResidencyFacet"]


class AwaitResidency(AwaitResult[None]):
    """The completion handle of one promotion or eviction; its value is None.

    Spec: *Residency transitions have asynchronous and blocking forms*.
    """

    __slots__ = ()


class TiledResidencyFacet:
    """Moves tiles of one carrier between its tiers: ``carrier.require_facet(TiledResidencyFacet)``.

    ``TiledEvictable`` has methods of the same names that delegate here.

    Args:
        carrier: the carrier whose tiles move.
    """

    __slots__ = ("_carrier",)

    def __init__(self, carrier: TiledEvictable) -> None:
        self._carrier = carrier

    def promote_async(self, tiles: TileSet | TileSelection) -> AwaitResidency:
        """Start making every tile of a set primary; see ``TiledEvictable.promote_async``."""
        ordinals = self._bind(tiles)
        traffic = self._carrier._traffic
        traffic.check_fits("promote_async", len(ordinals), 0)

        def enter(entry: LedgerEntry) -> None:
            traffic.ledger.enter_residency(entry, ordinals, self._missing(ordinals))
            traffic.keep(ordinals.tolist())

        with traffic.lock:
            traffic.require_valid("promote", ordinals)
            missing = self._missing(ordinals)
            traffic.ledger.check_residency("promote_async", ordinals, missing)
            if not missing.any():
                traffic.keep(ordinals.tolist())
                traffic.touch(ordinals)
                return AwaitResidency.completed(None)
        work = partial(self._promote, ordinals)
        return self._carrier._start_work(AwaitResidency(), "promote_async", enter, work)

    def evict_async(self, tiles: TileSet | TileSelection, *, durable: bool = False) -> AwaitResidency:
        """Start moving every tile of a set out of the primary tier; see ``TiledEvictable.evict_async``."""
        durable = as_flag(durable, "durable")
        ordinals = self._bind(tiles)
        traffic = self._carrier._traffic

        def enter(entry: LedgerEntry) -> None:
            traffic.ledger.enter_residency(entry, ordinals, self._leaving(ordinals))

        with traffic.lock:
            traffic.require_valid("evict", ordinals)
            leaving = self._leaving(ordinals)
            traffic.ledger.check_residency("evict_async", ordinals, leaving)
            if not durable and not leaving.any():
                return AwaitResidency.completed(None)
        work = partial(self._evict, ordinals, durable)
        return self._carrier._start_work(AwaitResidency(), "evict_async", enter, work)

    def promote(self, tiles: TileSet | TileSelection) -> None:
        """Make every tile of a set primary and return when that is done."""
        self.promote_async(tiles).wait()

    def evict(self, tiles: TileSet | TileSelection, *, durable: bool = False) -> None:
        """Move every tile of a set out of the primary tier and return when that is done."""
        self.evict_async(tiles, durable=durable).wait()

    def flush_async(self, *, durable: bool = False) -> AwaitResult[None]:
        """Start writing every dirty tile to the secondary tier; see ``TiledEvictable.flush_async``."""
        return start_flush(self._carrier, durable=as_flag(durable, "durable"))

    def flush(self, *, durable: bool = False) -> None:
        """Write every dirty tile to the secondary tier and return when that is done."""
        self.flush_async(durable=durable).wait()

    def _bind(self, tiles: TileSet | TileSelection) -> Ordinals:
        self._carrier._require_live()
        if isinstance(tiles, TileSelection):
            tiles = tiles.tile_set
        if not isinstance(tiles, TileSet):
            raise TypeError(f"tiles must be a TileSet or a TileSelection, found {type(tiles).__name__}")
        return tiles.bind(self._carrier._traffic.grid)

    def _missing(self, ordinals: Ordinals) -> Mask:
        """The tiles that a promotion would change."""
        return ~self._carrier._traffic.table.is_resident(ordinals)

    def _leaving(self, ordinals: Ordinals) -> Mask:
        """The tiles that an eviction would change: those resident, and those that others are about to fetch."""
        traffic = self._carrier._traffic
        return traffic.table.is_resident(ordinals) | (traffic.ledger.needed[ordinals] > 0)

    async def _promote(self, ordinals: Ordinals, entry: LedgerEntry) -> None:
        await self._carrier._traffic.bring_all(entry, ordinals)

    async def _evict(self, ordinals: Ordinals, durable: bool, entry: LedgerEntry) -> None:
        traffic = self._carrier._traffic
        resident = ordinals[traffic.table.is_resident(ordinals)]
        dirty = resident[traffic.table.is_dirty(resident)]
        if len(dirty):
            await traffic.write_back(dirty, durable=durable)
        elif durable:  # what has left before may not be durable yet
            await traffic.secondary.persist()
        with traffic.lock:
            traffic.ledger.begin_move(entry, resident)
        await traffic.drop(entry, resident)
