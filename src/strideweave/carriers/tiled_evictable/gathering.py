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

__all__ = ["copy_inline", "copy_resident", "copy_streamed", "loop_bytes"]

_LOOP_BYTES = 4 * INLINE_BYTES  # up to this much, the loop is done before a worker would have come back to it
_FEW_TILES = 8  # up to this many, copying tile by tile takes less time than preparing to copy them together


def loop_bytes(geometry: CompactGeometry) -> int:
    """Say how much the loop may copy at once: less where values change their order, which takes longer."""
    return _LOOP_BYTES if geometry.contiguous else INLINE_BYTES


async def copy_resident(
    traffic: TileTraffic,
    geometry: CompactGeometry,
    ordinals: Ordinals,
    positions: Ordinals | None,
    compact: Flat,
) -> None:
    """Copy tiles from the primary tier: in the loop when they are small together, else in worker threads.

    The loop copies ``loop_bytes`` at once, at the most, and others get their turn in between.

    Args:
        traffic: the carrier's.
        geometry: where the tiles of the selection go.
        ordinals: the tiles to copy, resident ones.
        positions: the position of each in the selection; None where these are all its tiles, in order.
        compact: the compact array.
    """
    nbytes, most = len(ordinals) * traffic.tile_bytes, loop_bytes(geometry)
    if nbytes <= _LOOP_BYTES and traffic.tile_bytes <= most:
        at_once = most // traffic.tile_bytes
        if len(ordinals) <= at_once:
            copy_inline(traffic, geometry, ordinals, positions, compact)
            return
        positions = np.arange(len(ordinals)) if positions is None else positions
        for first in range(0, len(ordinals), at_once):
            if first:
                await checkpoint()
            turn = slice(first, first + at_once)
            copy_inline(traffic, geometry, ordinals[turn], positions[turn], compact)
        return
    piece = share_bytes(nbytes)
    pieces = traffic.pieces(ordinals) if geometry.takes_pieces(traffic.tile_bytes) else None
    if pieces is None:
        rows = traffic.rows(ordinals)
        places = range(len(ordinals)) if positions is None else positions.tolist()
        await run_jobs(geometry.jobs(rows, places, compact, piece))
    else:
        await run_jobs(geometry.piece_jobs(pieces, positions, compact, piece))


def copy_inline(
    traffic: TileTraffic,
    geometry: CompactGeometry,
    ordinals: Ordinals,
    positions: Ordinals | None,
    compact: Flat,
) -> None:
    """Copy a few tiles from the primary tier at once; arguments as for ``copy_resident``."""
    together = len(ordinals) > _FEW_TILES and geometry.takes_pieces(traffic.tile_bytes)
    pieces = traffic.pieces(ordinals) if together else None
    if pieces is None:
        places = range(len(ordinals)) if positions is None else positions.tolist()
        geometry.copy_in(traffic.rows(ordinals), places, compact)
    else:
        geometry.copy_pieces(pieces, positions, compact)


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
    order: Ordinals | None = None

    def positions_of(wave: Ordinals) -> Ordinals:
        nonlocal order
        if wave is ordinals:  # as a few tiles are asked for: all at once
            return positions
        if order is None:
            order = ordinals.argsort()
        return positions[order[ordinals.searchsorted(wave, sorter=order)]]

    def landing(wave: Ordinals) -> tuple[Carrier, Ordinals]:
        return target, geometry.starts(positions_of(wave))

    async def consume(wave: Ordinals, rows: list[Flat]) -> None:
        compact = target._bytes().view(traffic.unit)[: geometry.size]
        at = positions_of(wave).tolist()
        nbytes = len(wave) * traffic.tile_bytes
        if nbytes > INLINE_BYTES:
            await run_jobs(geometry.jobs(rows, at, compact, share_bytes(nbytes)))
        else:
            geometry.copy_in(rows, at, compact)

    await traffic.stream(ordinals, consume, landing if geometry.contiguous else None, entry=entry)
