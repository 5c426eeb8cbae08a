"""A flush: dirty tiles written to the secondary tier while they stay where they are.

To the ledger it is a request that reads: it shares its tiles with projections and operations, which only read them
too, and holds off whatever would change them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from strideweave.runtime.await_result import AwaitResult
from strideweave.tiles.coordinates import NO_ORDINALS

if TYPE_CHECKING:
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.tiles.ledger import LedgerEntry

__all__ = ["start_flush"]

_KIND = "flush_async"


def start_flush(carrier: TiledEvictable, *, durable: bool) -> AwaitResult[None]:
    """Admit a flush and start it; see ``TiledEvictable.flush_async``."""
    carrier._require_live()
    traffic = carrier._traffic

    def enter(entry: LedgerEntry) -> None:
        traffic.ledger.enter_data(entry, traffic.table.dirty())

    if not durable:
        with traffic.lock:
            if not len(traffic.table.dirty()):
                return AwaitResult.completed(None)
    return carrier._start_work(AwaitResult[None](), _KIND, enter, partial(_flush, traffic, durable))


async def _flush(traffic: TileTraffic, durable: bool, entry: LedgerEntry) -> None:
    try:
        await traffic.reserve(entry, NO_ORDINALS, 0)  # so that nothing makes room at the cost of these tiles
        dirty = entry.needs[traffic.table.is_dirty(entry.needs)]  # some have been written back since
        if len(dirty):
            await traffic.write_back(dirty, durable=durable)
        elif durable:
            await traffic.secondary.persist()
    finally:
        await traffic.finish_with(entry, NO_ORDINALS)
