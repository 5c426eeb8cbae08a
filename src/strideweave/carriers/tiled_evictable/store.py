"""Where the tiles of one tier lie: an adopted extent, recycled slabs, and a spill beside a read-only file.

A store answers two questions, where tile ``k`` is and whether its storage may be given back, and knows
nothing of validity or of requests. Its methods are short plain bookkeeping that the carrier's lock guards.
What takes its time stays outside the lock: ``make_room`` and ``prepare_write`` allocate before the bookkeeping,
and ``discard`` only hands out the ``Leftovers``, for who dropped the tiles to call ``Leftovers.give_back`` and
then, under the lock again, ``reclaim``. All of these belong to the runtime's loop; other threads only look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.tiles.grid import TileGrid

    Ordinals = npt.NDArray[np.int64]
    TileRow = npt.NDArray[np.unsignedinteger]

__all__ = ["AdoptedStore", "Block", "Leftovers", "PrimaryStore", "SecondaryStore", "SlabStore"]

SLAB_BYTES = 1 << 20  # small tiles share an allocation of about this size, so that gathers stay vectorised


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Tiles that lie in one array.

    Attributes:
        array: all tiles of the block, one a row, as unsigned integers of the item size.
        rows: the rows asked for.
        positions: for each row, its index in the ordinals that were asked for.
    """

    array: npt.NDArray[np.unsignedinteger]
    rows: Ordinals
    positions: Ordinals


@dataclass(slots=True, eq=False)
class Leftovers:
    """Storage that no tile uses any more and that has yet to be given back to the system.

    Attributes:
        ranges: carrier, first slot and count of slots whose pages go back while the carrier stays.
        carriers: carriers to release.
        places: the numbers of the places in ``ranges``, usable again after ``reclaim``.
    """

    ranges: list[tuple[Carrier, int, int]] = field(default_factory=list)
    carriers: list[Carrier] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ranges or self.carriers)

    def give_back(self) -> None:
        """Return the pages to the system; not under the lock."""
        for carrier, start, slots in self.ranges:
            carrier._discard(start, slots)
        for carrier in self.carriers:
            carrier.release()


class PrimaryStore(Protocol):
    """What a tiled carrier asks of the storage of its primary tier."""

    def make_room(self, count: int) -> None:
        """Allocate what ``reserve`` needs for so many tiles; not under the lock. May raise MemoryError."""

    def reserve(self, ordinals: Ordinals) -> None:
        """Give each tile a place."""

    def discard(self, ordinals: Ordinals) -> Leftovers:
        """Take the places of tiles back; what is to be returned to the system is the caller's to do."""

    def reclaim(self, leftovers: Leftovers) -> None:
        """The pages of ``leftovers`` went back; their places may be used again."""

    def places(self, ordinals: Ordinals) -> Iterator[tuple[Carrier, int]]:
        """For each tile, the carrier that holds it and its first slot there."""

    def rows(self, ordinals: Ordinals) -> list[TileRow]:
        """The tiles, each as an array of its own."""

    def blocks(self, ordinals: Ordinals) -> list[Block]:
        """The tiles as rows of arrays, for whoever moves many."""

    def release(self) -> None:
        """Give everything back."""

    @property
    def recycled_bytes(self) -> int:
        """Bytes kept for the next tiles though no tile lies there."""


def tile_rows(carrier: Carrier, tile_size: int) -> npt.NDArray[np.unsignedinteger]:
    """All whole tiles of a memory carrier as rows of unsigned integers, so that bytes move, not values."""
    raw = carrier._bytes()
    return raw.view(f"u{carrier.dtype().itemsize}").reshape(-1, tile_size)


@dataclass(slots=True, eq=False)
class _Slab:
    carrier: Carrier
    rows: npt.NDArray[np.unsignedinteger]
    live: int = 0


