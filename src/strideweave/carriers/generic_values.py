"""Elements as Python objects: how the reference carrier reads, orders and rounds them.

Nothing here computes on arrays. Elements stand in C order in flat lists, and a NumPy scalar stands for one
stored element with all its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from strideweave.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from strideweave.layout import Layout

__all__ = ["Values", "fibers", "places", "rounded", "slots_of", "spread", "working"]


@dataclass(frozen=True, slots=True)
class Values:
    """The elements of one operand.

    Attributes:
        shape: their extents; ``()`` for a scalar.
        dtype: their type.
        items: the stored elements in C order.
    """

    shape: tuple[int, ...]
    dtype: DType
    items: Sequence[Any]

    def numbers(self, dtype: DType) -> list[Any]:
        """Give Python numbers: the elements as an operation with results of ``dtype`` computes with them."""
        plain = [self.dtype.to_python(item) for item in self.items]
        target = working(dtype)
        if not target.is_differentiable:
            return [bool(number) for number in plain] if target is DType.Bool else [int(n) for n in plain]
        return [float(target.convert(float(number))) for number in plain]

    def moved(self, dtype: DType) -> Sequence[Any]:
        """Give the elements to store as ``dtype``, bit for bit where that is their type."""
        return self.items if self.dtype is dtype else self.numbers(dtype)


def working(dtype: DType) -> DType:
    """Give the dtype in which results of ``dtype`` are computed: floats below 32 bits widen."""
    return DType.Float32 if dtype.is_differentiable and dtype.bits < 32 else dtype


def rounded(value: Any, dtype: DType) -> NDArray[Any]:
    """Give a computed number, or a stored element, as ``dtype`` stores it.

    Floats pass through the working dtype, and integers wrap as machine integers do.
    """
    if not isinstance(value, bool | int | float) or type(value).__module__ == "numpy":
        return dtype.convert(value)
    if dtype is DType.Bool:
        return dtype.convert(bool(value))
    if dtype.is_differentiable:
        return dtype.convert(float(working(dtype).convert(float(value))))
    lowest = 0 if dtype is DType.UInt8 else -(1 << dtype.bits - 1)
    return dtype.convert((int(value) - lowest) % (1 << dtype.bits) + lowest)


def slots_of(layout: Layout, offset: int) -> list[int]:
    """List the slot of every coordinate in C order."""
    if layout.size == 0:
        return []
    origin = (0,) * len(layout.extents)
    # A layout is linear, so each mode contributes on its own.
    parts = [
        [layout((*origin[:mode], entry, *origin[mode + 1 :])) for entry in range(extent)]
        for mode, extent in enumerate(layout.extents)
    ]
    return [offset + sum(chosen) for chosen in product(*parts)]


def places(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give how far apart, in C order, the neighbours along each axis stand."""
    steps = [1]
    for extent in reversed(shape[1:]):
        steps.append(steps[-1] * extent)
    return tuple(reversed(steps[: len(shape)]))


def spread(items: Sequence[Any], shape: tuple[int, ...], target: tuple[int, ...]) -> Sequence[Any]:
    """Repeat elements along axes of extent 1, and new axes in front, until they fill ``target``."""
    if shape == target:
        return items
    steps = (0,) * (len(target) - len(shape)) + tuple(
        0 if extent == 1 else step for extent, step in zip(shape, places(shape), strict=True)
    )
    runs = [[entry * step for entry in range(extent)] for extent, step in zip(target, steps, strict=True)]
    return [items[sum(chosen)] for chosen in product(*runs)]


def fibers(shape: tuple[int, ...], axes: Sequence[int]) -> Iterator[list[int]]:
    """List the places of the elements that run along ``axes``, for every coordinate of the other axes."""
    steps = places(shape)
    runs = [[entry * step for entry in range(extent)] for extent, step in zip(shape, steps, strict=True)]
    along = [sum(chosen) for chosen in product(*(runs[axis] for axis in axes))]
    for chosen in product(*(run for axis, run in enumerate(runs) if axis not in axes)):
        start = sum(chosen)
        yield [start + place for place in along]
