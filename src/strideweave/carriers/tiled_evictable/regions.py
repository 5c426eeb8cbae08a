"""Regions: which part of each operand of an operation goes with which part of its result.

An operation runs over *index axes*: those of the result where it is elementwise, those of the operand of a sum,
and stack, row, column and inner axis of a matrix product. Every axis of an operand or of the result runs along one
of them, or along none where it has extent 1 and is repeated. A *block* is an interval of each index axis; the
*region* of a tensor is what a block touches of it.

Everything here is plain arithmetic on shapes: no values, no tensors, no await.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from strideweave.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strideweave.layout.digits import Digit

__all__ = [
    "IndexSpace",
    "Interval",
    "Region",
    "covering",
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
