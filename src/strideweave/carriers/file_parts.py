"""Slots that lie in parts of files which exist already, read in place."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from strideweave.carriers.base import CarrierStatistics
from strideweave.carriers.in_place import InPlaceCarrier
from strideweave.carriers.part_cover import SMALL_PIECE, StagingArea
from strideweave.carriers.part_reading import PartTable, SlotSpans, changed, read_parts
from strideweave.errors import ImmutableError
from strideweave.io.file_pool import ChangedFile, FilePool, open_known, still_known
from strideweave.io.positioned import FileSpan, read_spans
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.event_loop import process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strideweave.dtype import DType
    from strideweave.io.file_pool import KnownFile

__all__ = ["FileParts", "FilePartsStatistics"]


@dataclass(frozen=True, slots=True)
class FilePartsStatistics(CarrierStatistics):
    """What a FileParts carrier is and has under way.

    Attributes:
        name: the tensor that it holds.
        files: how many files it lies in.
        bytes_read: bytes read from them so far.
        pieces_read: contiguous pieces that these were.
        staging_bytes: memory that small pieces which lie close together are read into now, before they are copied.
        peak_staging_bytes: the largest value ``staging_bytes`` ever had.
        staging_limit_bytes: the bound of both.
    """

    name: str
    files: int
    bytes_read: int
    pieces_read: int
    staging_bytes: int
    peak_staging_bytes: int
    staging_limit_bytes: int


@final
class FileParts(InPlaceCarrier):
    """The slots of a tiled array, in tile-major order, read out of the files in which it lies otherwise.

    Made by ``open_tiled``: read-only, and it reads what is asked for, when it is asked for. At most a bounded number
    of files is open at any time. One that changed since it was first looked at is an error, never other bytes.

    A carrier like it is a :class:`FileBacked` on a spill file: there a tiled carrier keeps what is written above files
    in place.

    Args:
        table: where the slots are.
        dtype: type of every slot.

    Raises:
        TypeError: ``dtype`` is no DType.
    """

    def __init__(self, table: PartTable, *, dtype: DType) -> None:
        super().__init__(table.map.grid.slot_count, dtype=dtype, mutable=False)
        self._table = table
        self._bytes_read = self._pieces_read = 0
        is_small = table.map.run_size * table.itemsize < SMALL_PIECE
        self._beside: StagingArea = StagingArea() if is_small else StagingArea(0)
        self._finalizer = weakref.finalize(self, _forget, table.files)
        self._finalizer.atexit = False  # the runtime closes the whole pool

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("FileParts is final; subclass Carrier to write a carrier")

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that it lies in."""
        return tuple([file.path for file in self._table.files])

    def statistics(self) -> FilePartsStatistics:
        """A frozen record of size, version, ownership and what was read."""
        return FilePartsStatistics(
            **self._statistics_fields(),
            name=self._table.name,
            files=len(self._table.files),
            bytes_read=self._bytes_read,
            pieces_read=self._pieces_read,
            staging_bytes=self._beside.in_use,
            peak_staging_bytes=self._beside.peak,
            staging_limit_bytes=self._beside.capacity,
        )

    async def _read_into(self, spans: Sequence[SlotSpans]) -> None:
        """Read spans of slots into memory; see ``read_parts``."""
        nbytes, pieces = await read_parts(self._table, spans, self._beside)
        with self._lock:
            self._bytes_read += nbytes
            self._pieces_read += pieces

    def _load_slot(self, i: int) -> bool | int | float:
        table = self._table
        number, skipped = divmod(i, table.map.run_size)
        found, offsets = table.find(np.array([number], np.int64))
        if found[0] < 0:
            return self._dtype.to_python(np.frombuffer(table.fill, self._dtype.numpy)[0])
        known, offset = table.files[int(found[0])], int(offsets[0]) + skipped * table.itemsize
        slot = np.empty(1, self._dtype.numpy)
        try:
            # Not of the pool, which belongs to the loop: one slot is a look, not a load.
            file = open_known(known)
            try:
                read_spans([FileSpan(file, offset, slot.view(np.uint8))])
                still_known(known, file.fd)
            finally:
                file.close()
        except ChangedFile as change:
            raise changed(table, change, i, offset) from change.__cause__
        with self._lock:
            self._bytes_read += slot.nbytes
            self._pieces_read += 1
        return self._dtype.to_python(slot[0])

    def _store_slot(self, i: int, value: NDArray[Any]) -> None:
        self._file()

    def _read_slots(self, start: int, slots: int) -> NDArray[Any]:
        self._require_live()
        values = np.empty(slots, self._dtype.numpy)
        spans = SlotSpans(np.array([start], np.int64), slots, values.view(np.uint8), np.zeros(1, np.int64))
        self._scope.start(AwaitResult[None](), self._read_into, [spans]).wait()
        return values

    def _file(self) -> NoReturn:
        """Refuse to be the one file that moves write to."""
        self._require_live()
        raise ImmutableError("files that are read in place cannot be written to; copy the tensor first")

    def _free_storage(self) -> None:
        self._finalizer()


def _forget(files: Sequence[KnownFile]) -> None:
    """Close what is open of files that nobody reads any more; starts nothing."""
    pool = process.find_service(FilePool)
    if pool is not None:
        pool.forget(files)
