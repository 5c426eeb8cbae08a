"""The arithmetic of compact order: strides, digits, runs and cuts."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "JointDigit",
    "array_runs",
    "axis_order",
    "compact_shape",
    "compact_strides",
    "groups",
    "joint_digits",
    "merged_steps",
    "parts",
    "row_major_strides",
    "strided_runs",
]


class JointDigit(NamedTuple):
    """One strided step of a tile: how far in the compact array, how far in the tile (slots), how many."""

    compact_stride: int
    tile_stride: int
    extent: int


def axis_order(mode_order: tuple[int, ...] | None, rank: int) -> Sequence[int]:
    """Give the axes of the compact Layout, fastest first."""
    if mode_order is None:
        return range(rank)
    return [*mode_order, *(axis for axis in range(rank) if axis not in mode_order)]


def compact_shape(tile_shape: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Give the extents of a compact array with so many tiles on each axis; ValueError where the ranks differ."""
    if len(counts) != len(tile_shape):
        raise ValueError(f"the selection has rank {len(counts)}, the grid has rank {len(tile_shape)}")
    return tuple(map(operator.mul, counts, tile_shape))


def compact_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Give the dense strides of ``shape`` in that order, and its size."""
    strides, size = [0] * len(shape), 1
    for axis in order:
        strides[axis] = size
        size *= shape[axis]
    return tuple(strides), size


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Give the dense strides of ``shape`` with the last axis fastest."""
    return compact_strides(shape, range(len(shape) - 1, -1, -1))[0]


def joint_digits(axes: Iterable[Iterable[tuple[int, int]]], strides: Sequence[int]) -> tuple[JointDigit, ...]:
    """Give the digits of a tile with their compact strides, fastest there first, merged where possible."""
    digits = []
    for axis, stride in zip(axes, strides, strict=True):
        compact_stride = stride
        for extent, tile_stride in axis:
            digits.append((compact_stride, tile_stride, extent))
            compact_stride *= extent
    digits.sort()
    merged: list[JointDigit] = []
    for compact_stride, tile_stride, extent in digits:
        if merged:
            outer, inner, count = merged[-1]
            if compact_stride == outer * count and tile_stride == inner * count:
                merged[-1] = JointDigit(outer, inner, count * extent)
                continue
        merged.append(JointDigit(compact_stride, tile_stride, extent))
    return tuple(merged)


def merged_steps(steps: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Give (count, step) of each axis with several tiles, or of one without any.

    Neighbours that continue each other are merged.
    """
    merged: list[tuple[int, int]] = []
    for count, step in steps:
        if count == 1:
            continue
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * count, merged[-1][1])
        else:
            merged.append((count, step))
    return tuple(merged) or ((1, 1),)


def array_runs(ascending: NDArray[np.int64], step: int) -> Iterator[tuple[int, int]]:
    """Give the half-open index ranges in which entries follow each other at a distance of ``step``.

    Args:
        ascending: distinct entries that differ by multiples of ``step``.
        step: the distance within a run.
    """
    count = len(ascending)
    if count == 0:
        return iter(())
    if ascending[-1] - ascending[0] == (count - 1) * step:  # the usual case: one run
        return iter([(0, count)])
    cuts = np.flatnonzero(ascending[1:] - ascending[:-1] != step) + 1
    return itertools.pairwise([0, *cuts.tolist(), count])


def strided_runs(*starts: NDArray[np.int64]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Give the runs in which every one of several sequences goes on by a step of its own.

    Args:
        starts: sequences of one length, at least one.

    Returns:
        For each run, its first index, how many entries it has, and the step of each sequence.
    """
    count = len(starts[0])
    steps = [np.diff(sequence) for sequence in starts]
    change = np.zeros(max(0, count - 2), np.bool_)
    for step in steps:
        change |= step[1:] != step[:-1]
    first = 0
    for stop in [*(np.flatnonzero(change) + 1).tolist(), count - 1]:
        if stop > first:  # else the entry before took the only step that was alike
            yield first, stop - first + 1, tuple([int(step[first]) for step in steps])
            first = stop + 1
    if first < count:
        yield first, 1, (0,) * len(steps)


def parts(extent: int, count: int) -> Iterator[slice]:
    """Give ``range(extent)`` cut into at most ``count`` slices of almost one length."""
    length = -(-extent // count)
    return (slice(first, first + length) for first in range(0, extent, length))


def groups(count: int, length: int) -> Iterator[slice]:
    """Give ``range(count)`` cut into slices of ``length``, or of one where that is less."""
    length = max(1, length)
    return (slice(first, first + length) for first in range(0, count, length))
