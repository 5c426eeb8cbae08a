"""Where each tile's value is: location, validity and dirtiness as arrays, and their commits.

Spec: *Residency state is independent of executable selection shape*. The table knows no carriers and moves no
bytes; the carrier's lock guards it, and a commit is a handful of array assignments, so other threads see a
whole transition or none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    Ordinals = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["Location", "ResidencyTable", "TileState"]


class Location(IntEnum):
    """Which storage holds the value of a tile."""

    NONE = 0
    """No value yet: the tile is invalid."""
    IMPLICIT = 1
    """A zero that occupies no storage."""
    SECONDARY = 2
    """Only the secondary tier holds the value."""
    PRIMARY = 3
    """The primary tier holds the value; while the tile is clean the secondary tier holds it too."""


@dataclass(frozen=True, slots=True)
class TileState:
    """What a tiled carrier knows of one tile: where its value is, if it has one.

    Attributes:
        location: the tier, ``"primary"`` or ``"secondary"``; ``"implicit"`` for zeros that are stored nowhere
            yet; ``"none"`` for a tile without a value.
        valid: whether the tile has a value.
        dirty: whether only the primary tier has the value.
    """

    location: Literal["primary", "secondary", "implicit", "none"]
    valid: bool
    dirty: bool


# Up to so many tiles, looking at one after the other takes less time than one NumPy call for all of them.
_FEW_TILES = 8

# Plain numbers to compare with: looking up a member of an enumeration takes longer than comparing a few tiles.
_NONE, _IMPLICIT, _SECONDARY, _PRIMARY = (int(location) for location in Location)

_NAMES: Mapping[Location, Literal["primary", "secondary", "implicit", "none"]] = {
    Location.NONE: "none",
    Location.IMPLICIT: "implicit",
    Location.SECONDARY: "secondary",
    Location.PRIMARY: "primary",
}


class ResidencyTable:
    """The residency of every tile of one carrier.

    Args:
        tile_count: how many tiles the grid has.
        location: where every tile starts; tiles that start in the primary tier are dirty, because nothing
            else keeps them.
    """

    def __init__(self, tile_count: int, location: Location) -> None:
        self._location: npt.NDArray[np.uint8] = np.full(tile_count, location, np.uint8)
        self._cells = self._location.data  # the same bytes, as plain integers
        self._dirty: Mask = np.full(tile_count, location is Location.PRIMARY, np.bool_)
        self._resident = tile_count if location is Location.PRIMARY else 0

    @property
    def resident_count(self) -> int:
        """How many tiles are in the primary tier."""
        return self._resident

    def clear(self) -> None:
        """No tile has a value any more."""
        self._location[:] = _NONE
        self._dirty[:] = False
        self._resident = 0

    def is_valid(self, ordinals: Ordinals) -> Mask:
        """Tell for each tile whether it has a value."""
        valid: Mask = self._location[ordinals] != _NONE
        return valid

    def is_resident(self, ordinals: Ordinals) -> Mask:
        """Tell for each tile whether its value is in the primary tier."""
        resident: Mask = self._location[ordinals] == _PRIMARY
        return resident

    def are_valid(self, ordinals: Ordinals) -> bool:
        """Tell whether each of some tiles has a value."""
        if self._resident == len(self._location):
            return True
        if len(ordinals) > _FEW_TILES:
            return int(np.count_nonzero(self._location[ordinals])) == len(ordinals)
        cells = self._cells
        for ordinal in ordinals.tolist():  # noqa: SIM110  a generator takes twice as long
            if cells[ordinal] == _NONE:
                return False
        return True

    def are_resident(self, ordinals: Ordinals) -> bool:
        """Tell whether the value of each of some tiles is in the primary tier."""
        if not self._resident:
            return not len(ordinals)
        return self._resident == len(self._location) or self._are(ordinals, _PRIMARY)

    def any_resident(self, ordinals: Ordinals) -> bool:
        """Tell whether the value of any of some tiles is in the primary tier."""
        return bool(self._resident) and bool(self.is_resident(ordinals).any())

    def are_stored(self, ordinals: Ordinals) -> bool:
        """Tell whether only the secondary tier has the value of each of some tiles."""
        return self._are(ordinals, _SECONDARY)

    def _are(self, ordinals: Ordinals, location: int) -> bool:
        if len(ordinals) > _FEW_TILES:
            return int(np.count_nonzero(self._location[ordinals] == location)) == len(ordinals)
        cells = self._cells
        for ordinal in ordinals.tolist():  # noqa: SIM110  a generator takes twice as long
            if cells[ordinal] != location:
                return False
        return True

    def is_implicit(self, ordinals: Ordinals) -> Mask:
        """Tell for each tile whether it is a zero without storage."""
        implicit: Mask = self._location[ordinals] == _IMPLICIT
        return implicit

    def is_dirty(self, ordinals: Ordinals) -> Mask:
        """Tell for each tile whether only the primary tier has its value."""
        return self._dirty[ordinals]

    def location(self, ordinal: int) -> Location:
        """Where the value of one tile is."""
        return Location(int(self._location[ordinal]))

    def state(self, ordinal: int) -> TileState:
        """Describe one tile."""
        location = self.location(ordinal)
        return TileState(_NAMES[location], location is not Location.NONE, bool(self._dirty[ordinal]))

    def located(self, location: Location) -> Ordinals:
        """The ordinals of all tiles at ``location``, ascending."""
        return np.flatnonzero(self._location == location)

    def valid(self) -> Ordinals:
        """The ordinals of all tiles that have a value, ascending."""
        return np.flatnonzero(self._location)

    def dirty(self) -> Ordinals:
        """The ordinals of all dirty tiles, ascending."""
        return np.flatnonzero(self._dirty)

    def commit_promotion(self, ordinals: Ordinals) -> None:
        """The primary tier has the values now; what was implicit there is dirty, the rest is clean."""
        implicit = self.is_implicit(ordinals)
        self._resident += int(np.count_nonzero(~self.is_resident(ordinals)))
        self._location[ordinals] = _PRIMARY
        self._dirty[ordinals[implicit]] = True

    def commit_write(self, ordinal: int) -> None:
        """A resident tile was written: only the primary tier has its value."""
        self._dirty[ordinal] = True

    def commit_fill(self, ordinals: Ordinals) -> None:
        """The primary tier, and only it, has new values of these tiles, wherever they were before."""
        self._resident += int(np.count_nonzero(~self.is_resident(ordinals)))
        self._location[ordinals] = _PRIMARY
        self._dirty[ordinals] = True

    def commit_stored(self, ordinals: Ordinals) -> None:
        """The secondary tier has new values of these tiles, which are not primary."""
        self._location[ordinals] = _SECONDARY

    def begin_implicit(self) -> None:
        """Every tile is a zero without storage: the start of a gradient. No tile has had a value before."""
        self._location[:] = _IMPLICIT

    def commit_clean(self, ordinals: Ordinals) -> None:
        """The secondary tier holds the same values again."""
        self._dirty[ordinals] = False

    def commit_drop(self, ordinals: Ordinals) -> None:
        """Clean resident tiles leave the primary tier."""
        self._resident -= len(ordinals)
        self._location[ordinals] = _SECONDARY
