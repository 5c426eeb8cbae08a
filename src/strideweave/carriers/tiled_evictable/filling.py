"""Giving whole tiles new values: the way in for scatter, for gradients and for ``assign``.

Spec: *Scatter is the asynchronous projection counterpart*; *Projection is an autograd-visible gather*. The values
come from a compact Tensor or from the tiles of another carrier. A set of tiles changes whole or not at all: tiles
that are not primary get a place and their value there first, which may fail; what overwrites a value in place is
prepared before, and comes last, since it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from strideweave.carriers.tiled_evictable.store import note_change
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.workers import INLINE_BYTES, run_jobs
from strideweave.tiles.compact import groups, parts, row_major_strides
from strideweave.tiles.gather import CompactGeometry

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.dtype import DType
    from strideweave.tensor import Tensor
    from strideweave.tiles.grid import TileGrid, TilePlacement
    from strideweave.tiles.ledger import LedgerEntry
    from strideweave.tiles.selection import TileSelection

    Ordinals = npt.NDArray[np.int64]
    Flat = npt.NDArray[np.unsignedinteger]

__all__ = ["CompactValues", "Reduction", "TileWriter", "Values", "add_tiles", "apply", "start_filling"]

Reduction: TypeAlias = Literal["replace", "add"]

Views: TypeAlias = "tuple[Flat, ...]"
"""Arrays of one shape: what is written, what is read, and for a sum of two what is read besides."""

Values: TypeAlias = "Callable[[Ordinals, Sequence[Flat]], list[Views]]"
"""Gives for some tiles, and the rows that they lie in, the views to write and to read; changes nothing."""

_PIECE_BYTES = 2 << 20  # what a worker writes at once


def start_filling(
    carrier: TiledEvictable,
    tensor: Tensor,
    selection: TileSelection,
    compact: Tensor,
    *,
    reduction: Reduction,
    kind: str,
) -> AwaitResult[None]:
    """Start giving the selected tiles of a full Tensor the values of a compact one, all of them or none.

    It is a request of ``carrier``, which covers the tiles as a residency request does. Afterwards they are primary,
    valid and dirty, and the version has advanced once. Nothing keeps the caller from changing ``compact``
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

    def enter() -> LedgerEntry:
        if reduction == "add":
            traffic.require_valid(kind, ordinals)
        return traffic.cover(kind, ordinals)

    async def fill(entry: LedgerEntry) -> None:
        writer = TileWriter(carrier, entry)
        values = await CompactValues.of(traffic.grid, placement, selection, compact)
        await writer.write(ordinals, values, reduction)

    return carrier._start_work(AwaitResult(), enter, fill)


@dataclass(frozen=True, slots=True)
class CompactValues:
    """The values of a compact Tensor, tile by tile."""

    geometry: CompactGeometry
    flat: Flat
    order: Ordinals
    ascending: Ordinals

    @classmethod
    async def of(
        cls,
        grid: TileGrid,
        placement: TilePlacement,
        selection: TileSelection,
        compact: Tensor,
        *,
        beside: Carrier | None = None,
    ) -> CompactValues:
        """Find out where each tile's values lie in a compact Tensor in memory, of the right shape.

        Where one stride does not say how an axis goes on, they are copied, which takes as much memory again.

        Args:
            grid: the tile grid.
            placement: how the full Tensor lies in it.
            selection: which tiles.
            compact: the values.
            beside: a carrier that is written to; values that share its memory are copied too.
        """
        ordinals = selection.bind(grid)
        order = np.argsort(ordinals)
        unit = f"u{compact.dtype.itemsize}"
        digits = compact.layout.digits()
        memory = compact.carrier._bytes()
        apart = beside is None or not np.may_share_memory(memory, beside._bytes())
        if apart and all(len(mode) <= 1 for mode in digits):
            strides = tuple([mode[0][1] if mode else 0 for mode in digits])
            first, flat = compact.offset, memory.view(unit)
        else:
            strides, first = row_major_strides(compact.shape), 0
            flat = (await _copied(compact)).reshape(-1).view(unit)
        geometry = CompactGeometry.over(grid, placement, selection, strides, first)
        return cls(geometry, flat, order, ordinals[order])

    def __call__(self, ordinals: Ordinals, rows: Sequence[Flat]) -> list[Views]:
        """The views of these tiles, in rows of the carrier that is written."""
        positions = self.order[np.searchsorted(self.ascending, ordinals)]
        return [*self.geometry.pairs(rows, positions.tolist(), self.flat)]

    def onto(self, ordinals: Ordinals, rows: Sequence[Flat], bases: Sequence[Flat]) -> list[Views]:
        """As a call, with the values to add to, which lie in other rows of the same order."""
        read = self(ordinals, bases)
        return [
            (target, source, base)
            for (target, source), (base, _) in zip(self(ordinals, rows), read, strict=True)
        ]


