"""Explicit residency: promote and evict sets of tiles, blocking or not.

Spec: *Residency transitions have asynchronous and blocking forms*. Each request moves its whole set or, when
anything fails, leaves it as it was. These transitions are not differentiable and change no version.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from strideweave.runtime.await_result import AwaitResult
from strideweave.tiles.selection import TileSelection, TileSet

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.tiles.ledger import LedgerEntry

    Ordinals = npt.NDArray[np.int64]

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
        with traffic.lock:
            traffic.require_valid("promote", ordinals)
            missing = ~traffic.table.is_resident(ordinals)
            entry = self._enter("promote_async", ordinals, missing)
            traffic.counters.put_off.difference_update(ordinals.tolist())
        if entry is None:
            return AwaitResidency.completed(None)
        return self._carrier._start_work(
            entry, AwaitResidency(), partial(self._promote, entry, ordinals[missing])
        )

    def evict_async(self, tiles: TileSet | TileSelection) -> AwaitResidency:
        """Start moving every tile of a set out of the primary tier; see ``TiledEvictable.evict_async``."""
        ordinals = self._bind(tiles)
        traffic = self._carrier._traffic
        with traffic.lock:
            traffic.require_valid("evict", ordinals)
            resident = traffic.table.is_resident(ordinals)
            entry = self._enter("evict_async", ordinals, resident)
        if entry is None:
            return AwaitResidency.completed(None)
        return self._carrier._start_work(
            entry, AwaitResidency(), partial(self._evict, entry, ordinals[resident])
        )

    def promote(self, tiles: TileSet | TileSelection) -> None:
        """Make every tile of a set primary and return when that is done."""
        self.promote_async(tiles).wait()

    def evict(self, tiles: TileSet | TileSelection) -> None:
        """Move every tile of a set out of the primary tier and return when that is done."""
        self.evict_async(tiles).wait()

    def _bind(self, tiles: TileSet | TileSelection) -> Ordinals:
        self._carrier._require_live()
        if isinstance(tiles, TileSelection):
            tiles = tiles.tile_set
        if not isinstance(tiles, TileSet):
            raise TypeError(f"tiles must be a TileSet or a TileSelection, found {type(tiles).__name__}")
        return tiles.bind(self._carrier._traffic.grid)

    def _enter(
        self, kind: str, ordinals: Ordinals, would_change: npt.NDArray[np.bool_]
    ) -> LedgerEntry | None:
        """Admit the request, or give None when there is nothing to do; under the lock."""
        ledger = self._carrier._traffic.ledger
        if would_change.any():
            return ledger.enter_residency(kind, ordinals, would_change)
        ledger.check_residency(kind, ordinals, would_change)
        return None

    async def _promote(self, entry: LedgerEntry, ordinals: Ordinals) -> None:
        await self._carrier._traffic.fetch(entry, ordinals)

    async def _evict(self, entry: LedgerEntry, ordinals: Ordinals) -> None:
        traffic = self._carrier._traffic
        dirty = ordinals[traffic.table.is_dirty(ordinals)]
        if len(dirty):
            await traffic.write_back(dirty)
        with traffic.lock:
            traffic.ledger.begin_move(entry, ordinals)
        await traffic.drop(entry, ordinals)
