"""Copy the tiles of a selection into one compact array: from the primary tier, or past it.

Both coroutines run in the runtime's loop, for a request that holds the tiles. Bytes move, not values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from anyio.lowlevel import checkpoint

from strideweave.runtime.workers import INLINE_BYTES, run_jobs, share_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.tiles.gather import CompactGeometry
    from strideweave.tiles.ledger import LedgerEntry

    Ordinals = npt.NDArray[np.int64]
    Flat = npt.NDArray[np.unsignedinteger]

__all__ = ["INLINE_BYTES", "copy_inline", "copy_resident", "copy_streamed"]

_LOOP_BYTES = 4 * INLINE_BYTES  # up to this much, the loop is done before a worker would have come back to it
_FEW_TILES = 8  # up to this many, copying tile by tile takes less time than preparing to copy them together


async def copy_resident(
    traffic: TileTraffic, geometry: CompactGeometry, ordinals: Ordinals, positions: Ordinals, compact: Flat
) -> None:
    """Copy tiles from the primary tier: in the loop when they are small together, else in worker threads.

    The loop copies 256 KiB at once, at the most, and others get their turn in between.

    Args:
        traffic: the carrier's.
        geometry: where the tiles of the selection go.
        ordinals: the tiles to copy, resident ones.
        positions: the position of each in the selection.
        compact: the compact array.
    """
    nbytes = len(ordinals) * traffic.tile_bytes
    if nbytes <= _LOOP_BYTES and traffic.tile_bytes <= INLINE_BYTES:
        at_once = INLINE_BYTES // traffic.tile_bytes
        for first in range(0, len(ordinals), at_once):
            if first:
                await checkpoint()
            turn = slice(first, first + at_once)
            copy_inline(traffic, geometry, ordinals[turn], positions[turn], compact)
        return
    piece = share_bytes(nbytes)
    block = traffic.block(ordinals)
    if block is None:
        rows = traffic.rows(ordinals)
        await run_jobs(geometry.jobs(rows, positions.tolist(), compact, piece))
    else:
        await run_jobs(geometry.row_jobs(*block, positions, compact, piece))


def copy_inline(
    traffic: TileTraffic, geometry: CompactGeometry, ordinals: Ordinals, positions: Ordinals, compact: Flat
) -> None:
    """Copy a few tiles from the primary tier at once; arguments as for ``copy_resident``."""
    block = traffic.block(ordinals) if len(ordinals) > _FEW_TILES else None
    if block is None:
        geometry.copy_in(traffic.rows(ordinals), positions.tolist(), compact)
    else:
        geometry.copy_rows(*block, positions, compact)


async def copy_streamed(
    traffic: TileTraffic,
    geometry: CompactGeometry,
    ordinals: Ordinals,
    positions: Ordinals,
    target: Carrier,
    *,
    entry: LedgerEntry | None = None,
) -> None:
    """Read tiles past the primary tier, straight to their places where each is one run of slots there.

    Args:
        traffic: the carrier's.
        geometry: where the tiles of the selection go.
        ordinals: the tiles to read.
        positions: the position of each in the selection.
        target: a carrier in memory, whose first slots are the compact array.
        entry: the request, which has reserved the staging; only a memory limit asks for it.
    """
    compact = target._bytes().view(traffic.unit)[: geometry.size]
    order = np.argsort(ordinals)
    ascending, in_order = ordinals[order], positions[order]

    def positions_of(wave: Ordinals) -> Ordinals:
        return in_order[np.searchsorted(ascending, wave)]

    def landing(wave: Ordinals) -> tuple[Carrier, Ordinals]:
        return target, geometry.starts(positions_of(wave))

    async def consume(wave: Ordinals, rows: list[Flat]) -> None:
        at = positions_of(wave).tolist()
        nbytes = len(wave) * traffic.tile_bytes
        if nbytes > INLINE_BYTES:
            await run_jobs(geometry.jobs(rows, at, compact, share_bytes(nbytes)))
        else:
            geometry.copy_in(rows, at, compact)

    await traffic.stream(ordinals, consume, landing if geometry.contiguous else None, entry=entry)
