"""The carrier whose slots are the tiles of a store: the slow tier of a tensor that survives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import anyio
import numpy as np

from strideweave.carriers.base import CarrierStatistics
from strideweave.carriers.in_place import InPlaceCarrier
from strideweave.io.buffers import aligned_array
from strideweave.runtime.await_result import AwaitResult
from strideweave.store.tile_files import BATCH_TILES, TileFiles, TileFilesStatistics, TilePlaces

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["StoreBacked", "StoreBackedStatistics"]


@dataclass(frozen=True, slots=True)
class StoreBackedStatistics(CarrierStatistics):
    """What a StoreBacked carrier is and has done.

    Attributes:
        path: the store's directory.
        store: tiles read and written, and the journal.
    """

    path: str
    store: TileFilesStatistics


@final
class StoreBacked(InPlaceCarrier):
    """The slots of an open store. What is read has the right checksum, and what is written goes by the journal.

    ``open_tiled`` makes one as the slow tier of a tiled Tensor. A carrier that is made like it is a
    :class:`FileBacked` on a spill file: what a store holds is decided by ``save_tiled``.

    Whole tiles are the unit of everything: a slot is read with its tile, and written by writing its tile anew.

    Args:
        files: the open store, which belongs to the carrier from then on. Public writes are allowed if it is writable.
    """

    def __init__(self, files: TileFiles) -> None:
        manifest = files.manifest
        super().__init__(manifest.grid.slot_count, dtype=manifest.dtype, mutable=files.writable)
        self._files = files
        self._partial_turn: anyio.Lock | None = None  # of one write of a part of a tile, which reads the rest

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("StoreBacked is final; subclass Carrier to write a carrier")

    @property
    def path(self) -> str:
        """The store's directory."""
        return self._files.directory

    def statistics(self) -> StoreBackedStatistics:
        """A frozen record of size, version, ownership, and what was done with the store."""
        return StoreBackedStatistics(
            **self._statistics_fields(), path=self.path, store=self._files.statistics()
        )

    # Spans of slots, in the runtime's loop

    def _places(
        self, starts: NDArray[np.int64], memory: NDArray[np.uint8], at: NDArray[np.int64]
    ) -> TilePlaces:
        """Whole tiles that begin at some slots, and their first bytes in memory."""
        return TilePlaces(starts // self._tile_size, memory, at)

    def _run(self, ordinal: int, memory: NDArray[np.uint8]) -> list[TilePlaces]:
        """Neighbours from one tile on, as many as fill some memory."""
        tiles = np.arange(len(memory) // self._tile_bytes)
        return [TilePlaces(ordinal + tiles, memory, tiles * self._tile_bytes)]

    async def _read_span(self, start: int, memory: NDArray[np.uint8]) -> None:
        """Read the slots from ``start`` on that fill some bytes of memory."""
        for ordinal, first, last, part in self._pieces(start, memory):
            if last - first == self._tile_size:
                await self._files.read(self._run(ordinal, part))
                continue
            tile = aligned_array(self._tile_bytes)
            await self._files.read(self._run(ordinal, tile))
            part[...] = tile[first * self._dtype.itemsize : last * self._dtype.itemsize]

    async def _write_span(self, start: int, memory: NDArray[np.uint8]) -> None:
        """Write the slots from ``start`` on from some bytes of memory; tiles written in part are read before."""
        self._files.require_writable()
        for ordinal, first, last, part in self._pieces(start, memory):
            if last - first == self._tile_size:
                await self._files.write(self._run(ordinal, part))
                continue
            if self._partial_turn is None:
                self._partial_turn = anyio.Lock()  # here: in the runtime's loop, whose kind it must be
            async with self._partial_turn:
                tile = aligned_array(self._tile_bytes)
                await self._files.read(self._run(ordinal, tile))
                tile[first * self._dtype.itemsize : last * self._dtype.itemsize] = part
                await self._files.write(self._run(ordinal, tile))

    def _pieces(self, start: int, memory: NDArray[np.uint8]) -> list[tuple[int, int, int, NDArray[np.uint8]]]:
        """Cut slots at the borders of tiles: a first tile in part, runs of whole tiles, a last one in part.

        Each is the first tile, the slots of it, and the memory. A run has all slots, and memory for all its tiles.
        """
        width, size = self._dtype.itemsize, self._tile_size
        pieces, place, stop = [], start, start + len(memory) // width
        while place < stop:
            ordinal, first = divmod(place, size)
            whole = 0 if first else min((stop - place) // size, BATCH_TILES)
            slots = whole * size if whole else min(size - first, stop - place)
            part = memory[(place - start) * width : (place - start + slots) * width]
            pieces.append((ordinal, first, size if whole else first + slots, part))
            place += slots
        return pieces

    def _outlasts_release(self) -> bool:
        return self._files.writable

    async def _persist(self) -> None:
        """Make what was written durable; nothing was through a store that was opened for reading."""
        if self._files.writable:
            await self._files.persist()

    @property
    def _tile_size(self) -> int:
        return self._files.manifest.grid.tile_size

    @property
    def _tile_bytes(self) -> int:
        return self._files.manifest.tile_bytes

    # Storage

    def _load_slot(self, i: int) -> bool | int | float:
        ordinal, within = divmod(i, self._tile_size)
        tile = self._files.read_blocking(ordinal)
        return self._dtype.to_python(tile.view(self._dtype.numpy)[within])

    def _store_slot(self, i: int, value: NDArray[Any]) -> None:
        one = np.array(value, self._dtype.numpy).reshape(1).view(np.uint8)
        self._scope.start(AwaitResult[None](), self._write_span, i, one).wait()

    def _read_slots(self, start: int, slots: int) -> NDArray[Any]:
        values = np.empty(slots, self._dtype.numpy)
        self._scope.start(AwaitResult[None](), self._read_span, start, values.view(np.uint8)).wait()
        return values

    def _free_storage(self) -> None:
        self._files.close()
