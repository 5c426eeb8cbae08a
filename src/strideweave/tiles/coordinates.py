"""Tile coordinates as a caller writes them, and the ordinals they stand for: plain functions."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.layout.int_tuple import as_integer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.tiles.grid import TileGrid

__all__ = [
    "NO_ORDINALS",
    "Axis",
    "Coordinate",
    "abbreviated",
    "ascending",
    "bind_coordinates",
    "bind_product",
    "check_axis",
    "check_coordinates",
    "iterate",
    "product",
    "read_only",
    "reverse",
    "to_axis",
    "to_integers",
    "without",
]

Axis = range | tuple[int, ...]
Coordinate = tuple[int, ...]

# Up to this many tiles plain integer arithmetic beats the fixed cost of the NumPy calls.
_FEW_TILES = 24
# Enough to recognise a set in a message, whatever its size.
_SHOWN = 8


def read_only(ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lock an array that every caller who binds to the same grid will share."""
    ordinals.setflags(write=False)
    return ordinals


NO_ORDINALS = read_only(np.empty(0, np.int64))


def without(ordinals: NDArray[np.int64], others: AbstractSet[int]) -> NDArray[np.int64]:
    """Give those of some ordinals that are not among others, in their order.

    As Python's numbers: for as few tiles as a request mostly has, NumPy's set operations take several times as long.
    """
    found: list[int] = ordinals.tolist()
    if others.isdisjoint(found):
        return ordinals
    return np.array([ordinal for ordinal in found if ordinal not in others], np.int64)


def iterate(values: Any, name: str) -> Iterator[Any]:
    """Start the one pass over ``values``.

    Raises:
        TypeError: ``values`` is not a finite iterable; the message calls it ``name``.
    """
    if isinstance(values, np.ndarray):
        values = values.tolist()  # plain integers; a 0-d array becomes a scalar and is refused below
    if _is_endless(values):
        raise TypeError(f"{name} must be finite, not {values!r}")
    try:
        iterator: Iterator[Any] = iter(values)
    except TypeError:
        found = f"{type(values).__name__} {values!r}"
        raise TypeError(f"{name} must be a finite iterable, not {found}{_instead_of(values)}") from None
    return iterator


def _instead_of(values: Any) -> str:
    """What somebody meant who gave no iterable, as the end of a message."""
    if isinstance(values, slice):
        return "; range(start, stop) is one"
    if isinstance(values, (int, np.integer)) and not isinstance(values, bool):
        return f"; [{int(values)}] is one"
    return "; its tolist() is one" if hasattr(values, "tolist") and getattr(values, "ndim", False) else ""


def _is_endless(values: Any) -> bool:
    """Recognise the endless iterators of `itertools`; others cannot be told from finite ones."""
    if isinstance(values, itertools.repeat):
        try:
            values.__length_hint__()  # operator.length_hint would hide the error
        except TypeError:  # no number of times was given
            return True
    return isinstance(values, (itertools.count, itertools.cycle))


def to_integers(values: Any, name: str) -> tuple[int, ...]:
    """Copy an iterable of integers into a tuple of plain ones.

    Raises:
        TypeError: it is not a finite iterable, or an entry is not an integer (booleans are not).
    """
    if isinstance(values, np.ndarray) and values.ndim == 1:
        if type(values) is np.ndarray and values.dtype.kind in "iu":
            return tuple(values.tolist())
        values = values.tolist()  # as ``iterate`` makes them; what is masked becomes None
    integers = tuple(values if isinstance(values, (list, tuple)) else iterate(values, name))
    if set(map(type, integers)) <= {int}:  # the common case, without a Python call per entry
        return integers
    what = f"an entry of {name}"
    # int(): a subclass of int, such as a member of an IntEnum, is its own index.
    return tuple([int(as_integer(value, what)) for value in integers])


def to_axis(values: Any, number: int) -> Axis:
    """Copy the coordinates of one axis; a range is a value already and stays one."""
    return values if isinstance(values, range) else to_integers(values, f"axis {number} of the selection")


def check_axis(axis: Axis, number: int) -> None:
    """Refuse an axis that is empty, repeats a coordinate or holds a negative one.

    Raises:
        ValueError: as said.
    """
    if not axis:
        raise ValueError(f"axis {number} of the selection selects no tile; every axis needs at least one")
    if isinstance(axis, range):
        lowest, distinct = min(axis[0], axis[-1]), True
        if (axis[-1] - axis[0]) // axis.step >= sys.maxsize:  # of which len() would be an OverflowError
            raise ValueError(
                f"axis {number} of the selection selects {axis!r}, more tiles than a grid can have"
            )
    elif all(map(operator.lt, axis, axis[1:])):  # ascending, as most are: half the price of a set
        lowest, distinct = axis[0], True
    else:
        lowest, distinct = min(axis), len(set(axis)) == len(axis)
    if lowest < 0:
        raise ValueError(f"axis {number} of the selection holds the negative tile coordinate {lowest}")
    if not distinct:
        raise ValueError(
            f"axis {number} of the selection selects tile {_first_repeated(axis)} more than once; project the tiles "
            "of np.unique(wanted, return_inverse=True) and repeat them with gather"
        )