class SlabStore:
    """Tiles in slabs that are allocated as tiles arrive and recycled as they leave.

    A slab holds as many tiles as fit about 1 MiB, at least one. A place that a tile left is used again first,
    warmest first, because a page that was touched before costs no page fault; free places above
    ``recycle_bytes`` have their pages given back to the system, and a slab without tiles is released.

    Args:
        prototype: an empty carrier of the primary tier's kind, which allocates the slabs.
        grid: the tile grid.
        recycle_bytes: how many bytes may stay warm without a tile in them.
    """

    def __init__(self, prototype: Carrier, grid: TileGrid, recycle_bytes: int) -> None:
        self._prototype = prototype
        self._tile_size = grid.tile_size
        self._tile_bytes = grid.tile_size * prototype.dtype().itemsize
        self._per_slab = max(1, SLAB_BYTES // self._tile_bytes)
        self._limit = recycle_bytes
        self._slabs: dict[int, _Slab] = {}
        self._next_slab = 0
        self._place: Ordinals = np.full(grid.tile_count, -1, np.int64)  # slab * per_slab + row, or -1
        self._warm: list[int] = []  # free places whose pages are still there; the end is the warmest
        self._cold: list[int] = []  # free places whose pages went back to the system

    @property
    def recycled_bytes(self) -> int:
        """Bytes of warm free places."""
        return len(self._warm) * self._tile_bytes

    def make_room(self, count: int) -> None:
        """Allocate slabs until ``reserve`` has free places for so many tiles.

        Raises:
            MemoryError: a slab could not be allocated; everything is as it was.
        """
        before = self._next_slab
        complete = False
        try:
            while len(self._warm) + len(self._cold) < count:
                self._add_slab()
            complete = True
        finally:
            if not complete:
                for carrier in self._remove_slabs(set(range(before, self._next_slab))):
                    carrier.release()

    def reserve(self, ordinals: Ordinals) -> None:
        """Give each tile a place, warm ones first; ``make_room`` has seen to it that there are enough."""
        count = len(ordinals)
        places = [self._warm.pop() if self._warm else self._cold.pop() for _ in range(count)]
        for place in places:
            self._slabs[place // self._per_slab].live += 1
        self._place[ordinals] = places

    def discard(self, ordinals: Ordinals) -> Leftovers:
        """Take the places back; keep pages warm up to the bound, the rest is left over."""
        places = self._place[ordinals].tolist()
        self._place[ordinals] = -1
        for place in places:
            self._slabs[place // self._per_slab].live -= 1
        self._warm.extend(places)
        keep = self._limit // self._tile_bytes
        if len(self._warm) <= keep:
            return Leftovers()
        surplus = len(self._warm) - keep
        chilled, self._warm = self._warm[:surplus], self._warm[surplus:]
        return self._chill(chilled)

    def reclaim(self, leftovers: Leftovers) -> None:
        """The places are cold now: usable, at the price of page faults."""
        for place in leftovers.places:
            self._slabs[place // self._per_slab].live -= 1
        self._cold.extend(leftovers.places)

    def places(self, ordinals: Ordinals) -> Iterator[tuple[Carrier, int]]:
        """For each tile, its slab and its first slot there."""
        for place in self._place[ordinals].tolist():
            slab, row = divmod(place, self._per_slab)
            yield self._slabs[slab].carrier, row * self._tile_size

    def rows(self, ordinals: Ordinals) -> list[TileRow]:
        """The tiles, each a row of its slab."""
        slabs, per_slab = self._slabs, self._per_slab
        return [slabs[place // per_slab].rows[place % per_slab] for place in self._place[ordinals].tolist()]

    def blocks(self, ordinals: Ordinals) -> list[Block]:
        """The tiles as rows of their slabs, in ascending slab order."""
        if not len(ordinals):
            return []
        slabs, rows = np.divmod(self._place[ordinals], self._per_slab)
        if (slabs == slabs[0]).all():
            return [Block(self._slabs[int(slabs[0])].rows, rows, np.arange(len(ordinals)))]
        order = np.argsort(slabs, kind="stable")
        cuts = np.flatnonzero(np.diff(slabs[order])) + 1
        return [
            Block(self._slabs[int(slabs[part[0]])].rows, rows[part], part) for part in np.split(order, cuts)
        ]

    def release(self) -> None:
        """Release every slab."""
        slabs, self._slabs = self._slabs, {}
        self._warm.clear()
        self._cold.clear()
        for slab in slabs.values():
            slab.carrier.release()

    def _add_slab(self) -> None:
        carrier = self._prototype.allocate_like(self._per_slab * self._tile_size, mutable=True, empty=True)
        slab = _Slab(carrier, tile_rows(carrier, self._tile_size))
        number, self._next_slab = self._next_slab, self._next_slab + 1
        self._slabs[number] = slab
        first = number * self._per_slab
        self._cold.extend(range(first + self._per_slab - 1, first - 1, -1))

    def _remove_slabs(self, numbers: set[int]) -> list[Carrier]:
        """Forget slabs without tiles and their cold places; gives their carriers, to be released."""
        if numbers:
            self._cold = [place for place in self._cold if place // self._per_slab not in numbers]
        return [self._slabs.pop(number).carrier for number in numbers]

    def _chill(self, places: list[int]) -> Leftovers:
        leftovers = Leftovers()
        still_warm = {place // self._per_slab for place in self._warm}
        unused = {place // self._per_slab for place in places} - still_warm
        unused = {number for number in unused if not self._slabs[number].live}
        leftovers.carriers = self._remove_slabs(unused)
        for place in places:
            number, row = divmod(place, self._per_slab)
            if number in self._slabs:
                start = row * self._tile_size
                self._slabs[number].live += 1  # not to be released while its pages are on their way back
                leftovers.ranges.append((self._slabs[number].carrier, start, self._tile_size))
                leftovers.places.append(place)
        return leftovers


class AdoptedStore:
    """A primary tier that came with values: tiles lie in it until they leave, and in slabs afterwards.

    Nothing is copied on the way in. A tile that leaves gives its memory back, out of the middle of the
    allocation too; memory that a caller owns, and that may be read-only, is only let go.

    Args:
        carrier: a memory carrier with a slot for every slot of the grid.
        grid: the tile grid.
        recycle_bytes: the bound for the slabs.
    """

    def __init__(self, carrier: Carrier, grid: TileGrid, recycle_bytes: int) -> None:
        self._carrier = carrier
        self._tile_size = grid.tile_size
        self._rows = tile_rows(carrier, grid.tile_size)
        self._home: npt.NDArray[np.bool_] = np.ones(grid.tile_count, np.bool_)
        self._slabs = SlabStore(carrier, grid, recycle_bytes)

    @property
    def recycled_bytes(self) -> int:
        """Bytes of warm free places in the slabs."""
        return self._slabs.recycled_bytes

    def make_room(self, count: int) -> None:
        """Allocate slabs for tiles that left before; MemoryError as there."""
        self._slabs.make_room(count)

    def reserve(self, ordinals: Ordinals) -> None:
        """Give tiles that left before a place in the slabs."""
        self._slabs.reserve(ordinals)

    def discard(self, ordinals: Ordinals) -> Leftovers:
        """Take places back: memory at home is left over, in runs of neighbours, the slabs recycle theirs."""
        home = self._home[ordinals]
        leftovers = self._slabs.discard(ordinals[~home])
        size = self._tile_size
        for start, stop in runs(np.sort(ordinals[home])):
            leftovers.ranges.append((self._carrier, start * size, (stop - start) * size))
        self._home[ordinals] = False
        return leftovers

    def reclaim(self, leftovers: Leftovers) -> None:
        """Hand the slabs' places back to them; nothing returns to a home."""
        self._slabs.reclaim(leftovers)

    def places(self, ordinals: Ordinals) -> Iterator[tuple[Carrier, int]]:
        """For each tile, the adopted carrier or a slab, and the first slot there."""
        home = self._home[ordinals]
        away = self._slabs.places(ordinals[~home])
        for ordinal, at_home in zip(ordinals.tolist(), home.tolist(), strict=True):
            yield (self._carrier, ordinal * self._tile_size) if at_home else next(away)

    def rows(self, ordinals: Ordinals) -> list[TileRow]:
        """The tiles, each a row of the adopted array or of a slab."""
        home = self._home[ordinals]
        away = iter(self._slabs.rows(ordinals[~home]))
        return [
            self._rows[ordinal] if at_home else next(away)
            for ordinal, at_home in zip(ordinals.tolist(), home.tolist(), strict=True)
        ]

    def blocks(self, ordinals: Ordinals) -> list[Block]:
        """The tiles as rows of the adopted array and of the slabs."""
        home = np.flatnonzero(self._home[ordinals])
        if len(home) == len(ordinals):
            return [Block(self._rows, ordinals, home)]
        away = np.flatnonzero(~self._home[ordinals])
        blocks = [
            Block(block.array, block.rows, away[block.positions])
            for block in self._slabs.blocks(ordinals[away])
        ]
        return [Block(self._rows, ordinals[home], home), *blocks] if len(home) else blocks

    def release(self) -> None:
        """Let the adopted array go, which the tiled carrier releases, and release the slabs."""
        self._rows = np.empty((0, self._tile_size), self._rows.dtype)
        self._slabs.release()


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

    def write_places(self, ordinals: Ordinals) -> Iterator[tuple[Carrier, int]]:
        """For each tile, the carrier that takes its write-back, and the first slot there."""
        carrier = self._carrier if self._spill is None else self._spill
        return ((carrier, ordinal * self._grid.tile_size) for ordinal in ordinals.tolist())

    def commit_write(self, ordinals: Ordinals) -> None:
        """The values of these tiles are at their ``write_places`` now."""
        if self._spilled is not None:
            self._spilled[ordinals] = True

    def release(self) -> None:
        """Release the spill; the tier itself belongs to the tiled carrier."""
        spill, self._spill = self._spill, None
        if spill is not None:
            spill.release()


def runs(ascending: Ordinals) -> Iterator[tuple[int, int]]:
    """The half-open runs of neighbours in ascending ordinals."""
    if not len(ascending):
        return
    cuts = np.flatnonzero(np.diff(ascending) != 1) + 1
    starts = ascending[np.concatenate(([0], cuts))].tolist()
    stops = ascending[np.concatenate((cuts - 1, [len(ascending) - 1]))].tolist()
    for start, stop in zip(starts, stops, strict=True):
        yield start, stop + 1
