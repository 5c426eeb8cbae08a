"""Where the slots of a tiled array lie when it is stored in parts, each a plain array: algebra, no files.

A tensor that exists already is seldom stored tile by tile. It is one array, or a grid of equal arrays (the chunks of
a store, the experts of a checkpoint). Cutting both ways, into tiles and into parts, leaves cells that are contiguous
in rows: runs of one length, the same everywhere, which arithmetic on their numbers finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.tiles.grid import TileGrid

__all__ = ["PartMap", "PartOrder"]

PartOrder = Literal["C", "F"]
"""``"C"``: the last axis is contiguous, in a part and in a tile; ``"F"``: the first."""


@dataclass(frozen=True)
class PartMap:
    """A tile grid over an array that is stored in equal parts.

    Run ``r`` is the slots ``[r * run_size, (r + 1) * run_size)`` of the tile-major array. It lies in one piece of one
    part. Parts are numbered row-major over ``parts_shape``; those at the upper ends may reach beyond the array.

    Args:
        grid: the tiles, which cover the array.
        part_shape: the extent of a part along each axis.
        order: which axis is contiguous, both in a part and in a tile.
    """

    grid: TileGrid
    part_shape: tuple[int, ...]
    order: PartOrder = "C"

    @cached_property
    def parts_shape(self) -> tuple[int, ...]:
        """Parts along each axis."""
        return tuple(
            [
                -(-extent // part)
                for extent, part in zip(self.grid.logical_shape, self.part_shape, strict=True)
            ]
        )

    @cached_property
    def part_size(self) -> int:
        """Elements of a part."""
        return prod(self.part_shape)

    @cached_property
    def _axes(self) -> tuple[int, ...]:
        """The axes from the slowest to the contiguous one."""
        axes = range(self.grid.rank)
        return tuple(axes if self.order == "C" else reversed(axes))

    @cached_property
    def _cut(self) -> int:
        """The place in ``_axes`` of the last axis along which a run is not all of a tile and a part."""
        tile, part = self.grid.tile_shape, self.part_shape
        place = self.grid.rank - 1
        while place > 0 and tile[self._axes[place]] == part[self._axes[place]]:
            place -= 1
        return place

    @cached_property
    def run_size(self) -> int:
        """Slots of a run."""
        tile, part = self.grid.tile_shape, self.part_shape
        inner = self._axes[self._cut + 1 :]
        axis = self._axes[self._cut]
        return gcd(tile[axis], part[axis]) * prod([tile[axis] for axis in inner])

    @cached_property
    def runs_per_tile(self) -> int:
        """Runs of a tile."""
        return self.grid.tile_size // self.run_size

    @cached_property
    def _strides(self) -> dict[int, int]:
        """Elements of a part from one index to the next, by axis."""
        strides, step = {}, 1
        for axis in reversed(self._axes):
            strides[axis] = step
            step *= self.part_shape[axis]
        return strides

    def locate(self, runs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tell where runs lie.

        Args:
            runs: numbers of runs, of any shape.

        Returns:
            The number of each one's part, and the elements of the part before it.
        """
        tiles, inside = np.divmod(runs, self.runs_per_tile)
        starts: list[NDArray[np.int64]] = []
        for count, extent in zip(self.grid.grid_shape, self.grid.tile_shape, strict=True):
            tiles, index = np.divmod(tiles, count) if count > 1 else (tiles, np.zeros_like(tiles))
            starts.append(index * extent)
        axis = self._axes[self._cut]
        step = gcd(self.grid.tile_shape[axis], self.part_shape[axis])
        for place in range(self._cut, -1, -1):
            axis = self._axes[place]
            extent = self.grid.tile_shape[axis] // (step if place == self._cut else 1)
            if extent > 1:
                inside, index = np.divmod(inside, extent)
                starts[axis] = starts[axis] + index * (step if place == self._cut else 1)
        parts, elements = np.zeros_like(runs), np.zeros_like(runs)
        for axis, start in enumerate(starts):
            along, within = np.divmod(start, self.part_shape[axis])
            parts = parts * self.parts_shape[axis] + along
            elements = elements + within * self._strides[axis]
        return parts, elements
