"""Copy whole tiles into one compact array and back: strided NumPy views, no await, no state.

A tile is a run of ``P`` slots; where its values go is decided once per selection from the digits of the
placement, and each tile is then one strided assignment. When tile and compact order agree (`contiguous`), it
is a plain copy of ``P`` slots.

Bytes move, not values: every array here has an unsigned integer type of the item's size, so that NaN payloads
and negative zeros survive.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.layout import Layout
from strideweave.tiles.compact import (
    JointDigit,
    array_runs,
    axis_order,
    compact_shape,
    compact_strides,
    groups,
    joint_digits,
    merged_steps,
    parts,
    strided_runs,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.io.scattered import ScatteredMemory as Pieces
    from strideweave.tiles.grid import TileGrid, TilePlacement
    from strideweave.tiles.selection import TileSelection

    Slots = NDArray[np.unsignedinteger[Any]]

__all__ = ["CompactGeometry"]

Job = Callable[[], None]

# Above this a tile's copy takes longer than making its two views, and a temporary would leave the caches.
_LARGE_TILE_BYTES = 64 * 1024
# Up to this many, the places are found with plain integers: quicker than the fixed cost of NumPy calls.
_FEW_TILES = 8
# How much the vectorised path for small tiles gathers before it writes.
_STAGE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompactGeometry:
    """Where the tiles of one selection go in the compact array of its projection.

    Compact axis ``i`` has ``n_i * T_i`` entries: the ``n_i`` selected tiles in the order of ``per_axis[i]``,
    each with its ``T_i`` coordinates. *Position* means the ordinal of a tile in compact order
    (`TileSelection.coordinates`).

    Spec: *Gather preserves public TileSelection ordering*.

    Attributes:
        shape: the extents of the compact Tensor.
        layout: its dense, flat Layout. Axes cut inside a tile come in the source's order inside a tile,
            fastest first, then those of tile extent 1, the first fastest; column-major when the source has no
            plain order inside a tile.
        size: slots of the compact array, from its slot 0 to the last that a tile reaches.
        tile_size: slots of one tile.
        contiguous: whether every tile is one run of ``tile_size`` compact slots, in slot order.
    """

    shape: tuple[int, ...]
    layout: Layout
    size: int
    tile_size: int
    contiguous: bool
    _digits: tuple[JointDigit, ...]  # slowest in the compact array first
    _origin: int
    _steps: tuple[tuple[int, int], ...]  # (count, slots from one tile to the next), fastest position first
    _first: int  # the slot of compact coordinate 0

    @classmethod
    def of(cls, grid: TileGrid, placement: TilePlacement, selection: TileSelection) -> CompactGeometry:
        """Work the geometry out; the cost depends on ranks and digits, not on elements.

        Args:
            grid: the tile grid.
            placement: how the full Tensor's Layout orders the inside of a tile.
            selection: a selection of the grid's rank.

        Raises:
            ValueError: the ranks of grid and selection differ.
        """
        shape = compact_shape(grid.tile_shape, selection.compact_grid_shape)
        strides, _ = compact_strides(shape, axis_order(placement.mode_order, len(shape)))
        return cls.over(grid, placement, selection, strides)

    @classmethod
    def over(
        cls,
        grid: TileGrid,
        placement: TilePlacement,
        selection: TileSelection,
        strides: Sequence[int],
        first: int = 0,
    ) -> CompactGeometry:
        """Work the geometry out for a compact array that is there already and lies in some order of its own.

        Args:
            grid: the tile grid.
            placement: how the full Tensor's Layout orders the inside of a tile.
            selection: a selection of the grid's rank.
            strides: slots from one entry to the next on each compact axis; 0 and negative ones are fine for a
                source.
            first: the slot of compact coordinate 0.

        Raises:
            ValueError: the ranks of grid and selection differ.
        """
        counts, tile_shape = selection.compact_grid_shape, grid.tile_shape
        shape = compact_shape(tile_shape, counts)
        layout = Layout(shape, tuple(strides))
        digits = joint_digits(placement.axes, strides)
        # Nothing to reorder: at most one digit is left, and it runs alike on both sides.
        contiguous = not digits or (len(digits) == 1 and digits[0][:2] == (1, 1))
        steps = map(operator.mul, tile_shape, strides)
        return cls(
            shape=shape,
            layout=layout,
            size=first + layout.max_index + 1,
            tile_size=grid.tile_size,
            contiguous=contiguous,
            _digits=digits[::-1],
            _origin=placement.origin,
            _steps=merged_steps(zip(counts, steps, strict=True)),
            _first=first,
        )

    def start(self, position: int) -> int:
        """Give the compact slot of within-tile coordinate 0 of the tile at ``position``.

        When the geometry is ``contiguous`` the tile owns the run ``[start, start + tile_size)``.

        Raises:
            IndexError: the selection has no such position.
        """
        rest, slot = position, self._first
        for count, step in self._steps:
            rest, entry = divmod(rest, count)
            slot += entry * step
        if rest:  # too large, or negative
            raise IndexError(f"position {position} of a selection of {self._tile_count} tiles")
        return slot

    def copy_in(self, tiles: Sequence[Slots], positions: Sequence[int], compact: Slots) -> None:
        """Copy tiles to their places in the compact array.

        Args:
            tiles: arrays of ``tile_size`` slots, contiguous in memory.
            positions: the position of each, distinct.
            compact: at least ``size`` slots, contiguous in memory, of the same type.

        Raises:
            ValueError: an array has another size or type than that. Nothing was copied.
            IndexError: the selection has no such position. Nothing was copied.
        """
        self._check(tiles, positions, compact)
        if self.contiguous and len(tiles) == 1:
            start = self.start(positions[0])
            compact[start : start + self.tile_size] = tiles[0]
            return
        self._copy(tiles, self.starts(positions), compact)

    def copy_out(self, tiles: Sequence[Slots], positions: Sequence[int], compact: Slots) -> None:
        """Copy the other way, from the compact array to writable tiles (see `copy_in`)."""
        self._check(tiles, positions, compact)
        for tile, part in self._views(tiles, self.starts(positions), compact):
            tile[...] = part

    def views(
        self,
        positions: NDArray[np.int64],
        compact: Slots,
        *blocks: tuple[Slots, NDArray[np.int64]],
    ) -> list[tuple[Slots, ...]]:
        """For tiles their slots in some arrays, and their places in the compact array, as views of one shape.

        Tiles that lie at equal distances in all of them share their views, so that there are few.

        Args:
            positions: the position of each tile, distinct.
            compact: the compact array.
            blocks: arrays of the same type that have the tiles, and the first slot of each there.

        Returns:
            Views of each of the ``blocks``, then of ``compact``.

        Raises:
            TypeError, ValueError: a tile does not lie within its array.
        """
        digits, item = self._digits, compact.itemsize
        shape = [digit.extent for digit in digits]
        inside = [digit.tile_stride * item for digit in digits]
        outside = [digit.compact_stride * item for digit in digits]
        arrays = [*(block for block, _ in blocks), compact]
        starts = [*(first + self._origin for _, first in blocks), self.starts(positions)]
        strides = [*([inside] * len(blocks)), outside]
        result = []
        for first, count, steps in strided_runs(*starts):
            whole = [count, *shape]
            result.append(
                tuple(
                    [
                        np.ndarray(
                            whole, array.dtype, array, int(start[first]) * item, [step * item, *within]
                        )
                        for array, start, step, within in zip(arrays, starts, steps, strides, strict=True)
                    ]
                )
            )
        return result

    def takes_pieces(self, tile_bytes: int) -> bool:
        """Tell whether `copy_pieces` is quicker than `copy_in`: not where tiles are large and reordered."""
        return self.contiguous or tile_bytes < _LARGE_TILE_BYTES

    def copy_pieces(self, tiles: Pieces, positions: NDArray[np.int64] | None, compact: Slots) -> None:
        """Do what `copy_in` does, with few NumPy calls for many tiles.

        Args:
            tiles: pieces of memory of ``tile_size`` slots.
            positions: the position of each, distinct; None where these are all tiles, in order.
            compact: as for `copy_in`.

        Raises:
            ValueError: an array has another size or type than that. Nothing was copied.
            IndexError: a position is out of range. Nothing was copied.
        """
        self._check_pieces(tiles, positions, compact)
        if positions is None and self._is_stack:
            tiles.copy(None, compact[: self.size])
            return
        starts, order = _ascending(self.starts(np.arange(len(tiles)) if positions is None else positions))
        self._copy_pieces(tiles, starts, order, compact)

    def jobs(
        self, tiles: Sequence[Slots], positions: Sequence[int], compact: Slots, piece_bytes: int
    ) -> list[Job]:
        """Split `copy_in` into independent calls of about ``piece_bytes`` each, for worker threads.

        Small tiles are grouped, tiles larger than a piece are cut.

        Raises:
            ValueError: as `copy_in`, before any job is made.
            IndexError: likewise.
        """
        self._check(tiles, positions, compact)
        starts = self.starts(positions)
        order = np.argsort(starts)  # neighbours in one piece, so that it writes one stretch of memory
        tiles, starts = [tiles[index] for index in order.tolist()], starts[order]
        tile_bytes = self.tile_size * compact.itemsize
        if tile_bytes > piece_bytes and self._digits:
            cuts = list(parts(self._digits[0].extent, -(-tile_bytes // piece_bytes)))
            views = self._views(tiles, starts, compact)
            return [partial(np.copyto, target[cut], source[cut]) for source, target in views for cut in cuts]
        return [
            partial(self._copy, tiles[part], starts[part], compact)
            for part in groups(len(tiles), piece_bytes // tile_bytes)
        ]

    def piece_jobs(
        self, tiles: Pieces, positions: NDArray[np.int64] | None, compact: Slots, piece_bytes: int
    ) -> list[Job]:
        """Split `copy_pieces` as `jobs` splits `copy_in`.

        Raises:
            ValueError: as `copy_pieces`, before any job is made.
            IndexError: likewise.
        """
        self._check_pieces(tiles, positions, compact)
        if positions is None and self._is_stack:
            return tiles.jobs(None, compact[: self.size], piece_bytes)
        starts, order = _ascending(self.starts(np.arange(len(tiles)) if positions is None else positions))
        runs = [*array_runs(starts, self.tile_size)]
        if self.contiguous and len(runs) == 1:
            return tiles.jobs(order, self._run(compact, starts), piece_bytes)
        return [
            partial(self._copy_pieces, tiles, starts[part], order[part], compact)
            for part in groups(len(order), piece_bytes // (self.tile_size * compact.itemsize))
        ]

    def _copy(self, tiles: Sequence[Slots], starts: NDArray[np.int64], compact: Slots) -> None:
        if not self.contiguous or len(tiles) == 1:
            for source, target in self._views(tiles, starts, compact):
                target[...] = source
            return
        order = np.argsort(starts)
        tiles, starts, size = [tiles[index] for index in order.tolist()], starts[order], self.tile_size
        for first, stop in array_runs(starts, size):
            start = int(starts[first])
            out = compact[start : start + (stop - first) * size]
            # One call for many tiles: a Python loop costs more than the copy of a small tile.
            np.concatenate(tiles[first:stop], out=out, casting="no")

    def _copy_pieces(
        self, tiles: Pieces, starts: NDArray[np.int64], order: NDArray[np.int64], compact: Slots
    ) -> None:
        if not self.contiguous:
            self._stage_pieces(tiles, starts, order, compact)
            return
        for first, stop in array_runs(starts, self.tile_size):  # neighbours in the compact array
            tiles.copy(order[first:stop], self._run(compact, starts[first:stop]))

    def _run(self, compact: Slots, starts: NDArray[np.int64]) -> Slots:
        """The slots of contiguous tiles that follow each other."""
        start = int(starts[0])
        return compact[start : start + len(starts) * self.tile_size]

    def _views(
        self, tiles: Sequence[Slots], starts: NDArray[np.int64], compact: Slots
    ) -> list[tuple[Slots, Slots]]:
        """For each tile its slots and their places, as two views of one shape; all made at once."""
        item, dtype = compact.itemsize, compact.dtype
        shape = [digit.extent for digit in self._digits]
        inside = [digit.tile_stride * item for digit in self._digits]
        outside = [digit.compact_stride * item for digit in self._digits]
        offset = self._origin * item
        # The constructor is five times as quick as as_strided and checks the bounds of both buffers.
        return [
            (
                np.ndarray(shape, dtype, tile, offset, inside),
                np.ndarray(shape, dtype, compact, start * item, outside),
            )
            for tile, start in zip(tiles, starts.tolist(), strict=True)
        ]

    def _stage_pieces(
        self, tiles: Pieces, starts: NDArray[np.int64], order: NDArray[np.int64], compact: Slots
    ) -> None:
        """Reordered tiles: gather some at equal distances, then write them with one assignment."""
        item, dtype = compact.itemsize, compact.dtype
        step = min([step for _, step in self._steps])
        shape = [digit.extent for digit in self._digits]
        inside = [self.tile_size * item, *(digit.tile_stride * item for digit in self._digits)]
        outside = [step * item, *(digit.compact_stride * item for digit in self._digits)]
        most = max(1, _STAGE_BYTES // (self.tile_size * item))
        for first, stop in array_runs(starts, step):
            for begin in range(first, stop, most):
                count = min(stop - begin, most)
                stage = np.empty(count * self.tile_size, dtype)
                tiles.copy(order[begin : begin + count], stage)
                source = np.ndarray([count, *shape], dtype, stage, self._origin * item, inside)
                target = np.ndarray([count, *shape], dtype, compact, int(starts[begin]) * item, outside)
                target[...] = source

    def starts(self, positions: Sequence[int] | NDArray[np.intp]) -> NDArray[np.int64]:
        """Give what `start` gives, for many positions.

        Raises:
            IndexError: the selection has no such position.
        """
        if len(positions) <= _FEW_TILES:
            return np.array([self.start(position) for position in np.asarray(positions).tolist()], np.int64)
        rest = np.asarray(positions, np.int64)
        starts = np.full(len(rest), self._first, np.int64)
        for count, step in self._steps:
            rest, entries = np.divmod(rest, count)
            starts += entries * step
        if rest.any():
            raise IndexError(f"a position beyond a selection of {self._tile_count} tiles")
        return starts

    @property
    def _is_stack(self) -> bool:
        """Whether the compact array is the tiles one behind the other, in the order of their positions."""
        return self.contiguous and not self._first and [step for _, step in self._steps] == [self.tile_size]

    @property
    def _tile_count(self) -> int:
        return math.prod([count for count, _ in self._steps])

    def _check(self, tiles: Sequence[Slots], positions: Sequence[int], compact: Slots) -> None:
        if len(tiles) != len(positions):
            raise ValueError(f"{len(tiles)} tiles and {len(positions)} positions; give one position per tile")
        self._check_compact(compact)
        shape, dtype = (self.tile_size,), compact.dtype
        for tile in tiles:
            if tile.shape != shape or tile.dtype != dtype:
                raise ValueError(
                    f"a tile is {self.tile_size} slots of {dtype}, got an array of shape {tile.shape} and "
                    f"{tile.dtype}"
                )

    def _check_pieces(self, tiles: Pieces, positions: NDArray[np.int64] | None, compact: Slots) -> None:
        places = self._tile_count if positions is None else len(positions)
        if len(tiles) != places:
            raise ValueError(f"{len(tiles)} tiles and {places} positions; give one position per tile")
        self._check_compact(compact)
        if tiles.piece_slots != self.tile_size or tiles.dtype != compact.dtype:
            raise ValueError(
                f"a tile is {self.tile_size} slots of {compact.dtype}, got pieces of {tiles.piece_slots} slots "
                f"of {tiles.dtype}"
            )

    def _check_compact(self, compact: Slots) -> None:
        if compact.ndim != 1 or len(compact) < self.size:
            raise ValueError(
                f"the compact array needs one axis of at least {self.size} slots, got shape {compact.shape}"
            )


def _ascending(starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The starts in ascending order, and which that are."""
    if (starts[1:] > starts[:-1]).all():
        return starts, np.arange(len(starts))
    order = np.argsort(starts)
    return starts[order], order
