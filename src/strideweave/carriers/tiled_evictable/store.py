"""Where the tiles of one tier lie: what a store of the primary tier promises, and the store of the secondary tier.

A store answers two questions, where tile ``k`` is and whether its storage may be given back, and knows
nothing of validity or of requests. Its methods are short plain bookkeeping that the carrier's lock guards.
What takes its time stays outside the lock: ``make_room`` and ``prepare_write`` allocate before the bookkeeping,
and ``discard`` only hands out the ``Leftovers``, for who dropped the tiles to call ``Leftovers.give_back`` and
then, under the lock again, ``reclaim``. All of these belong to the runtime's loop; other threads only look.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from mmap import PAGESIZE
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.part_cover import StagingArea
    from strideweave.tiles.grid import TileGrid

    Ordinals = npt.NDArray[np.int64]
    TileRow = npt.NDArray[np.unsignedinteger]

__all__ = [
    "Leftovers",
    "Places",
    "PrimaryStore",
    "SecondaryStore",
    "by_carrier",
    "note_change",
    "page_neighbours",
    "run_bounds",
    "runs",
    "tile_rows",
]


@dataclass(slots=True, eq=False)
class Leftovers:
    """Storage that no tile uses any more and that has yet to be given back to the system.

    Attributes:
        ranges: carrier, first slot and count of slots whose pages go back while the carrier stays.
        carriers: carriers to release.
        places: half-open runs of numbered places in ``ranges``, usable again after ``reclaim``.
    """

    ranges: list[tuple[Carrier, int, int]] = field(default_factory=list)
    carriers: list[Carrier] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ranges or self.carriers)

    def give_back(self) -> None:
        """Return the pages to the system; not under the lock."""
        for carrier, start, slots in self.ranges:
            carrier._discard(start, slots)
        for carrier in self.carriers:
            carrier.release()


class Places(NamedTuple):
    """Where some tiles lie in one carrier.

    Attributes:
        which: their positions among the tiles that were asked for, or None for all of them in order.
        carrier: holds them.
        starts: the first slot of each.
    """

    which: Ordinals | None
    carrier: Carrier
    starts: Ordinals


def by_carrier(places: Iterable[tuple[Carrier, int]]) -> list[Places]:
    """Places that are given tile by tile, carrier by carrier."""
    found: dict[Carrier, tuple[list[int], list[int]]] = {}
    for position, (carrier, start) in enumerate(places):
        which, starts = found.setdefault(carrier, ([], []))
        which.append(position)
        starts.append(start)
    return [
        Places(np.array(which, np.int64), carrier, np.array(starts, np.int64))
        for carrier, (which, starts) in found.items()
    ]


class PrimaryStore(Protocol):
    """What a tiled carrier asks of the storage of its primary tier."""

    def take_scratch(self) -> None:
        """Take memory from now on that is recycled when the store goes."""

    def make_room(self, count: int) -> None:
        """Allocate what ``reserve`` needs for so many tiles; not under the lock. May raise MemoryError."""

    def reserve(self, ordinals: Ordinals) -> None:
        """Give each tile a place."""

    def discard(self, ordinals: Ordinals) -> Leftovers:
        """Take the places of tiles back; what is to be returned to the system is the caller's to do."""

    def trim(self, count: int) -> Leftovers:
        """Keep so many places fewer for the next tiles; as ``discard`` for what is to be returned."""

    def reclaim(self, leftovers: Leftovers) -> None:
        """The pages of ``leftovers`` went back; their places may be used again."""

    def places(self, ordinals: Ordinals) -> Iterator[tuple[Carrier, int]]:
        """For each tile, the carrier that holds it and its first slot there."""

    def place_arrays(self, ordinals: Ordinals) -> list[Places]:
        """The same as ``places``, carrier by carrier."""

    def rows(self, ordinals: Ordinals) -> list[TileRow]:
        """The tiles, each as an array of its own."""

    def addresses(self, ordinals: Ordinals) -> tuple[Ordinals, object]:
        """Where each tile begins in memory, and what keeps that alive as long as they stay or the store goes."""

    def block(self, ordinals: Ordinals) -> tuple[npt.NDArray[np.unsignedinteger], Ordinals] | None:
        """The one array that all of the tiles are rows of, and which rows; None where they lie in several."""

    def release(self) -> None:
        """Give everything back."""

    @property
    def recycled_bytes(self) -> int:
        """Bytes kept for the next tiles though no tile lies there."""


def note_change(tier: Carrier) -> None:
    """Advance the version of a tier whose slots changed: a graph of a retained alias may have saved them."""
    tier._advance_version(tier._owner)


