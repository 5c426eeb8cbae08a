"""The tile grid: which slots a tile owns, and whether a Tensor's Layout respects that.

Tiles are stored one after the other. With ``P`` slots to a tile, tile ``k`` owns the slots ``[k * P, (k + 1)
* P)``, where ``k`` is the first-mode-fastest ordinal of the tile coordinate in ``grid_shape``; inside a tile,
slots run first-mode-fastest over ``tile_shape``. A Tensor may order the slots inside its tiles differently,
and `TileGrid.place` finds out how.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from strideweave.layout.digits import Digit, merge_digits
from strideweave.layout.int_tuple import as_integer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.layout import Layout

__all__ = ["TileGrid", "TilePlacement"]

_MOST_SLOTS = 2**63 - 1  # slots and ordinals are counted in int64


@dataclass(frozen=True, slots=True)
class TilePlacement:
    """How a Tensor orders the slots inside every one of its tiles; the same for all of them.

    The element with within-tile coordinate ``w`` sits at slot ``origin + sum(entry * stride)`` of its tile,
    the entries being those of ``w`` in the digits of each axis, fastest first.

    Attributes:
        axes: per axis the ``(extent, stride)`` digits inside a tile, fastest first, strides in slots; an axis
            with tile extent 1 has none.
        origin: the slot inside the tile of the within-tile coordinate 0; above 0 where strides are negative.
        mode_order: the axes with tile extent above 1, fastest first, when each is one plain mode with a
            positive stride; None when the order inside a tile is not that of its axes.
    """

    axes: tuple[tuple[Digit, ...], ...]
    origin: int
    mode_order: tuple[int, ...] | None


@dataclass(frozen=True)
class TileGrid:
    """A logical array cut into ``grid_shape`` equal tiles of ``tile_shape``.

    Spec: *TiledEvictable owns one flat logical storage extent*.

    Args:
        grid_shape: the number of tiles along each axis.
        tile_shape: the extent of a tile along each axis.

    Raises:
        TypeError: a shape is not iterable, or an extent is not an integer (a bool counts as none).
        ValueError: an extent is below 1, the two shapes differ in rank, there is no axis, or there would be more
            than 2**63 - 1 slots.
    """

    grid_shape: tuple[int, ...]
    tile_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("grid_shape", "tile_shape"):
            # The class is frozen for its users; here the shapes become plain tuples once.
            object.__setattr__(self, name, _checked_shape(name, getattr(self, name)))
        if len(self.grid_shape) != len(self.tile_shape):
            raise ValueError(
                f"grid_shape and tile_shape need one extent each per axis, got {self.grid_shape} "
                f"and {self.tile_shape}"
            )
        if self.slot_count > _MOST_SLOTS:
            raise ValueError(
                f"the grid {self.grid_shape} of tiles {self.tile_shape} has {self.slot_count} slots; "
                f"there are numbers for {_MOST_SLOTS}"
            )

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.grid_shape)

    @cached_property
    def full_axes(self) -> tuple[range, ...]:
        """The tile coordinates along each axis."""
        return tuple(map(range, self.grid_shape))

    @cached_property
    def tile_count(self) -> int:
        """The number of tiles."""
        return prod(self.grid_shape)

    @cached_property
    def tile_size(self) -> int:
        """The number of slots in a tile."""
        return prod(self.tile_shape)

    @cached_property
    def slot_count(self) -> int:
        """The number of slots in all tiles."""
        return self.tile_count * self.tile_size

    @cached_property
    def logical_shape(self) -> tuple[int, ...]:
        """The extents of the logical array: ``grid_shape * tile_shape``."""
        return tuple([tiles * extent for tiles, extent in zip(self.grid_shape, self.tile_shape, strict=True)])

    def ordinal(self, coordinate: Iterable[int]) -> int:
        """Return the first-mode-fastest ordinal of a tile coordinate.

        Raises:
            TypeError: ``coordinate`` is not an iterable of integers.
            ValueError: its rank is not that of the grid, or an entry is outside its axis.
        """
        entries = [as_integer(entry, "a tile coordinate") for entry in coordinate]
        if len(entries) != self.rank:
            raise ValueError(
                f"a tile of the grid {self.grid_shape} has {self.rank} coordinates, got {tuple(entries)}"
            )
        ordinal, weight = 0, 1
        for axis, (entry, extent) in enumerate(zip(entries, self.grid_shape, strict=True)):
            if not 0 <= entry < extent:
                raise ValueError(
                    f"tile coordinate {tuple(entries)} is not in the grid {self.grid_shape}: "
                    f"{entry} is outside [0, {extent}) of axis {axis}"
                )
            ordinal += entry * weight
            weight *= extent
        return ordinal

    def coordinate(self, ordinal: int) -> tuple[int, ...]:
        """Return the tile coordinate with that ordinal; inverse of `ordinal`.

        Raises:
            TypeError: ``ordinal`` is not an integer.
            IndexError: it is outside ``[0, tile_count)``.
        """
        rest = as_integer(ordinal, "a tile ordinal")
        if not 0 <= rest < self.tile_count:
            raise IndexError(
                f"tile ordinal {rest} is outside [0, {self.tile_count}) of the grid {self.grid_shape}"
            )
        entries = []
        for extent in self.grid_shape:
            rest, entry = divmod(rest, extent)
            entries.append(entry)
        return tuple(entries)

    def coordinates(self, ordinals: Sequence[int] | NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
        """Return the tile coordinates of many ordinals, in the given order.

        Raises:
            IndexError: an ordinal is outside ``[0, tile_count)``.
        """
        rest = np.asarray(ordinals, np.int64)
        if rest.size == 0:
            return ()
        if rest.min() < 0 or rest.max() >= self.tile_count:
            raise IndexError(
                f"tile ordinals from {rest.min()} to {rest.max()} are not all in [0, {self.tile_count}) "
                f"of the grid {self.grid_shape}"
            )
        columns = []
        for extent in self.grid_shape:
            rest, column = np.divmod(rest, extent)
            columns.append(column.tolist())
        return tuple(zip(*columns, strict=True))

    def tile_of(self, slot: int) -> int:
        """Return the ordinal of the tile that owns a slot.

        Raises:
            TypeError: ``slot`` is not an integer.
            IndexError: it is outside ``[0, slot_count)``.
        """
        position = as_integer(slot, "a slot")
        if not 0 <= position < self.slot_count:
            raise IndexError(f"slot {position} is outside [0, {self.slot_count})")
        return position // self.tile_size

    def place(self, layout: Layout, offset: int) -> TilePlacement:
        """Return how a Tensor with that Layout and offset orders the slots inside its tiles.

        Spec: *Tensor Layout compatibility preserves exact carrier tile footprints*. The Tensor is compatible
        exactly when this returns. The cost depends on the number of modes, not on that of tiles or slots.

        Args:
            layout: the Layout of the full Tensor, its top-level modes being the axes.
            offset: the Tensor's offset in slots.

        Raises:
            ValueError: a logical tile repeats a slot, leaves one out, or reaches one of another tile. The
                message names the axis and what was expected.
        """
        if layout.extents != self.logical_shape:
            raise ValueError(
                f"a Tensor over the grid {self.grid_shape} with tiles {self.tile_shape} has the extents "
                f"{self.logical_shape}, got {layout.extents} from {layout}; pass the full Tensor in its own "
                "shape"
            )
        cuts = [self._cut(layout, axis) for axis in range(self.rank)]
        inner = tuple([digits for digits, _ in cuts])
        self._check_inside(layout, inner)
        self._check_steps(layout, [digits for _, digits in cuts])
        first = offset + sum([min(0, stride * (extent - 1)) for axis in inner for extent, stride in axis])
        if first:
            raise ValueError(
                f"the tiles of {layout} at offset {offset} are shifted: tile {(0,) * self.rank} reaches the "
                f"slots [{first}, {first + self.tile_size}) and must reach [0, {self.tile_size}); "
                f"use the offset {offset - first}"
            )
        return TilePlacement(inner, offset, _mode_order(inner))

    def _cut(self, layout: Layout, axis: int) -> tuple[tuple[Digit, ...], tuple[Digit, ...]]:
        """Split the digits of an axis into those inside a tile and those from tile to tile."""
        digits = layout.mode_digits(axis)
        inner: list[Digit] = []
        rest = self.tile_shape[axis]
        for place, (extent, stride) in enumerate(digits):
            if rest % extent == 0:
                inner.append((extent, stride))
                rest //= extent
            elif extent % rest == 0:
                # The tile ends inside this digit: its first `rest` entries belong to the tile.
                outer = ((extent // rest, rest * stride), *digits[place + 1 :])
                return merge_digits([*inner, (rest, stride)]), merge_digits(outer)
            else:
                raise ValueError(
                    f"tiles along axis {axis} of {layout} differ in form: its (extent, stride) digits, "
                    f"fastest first, are {digits}, and none ends or divides at the tile extent "
                    f"{self.tile_shape[axis]}; {_ADVICE}"
                )
        return tuple(inner), ()

    def _check_inside(self, layout: Layout, inner: tuple[tuple[Digit, ...], ...]) -> None:
        """Raise unless the digits inside a tile reach each of its slots exactly once.

        Sums that fill an interval without repetition form a mixed radix: the smallest stride is 1, and each
        next one is what the smaller ones fill. (N. G. de Bruijn, "On bases for the set of integers", 1950.)
        """
        filled = 1
        for stride, extent, axis in sorted(
            [(abs(stride), extent, axis) for axis, digits in enumerate(inner) for extent, stride in digits]
        ):
            if stride != filled:
                fault = "repeats slots" if stride < filled else "leaves out slots of its own"
                raise ValueError(
                    f"every tile of {layout} {fault}: inside a tile of {self.tile_size} slots axis {axis} "
                    f"steps by {stride}, where the finer steps fill {filled}; {_ADVICE}"
                )
            filled *= extent

    def _check_steps(self, layout: Layout, outer: list[tuple[Digit, ...]]) -> None:
        """Raise unless the step to the next tile along each axis is the distance of those tiles' slots."""
        step = self.tile_size
        for axis, (found, tiles) in enumerate(zip(outer, self.grid_shape, strict=True)):
            if tiles > 1 and found != ((tiles, step),):
                extent, stride = found[0]
                wrong = 1 if stride != step else extent
                reached = stride if wrong == 1 else found[1][1]
                coordinate = tuple([wrong if other == axis else 0 for other in range(self.rank)])
                raise ValueError(
                    f"tile {coordinate} of {layout} reaches slots that are not its own: it lies {reached} "
                    f"slots from tile {(0,) * self.rank} instead of {wrong * step}; {_ADVICE}"
                )
            step *= tiles


_ADVICE = (
    "store whole tiles one after the other, the first axis of the grid fastest, and nest each mode that is "
    "cut as (tile extent, grid extent)"
)


def _checked_shape(name: str, shape: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(shape, Iterable) or isinstance(shape, (str, bytes)):
        raise TypeError(f"{name} must be a tuple of integers, got {shape!r}")
    extents = tuple([as_integer(extent, f"an extent of {name}") for extent in shape])
    if not extents:
        raise ValueError(f"{name} is empty: a tile grid has one axis or more")
    if min(extents) < 1:
        raise ValueError(f"extents of {name} must be at least 1, got {extents}")
    return extents


def _mode_order(inner: tuple[tuple[Digit, ...], ...]) -> tuple[int, ...] | None:
    if any(len(digits) > 1 or digits[0][1] < 0 for digits in inner if digits):
        return None
    strides = [(digits[0][1], axis) for axis, digits in enumerate(inner) if digits]
    return tuple([axis for _, axis in sorted(strides)])