async def _copied(compact: Tensor) -> npt.NDArray[Any]:
    if compact.nbytes <= INLINE_BYTES:
        return compact.carrier._gather_array(compact)
    copies: list[npt.NDArray[Any]] = []
    await run_jobs([lambda: copies.append(compact.carrier._gather_array(compact))])
    return copies[0]


class TileWriter:
    """Gives tiles of one carrier new values, inside a request.

    Args:
        carrier: whose tiles they are.
        entry: covers the tiles in that carrier's ledger, as a residency request does.
        counted: whether each write advances the version.
    """

    def __init__(self, carrier: TiledEvictable, entry: LedgerEntry, *, counted: bool = True) -> None:
        self._carrier = carrier
        self._entry = entry
        self._counted = counted

    @property
    def _traffic(self) -> TileTraffic:
        return self._carrier._traffic

    async def write(self, ordinals: Ordinals, values: Values, reduction: Reduction) -> None:
        """Replace the values of tiles, or add to them; all of them or none.

        The version advances once, together with the tiles. A failure may leave tiles primary that were fetched to
        be added to.

        Args:
            ordinals: distinct tiles, valid ones where values are added.
            values: gives where to read and to write.
            reduction: ``"replace"`` or ``"add"``.

        Raises:
            OSError, MemoryError, RuntimeError: a transfer's own error, or there is no memory.
        """
        traffic, dtype = self._traffic, self._carrier.dtype()
        table = traffic.table
        if reduction == "add":
            stored = ordinals[~(table.is_resident(ordinals) | table.is_implicit(ordinals))]
            if len(stored):
                await traffic.fetch(self._entry, stored)
        resident = table.is_resident(ordinals)
        kept, new = np.sort(ordinals[resident]), np.sort(ordinals[~resident])
        in_place = values(kept, traffic.rows(kept)) if len(kept) else []
        first, again = (_add_to_zero, add_tiles) if reduction == "add" else (np.copyto, np.copyto)

        async def fill(batch: Ordinals) -> None:
            await apply(first, values(batch, traffic.rows(batch)), dtype, traffic.tile_bytes)

        async def overwrite() -> None:
            await apply(again, in_place, dtype, traffic.tile_bytes)

        await self._install(kept, new, fill, overwrite)

    async def store(self, ordinals: Ordinals, values: Values, operation: Callable[..., object]) -> None:
        """Give tiles that are not primary their values by an operation of your choice; else as ``write``."""
        traffic, dtype = self._traffic, self._carrier.dtype()

        async def fill(batch: Ordinals) -> None:
            await apply(operation, values(batch, traffic.rows(batch)), dtype, traffic.tile_bytes)

        await self._install(ordinals[:0], np.sort(ordinals), fill, None)

    async def _install(
        self,
        kept: Ordinals,
        new: Ordinals,
        fill: Callable[[Ordinals], Any],
        overwrite: Callable[[], Any] | None,
    ) -> None:
        traffic = self._traffic

        def commit() -> None:
            if self._counted:
                self._carrier._advance_version(None)
            for tier in {tier for tier, _ in traffic.primary.places(kept)}:
                note_change(tier)
            traffic.table.commit_fill(np.concatenate((kept, new)))

        await traffic.install(self._entry, new, fill, commit, complete=overwrite)


def add_tiles(
    target: npt.NDArray[Any], source: npt.NDArray[Any], base: npt.NDArray[Any] | None = None
) -> None:
    """Write the sum of ``base``, or of what is there, and ``source``: rounded once, integers wrap, as ``add`` does."""
    np.add(target if base is None else base, source, out=target)


def _add_to_zero(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Write the sum of zero and ``source``, which is ``source`` save for a negative zero."""
    np.add(source, np.zeros((), source.dtype), out=target)


async def apply(
    operation: Callable[..., object], views: Sequence[Views], dtype: DType, tile_bytes: int
) -> None:
    """Run an operation on the views of tiles: at once where they are small together, else in worker threads.

    Copies move bits, so that NaN payloads and negative zeros survive; anything else gets numbers.
    """
    if not views:
        return
    as_numbers = None if operation is np.copyto else dtype.numpy
    nbytes = len(views) * tile_bytes
    if nbytes <= INLINE_BYTES:
        _run(operation, views, as_numbers)
        return
    if tile_bytes > _PIECE_BYTES and views[0][0].ndim:
        cuts = list(parts(views[0][0].shape[0], -(-tile_bytes // _PIECE_BYTES)))
        pieces = [[tuple([view[cut] for view in tile])] for tile in views for cut in cuts]
    else:
        pieces = [[*views[part]] for part in groups(len(views), _PIECE_BYTES // tile_bytes)]
    await run_jobs([partial(_run, operation, piece, as_numbers) for piece in pieces])


def _run(operation: Callable[..., object], views: Sequence[Views], as_numbers: np.dtype[Any] | None) -> None:
    # Infinities and NaN are values; a warning from a worker thread would end the request.
    with np.errstate(all="ignore"):
        for tile in views:
            operation(*(tile if as_numbers is None else [view.view(as_numbers) for view in tile]))
