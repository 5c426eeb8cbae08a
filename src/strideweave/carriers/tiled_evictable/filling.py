"""Giving whole tiles new values: the way in for scatter, for gradients and for ``assign``.

Spec: *Scatter is the asynchronous projection counterpart*; *Projection is an autograd-visible gather*. The values
come from a compact Tensor or from the tiles of another carrier. A set of tiles changes whole or not at all: tiles
that are not primary get a place and their value there first, which may fail; what overwrites a value in place is
prepared before, and comes last, since it cannot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from anyio.lowlevel import checkpoint

from strideweave.carriers.tiled_evictable.store import note_change
from strideweave.carriers.tiled_evictable.tile_values import (
    CompactValues,
    add_tiles,
    add_to_zero,
    apply,
    blocks_of,
)
from strideweave.carriers.tiled_evictable.traffic import Changes
from strideweave.runtime.await_result import AwaitResult
from strideweave.tiles.compact import groups
from strideweave.tiles.coordinates import NO_ORDINALS

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.tile_values import Values, Views
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.tensor import Tensor
    from strideweave.tiles.ledger import LedgerEntry
    from strideweave.tiles.selection import TileSelection

    Ordinals = npt.NDArray[np.int64]

__all__ = ["BATCH_TILES", "Reduction", "TileWriter", "in_waves", "start_filling"]

BATCH_TILES = 256  # after so many, the loop has a turn

Reduction: TypeAlias = Literal["replace", "add"]


def start_filling(
    carrier: TiledEvictable,
    tensor: Tensor,
    selection: TileSelection,
    compact: Tensor,
    *,
    reduction: Reduction,
    kind: str,
) -> AwaitResult[None]:
    """Start giving the selected tiles of a full Tensor the values of a compact one.

    It is a request of ``carrier``, which nobody else uses: one that is being filled, or a gradient. Afterwards the
    tiles are valid and dirty, and the version has advanced. They change all together or not at all, and are
    primary then, save where they do not fit a memory limit together: then they change in several steps, and all
    but the last ones may have left for the secondary tier. Nothing keeps the caller from changing ``compact``
    meanwhile, so it has to be one that nobody else writes to.

    Args:
        carrier: the carrier of ``tensor``.
        tensor: a full Tensor.
        selection: which tiles.
        compact: a Tensor in memory of the compact shape and of the carrier's dtype, with any Layout.
        reduction: ``"add"`` adds to the values that are there, implicit zeros among them, as the operation
            ``add`` does; tiles that are not primary are fetched for it and stay.
        kind: what the request is called in messages.

    Returns:
        The handle; awaiting it in the runtime's loop is fine.

    Raises:
        TypeError, ValueError: tensor, selection and compact shape do not fit each other.
        InvalidTileError: values are to be added to a tile that has none.
        TileConflictError: unfinished work needs, moves or covers one of the tiles.
    """
    traffic = carrier._traffic
    placement = carrier._place(tensor)
    ordinals = selection.bind(traffic.grid)
    waves = [*_waves(traffic, ordinals)]
    at_once = len(waves) == 1

    def enter(entry: LedgerEntry) -> None:
        if reduction == "add":
            traffic.require_valid(kind, ordinals)
        if not at_once:
            traffic.ledger.check_residency(kind, ordinals, np.ones(len(ordinals), np.bool_))
        traffic.cover(entry, ordinals if at_once else NO_ORDINALS)

    async def fill(entry: LedgerEntry) -> None:
        values = await CompactValues.of(traffic.grid, placement, selection, compact)
        if at_once:
            await TileWriter(carrier, entry).write(ordinals, values, reduction)
        else:
            await in_waves(
                carrier, kind, ordinals, lambda writer, wave: writer.write(wave, values, reduction)
            )

    return carrier._start_work(AwaitResult(), kind, enter, fill)


async def in_waves(
    carrier: TiledEvictable,
    kind: str,
    ordinals: Ordinals,
    write: Callable[[TileWriter, Ordinals], Awaitable[None]],
) -> None:
    """Cover tiles of a carrier that only the running request knows, and write them.

    Args:
        carrier: whose tiles they are.
        kind: what the request is called in messages.
        ordinals: the tiles.
        write: called with all of them, or with as many at a time as the carrier's memory limit holds.
    """
    for wave in _waves(carrier._traffic, ordinals):
        with carrier._covering(kind, wave) as entry:
            await write(TileWriter(carrier, entry), wave)


def _waves(traffic: TileTraffic, ordinals: Ordinals) -> Iterator[Ordinals]:
    """The tiles, cut into sets that the memory limit can hold."""
    limit = None if traffic.budget is None else traffic.budget.limit
    most = len(ordinals) if limit is None else limit // traffic.tile_bytes
    return (ordinals[part] for part in groups(len(ordinals), most))


class TileWriter:
    """Gives tiles of one carrier new values, all of them or none, inside a request.

    The version advances with each call, together with the tiles.

    Args:
        carrier: whose tiles they are.
        entry: covers the tiles in that carrier's ledger, as a residency request does.
    """

    def __init__(self, carrier: TiledEvictable, entry: LedgerEntry) -> None:
        self._carrier = carrier
        self._entry = entry

    async def write(self, ordinals: Ordinals, values: Values, reduction: Reduction) -> None:
        """Replace the values of tiles, or add to them.

        A failure may leave tiles primary that were fetched to be added to.

        Args:
            ordinals: distinct tiles, valid ones where values are added.
            values: gives where to read and to write.
            reduction: ``"replace"`` or ``"add"``.

        Raises:
            OSError, MemoryError, RuntimeError: a transfer's own error, or there is no memory.
        """
        if reduction == "add":
            await self._write(ordinals, values, add_to_zero, add_tiles)
        else:
            await self._write(ordinals, values, np.copyto, np.copyto)

    async def store(self, ordinals: Ordinals, values: Values, operation: Callable[..., object]) -> None:
        """Give tiles that are not primary their values by an operation of your choice; else as ``write``."""
        await self._write(ordinals, values, operation, None)

    async def _write(
        self,
        ordinals: Ordinals,
        values: Values,
        operation: Callable[..., object],
        in_place: Callable[..., object] | None,
    ) -> None:
        """Make room, and give values to tiles by one operation, by another to those that are primary."""
        traffic = self._carrier._traffic
        changes, complete = Changes(), False
        try:
            await traffic.reserve(self._entry, ordinals, 0, changes=changes)
            if in_place is add_tiles:
                table = traffic.table
                stored = ordinals[~(table.is_resident(ordinals) | table.is_implicit(ordinals))]
                if len(stored):
                    await traffic.fetch(self._entry, stored)
            await self._install(ordinals, values, operation, in_place)
            complete = True
        finally:
            if not complete:
                await traffic.undo(self._entry, changes)

    async def _install(
        self,
        ordinals: Ordinals,
        values: Values,
        operation: Callable[..., object],
        in_place: Callable[..., object] | None,
    ) -> None:
        traffic = self._carrier._traffic
        resident = traffic.table.is_resident(ordinals)
        kept, new = np.sort(ordinals[resident]), np.sort(ordinals[~resident])
        # Copies move bits, so that NaN payloads and negative zeros survive; anything else gets numbers.
        dtype = traffic.unit if operation is np.copyto else self._carrier.dtype().numpy

        def views_of(part: Ordinals) -> list[Views]:
            return [
                views
                for tiles, (flat, starts) in blocks_of(traffic, part)
                for views in values(tiles, (flat.view(dtype), starts))
            ]

        overwritten: list[Views] = []
        for part in groups(len(kept), BATCH_TILES):
            overwritten += views_of(kept[part])
            if len(kept) > BATCH_TILES:
                await checkpoint()

        async def fill(batch: Ordinals) -> None:
            await apply(operation, views_of(batch))
            if len(new) > BATCH_TILES:
                await checkpoint()

        async def overwrite() -> None:
            if in_place is not None:
                await apply(in_place, overwritten)

        def commit() -> None:
            self._carrier._advance_version(None)
            for tier in {tier for tier, _ in traffic.primary.places(kept)}:
                note_change(tier)
            traffic.table.commit_fill(np.concatenate((kept, new)))

        await traffic.install(self._entry, new, fill, commit, complete=overwrite)
