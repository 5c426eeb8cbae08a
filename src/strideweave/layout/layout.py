"""Layout: the function from a hierarchical coordinate to a flat slot index.

A Layout is *CuTe*'s (NVIDIA CUTLASS documentation, "CuTe layouts"): a Shape and a congruent Stride; the value
at a coordinate is the inner product of the two flattened. Every query is answered from the modes, none visits
the coordinates, so a Layout of 10**9 slots is as quick as one of ten.
"""

from __future__ import annotations

from functools import cached_property
from typing import NoReturn

from strideweave.layout import algebra
from strideweave.layout.digits import Digit, merge_digits
from strideweave.layout.injectivity import is_injective
from strideweave.layout.int_tuple import IntTuple, congruent, flatten, product, running_products
from strideweave.layout.shape import Shape, Stride

__all__ = ["Layout", "column_major", "row_major"]


class Layout:
    """An immutable map from the coordinates of ``shape`` to flat indices.

    Equality and hash are structural: the same shape and the same stride. Two Layouts that compute the same
    function in different ways differ.

    Args:
        shape: a Shape, an integer, or a nested tuple of integers >= 0.
        stride: a Stride, an integer, or a nested tuple of integers, nested exactly like ``shape``.

    Raises:
        TypeError: an extent or stride is not an integer.
        ValueError: an extent is negative, or the nesting of the two differs.
    """

    shape: Shape
    stride: Stride

    def __init__(self, shape: object, stride: object) -> None:
        shape, stride = Shape(shape), Stride(stride)
        if not congruent(shape, stride):
            raise ValueError(
                f"shape and stride must be nested alike, got {tuple(shape)} and {tuple(stride)}; "
                "give one stride for each extent"
            )
        # Straight into the dictionary, because __setattr__ keeps everybody else out.
        self.__dict__["shape"] = shape
        self.__dict__["stride"] = stride

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Layout is immutable; make a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Layout is immutable; {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.shape == other.shape and self.stride == other.stride

    def __hash__(self) -> int:
        return hash((self.shape, self.stride))

    def __reduce__(self) -> tuple[type[Layout], tuple[tuple[IntTuple, ...], tuple[IntTuple, ...]]]:
        return Layout, (tuple(self.shape), tuple(self.stride))

    def __repr__(self) -> str:
        return f"Layout({tuple(self.shape)}, {tuple(self.stride)})"

    @property
    def rank(self) -> int:
        """The number of top-level modes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return self.shape.size

    @property
    def extents(self) -> tuple[int, ...]:
        """The size of each top-level mode, plain integers: the shape that NumPy sees."""
        return self.shape.extents

    @cached_property
    def leaves(self) -> tuple[Digit, ...]:
        """Every ``(extent, stride)`` from left to right, fastest first, nothing merged or left out."""
        return tuple(zip(flatten(self.shape), flatten(self.stride), strict=True))

    @cached_property
    def min_index(self) -> int:
        """The smallest value of the Layout, in slots; 0 for an empty one."""
        if self.size == 0:
            return 0
        return sum([(extent - 1) * stride for extent, stride in self.leaves if stride < 0])

    @cached_property
    def max_index(self) -> int:
        """The largest value of the Layout, in slots; 0 for an empty one."""
        if self.size == 0:
            return 0
        return sum([(extent - 1) * stride for extent, stride in self.leaves if stride > 0])

    @property
    def cosize(self) -> int:
        """The number of slots from the smallest to the largest value, both included; 0 for an empty Layout.

        With non-negative strides this is ``max_index + 1``. As in CuTe, a negative stride counts by its
        magnitude.
        """
        return self.max_index - self.min_index + 1 if self.size else 0

    @cached_property
    def is_injective(self) -> bool:
        """Whether no two coordinates share a slot. Exact for every Layout; an empty one is injective.

        The work depends on the number of modes and on the digits of the strides, never on the extents; see
        `strideweave.layout.injectivity`.
        """
        return is_injective(self.leaves)

    def mode_digits(self, mode: int) -> tuple[Digit, ...]:
        """Return the ``(extent, stride)`` leaves of one top-level mode, fastest first, in canonical form.

        Extents of 1 are left out and neighbours that continue each other (``stride[j + 1] == extent[j] *
        stride[j]``) are merged, so two modes of one extent compute the same function of their integer
        coordinate exactly when their digits are equal. A mode of extent 1 has no digits, an empty one the
        single digit ``(0, 0)``.

        Raises:
            IndexError: there is no such mode.
        """
        return self._digits[mode]

    def digits(self) -> tuple[tuple[Digit, ...], ...]:
        """Return `mode_digits` of every top-level mode."""
        return self._digits

    @cached_property
    def _digits(self) -> tuple[tuple[Digit, ...], ...]:
        return tuple([_merged(shape, stride) for shape, stride in zip(self.shape, self.stride, strict=True)])

    def __call__(self, *coordinate: object) -> int:
        """Return the flat index at a coordinate.

        Args:
            *coordinate: one tuple as `Shape.encode` takes it, or one linear index (the first mode varies
                fastest), or the entries of the tuple one by one.

        Raises:
            TypeError: an entry is not an integer.
            ValueError: the nesting of the coordinate does not fit the shape.
            IndexError: an entry is negative or not below its extent.
        """
        position = self.shape.encode(coordinate[0] if len(coordinate) == 1 else coordinate)
        value = 0
        for extent, stride in self.leaves:
            position, entry = divmod(position, extent)
            value += entry * stride
        return value

    def compose(self, tiler: algebra.Tiler) -> Layout:
        """Return the Layout that applies ``tiler`` first; see `strideweave.layout.algebra.compose`."""
        return algebra.compose(self, tiler)

    def coalesce(self) -> Layout:
        """Return the shortest equal flat Layout; see `strideweave.layout.algebra.coalesce`."""
        return algebra.coalesce(self)

    def complement(self, size: int | None = None) -> Layout:
        """Return the Layout that fills the rest of ``size``; see `strideweave.layout.algebra.complement`."""
        return algebra.complement(self, size)

    def divide(self, tiler: algebra.Tiler) -> Layout:
        """Return ``(tile, rest)``; see `strideweave.layout.algebra.divide`."""
        return algebra.divide(self, tiler)

    def permute(self, *axes: object) -> Layout:
        """Return the modes in another order; see `strideweave.layout.algebra.permute`."""
        return algebra.permute(self, *axes)

    def broadcast_to(self, *shape: object) -> Layout:
        """Return the Layout repeated to ``shape``; see `strideweave.layout.algebra.broadcast_to`."""
        return algebra.broadcast_to(self, *shape)


def column_major(*shape: object) -> Layout:
    """Return the dense Layout of ``shape`` whose first mode varies fastest (CuTe's ``LayoutLeft``).

    Args:
        *shape: as for `Shape`.
    """
    extents = Shape(*shape)
    return Layout(extents, running_products(extents)[0])


def row_major(*shape: object) -> Layout:
    """Return the dense Layout of ``shape`` whose last extent varies fastest: C order, CuTe's ``LayoutRight``.

    Inside a nested mode the last leaf varies fastest too, as in CuTe: strides ignore the nesting.

    Args:
        *shape: as for `Shape`.
    """
    extents = Shape(*shape)
    strides, _ = running_products(_reversed(tuple(extents)))
    return Layout(extents, _reversed(strides))


def _reversed(value: IntTuple) -> IntTuple:
    if isinstance(value, int):
        return value
    return tuple([_reversed(item) for item in reversed(value)])


def _merged(shape: IntTuple, stride: IntTuple) -> tuple[Digit, ...]:
    if isinstance(shape, int) and isinstance(stride, int):  # the common case, a plain mode
        if shape > 1:
            return ((shape, stride),)
        return ((0, 0),) if shape == 0 else ()
    if product(shape) == 0:
        return ((0, 0),)
    return merge_digits(zip(flatten(shape), flatten(stride), strict=True))
