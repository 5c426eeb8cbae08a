"""Windows: regions of a full tiled Tensor as ordinary tensors, a bounded number of tiles at a time.

A window holds the whole tiles that a region touches, gathered as a projection gathers them, resident tiles from where
they are and missing ones past the primary tier. Where the tiles lie in one piece in the primary tier already, the
window is that piece. Where they would take more than the budget, it holds the elements of the region and no others.
Residency stays what it was.

Which of these it is depends on shapes alone, save for where the bytes lie; so what is computed from windows does not
depend on what was resident.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from strideweave.carriers.tiled_evictable.gathering import copy_resident, copy_streamed
from strideweave.carriers.tiled_evictable.regions import covering, sliced, slices, within
from strideweave.layout import row_major
from strideweave.runtime.workers import INLINE_BYTES, run_jobs
from strideweave.tensor import Tensor
from strideweave.tiles.selection import TileSelection

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.passages import Staging
    from strideweave.carriers.tiled_evictable.regions import Region
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.tiles.gather import CompactGeometry
    from strideweave.tiles.grid import TilePlacement
    from strideweave.tiles.ledger import LedgerEntry

    Ordinals = npt.NDArray[np.int64]
    Row = npt.NDArray[np.unsignedinteger]

__all__ = ["TiledSource", "Window", "part_of"]

# Of more tiles nobody asks whether they lie one after the other; they are small, and copied.
_MOST_ADJACENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Some of a tensor's elements, at hand.

    Attributes:
        tensor: on the compute class.
        origin: the coordinate of its first element in the full tensor.
        staging: the memory that it takes, None where it lies in the primary tier.
    """

    tensor: Tensor
    origin: tuple[int, ...]
    staging: Staging | None

    def region(self, region: Region) -> Tensor:
        """The elements of a region that lies in this window."""
        return part_of(self.tensor, within(region, self.origin))


class Hold(Protocol):
    """What a window asks of the request that reads it."""

    @property
    def carrier(self) -> TiledEvictable:
        """The carrier of the tensor."""

    @property
    def entry(self) -> LedgerEntry:
        """The request in that carrier's ledger."""

    @property
    def window_bytes(self) -> int:
        """Bytes that a window may take, or one tile."""


