"""The values that whole tiles are given, and the arithmetic on tiles.

Where to read and where to write is worked out first, as pairs of NumPy views, which may fail; reading and writing
comes after, and cannot. Copies move bits, so that NaN payloads and negative zeros survive; sums are those of the
operation ``add``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from strideweave.runtime.workers import INLINE_BYTES, run_jobs
from strideweave.tiles.compact import parts, row_major_strides, strided_runs
from strideweave.tiles.gather import CompactGeometry

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.tensor import Tensor
    from strideweave.tiles.grid import TileGrid, TilePlacement
    from strideweave.tiles.selection import TileSelection

    Ordinals = npt.NDArray[np.int64]
    Flat = npt.NDArray[np.unsignedinteger]

__all__ = [
    "Block",
    "CompactValues",
    "Values",
    "Views",
    "add_tiles",
    "add_to_zero",
    "apply",
    "block_of",
    "blocks_of",
    "values_of_rows",
]

Views: TypeAlias = "tuple[npt.NDArray[Any], ...]"
"""Arrays of one shape: what is written, what is read, and for a sum of two what is read besides."""

Block: TypeAlias = "tuple[npt.NDArray[Any], Ordinals]"
"""One array that has some tiles, and the first slot of each there."""

Values: TypeAlias = "Callable[[Ordinals, Block], list[Views]]"
"""Gives for some tiles, and the block that they lie in, the views to write and to read; changes nothing."""

_PIECE_BYTES = 2 << 20  # what a worker writes at once
_LARGE_TILE_BYTES = 64 << 10  # from here on a tile's copy takes longer than making its views


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

    def __call__(self, ordinals: Ordinals, block: Block) -> list[Views]:
        """The views of these tiles, which lie in a block of the carrier that is written."""
        return self._views(ordinals, block)

    def onto(self, ordinals: Ordinals, block: Block, base: Block) -> list[Views]:
        """As a call, with the values to add to, which lie in another block in the same order."""
        views = self._views(ordinals, block, base)
        return [(target, source, added) for target, added, source in views]

    def _views(self, ordinals: Ordinals, *blocks: Block) -> list[Views]:
        positions = self.order[np.searchsorted(self.ascending, ordinals)]
        return [*self.geometry.views(positions, self.flat.view(blocks[0][0].dtype), *blocks)]


def block_of(rows: Sequence[Flat]) -> Block:
    """One block with these tiles, the row itself or, of several, a copy."""
    if len(rows) == 1:
        return rows[0], np.zeros(1, np.int64)
    return np.concatenate(rows), np.arange(len(rows)) * len(rows[0])


def blocks_of(traffic: TileTraffic, ordinals: Ordinals) -> list[tuple[Ordinals, Block]]:
    """The blocks of the primary tier that these tiles lie in: many small tiles each, or one large one."""
    if not len(ordinals):
        return []
    if len(ordinals) == 1 or traffic.tile_bytes >= _LARGE_TILE_BYTES:
        rows = traffic.rows(ordinals)
        return [(ordinals[at : at + 1], block_of([row])) for at, row in enumerate(rows)]
    found = traffic.block(ordinals)
    if found is None:  # in several slabs, which hold neighbours
        half = len(ordinals) // 2
        return [*blocks_of(traffic, ordinals[:half]), *blocks_of(traffic, ordinals[half:])]
    slab, rows_there = found
    return [(ordinals, (slab.reshape(-1), rows_there * traffic.grid.tile_size))]


def values_of_rows(ordinals: Ordinals, rows: Sequence[Flat]) -> Values:
    """Values that lie in rows of the same order."""
    row_of, size = dict(zip(ordinals.tolist(), rows, strict=True)), len(rows[0])

    def values(part: Ordinals, block: Block) -> list[Views]:
        dtype, blocks = block[0].dtype, (block, block_of([row_of[ordinal] for ordinal in part.tolist()]))
        return [
            tuple(
                [
                    np.ndarray(
                        (count, size),
                        dtype,
                        array,
                        int(starts[first]) * dtype.itemsize,
                        (step * dtype.itemsize, dtype.itemsize),
                    )
                    for (array, starts), step in zip(blocks, steps, strict=True)
                ]
            )
            for first, count, steps in strided_runs(*(starts for _, starts in blocks))
        ]

    return values


async def _copied(compact: Tensor) -> npt.NDArray[Any]:
    if compact.nbytes <= INLINE_BYTES:
        return compact.carrier._gather_array(compact)
    copies: list[npt.NDArray[Any]] = []
    await run_jobs([lambda: copies.append(compact.carrier._gather_array(compact))])
    return copies[0]


def add_tiles(
    target: npt.NDArray[Any], source: npt.NDArray[Any], base: npt.NDArray[Any] | None = None
) -> None:
    """Write the sum of ``base``, or of what is there, and ``source``: rounded once, integers wrap, as ``add`` does."""
    np.add(target if base is None else base, source, out=target)


def add_to_zero(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Write the sum of zero and ``source``, which is ``source`` save for a negative zero."""
    np.add(source, np.zeros((), source.dtype), out=target)


async def apply(operation: Callable[..., object], views: Sequence[Views]) -> None:
    """Run an operation on the views of tiles: at once where they are small together, else in worker threads."""
    if sum([tile[0].nbytes for tile in views]) <= INLINE_BYTES:
        _run(operation, views)
        return
    await run_jobs([partial(_run, operation, piece) for piece in _pieces(views)])


def _pieces(views: Sequence[Views]) -> Iterator[list[Views]]:
    """The views in groups of about the size that a worker writes at once; larger ones are cut."""
    group: list[Views] = []
    room = _PIECE_BYTES
    for tile in views:
        for part in _cut(tile):
            group.append(part)
            room -= part[0].nbytes
            if room <= 0:
                yield group
                group, room = [], _PIECE_BYTES
    if group:
        yield group


def _cut(tile: Views) -> Iterator[Views]:
    first = tile[0]
    axis = next((axis for axis, extent in enumerate(first.shape) if extent > 1), None)
    if first.nbytes <= _PIECE_BYTES or axis is None:
        yield tile
        return
    for cut in parts(first.shape[axis], -(-first.nbytes // _PIECE_BYTES)):
        yield tuple([view[(slice(None),) * axis + (cut,)] for view in tile])


def _run(operation: Callable[..., object], views: Sequence[Views]) -> None:
    # Infinities and NaN are values; a warning from a worker thread would end the request.
    with np.errstate(all="ignore"):
        for tile in views:
            operation(*tile)
