"""Cutting an operation into blocks that take a bounded amount of memory.

A pass has one target, whose regions it makes one after the other; the index axes that the target does not run along
are summed. Plain arithmetic on shapes, as in ``regions``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strideweave.carriers.tiled_evictable.regions import Axes, Interval, Region

__all__ = ["Cut", "Footprint", "Step", "cut_operation"]


class Footprint(NamedTuple):
    """A tensor as far as the size of blocks is concerned.

    Attributes:
        axes: the index axes that it runs along.
        itemsize: bytes of an element while it is computed with.
        tile_shape: elements of a tile along each of its axes, None for a dense tensor.
    """

    axes: Axes
    itemsize: int
    tile_shape: tuple[int, ...] | None = None

    def nbytes(self, lengths: Sequence[int]) -> int:
        """Bytes of the region of a block with these lengths."""
        return self.itemsize * math.prod([lengths[axis] for axis in self.axes if axis is not None])

    def limit(self, budget: int) -> int:
        """How large a region may be: the budget, or one tile where that is more."""
        return max(budget, self.itemsize * math.prod(self.tile_shape or ()))


class Step(NamedTuple):
    """One block of a pass.

    Attributes:
        block: an interval of each index axis.
        first: whether it is the first block of its region of the target.
        last: whether it is the last one.
    """

    block: Region
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """An operation cut into blocks.

    Attributes:
        extents: of the index axes.
        lengths: of a block along each of them; the last block of an axis may be shorter.
        outer: the axes that the target runs along, in the order of the loops, slowest first.
        inner: the others, which are summed.
    """

    extents: tuple[int, ...]
    lengths: tuple[int, ...]
    outer: tuple[int, ...]
    inner: tuple[int, ...]

    @property
    def parts(self) -> int:
        """How many blocks add up to one region of the target."""
        return math.prod([-(-self.extents[axis] // self.lengths[axis]) for axis in self.inner])

    def steps(self) -> Iterator[Step]:
        """Every block, all those of one region of the target in a row; none where an extent is 0."""
        order = (*self.outer, *self.inner)
        place = [order.index(axis) for axis in range(len(order))]
        regions = [list(self._intervals(axis)) for axis in self.inner]
        parts = math.prod(map(len, regions))
        for outside in itertools.product(*map(self._intervals, self.outer)):
            for number, inside in enumerate(itertools.product(*regions)):
                chosen = (*outside, *inside)
                yield Step(tuple([chosen[at] for at in place]), number == 0, number == parts - 1)

    def _intervals(self, axis: int) -> Iterator[Interval]:
        extent, length = self.extents[axis], self.lengths[axis]
        return ((first, min(first + length, extent)) for first in range(0, extent, length))


def cut_operation(
    extents: tuple[int, ...], target: Footprint, operands: Sequence[Footprint], budget: int
) -> Cut:
    """Choose blocks whose regions take no more than ``budget`` bytes each, or one tile.

    Blocks consist of whole tiles of the target and, as far as the budget allows, of the operands: of the first
    one before the others.

    Args:
        extents: of the index axes.
        target: what the pass makes.
        operands: what it reads; those that are tiled are fetched region by region.
        budget: bytes.
    """
    everybody = [target, *operands]
    fixed = {axis for axis in target.axes if axis is not None and target.tile_shape}
    tiled = {axis for item in everybody if item.tile_shape for axis in item.axes if axis is not None}
    outer = {axis for axis in target.axes if axis is not None}
    inner = [axis for axis in range(len(extents)) if axis not in outer]
    lengths = _grains(len(extents), everybody, budget)
    _shrink(lengths, everybody, budget, fixed)
    # What no tiled tensor runs along costs no second reading; what is summed at once costs no addition.
    free = [axis for axis in outer if axis not in tiled]
    rest = [axis for axis in outer if axis in tiled]
    for axis in (*sorted(free, reverse=True), *reversed(inner), *sorted(rest, reverse=True)):
        _grow(lengths, axis, extents[axis], everybody, budget)
    # The loops over what no tiled tensor runs along are innermost: meanwhile the same windows serve.
    return Cut(extents, tuple(lengths), (*sorted(rest), *sorted(free)), tuple(inner))


def _grains(rank: int, everybody: Sequence[Footprint], budget: int) -> list[int]:
    """The least lengths that are whole tiles: of everybody if that fits the budget, else of the first there."""
    own, common = [1] * rank, [1] * rank
    for item in everybody:
        for axis, extent in zip(item.axes, item.tile_shape or (), strict=False):
            if axis is not None:
                own[axis] = extent if common[axis] == 1 else own[axis]
                common[axis] = math.lcm(common[axis], extent)
    target = everybody[0]
    for axis, extent in zip(target.axes, target.tile_shape or (), strict=False):
        if axis is not None:
            own[axis] = extent  # also where that is 1, since nothing shrinks it
    fits = all(item.nbytes(common) <= item.limit(budget) for item in everybody)
    return common if fits else own


def _shrink(lengths: list[int], everybody: Sequence[Footprint], budget: int, fixed: set[int]) -> None:
    """Halve the longest axes, tiles or not, of what is too large even so; the target's tiles stay whole."""
    for item in everybody:
        movable = [axis for axis in item.axes if axis is not None and axis not in fixed]
        while movable and item.nbytes(lengths) > item.limit(budget):
            longest = max(movable, key=lambda axis: lengths[axis])
            if lengths[longest] == 1:
                break
            lengths[longest] = -(-lengths[longest] // 2)


def _grow(lengths: list[int], axis: int, extent: int, everybody: Sequence[Footprint], budget: int) -> None:
    """Make blocks longer along an axis, by whole multiples, as far as every region allows."""
    times = max(1, -(-extent // lengths[axis]))
    for item in everybody:
        if axis in item.axes:
            times = min(times, item.limit(budget) // max(1, item.nbytes(lengths)))
    lengths[axis] = max(1, min(extent, lengths[axis] * max(1, times)))
