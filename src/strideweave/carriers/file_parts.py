"""Slots that lie in parts of files which exist already, read in place."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, final

import numpy as np

from strideweave.carriers.base import CarrierStatistics
from strideweave.carriers.file_backed import FileBacked
from strideweave.carriers.file_slots import FileCarrier
from strideweave.carriers.lifecycle import check_slot_count
from strideweave.carriers.part_reading import PartTable, SlotSpans, changed, read_parts
from strideweave.dtype import DType
from strideweave.errors import ImmutableError
from strideweave.flags import as_flag
from strideweave.io.file_pool import ChangedFile, FilePool, open_known, still_known
from strideweave.io.positioned import FileSpan, read_spans
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.event_loop import process

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from typing import Self

    from numpy.typing import NDArray

    from strideweave.io.file_pool import KnownFile
    from strideweave.io.files import OpenFile

__all__ = ["FileParts", "FilePartsStatistics"]


@dataclass(frozen=True, slots=True)
class FilePartsStatistics(CarrierStatistics):
    """What a FileParts carrier is and has under way.

    Attributes:
        name: the tensor that it holds; None for a spill.
        files: how many files it lies in.
        bytes_read: bytes read from them so far.
        pieces_read: contiguous pieces that these were.
        occupied_bytes: storage that a spill occupies; 0 for files in place, which are somebody else's.
    """

    name: str | None
    files: int
    bytes_read: int
    pieces_read: int
    occupied_bytes: int


@final
class FileParts(FileCarrier):
    """The slots of a tiled array, in tile-major order, read out of the files in which it lies otherwise.

    Made by ``open_tiled``: read-only, and it reads what is asked for, when it is asked for. At most a bounded number
    of files is open at any time. One that changed since it was first looked at is an error, never other bytes.

    A carrier like it, which the factories make, lies in a spill file as ``FileBacked`` does: where a tiled carrier
    keeps what is written above files in place.

    Args:
        table: where the slots are; None makes an empty carrier that can be given storage in a spill file, once.
        mutable: whether public writes are allowed; files in place take none.
        dtype: type of every slot.

    Raises:
        TypeError: ``dtype`` is no DType.
        ImmutableError: files in place were to be mutable.
    """

    _sparse: ClassVar[bool] = True

    def __init__(
        self, table: PartTable | None = None, *, mutable: bool = False, dtype: DType = DType.Float32
    ) -> None:
        if table is not None and mutable:
            raise ImmutableError("files that are read in place cannot be written to; copy the tensor first")
        super().__init__(0 if table is None else table.map.grid.slot_count, dtype=dtype, mutable=mutable)
        self._table = table
        self._spill = FileBacked(mutable=True, dtype=dtype) if table is None else None
        self._bytes_read = self._pieces_read = 0
        if table is not None:
            self._finalizer = weakref.finalize(self, _forget, table.files)
            self._finalizer.atexit = False  # the runtime closes the whole pool

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("FileParts is final; subclass Carrier to write a carrier")

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that it lies in."""
        if self._table is not None:
            return tuple([file.path for file in self._table.files])
        path = None if self._spill is None else self._spill.path
        return () if path is None else (path,)

    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> Self:
        """Make a carrier on a fresh sparse spill file, zero whether ``empty`` or not.

        Raises:
            TypeError: ``size`` is not an integer, or ``dtype`` no DType.
            ValueError: ``size`` is negative.
            OSError: the file could not be made.
        """
        as_flag(empty, "empty")
        count = check_slot_count(size)
        carrier = type(self)(mutable=mutable, dtype=self._dtype if dtype is None else dtype)
        if count:
            carrier._allocate_in_place(count)
        return carrier

    def statistics(self) -> FilePartsStatistics:
        """A frozen record of size, version, ownership and what was read."""
        spill = None if self._spill is None else self._spill.statistics()
        return FilePartsStatistics(
            **self._statistics_fields(),
            name=None if self._table is None else self._table.name,
            files=len(self.paths),
            bytes_read=self._bytes_read if spill is None else spill.file.bytes_read,
            pieces_read=self._pieces_read if spill is None else spill.file.reads,
            occupied_bytes=0 if spill is None else spill.occupied_bytes,
        )

    async def _read_into(self, spans: Sequence[SlotSpans]) -> None:
        """Read spans of slots of files in place into memory; see ``read_parts``."""
        assert self._table is not None
        nbytes, pieces = await read_parts(self._table, spans)
        with self._lock:
            self._bytes_read += nbytes
            self._pieces_read += pieces

    @property
    def _in_place(self) -> bool:
        """Whether the slots lie in parts of files, not in a spill."""
        return self._table is not None

    def _load_slot(self, i: int) -> bool | int | float:
        table = self._table
        if table is None:
            return super()._load_slot(i)
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
        if self._table is not None:
            raise ImmutableError("files that are read in place cannot be written to; copy the tensor first")
        super()._store_slot(i, value)

    def _read_slots(self, start: int, slots: int) -> NDArray[Any]:
        if self._table is None:
            return super()._read_slots(start, slots)
        self._require_live()
        values = np.empty(slots, self._dtype.numpy)
        spans = SlotSpans(np.array([start], np.int64), slots, values.view(np.uint8), np.zeros(1, np.int64))
        self._scope.start(AwaitResult[None](), self._read_into, [spans]).wait()
        return values

    def _file(self) -> tuple[OpenFile, int]:
        self._require_live()
        if self._spill is None:
            raise ImmutableError("files that are read in place cannot be written to; copy the tensor first")
        return self._spill._file()

    async def _persist(self) -> None:
        if self._spill is not None:  # files in place have nothing that was written by us
            await super()._persist()

    def _writing_durably(self) -> AbstractContextManager[None]:
        return nullcontext() if self._spill is None else super()._writing_durably()

    def _can_allocate(self) -> bool:
        return self._spill is not None and self._size == 0 and not self._released

    def _allocate_in_place(self, size: int) -> None:
        with self._lock:
            self._require_live()
            if self._spill is None or not self._can_allocate():
                super()._allocate_in_place(size)
        assert self._spill is not None
        self._spill._allocate_in_place(size)
        self._size = self._spill.size()

    def _discard(self, start: int, slots: int) -> None:
        self._require_live()
        if self._spill is not None:
            self._spill._discard(start, slots)

    def _free_storage(self) -> None:
        if self._spill is not None:
            self._spill.release()
        else:
            self._finalizer()


def _forget(files: Sequence[KnownFile]) -> None:
    """Close what is open of files that nobody reads any more; starts nothing."""
    pool = process.find_service(FilePool)
    if pool is not None:
        pool.forget(files)