def check_coordinates(coordinates: Sequence[Coordinate]) -> None:
    """Refuse coordinates of several ranks, negative components and duplicates.

    Raises:
        ValueError: as said.
    """
    ranks = set(map(len, coordinates))
    if len(ranks) > 1:
        raise ValueError(f"tile coordinates must have one rank, found the ranks {sorted(ranks)}")
    if ranks and ranks != {0} and min(map(min, coordinates)) < 0:
        negative = next(coordinate for coordinate in coordinates if min(coordinate) < 0)
        raise ValueError(f"tile coordinate {negative} has a negative component")
    if len(set(coordinates)) != len(coordinates):
        raise ValueError(f"tile coordinate {_first_repeated(coordinates)} occurs more than once")


def _first_repeated(values: Iterable[Any]) -> Any:
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def reverse(coordinate: Coordinate) -> Coordinate:
    """Turn a coordinate round: the sort key of the order in which the first axis varies fastest."""
    return coordinate[::-1]


def ascending(axis: Axis) -> Axis:
    """Sort the coordinates of one axis."""
    if isinstance(axis, range):
        return axis if axis.step > 0 else axis[::-1]
    return tuple(sorted(axis))


def product(axes: Sequence[Axis]) -> tuple[Coordinate, ...]:
    """Enumerate the Cartesian product of ``axes``, the first axis fastest."""
    # itertools varies its last factor fastest; with axes and coordinates turned round, that is the first.
    return tuple(map(reverse, itertools.product(*reversed(axes))))


def bind_product(axes: Sequence[Axis], grid: TileGrid, what: str) -> NDArray[np.int64]:
    """Give the ordinals of ``product(axes)`` in ``grid``, in the same order, without the coordinates.

    Raises:
        ValueError: the rank is not the grid's, or a coordinate is out of range; ``what`` begins the message.
    """
    extents = grid.grid_shape
    _check_rank(len(axes), extents, what)
    count = 1
    for number, axis in enumerate(axes):
        # A range is asked for its ends, never walked.
        highest = max(axis[0], axis[-1]) if isinstance(axis, range) else max(axis)
        if highest >= extents[number]:
            raise ValueError(f"{what} asks for tile {highest} on axis {number} of the grid {tuple(extents)}")
        count *= len(axis)
    if count <= _FEW_TILES:
        return read_only(np.array(_few_ordinals(axes, extents), np.int64))
    return read_only(_many_ordinals(axes, extents))


def _few_ordinals(axes: Sequence[Axis], extents: Sequence[int]) -> list[int]:
    ordinals, stride = [0], 1
    for axis, extent in zip(axes, extents, strict=True):
        if extent == 1:  # the axis adds nothing
            continue
        ordinals = [ordinal + tile * stride for tile in axis for ordinal in ordinals]
        stride *= extent
    return ordinals


def _many_ordinals(axes: Sequence[Axis], extents: Sequence[int]) -> NDArray[np.int64]:
    ordinals, stride = np.zeros(1, np.int64), 1
    for axis, extent in zip(axes, extents, strict=True):
        if extent == 1:  # the axis adds nothing
            continue
        if isinstance(axis, range):
            tiles = np.arange(axis.start, axis.stop, axis.step, dtype=np.int64)
        else:
            tiles = np.array(axis, np.int64)
        ordinals = (tiles[:, None] * stride + ordinals).reshape(-1)
        stride *= extent
    return ordinals


def bind_coordinates(coordinates: Sequence[Coordinate], grid: TileGrid, what: str) -> NDArray[np.int64]:
    """Give the ordinals of one or more coordinates of one rank in ``grid``, in the same order.

    Raises:
        ValueError: the rank is not the grid's, or a coordinate is out of range; ``what`` begins the message.
    """
    extents = grid.grid_shape
    _check_rank(len(coordinates[0]), extents, what)
    strides = list(itertools.accumulate(extents[:-1], operator.mul, initial=1))
    columns = list(zip(*coordinates, strict=True))
    if any(max(column) >= extent for column, extent in zip(columns, extents, strict=True)):
        outside = next(c for c in coordinates if any(map(operator.ge, c, extents)))
        raise ValueError(f"{what} holds tile {outside}, which is outside the grid {tuple(extents)}")
    if len(coordinates) <= _FEW_TILES:
        return read_only(np.array([sum(map(operator.mul, c, strides)) for c in coordinates], np.int64))
    terms = [np.array(column, np.int64) * stride for column, stride in zip(columns, strides, strict=True)]
    return read_only(np.sum(terms, axis=0, dtype=np.int64))


def _check_rank(rank: int, extents: Sequence[int], what: str) -> None:
    if rank != len(extents):
        raise ValueError(f"{what} has rank {rank}; the grid {tuple(extents)} has rank {len(extents)}")


def abbreviated(values: Sequence[Any]) -> str:
    """Write a tuple, the middle left out when it is long."""
    if len(values) <= 2 * _SHOWN:
        return repr(tuple(values))
    first = ", ".join(map(repr, values[:_SHOWN]))
    return f"({first}, ... {len(values) - _SHOWN - 1} more ..., {values[-1]!r})"
