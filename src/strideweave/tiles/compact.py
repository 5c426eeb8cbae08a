"""The integer arithmetic of compact order: strides, digits and runs; no arrays."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "JointDigit",
    "axis_order",
    "compact_strides",
    "groups",
    "joint_digits",
    "merged_steps",
    "parts",
    "runs",
]


class JointDigit(NamedTuple):
    """One strided step of a tile: how many, how far in the tile, how far in the compact array (slots)."""

    extent: int
    tile_stride: int
    compact_stride: int


def axis_order(mode_order: tuple[int, ...] | None, rank: int) -> Sequence[int]:
    """Give the axes of the compact Layout, fastest first."""
    if mode_order is None:
        return range(rank)
    return [*mode_order, *(axis for axis in range(rank) if axis not in mode_order)]


def compact_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Give the dense strides of ``shape`` in that order, and its size."""
    strides, size = [0] * len(shape), 1
    for axis in order:
        strides[axis] = size
        size *= shape[axis]
    return tuple(strides), size


def joint_digits(axes: Iterable[Iterable[tuple[int, int]]], strides: Sequence[int]) -> tuple[JointDigit, ...]:
    """Give the digits of a tile with their compact strides, fastest there first, merged where possible."""
    digits = []
    for axis, stride in zip(axes, strides, strict=True):
        compact_stride = stride
        for extent, tile_stride in axis:
            digits.append(JointDigit(extent, tile_stride, compact_stride))
            compact_stride *= extent
    digits.sort(key=operator.attrgetter("compact_stride"))
    merged: list[JointDigit] = []
    for digit in digits:
        if merged and digit[1:] == (merged[-1].extent * merged[-1][1], merged[-1].extent * merged[-1][2]):
            merged[-1] = merged[-1]._replace(extent=merged[-1].extent * digit.extent)
        else:
            merged.append(digit)
    return tuple(merged)


def merged_steps(steps: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Give (count, step) of each axis with several tiles; neighbours that continue each other are one."""
    merged: list[tuple[int, int]] = []
    for count, step in steps:
        if count == 1:
            continue
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * count, merged[-1][1])
        else:
            merged.append((count, step))
    return tuple(merged)


def runs(ascending: Sequence[int], step: int) -> Iterator[tuple[int, int]]:
    """Give the half-open index ranges in which entries follow each other at a distance of ``step``."""
    first = 0
    for index, (before, after) in enumerate(itertools.pairwise(ascending), start=1):
        if after - before != step:
            yield first, index
            first = index
    if ascending:
        yield first, len(ascending)


def parts(extent: int, count: int) -> Iterator[slice]:
    """Give ``range(extent)`` cut into at most ``count`` slices of almost one length."""
    length = -(-extent // count)
    return (slice(first, first + length) for first in range(0, extent, length))


def groups(count: int, length: int) -> Iterator[slice]:
    """Give ``range(count)`` cut into slices of ``length``, or of one where that is less."""
    length = max(1, length)
    return (slice(first, first + length) for first in range(0, count, length))
