"""Cutting an operation into blocks: which part of each operand gives which part of the result.

An operation runs over *index axes*: those of the result where it is elementwise, those of the operand of a sum,
and stack, row, column and inner axis of a matrix product. Every axis of an operand or of the result runs along one
of them, or along none where it has extent 1 and is repeated. A *block* is an interval of each index axis; the
*region* of a tensor is what a block touches of it.

A pass has one target, whose regions it makes one after the other; the index axes that the target does not run along
are summed. Everything here is plain arithmetic on shapes: no values, no tensors, no await.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from strideweave.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from strideweave.layout.digits import Digit

__all__ = [
    "Cut",
    "Footprint",
    "IndexSpace",
    "Interval",
    "Region",
    "Step",
    "covering",
    "cut_operation",
    "index_space",
    "region_of",
    "sliced",
    "slices",
    "within",
]

Interval: TypeAlias = "tuple[int, int]"
"""Half-open, of one axis."""

Region: TypeAlias = "tuple[Interval, ...]"
"""An interval of every axis of a tensor; of every index axis it is a block."""

Axes: TypeAlias = "tuple[int | None, ...]"
"""For each axis of a tensor the index axis that it runs along, None for a repeated one of extent 1."""


@dataclass(frozen=True, slots=True)
class IndexSpace:
    """The index axes of an operation, and who runs along which.

    Attributes:
        extents: of the index axes.
        operands: the axes of each operand, None for a scalar.
        result: the axes of the result.
    """

    extents: tuple[int, ...]
    operands: tuple[Axes | None, ...]
    result: Axes


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


def index_space(
    name: str,
    shapes: Sequence[tuple[int, ...] | None],
    result: tuple[int, ...],
    options: Mapping[str, Any],
) -> IndexSpace:
    """Give the index axes of an operation whose operands have been checked.

    Args:
        name: ``"matmul"``, ``"reduce_sum"`` or an elementwise operation.
        shapes: of the operands, None for a scalar.
        result: the shape of the result.
        options: in normal form; those of ``reduce_sum`` count.
    """
    if name == "matmul":
        left, right = (shape or () for shape in shapes)
        return _contraction(left, right, result)
    if name == "reduce_sum":
        summed, keepdims, shape = options["axis"], options["keepdims"], shapes[0] or ()
        axes = tuple(range(len(shape)))
        kept = tuple([None if axis in summed else axis for axis in axes if keepdims or axis not in summed])
        return IndexSpace(shape, (axes,), kept)
    operands = tuple([None if shape is None else _aligned(shape, result) for shape in shapes])
    return IndexSpace(result, operands, tuple(range(len(result))))


def _contraction(x: tuple[int, ...], y: tuple[int, ...], result: tuple[int, ...]) -> IndexSpace:
    rows, columns = x[-2:-1], y[-1:] if len(y) > 1 else ()
    stack = result[: len(result) - len(rows) - len(columns)]
    extents = (*stack, *rows, *columns, x[-1])
    depth, inner = len(stack), len(extents) - 1
    row, column = (depth,) * len(rows), (depth + len(rows),) * len(columns)
    left = (*_aligned(x[:-2], stack), *row, inner)
    right = (*_aligned(y[:-2], stack), inner, *column)
    return IndexSpace(extents, (left, right), (*range(depth), *row, *column))


def _aligned(shape: tuple[int, ...], extents: tuple[int, ...]) -> Axes:
    """Match the axes from the last on, as broadcasting does."""
    first = len(extents) - len(shape)
    return tuple([axis if extent == extents[axis] else None for axis, extent in enumerate(shape, first)])


def region_of(axes: Axes, block: Region) -> Region:
    """What a block touches of a tensor with these axes."""
    return tuple([(0, 1) if axis is None else block[axis] for axis in axes])


def slices(region: Region) -> tuple[slice, ...]:
    """The region as an index of an array."""
    return tuple([slice(start, stop) for start, stop in region])


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


def covering(region: Region, tile_shape: tuple[int, ...]) -> tuple[range, ...]:
    """The tiles that a region touches, as coordinates along each axis."""
    return tuple(
        [
            range(start // extent, -(-stop // extent))
            for (start, stop), extent in zip(region, tile_shape, strict=True)
        ]
    )


def within(region: Region, origin: Sequence[int]) -> Region:
    """The same region, counted from another origin."""
    return tuple([(start - at, stop - at) for (start, stop), at in zip(region, origin, strict=True)])


def sliced(layout: Layout, offset: int, region: Region) -> tuple[int, Layout, Region]:
    """Give the part of a Layout that shows a region: a tensor of the same slots, without a copy.

    An axis whose mode is nested can be cut between digits only. Then the part is larger than the region, by less
    than one turn of the finer digits at each end.

    Args:
        layout: of the whole tensor.
        offset: of the whole tensor, in slots.
        region: not empty.

    Returns:
        Offset and Layout of the part, and where the region lies in it.
    """
    shape: list[Any] = []
    stride: list[Any] = []
    inside: list[Interval] = []
    for axis, (start, stop) in enumerate(region):
        first, kept, at = _cut_mode(layout.mode_digits(axis), start, stop)
        offset += first
        nested = len(kept) > 1
        shape.append(tuple([extent for extent, _ in kept]) if nested else kept[0][0])
        stride.append(tuple([step for _, step in kept]) if nested else kept[0][1])
        inside.append(at)
    return offset, Layout(tuple(shape), tuple(stride)), tuple(inside)


def _cut_mode(digits: tuple[Digit, ...], start: int, stop: int) -> tuple[int, list[Digit], Interval]:
    """Slots ahead, the digits that are left, and where ``[start, stop)`` lies in these."""
    size, offset = 1, 0
    for place, (extent, stride) in enumerate(digits):
        turn, size = size, size * extent
        if start // size != (stop - 1) // size:
            continue
        # All of it lies in one turn of the digits so far; of the coarser ones each has one entry.
        rest = start // size
        for count, step in digits[place + 1 :]:
            offset += rest % count * step
            rest //= count
        start, stop = start % size, (stop - 1) % size + 1
        first, last = start // turn, -(-stop // turn)
        kept = [*digits[:place], (last - first, stride)]
        return offset + first * stride, kept, (start - first * turn, stop - first * turn)
    return 0, [(1, 0)], (start, stop)
