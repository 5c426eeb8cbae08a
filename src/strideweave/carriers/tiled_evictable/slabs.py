"""Where tiles lie that arrived in the primary tier: slabs, whose places are recycled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.base import Carrier
from strideweave.carriers.tiled_evictable.store import (
    Leftovers,
    Places,
    page_neighbours,
    run_bounds,
    tile_rows,
)
from strideweave.io.buffers import address_of
from strideweave.io.recycling import give_way, has_room

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from strideweave.tiles.grid import TileGrid

    Ordinals = npt.NDArray[np.int64]
    TileRow = npt.NDArray[np.unsignedinteger]

__all__ = ["SlabStore"]

SLAB_BYTES = 1 << 20  # small tiles share an allocation of about this size, so that gathers stay vectorised
LARGE_SLAB_BYTES = 4 << 20  # or of this size where so many come at once: fewer pieces, and huge pages


@dataclass(slots=True, eq=False)
class _Slab:
    """One allocation.

    Attributes:
        carrier: owns the memory.
        rows: a place each.
        address: where they begin.
        cold: which places are free and have no pages.
        cold_count: how many these are.
        live: how many places hold a tile, or have pages on their way back to the system.
    """

    carrier: Carrier
    rows: npt.NDArray[np.unsignedinteger]
    address: int
    cold: npt.NDArray[np.bool_]
    cold_count: int
    live: int = 0


class SlabStore:
    """Tiles in slabs that are allocated as tiles arrive and recycled as they leave.

    A slab holds as many tiles as fit about 1 MiB, at least one, or 4 MiB where so many arrive together. A place that
    a tile left is used again first, warmest first, because a page that was touched before costs no page fault. Free
    places above ``recycle_bytes`` turn cold: their pages go back to the system, those that tiles share once no tile or
    warm place lies on them any more, and a slab without tiles is released: to the process's pool of recycled memory,
    which keeps it for ten seconds, unless it is ``exact``.

    Args:
        prototype: an empty carrier of the primary tier's kind, which allocates the slabs.
        grid: the tile grid.
        recycle_bytes: how many bytes may stay warm without a tile in them.
        exact: nothing may be kept beyond ``recycle_bytes``, so allocate tile by tile where a carrier cannot give back
            pages out of the middle of its memory.
    """

    def __init__(
        self, prototype: Carrier, grid: TileGrid, recycle_bytes: int, *, exact: bool = False
    ) -> None:
        self._prototype = prototype
        self._tile_size = grid.tile_size
        self._tile_bytes = tile_bytes = grid.tile_size * prototype.dtype().itemsize
        whole = type(prototype)._discard is Carrier._discard  # it gives memory back as a whole only
        # Tiles of a slab, and of the largest one.
        self._small = 1 if exact and whole else max(1, SLAB_BYTES // tile_bytes)
        large = 1 if exact or whole else LARGE_SLAB_BYTES // tile_bytes
        self._per_slab = max(self._small, large)
        self._page_bytes = _page_bytes(tile_bytes)
        self._most_warm = recycle_bytes // self._page_bytes
        self._neighbours = page_neighbours(tile_bytes)
        self._slabs: dict[int, _Slab] = {}
        self._next_slab = 0
        # A place is a number, slab * per_slab + row.
        self._place: Ordinals = np.full(grid.tile_count, -1, np.int64)
        self._address: Ordinals = np.empty(grid.tile_count, np.int64)  # of each tile that has a place
        # Free places whose pages are there; the end is the warmest.
        self._warm: Ordinals = np.empty(0, np.int64)
        self._roomy: dict[int, None] = {}  # slabs with cold places
        self._exact = exact  # what is given back goes to the system, not to the next result
        self._scratch = False

    def take_scratch(self) -> None:
        """Take memory from now on that is recycled when the store goes: for tiles that may not live long."""
        self._scratch = True

    @property
    def recycled_bytes(self) -> int:
        """Bytes of the pages that warm free places keep."""
        return len(self._warm) * self._page_bytes

    def make_room(self, count: int) -> None:
        """Allocate slabs until ``reserve`` has free places for so many tiles.

        Raises:
            MemoryError: a slab could not be allocated; everything is as it was.
        """
        missing = count - len(self._warm) - sum([self._slabs[number].cold_count for number in self._roomy])
        before, complete = self._next_slab, False
        try:
            while missing > 0:
                missing -= self._add_slab(self._per_slab if missing >= self._per_slab else self._small)
            complete = True
        finally:
            if not complete:
                for number in range(before, self._next_slab):
                    self._remove_slab(number).release()

    def reserve(self, ordinals: Ordinals) -> None:
        """Give each tile a place, warm ones first; ``make_room`` has seen to it that there are enough."""
        warm = min(len(ordinals), len(self._warm))
        parts = [self._warm[len(self._warm) - warm :]]
        self._warm = self._warm[: len(self._warm) - warm]
        missing = len(ordinals) - warm
        while missing:
            number = next(reversed(self._roomy))
            rows = np.flatnonzero(self._slabs[number].cold)[:missing]
            self._warm_up(number, rows)
            parts.append(rows + number * self._per_slab)
            missing -= len(rows)
        places = np.concatenate(parts)
        self._count(places, 1)
        self._place[ordinals] = places
        numbers, rows = np.divmod(places, self._per_slab)
        slabs = np.array([self._slabs[number].address for number in numbers.tolist()], np.int64)
        self._address[ordinals] = slabs + rows * self._tile_bytes

    def discard(self, ordinals: Ordinals) -> Leftovers:
        """Take the places back; keep pages warm up to the bound, the rest is left over."""
        places = self._place[ordinals]
        self._place[ordinals] = -1
        self._count(places, -1)
        free = np.concatenate((self._warm, places))
        surplus = max(0, len(free) - self._most_warm)
        self._warm = free[surplus:]
        return self._chill(free[:surplus])

    def trim(self, count: int) -> Leftovers:
        """Turn so many warm places cold, the coldest first; their pages are left over."""
        chilled, self._warm = self._warm[:count], self._warm[count:]
        return self._chill(chilled)

    def reclaim(self, leftovers: Leftovers) -> None:
        """The places are cold now: usable, at the price of page faults."""
        for place, stop in leftovers.places:
            number, first = divmod(place, self._per_slab)
            self._cool(number, np.arange(first, first + stop - place))
            self._slabs[number].live -= stop - place

    def places(self, ordinals: Ordinals) -> Iterator[tuple[Carrier, int]]:
        """For each tile, its slab and its first slot there."""
        for place in self._place[ordinals].tolist():
            slab, row = divmod(place, self._per_slab)
            yield self._slabs[slab].carrier, row * self._tile_size

    def place_arrays(self, ordinals: Ordinals) -> list[Places]:
        """The same as ``places``, slab by slab."""
        slabs, rows = np.divmod(self._place[ordinals], self._per_slab)
        starts = rows * self._tile_size
        if not len(slabs):
            return []
        if (slabs == slabs[0]).all():
            return [Places(None, self._slabs[int(slabs[0])].carrier, starts)]
        order = np.argsort(slabs, kind="stable")
        cuts = np.flatnonzero(np.diff(slabs[order])) + 1
        return [
            Places(which, self._slabs[int(slabs[which[0]])].carrier, starts[which])
            for which in np.split(order, cuts)
        ]

    def rows(self, ordinals: Ordinals) -> list[TileRow]:
        """The tiles, each a row of its slab."""
        slabs, per_slab = self._slabs, self._per_slab
        return [slabs[place // per_slab].rows[place % per_slab] for place in self._place[ordinals].tolist()]

    def addresses(self, ordinals: Ordinals) -> tuple[Ordinals, object]:
        """Where each tile begins in memory, and what keeps that alive: the slabs that there are now."""
        return self._address[ordinals], self._slabs  # release() puts others in their place

    def block(self, ordinals: Ordinals) -> tuple[npt.NDArray[np.unsignedinteger], Ordinals] | None:
        """The slab that all of the tiles lie in, and their rows; None where they lie in several."""
        if not len(ordinals):
            return None
        slabs, rows = np.divmod(self._place[ordinals], self._per_slab)
        return None if (slabs != slabs[0]).any() else (self._slabs[int(slabs[0])].rows, rows)

    def release(self) -> None:
        """Release every slab."""
        slabs, self._slabs = self._slabs, {}
        self._warm = self._warm[:0]
        self._roomy.clear()
        for slab in slabs.values():
            slab.carrier.release()

    def _add_slab(self, count: int) -> int:
        """Allocate a slab for so many tiles, which it gives back."""
        size = count * self._tile_size
        if self._scratch or (not self._exact and has_room(count * self._tile_bytes)):
            carrier = self._prototype._allocate_result(size)
        else:
            carrier = self._prototype.allocate_like(size, mutable=True, empty=True)
        rows = tile_rows(carrier, self._tile_size)
        if not self._scratch and isinstance(rows.base, np.ndarray):
            give_way(rows.base)
        slab = _Slab(carrier, rows, address_of(rows), np.ones(count, np.bool_), count)
        number, self._next_slab = self._next_slab, self._next_slab + 1
        self._slabs[number] = slab
        self._roomy[number] = None
        return count

    def _remove_slab(self, number: int) -> Carrier:
        """Forget a slab without tiles; gives its carrier, to be released."""
        self._roomy.pop(number, None)
        return self._slabs.pop(number).carrier

    def _count(self, places: Ordinals, step: int) -> None:
        """Tiles came to these places, or left them."""
        for number, count in Counter((places // self._per_slab).tolist()).items():
            self._slabs[number].live += step * count

    def _warm_up(self, number: int, rows: Ordinals) -> None:
        """Some rows of a slab are cold no longer."""
        slab = self._slabs[number]
        slab.cold[rows] = False
        slab.cold_count -= len(rows)
        if not slab.cold_count:
            self._roomy.pop(number, None)

    def _cool(self, number: int, rows: Ordinals) -> None:
        """Some rows of a slab are cold now."""
        slab = self._slabs[number]
        slab.cold[rows] = True
        slab.cold_count += len(rows)
        self._roomy[number] = None

    def _chill(self, chilled: Ordinals) -> Leftovers:
        """Turn warm places cold: slabs without tiles are left over whole, of the others the pages."""
        leftovers = Leftovers()
        if not len(chilled):
            return leftovers
        in_use = set((self._warm // self._per_slab).tolist())
        numbers, rows = np.divmod(np.sort(chilled), self._per_slab)
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(numbers)) + 1):
            number = int(numbers[part[0]])
            if self._slabs[number].live or number in in_use:
                self._cool(number, rows[part])
                self._take_pages(number, rows[part], leftovers)
            else:
                carrier = self._remove_slab(number)
                leftovers.carriers.append(carrier)
                if self._scratch:  # to the system, and not to whoever allocates next
                    leftovers.ranges.append((carrier, 0, carrier.size()))
        return leftovers

    def _take_pages(self, number: int, chilled: Ordinals, leftovers: Leftovers) -> None:
        """Leave over the pages that lie under cold rows only, since some of these have turned cold."""
        slab, size = self._slabs[number], self._tile_size
        for first, stop in self._cold_runs(slab, chilled):
            self._warm_up(number, np.arange(first, stop))
            # Neither to be used nor to be released with its slab while its pages are on their way back.
            slab.live += stop - first
            base = number * self._per_slab
            leftovers.places.append((base + first, base + stop))
            leftovers.ranges.append((slab.carrier, first * size, (stop - first) * size))

    def _cold_runs(self, slab: _Slab, chilled: Ordinals) -> Iterator[tuple[int, int]]:
        """The half-open runs of cold rows with some that have just turned cold and with at least a page.

        A run reaches no further than rows share pages with the latter.
        """
        low, reach = max(0, int(chilled[0]) - self._neighbours), self._neighbours
        chilled = chilled - low
        cold = slab.cold[low : low + int(chilled[-1]) + reach + 1].copy()
        if reach:
            # One more at the first row in reach of each, one less behind the last: what adds up to 0 is in no reach.
            edges = np.zeros(len(cold) + 1, np.int64)
            np.add.at(edges, np.maximum(chilled - reach, 0), 1)
            np.add.at(edges, np.minimum(chilled + reach + 1, len(cold)), -1)
            cold &= np.cumsum(edges[:-1]) > 0
        starts, stops = run_bounds(np.flatnonzero(cold))
        wanted = np.searchsorted(chilled, starts) < np.searchsorted(chilled, stops)
        wanted &= (stops - starts) * self._tile_bytes >= PAGESIZE
        return zip((low + starts[wanted]).tolist(), (low + stops[wanted]).tolist(), strict=True)


def _page_bytes(tile_bytes: int) -> int:
    """Bytes of the pages that a tile lies on, at the most, in a slab that begins with a page."""
    if tile_bytes % PAGESIZE == 0 or PAGESIZE % tile_bytes == 0:
        return max(tile_bytes, PAGESIZE)
    return (tile_bytes // PAGESIZE + 2) * PAGESIZE
