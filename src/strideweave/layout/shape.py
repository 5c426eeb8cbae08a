"""Shape and Stride: immutable, possibly nested tuples of integers.

They are tuples, so they compare, hash, unpack and index as tuples; they add only what the meaning of the
numbers allows. Terms follow *CuTe* (NVIDIA CUTLASS documentation, "CuTe layouts").
"""

from __future__ import annotations

from functools import cached_property

from strideweave.layout.int_tuple import IntTuple, as_int_tuple, as_integer, flatten, product

__all__ = ["Shape", "Stride"]


class Shape(tuple[IntTuple, ...]):
    """The extents of a logical array, one entry per mode; an entry may itself be a tuple of extents.

    ``Shape(4, 3)``, ``Shape((4, 3))`` and ``(4, 3)`` are equal and hash alike. A single tuple argument is the
    whole shape, so one nested mode is written ``Shape(((4, 3),))``. ``Shape()`` is the shape of a scalar.

    Args:
        *modes: integers >= 0, or nested tuples of them. A zero extent makes the whole shape empty.

    Raises:
        TypeError: an extent is not an integer (a bool counts as none).
        ValueError: an extent is negative.
    """

    def __new__(cls, *modes: object) -> Shape:
        """Make a Shape; one that is given back unchanged needs no copy."""
        if len(modes) == 1:
            if type(modes[0]) is cls:
                return modes[0]
            if isinstance(modes[0], (tuple, list)):
                modes = tuple(modes[0])
        self = super().__new__(cls, [as_int_tuple(mode, "an extent of a Shape") for mode in modes])
        for extent in flatten(self):
            if extent < 0:
                raise ValueError(f"extents of a Shape must be >= 0, got {extent} in {tuple(self)}")
        return self

    @property
    def rank(self) -> int:
        """The number of top-level modes."""
        return len(self)

    @cached_property
    def size(self) -> int:
        """The number of coordinates: the product of all extents, 1 for ``Shape()``."""
        return product(self)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """The size of each top-level mode: the shape that NumPy sees."""
        return tuple([mode if isinstance(mode, int) else product(mode) for mode in self])

    def encode(self, coordinate: object) -> int:
        """Return the linear index of ``coordinate``, the first mode varying fastest.

        Args:
            coordinate: a tuple with one entry per mode; an entry for a nested mode is a tuple in turn, or the
                mode's own linear index. An integer is a linear index already and is only checked.

        Raises:
            TypeError: an entry is not an integer.
            ValueError: the nesting of the coordinate does not fit the shape.
            IndexError: an entry is negative or not below its extent.
        """
        return _encode(self, coordinate, self)

    def decode(self, index: int) -> tuple[IntTuple, ...]:
        """Return the coordinate with linear index ``index``, nested like the shape; inverse of `encode`.

        Raises:
            TypeError: ``index`` is not an integer.
            IndexError: ``index`` is not in ``[0, size)``.
        """
        position = as_integer(index, "a linear index")
        if not 0 <= position < self.size:
            raise IndexError(f"linear index {position} is outside [0, {self.size}) of {self!r}")
        coordinate, _ = _decode(tuple(self), position)
        return coordinate  # type: ignore[return-value]  # a tuple decodes to a tuple

    def __repr__(self) -> str:
        return f"Shape({', '.join(map(repr, self))})"


class Stride(tuple[IntTuple, ...]):
    """The distance in slots between neighbours along each mode of a Shape, nested like that Shape.

    ``Stride(3, 1)``, ``Stride((3, 1))`` and ``(3, 1)`` are equal and hash alike.

    Args:
        *modes: integers or nested tuples of them; zero repeats one slot, a negative stride walks backwards.

    Raises:
        TypeError: a stride is not an integer (a bool counts as none).
    """

    def __new__(cls, *modes: object) -> Stride:
        """Make a Stride; one that is given back unchanged needs no copy."""
        if len(modes) == 1:
            if type(modes[0]) is cls:
                return modes[0]
            if isinstance(modes[0], (tuple, list)):
                modes = tuple(modes[0])
        return super().__new__(cls, [as_int_tuple(mode, "a stride") for mode in modes])

    @property
    def rank(self) -> int:
        """The number of top-level modes."""
        return len(self)

    def __repr__(self) -> str:
        return f"Stride({', '.join(map(repr, self))})"


def _encode(shape: IntTuple, coordinate: object, whole: Shape) -> int:
    if isinstance(coordinate, (tuple, list)):
        if isinstance(shape, int) or len(coordinate) != len(shape):
            raise ValueError(f"coordinate {coordinate!r} does not fit the mode {shape} of {whole!r}")
        position, weight = 0, 1
        for mode, entry in zip(shape, coordinate, strict=True):
            position += weight * _encode(mode, entry, whole)
            weight *= product(mode)
        return position
    position = as_integer(coordinate, "a coordinate")
    if not 0 <= position < product(shape):
        where = "" if shape is whole else f"the mode {shape} of "
        raise IndexError(f"coordinate {position} is outside [0, {product(shape)}) of {where}{whole!r}")
    return position


def _decode(shape: IntTuple, position: int) -> tuple[IntTuple, int]:
    """Split the fastest part of ``position`` off; also return what is left for slower modes."""
    if isinstance(shape, int):
        rest, entry = divmod(position, shape)
        return entry, rest
    entries: list[IntTuple] = []
    for mode in shape:
        digit, position = _decode(mode, position)
        entries.append(digit)
    return tuple(entries), position