def tile_rows(carrier: Carrier, tile_size: int) -> npt.NDArray[np.unsignedinteger]:
    """All whole tiles of a memory carrier as rows of unsigned integers, so that bytes move, not values."""
    raw = carrier._bytes()
    return raw.view(f"u{carrier.dtype().itemsize}").reshape(-1, tile_size)


class SecondaryStore:
    """Every tile at its own slots of the secondary tier, or of a spill where that tier may not be written.

    The tier is allocated to the full extent on the first write-back; storage that a file system keeps sparse
    costs nothing until then. A tier that came with values and is read-only stays untouched: what is written
    back from above it goes to a spill of the same kind.

    Args:
        carrier: the secondary tier.
        grid: the tile grid.
        writable: whether write-backs may go to the tier itself.
    """

    def __init__(self, carrier: Carrier, grid: TileGrid, *, writable: bool) -> None:
        self._carrier = carrier
        self._grid = grid
        self._writable = writable
        self._spill: Carrier | None = None
        self._spilled: npt.NDArray[np.bool_] | None = None

    @property
    def beside(self) -> StagingArea | None:
        """Memory that reading the tier takes besides that which tiles go to, where it takes any."""
        return self._carrier._beside

    def places(self, ordinals: Ordinals) -> Iterator[tuple[Carrier, int]]:
        """For each tile, the carrier that holds its value and its first slot there."""
        size = self._grid.tile_size
        if self._spill is None or self._spilled is None:
            return ((self._carrier, ordinal * size) for ordinal in ordinals.tolist())
        spill, spilled = self._spill, self._spilled[ordinals].tolist()
        return (
            (spill if away else self._carrier, ordinal * size)
            for ordinal, away in zip(ordinals.tolist(), spilled, strict=True)
        )

    def place_arrays(self, ordinals: Ordinals) -> list[Places]:
        """The same as ``places``, carrier by carrier."""
        starts = ordinals * self._grid.tile_size
        if self._spill is None or self._spilled is None:
            return [Places(None, self._carrier, starts)]
        away = self._spilled[ordinals]
        return [
            Places(which, carrier, starts[which])
            for which, carrier in (
                (np.flatnonzero(~away), self._carrier),
                (np.flatnonzero(away), self._spill),
            )
            if len(which)
        ]

    def prepare_write(self) -> None:
        """Allocate the storage of write-backs to the full extent, if that was not done before; outside the lock.

        Raises:
            OSError: there is no room for it.
            MemoryError: likewise, for a tier in memory.
        """
        if self._writable:
            if self._carrier.size() == 0:
                self._carrier._allocate_in_place(self._grid.slot_count)
        elif self._spill is None:
            self._spilled = np.zeros(self._grid.tile_count, np.bool_)
            self._spill = self._carrier.allocate_like(self._grid.slot_count, mutable=True, empty=True)

    def write_places(self, ordinals: Ordinals) -> list[Places]:
        """The carrier that takes the write-back of tiles, and the first slots there."""
        carrier = self._carrier if self._spill is None else self._spill
        note_change(carrier)  # already: a write-back that fails may have changed slots too
        return [Places(None, carrier, ordinals * self._grid.tile_size)]

    def commit_write(self, ordinals: Ordinals) -> None:
        """The values of these tiles are at their ``write_places`` now."""
        note_change(self._carrier if self._spill is None else self._spill)  # for what was saved meanwhile
        if self._spilled is not None:
            self._spilled[ordinals] = True

    def writing(self, *, durable: bool) -> AbstractContextManager[None]:
        """What write-backs are made in."""
        if not durable:
            return nullcontext()
        return (self._carrier if self._spill is None else self._spill)._writing_durably()

    async def persist(self) -> None:
        """Return once what was written back would survive a loss of power, as far as the storage can.

        Raises:
            OSError: the storage failed.
        """
        await (self._carrier if self._spill is None else self._spill)._persist()

    def release(self) -> None:
        """Release the spill; the tier itself belongs to the tiled carrier."""
        spill, self._spill = self._spill, None
        if spill is not None:
            spill.release()


def page_neighbours(tile_bytes: int) -> int:
    """How many tiles on each side of one may share a page with it."""
    return 0 if tile_bytes % PAGESIZE == 0 else -(-PAGESIZE // tile_bytes)


def run_bounds(ascending: Ordinals) -> tuple[Ordinals, Ordinals]:
    """The first of each run of neighbours in distinct ascending numbers, and the number behind its last."""
    breaks = np.diff(ascending) != 1
    begins, ends = (np.append(True, breaks), np.append(breaks, True)) if len(ascending) else (breaks, breaks)
    return ascending[begins], ascending[ends] + 1


def runs(ascending: Ordinals) -> Iterator[tuple[int, int]]:
    """The half-open runs of neighbours in distinct ascending numbers."""
    starts, stops = run_bounds(ascending)
    return zip(starts.tolist(), stops.tolist(), strict=True)