class TiledSource:
    """A full tiled Tensor, to be read region by region by a request that holds all of its tiles.

    Args:
        tensor: the Tensor.
        hold: how the request holds them.
    """

    def __init__(self, tensor: Tensor, hold: Hold) -> None:
        self._hold = hold
        self._placement: TilePlacement = hold.carrier._place(tensor)

    @property
    def _traffic(self) -> TileTraffic:
        return self._hold.carrier._traffic

    @property
    def _most_tiles(self) -> int:
        return max(1, self._hold.window_bytes // self._traffic.tile_bytes)

    def key(self, region: Region) -> Hashable:
        """Regions with the same key are served by the same window."""
        tiles = covering(region, self._traffic.grid.tile_shape)
        whole = prod(map(len, tiles)) <= self._most_tiles
        return tuple([(found.start, found.stop) for found in tiles]) if whole else region

    async def load(self, region: Region) -> Window:
        """Make the window that serves a region.

        Raises:
            OSError, MemoryError, RuntimeError: the transfer's own error.
        """
        tile_shape = self._traffic.grid.tile_shape
        tiles = covering(region, tile_shape)
        selection = TileSelection(tiles)
        ordinals = selection.bind(self._traffic.grid)
        if len(ordinals) > self._most_tiles:
            return await self._load_elements(region, ordinals)
        geometry = self._hold.carrier._geometry(self._placement, selection)
        origin = tuple([found.start * extent for found, extent in zip(tiles, tile_shape, strict=True)])
        where = self._in_place(geometry, ordinals)
        if where is not None:
            return Window(Tensor._of(*where, geometry.layout, False), origin, None)
        staging = self._traffic.stage(self._hold.entry, geometry.size)
        complete = False
        try:
            await self._gather(geometry, ordinals, staging.carrier)
            complete = True
        finally:
            if not complete:
                self._traffic._unstage(staging)
        return Window(Tensor._of(staging.carrier, 0, geometry.layout, False), origin, staging)

    def free(self, window: Window) -> None:
        """Give a window's memory back."""
        if window.staging is not None:
            self._traffic._unstage(window.staging)

    def _in_place(self, geometry: CompactGeometry, ordinals: Ordinals) -> tuple[Carrier, int] | None:
        """Where the tiles lie in the primary tier as they would in a window: carrier and first slot, or None."""
        traffic = self._traffic
        count = len(ordinals)
        if count > _MOST_ADJACENT or not geometry.contiguous or not traffic.table.is_resident(ordinals).all():
            return None
        block = traffic.block(ordinals)
        if block is None:
            return None
        starts = [geometry.start(position) for position in range(count)]
        first = int(block[1][starts.index(0)])
        expected = [first + start // geometry.tile_size for start in starts]
        if block[1].tolist() != expected:
            return None
        with traffic.lock:
            where = next(iter(traffic.primary.places(ordinals[[starts.index(0)]])))
        traffic.count(hits=count)
        return where

    async def _gather(self, geometry: CompactGeometry, ordinals: Ordinals, staging: Carrier) -> None:
        traffic = self._traffic
        resident = traffic.table.is_resident(ordinals)
        at_hand, missing = np.flatnonzero(resident), np.flatnonzero(~resident)
        compact = staging._bytes().view(traffic.unit)[: geometry.size]
        await copy_resident(traffic, geometry, ordinals[at_hand], at_hand, compact)
        traffic.count(hits=len(at_hand))
        if len(missing):
            await copy_streamed(
                traffic, geometry, ordinals[missing], missing, staging, entry=self._hold.entry
            )

    async def _load_elements(self, region: Region, ordinals: Ordinals) -> Window:
        """Copy the elements of a region out of tiles that are too many to be held at once."""
        traffic = self._traffic
        shape = tuple([stop - start for start, stop in region])
        staging = traffic.stage(self._hold.entry, prod(shape))
        values = staging.carrier._bytes().view(traffic.unit)[: prod(shape)].reshape(shape)

        async def consume(wave: Ordinals, rows: list[Row]) -> None:
            coordinates = traffic.grid.coordinates(wave)
            jobs = [
                partial(self._copy_overlap, region, coordinate, row, values)
                for coordinate, row in zip(coordinates, rows, strict=True)
            ]
            if len(wave) * traffic.tile_bytes > INLINE_BYTES:
                await run_jobs(jobs)
            else:
                for job in jobs:
                    job()

        complete = False
        try:
            await traffic.stream(ordinals, consume, entry=self._hold.entry)
            complete = True
        finally:
            if not complete:
                traffic._unstage(staging)
        origin = tuple([start for start, _ in region])
        return Window(Tensor._of(staging.carrier, 0, row_major(shape), False), origin, staging)

    def _copy_overlap(
        self, region: Region, coordinate: tuple[int, ...], row: Row, values: npt.NDArray[Any]
    ) -> None:
        """Copy what a tile and a region have in common."""
        tile_shape = self._traffic.grid.tile_shape
        corner = [at * extent for at, extent in zip(coordinate, tile_shape, strict=True)]
        common = tuple(
            [
                (max(start, first), min(stop, first + extent))
                for (start, stop), first, extent in zip(region, corner, tile_shape, strict=True)
            ]
        )
        inside = slices(within(common, corner))
        outside = slices(within(common, [start for start, _ in region]))
        values[outside] = self._elements(row)[inside]

    def _elements(self, row: Row) -> npt.NDArray[Any]:
        """A tile's slots, shaped like the tile: a view, or a copy where an axis has several digits."""
        placement, item = self._placement, row.itemsize
        leaves = [digit for axis in placement.axes for digit in reversed(axis)]
        view: npt.NDArray[Any] = np.ndarray(
            [extent for extent, _ in leaves],
            row.dtype,
            row,
            placement.origin * item,
            [stride * item for _, stride in leaves],
        )
        return view.reshape(self._traffic.grid.tile_shape)


def part_of(tensor: Tensor, region: Region) -> Tensor:
    """The elements of a region of a tensor in memory: a view, or a copy where no Layout says so.

    The copy takes no more than the region and a turn of the finer digits around it.
    """
    offset, layout, inside = sliced(tensor.layout, tensor.offset, region)
    part = Tensor._of(tensor.carrier, offset, layout, False)
    if inside == tuple([(0, extent) for extent in layout.extents]):
        return part
    values = np.ascontiguousarray(part.numpy()[slices(inside)])
    carrier = tensor.carrier._adopt_like(values.reshape(-1), tensor.dtype)
    return Tensor._of(carrier, 0, row_major(values.shape), False)
