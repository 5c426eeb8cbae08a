"""Which tiles: `TileSelection` (an ordered product, one compact Tensor) and `TileSet` (any finite set).

Both are values: they keep nothing of the caller's lists, know no grid until they are bound to one, and make
their coordinates only when somebody looks at them, so a full axis of a million tiles costs what its ``range``
costs. Inside the library tiles travel as ordinals (`bind`): read-only NumPy arrays of int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from strideweave.tiles.coordinates import (
    NO_ORDINALS,
    Axis,
    Coordinate,
    abbreviated,
    ascending,
    bind_coordinates,
    bind_product,
    check_axis,
    check_coordinates,
    iterate,
    product,
    read_only,
    reverse,
    to_axis,
    to_integers,
)
from strideweave.tiles.immutable import Immutable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.tiles.grid import TileGrid

__all__ = ["TileSelection", "TileSet"]

# So few ordinals are sorted as Python's numbers: an array lets go of the interpreter for as little as that, and waits
# until it has it back.
_FEW_TILES = 64


class TileSelection(Immutable):
    """An ordered Cartesian product of tile coordinates: the tiles gathered into one compact Tensor.

    Compact coordinate ``c`` stands for the source tile ``tuple(per_axis[i][c[i]] for i in range(rank))``; the
    order on each axis is the caller's, and compact coordinates count with the first axis fastest. Selections
    are equal when their ``per_axis`` are; ``len`` is the number of tiles.

    Spec: *TileSelection is an ordered Cartesian product*.

    Args:
        per_axis: for each grid axis a non-empty finite iterable of distinct, non-negative integer tile
            coordinates. NumPy integers and integer arrays count as integers, booleans do not.

    Raises:
        TypeError: ``per_axis`` or an axis is not a finite iterable, or a coordinate is not an integer.
        ValueError: no axes, an empty axis, a duplicate or a negative coordinate.

    Example:
        >>> TileSelection([[7, 2], [4, 9]]).coordinates
        ((7, 4), (2, 4), (7, 9), (2, 9))
    """

    __slots__ = ("__weakref__", "_axes", "_bound", "_coordinates", "_counts", "_per_axis", "_tile_set")
    _axes: tuple[Axis, ...]
    _bound: tuple[TileGrid, NDArray[np.int64]] | None
    _coordinates: tuple[Coordinate, ...] | None
    _counts: tuple[int, ...]
    _per_axis: tuple[Coordinate, ...] | None
    _tile_set: TileSet | None

    def __init__(self, per_axis: Iterable[Iterable[SupportsIndex]]) -> None:
        axes = tuple([to_axis(values, number) for number, values in enumerate(iterate(per_axis, "per_axis"))])
        if not axes:
            raise ValueError("TileSelection needs at least one axis, per_axis is empty")
        for number, axis in enumerate(axes):
            check_axis(axis, number)
        self._fill(axes)

    @classmethod
    def _of_grid(cls, grid: TileGrid, named: Mapping[int, Iterable[SupportsIndex]]) -> TileSelection:
        """Make a selection of some axes of a grid, every other one full, bound to it; errors as the constructor's.

        Args:
            grid: the grid.
            named: the tile coordinates of some of its axes.

        Raises:
            ValueError: a coordinate is out of the grid's range.
        """
        axes: list[Axis] = list(grid.full_axes)
        for number, values in named.items():
            axes[number] = axis = to_axis(values, number)
            check_axis(axis, number)
        selection = cls.__new__(cls)
        selection._fill(tuple(axes))
        selection.bind(grid)
        return selection

    def _fill(self, axes: tuple[Axis, ...]) -> None:
        put = object.__setattr__
        put(self, "_axes", axes)
        put(self, "_counts", tuple(map(len, axes)))
        put(self, "_bound", None)
        put(self, "_coordinates", None)
        put(self, "_per_axis", None)
        put(self, "_tile_set", None)

    @property
    def per_axis(self) -> tuple[tuple[int, ...], ...]:
        """The selected tile coordinates of each grid axis, in the caller's order."""
        made = self._per_axis
        if made is None:
            made = tuple(map(tuple, self._axes))
            self._set(_per_axis=made)
        return made

    @property
    def rank(self) -> int:
        """The number of grid axes."""
        return len(self._counts)

    @property
    def compact_grid_shape(self) -> tuple[int, ...]:
        """How many tiles are selected on each axis."""
        return self._counts

    @property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Every source tile coordinate in compact order, the first axis fastest (made on first use)."""
        made = self._coordinates
        if made is None:
            made = product(self._axes)
            self._set(_coordinates=made)
        return made

    @property
    def tile_set(self) -> TileSet:
        """The selected tiles as a `TileSet`, their order forgotten (made on first use)."""
        made = self._tile_set
        if made is None:
            count = len(self)
            if self._bound is None or count > _FEW_TILES:
                made = TileSet._from_axes(tuple(map(ascending, self._axes)), count)
            else:  # to sort a few numbers that are there takes less time than to make them again
                grid, ordinals = self._bound
                made = TileSet._from_ordinals(grid, ordinals.tolist())
            self._set(_tile_set=made)
        return made

    def bind(self, grid: TileGrid) -> NDArray[np.int64]:
        """Give the ordinals of the selected tiles in ``grid``, in compact order, read-only.

        The last grid is remembered, so binding a selection again costs next to nothing.

        Raises:
            ValueError: the rank is not the grid's, or a coordinate is out of the grid's range.
        """
        bound = self._bound
        if bound is None or (bound[0] is not grid and bound[0] != grid):
            bound = (grid, bind_product(self._axes, grid, "TileSelection"))
            object.__setattr__(self, "_bound", bound)
        return bound[1]

    def __len__(self) -> int:
        return math.prod(self._counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TileSelection):
            return NotImplemented
        # A range and the tuple of its numbers differ as objects and are the same axis.
        return self._counts == other._counts and (
            self._axes == other._axes or self.per_axis == other.per_axis
        )

    def __hash__(self) -> int:
        return hash(self.per_axis)

    def __repr__(self) -> str:
        axes = ", ".join(map(abbreviated, self._axes))
        return f"TileSelection(({axes}{',' if self.rank == 1 else ''}))"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._axes,)


class TileSet(Immutable):
    """An immutable finite set of tile coordinates of one rank; it need not form a product.

    ``len``, iteration and ``in`` work over ``coordinates``. The empty set has no rank and fits every grid.

    Spec: *Residency requests use arbitrary immutable tile sets*.

    Args:
        coordinates: a finite iterable of finite iterables of non-negative integers.

    Raises:
        TypeError: ``coordinates`` or an entry is not a finite iterable, or a component is not an integer.
        ValueError: mixed ranks, a negative component, or a duplicate coordinate.

    Example:
        >>> TileSet([(1, 0), (0, 1), (0, 0)]).coordinates
        ((0, 0), (1, 0), (0, 1))
    """

    __slots__ = ("__weakref__", "_axes", "_bound", "_coordinates", "_count")
    # At least one of the three is always there; the others are made from it on first use.
    _axes: tuple[Axis, ...] | None  # a product of ascending axes
    _bound: tuple[TileGrid, NDArray[np.int64]] | None  # ascending ordinals of a grid
    _coordinates: tuple[Coordinate, ...] | None
    _count: int

    def __init__(self, coordinates: Iterable[Iterable[SupportsIndex]] = ()) -> None:
        entries = [to_integers(entry, "a tile coordinate") for entry in iterate(coordinates, "coordinates")]
        check_coordinates(entries)
        entries.sort(key=reverse)
        self._set(_axes=None, _bound=None, _coordinates=tuple(entries), _count=len(entries))

    @classmethod
    def _from_ordinals(cls, grid: TileGrid, ordinals: Iterable[int] | NDArray[np.int64]) -> TileSet:
        """Make the set of these ordinals of ``grid``, in any order; trusted to be distinct and in range."""
        if not isinstance(ordinals, np.ndarray):
            array = np.array(sorted(ordinals), np.int64)
        else:
            array = np.array(ordinals, np.int64)  # a copy: the caller may go on writing to its own
            if len(array) > 1 and not (array[1:] > array[:-1]).all():
                array.sort()
        return cls._make(None, (grid, read_only(array)), len(array))

    @classmethod
    def _from_axes(cls, axes: tuple[Axis, ...], count: int) -> TileSet:
        """Make the product of ascending axes with ``count`` coordinates, trusted."""
        return cls._make(axes, None, count)

    @classmethod
    def _make(
        cls, axes: tuple[Axis, ...] | None, bound: tuple[TileGrid, NDArray[np.int64]] | None, count: int
    ) -> TileSet:
        tiles = cls.__new__(cls)
        put = object.__setattr__
        put(tiles, "_axes", axes)
        put(tiles, "_bound", bound)
        put(tiles, "_coordinates", None if count else ())
        put(tiles, "_count", count)
        return tiles

    @property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """The tile coordinates, sorted with the first axis fastest (made on first use)."""
        made = self._coordinates
        if made is None:
            if self._axes is not None:
                made = product(self._axes)
            elif self._bound is not None:
                # Whichever grid was bound last: its ordinals stand for the same coordinates.
                grid, ordinals = self._bound
                made = grid.coordinates(ordinals)
            else:
                made = ()
            self._set(_coordinates=made)
        return made

    def bind(self, grid: TileGrid) -> NDArray[np.int64]:
        """Give the ordinals of the tiles in ``grid``, ascending (the order of ``coordinates``), read-only.

        The last grid is remembered, so binding a set again costs next to nothing.

        Raises:
            ValueError: the set is not empty and its rank is not the grid's, or a coordinate is out of range.
        """
        if not self._count:
            return NO_ORDINALS
        bound = self._bound
        if bound is None or (bound[0] is not grid and bound[0] != grid):
            if self._axes is not None:
                bound = (grid, bind_product(self._axes, grid, "TileSet"))
            else:
                bound = (grid, bind_coordinates(self.coordinates, grid, "TileSet"))
            self._set(_bound=bound)
        return bound[1]

    def _common(self, other: TileSet) -> tuple[Coordinate, ...]:
        """Give the coordinates that are in both sets."""
        if not self._count or not other._count:
            return ()
        mine, theirs = self._bound, other._bound
        if mine is not None and theirs is not None and mine[0] == theirs[0]:
            grid, ordinals = mine
            return grid.coordinates(np.intersect1d(ordinals, theirs[1], assume_unique=True))
        return TileSet(set(self.coordinates).intersection(other.coordinates)).coordinates

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.coordinates)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TileSet):
            return NotImplemented
        if self._count != other._count:
            return False
        mine, theirs = self._bound, other._bound
        if mine is not None and theirs is not None and mine[0] == theirs[0]:
            return np.array_equal(mine[1], theirs[1])
        return self.coordinates == other.coordinates

    def __hash__(self) -> int:
        return hash(self.coordinates)

    def __repr__(self) -> str:
        return f"TileSet({abbreviated(self.coordinates) if self._count else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.coordinates,)
