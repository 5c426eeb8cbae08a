"""A primary tier that came with values: its tiles lie where they were, until they leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.tiled_evictable.slabs import SlabStore
from strideweave.carriers.tiled_evictable.store import (
    Leftovers,
    Places,
    note_change,
    page_neighbours,
    runs,
    tile_rows,
)
from strideweave.io.buffers import address_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.tiles.grid import TileGrid

    Ordinals = npt.NDArray[np.int64]
    TileRow = npt.NDArray[np.unsignedinteger]

__all__ = ["AdoptedStore"]


class AdoptedStore:
    """A primary tier that came with values: tiles lie in it until they leave, and in slabs afterwards.

    Nothing is copied on the way in. A tile that leaves gives its memory back, out of the middle of the
    allocation too; memory that a caller owns, and that may be read-only, is only let go.

    Args:
        carrier: a memory carrier with a slot for every slot of the grid.
        grid: the tile grid.
        recycle_bytes: the bound for the slabs.
        exact: as for the slabs.
    """

    def __init__(self, carrier: Carrier, grid: TileGrid, recycle_bytes: int, *, exact: bool = False) -> None:
        self._carrier = carrier
        self._tile_size = grid.tile_size
        self._rows = tile_rows(carrier, grid.tile_size)
        self._home: npt.NDArray[np.bool_] = np.ones(grid.tile_count, np.bool_)
        self._slabs = SlabStore(carrier, grid, recycle_bytes, exact=exact)
        self._neighbours = page_neighbours(grid.tile_size * carrier.dtype().itemsize)

    @property
    def recycled_bytes(self) -> int:
        """Bytes of warm free places in the slabs."""
        return self._slabs.recycled_bytes

    def take_scratch(self) -> None:
        """As there, for the slabs."""
        self._slabs.take_scratch()

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
        self._home[ordinals] = False
        for start, stop in runs(np.sort(ordinals[home])):
            first, last = self._widen(start, stop)
            leftovers.ranges.append((self._carrier, first * size, (last - first) * size))
        return leftovers

    def trim(self, count: int) -> Leftovers:
        """Turn warm places of the slabs cold."""
        return self._slabs.trim(count)

    def _widen(self, start: int, stop: int) -> tuple[int, int]:
        """Add the neighbours that left before and share a page with a run: with its last tile a page goes back."""
        low, high = max(0, start - self._neighbours), min(len(self._home), stop + self._neighbours)
        stayed = low + np.flatnonzero(self._home[low:high])
        before, after = stayed[stayed < start], stayed[stayed >= stop]
        return int(before[-1]) + 1 if len(before) else low, int(after[0]) if len(after) else high

    def reclaim(self, leftovers: Leftovers) -> None:
        """Hand the slabs' places back to them; nothing returns to a home."""
        if any(carrier is self._carrier for carrier, _, _ in leftovers.ranges):
            note_change(self._carrier)
        self._slabs.reclaim(leftovers)

    def places(self, ordinals: Ordinals) -> Iterator[tuple[Carrier, int]]:
        """For each tile, the adopted carrier or a slab, and the first slot there."""
        home = self._home[ordinals]
        away = self._slabs.places(ordinals[~home])
        for ordinal, at_home in zip(ordinals.tolist(), home.tolist(), strict=True):
            yield (self._carrier, ordinal * self._tile_size) if at_home else next(away)

    def place_arrays(self, ordinals: Ordinals) -> list[Places]:
        """The same as ``places``, carrier by carrier."""
        home = self._home[ordinals]
        if home.all():
            return [Places(None, self._carrier, ordinals * self._tile_size)]
        at_home, away = np.flatnonzero(home), np.flatnonzero(~home)
        found = [Places(at_home, self._carrier, ordinals[at_home] * self._tile_size)] if len(at_home) else []
        for which, carrier, starts in self._slabs.place_arrays(ordinals[away]):
            found.append(Places(away if which is None else away[which], carrier, starts))
        return found

    def rows(self, ordinals: Ordinals) -> list[TileRow]:
        """The tiles, each a row of the adopted array or of a slab."""
        home = self._home[ordinals]
        away = iter(self._slabs.rows(ordinals[~home]))
        return [
            self._rows[ordinal] if at_home else next(away)
            for ordinal, at_home in zip(ordinals.tolist(), home.tolist(), strict=True)
        ]

    def addresses(self, ordinals: Ordinals) -> tuple[Ordinals, object]:
        """Where each tile begins in memory, and what keeps that alive."""
        starts = address_of(self._rows) + ordinals * self._rows.strides[0]
        home = self._home[ordinals]
        if home.all():
            return starts, self._rows
        starts[~home], slabs = self._slabs.addresses(ordinals[~home])
        return starts, (self._rows, slabs)

    def block(self, ordinals: Ordinals) -> tuple[npt.NDArray[np.unsignedinteger], Ordinals] | None:
        """The adopted array or the slab that all of the tiles lie in, and their rows; None for several."""
        home = self._home[ordinals]
        if home.all():
            return self._rows, ordinals
        return None if home.any() else self._slabs.block(ordinals)

    def release(self) -> None:
        """Let the adopted array go, which the tiled carrier releases, and release the slabs."""
        self._rows = np.empty((0, self._tile_size), self._rows.dtype)
        self._slabs.release()
