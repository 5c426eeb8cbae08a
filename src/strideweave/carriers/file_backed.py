"""Slots in a file: a spill file of this process, or a file that exists already and stays."""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, final

from strideweave.carriers.base import CarrierStatistics
from strideweave.carriers.file_slots import FileCarrier
from strideweave.carriers.lifecycle import check_slot_count
from strideweave.dtype import DType, check_dtype
from strideweave.flags import as_flag
from strideweave.io.files import FileStatistics, OpenFile
from strideweave.io.spill import SpillDirectory
from strideweave.layout.int_tuple import as_integer
from strideweave.runtime.event_loop import current_runtime

if TYPE_CHECKING:
    from typing import Self

__all__ = ["FileBacked", "FileBackedStatistics"]


@dataclass(frozen=True, slots=True)
class FileBackedStatistics(CarrierStatistics):
    """What a FileBacked carrier is and has under way.

    Attributes:
        path: the file; None where there is none yet.
        spills: whether it is a spill file, removed with the carrier, or a file that stays.
        occupied_bytes: storage that the whole file occupies; holes occupy none. 0 after release.
        file: bytes and system calls moved through this carrier.
    """

    path: str | None
    spills: bool
    occupied_bytes: int
    file: FileStatistics


@final
class FileBacked(FileCarrier):
    """Storage in a raw little-endian file; it is read and written at offsets and computes nothing.

    ``FileBacked()`` is empty and can be given storage once, as a destination or a secondary tier. Its file is
    made in the private spill directory of this process, sparse: what was never written reads zero and
    occupies nothing. Release and garbage collection remove it, and so does the interpreter's end. The
    directory lies in ``tempfile.gettempdir()`` or where the environment variable ``STRIDEWEAVE_SPILL_DIR``
    says. :meth:`open` stands on a file that exists, which is left in place.

    A forked child may read the carriers it inherits, and can neither change nor remove their spill files.

    Args:
        filename: name of the file inside the spill directory, made at once; None lets the carrier name it.
        mutable: whether public writes are allowed.
        dtype: type of every slot.

    Raises:
        TypeError: ``filename`` is not a string, or ``dtype`` no DType.
        ValueError: ``filename`` is not a plain file name, or is taken.
        OSError: the system refused to make the file.
    """

    def __init__(
        self, filename: str | None = None, *, mutable: bool = True, dtype: DType = DType.Float32
    ) -> None:
        self._prepare(0, dtype=dtype, mutable=mutable)
        if filename is not None:
            self._adopt(current_runtime().service(SpillDirectory).create(filename))

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("FileBacked is final; subclass Carrier to write a carrier")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: DType,
        offset: int = 0,
        size: int | None = None,
        mutable: bool = False,
    ) -> Self:
        """Stand on an existing file of raw little-endian slots, which is left in place on release.

        Bytes of a Bool file other than 0 and 1 are read as NumPy reads them.

        Args:
            path: a regular file.
            dtype: type of every slot.
            offset: bytes before the first slot.
            size: slots; None takes all that follow ``offset``.
            mutable: open the file for writing too, and allow public writes.

        Raises:
            TypeError: an argument has the wrong type.
            FileNotFoundError: nothing is at ``path``.
            ValueError: ``path`` is not a regular file; ``offset`` or ``size`` is negative or reaches beyond
                the end of the file; or the file ends in a part of a slot and ``size`` was not given.
            OSError: the system refused to open the file.
            NotImplementedError: this machine is big-endian and the slots are wider than a byte.
        """
        check_dtype(dtype)
        start = as_integer(offset, "offset")
        if start < 0:
            raise ValueError(f"offset must not be negative, found {start}")
        asked = None if size is None else check_slot_count(size)
        if sys.byteorder != "little" and dtype.itemsize > 1:
            raise NotImplementedError(
                f"{dtype.name} slots in a file are little-endian and this machine is not"
            )
        file = OpenFile.open(path, writable=as_flag(mutable, "mutable"))
        carrier = cls.__new__(cls)
        carrier._prepare(_slots_in(file, start, asked, dtype), dtype=dtype, mutable=mutable)
        carrier._opened, carrier._start, carrier._spills = file, start, False
        return carrier

    def _prepare(self, size: int, *, dtype: DType, mutable: bool) -> None:
        super().__init__(size, dtype=dtype, mutable=mutable)
        self._opened: OpenFile | None = None
        self._start = 0
        self._spills = True
        self._finalizer: weakref.finalize[[], FileBacked] | None = None

    def _adopt(self, file: OpenFile) -> OpenFile:
        """Take a fresh spill file, which goes when this carrier does."""
        self._opened = file
        self._finalizer = weakref.finalize(self, file.remove)
        self._finalizer.atexit = False  # pending work may still use it; the whole directory goes after that
        return file

    @property
    def path(self) -> str | None:
        """Where the slots are; None for an empty carrier that has no file yet."""
        return None if self._opened is None else self._opened.path

    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> Self:
        """Make a carrier on a fresh sparse spill file, zero whether ``empty`` or not.

        ``allocate_like(0)`` can be given storage later, once. Works after release too.

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

    def statistics(self) -> FileBackedStatistics:
        """A frozen record of size, version, ownership, the file and what was moved through it."""
        file = self._opened
        return FileBackedStatistics(
            **self._statistics_fields(),
            path=self.path,
            spills=self._spills,
            occupied_bytes=0 if file is None or file.is_closed() else file.occupied(),
            file=FileStatistics() if file is None else file.statistics(),
        )

    def _file(self) -> tuple[OpenFile, int]:
        self._require_live()
        file = self._opened
        return (self._make_file() if file is None else file), self._start

    def _make_file(self) -> OpenFile:
        # Not under the lock: making a file takes its time, and the first one of a process starts the runtime.
        fresh = current_runtime().service(SpillDirectory).create()
        with self._lock:
            if self._opened is None and not self._released:
                return self._adopt(fresh)
        fresh.remove()  # another thread was quicker, or has released this carrier
        return self._file()[0]

    def _can_allocate(self) -> bool:
        return self._spills and self._size == 0 and not self._released

    def _allocate_in_place(self, size: int) -> None:
        count = check_slot_count(size)
        file, _ = self._file()
        with self._lock:
            self._require_live()
            if not self._can_allocate():
                super()._allocate_in_place(size)
            file.truncate(count * self._dtype.itemsize)
            self._size = count

    def _outlasts_release(self) -> bool:
        return self._mutable and not self._spills

    def _empty_in_place(self) -> None:
        file, _ = self._file()
        with self._lock:
            self._require_live()
            self._size = 0
            file.truncate(0)  # the file stays, and its name

    def _discard(self, start: int, slots: int) -> None:
        self._require_live()
        if self._spills and self._opened is not None:
            width = self._dtype.itemsize
            self._opened.punch(start * width, slots * width)

    def _free_storage(self) -> None:
        if self._opened is None:
            return
        if self._finalizer is None:
            self._opened.close()
        else:  # by itself, since a finalizer that was interrupted runs no more
            self._opened.remove()
            self._finalizer.detach()


def _slots_in(file: OpenFile, start: int, asked: int | None, dtype: DType) -> int:
    """How many slots the file holds from byte ``start`` on, checked against what was asked."""
    end, width = file.size(), dtype.itemsize
    if start > end:
        raise ValueError(f"offset {start} lies beyond the end of {file.path!r}, which has {end} bytes")
    count, rest = divmod(end - start, width)
    if asked is None:
        if rest:
            raise ValueError(
                f"{file.path!r} has {end - start} bytes from offset {start} on, which is no multiple of the "
                f"{width} bytes of a {dtype.name}; give size to leave out the last {rest}"
            )
        return count
    if asked > count:
        raise ValueError(
            f"{asked} slots of {dtype.name} are {asked * width} bytes, and {file.path!r} has {end - start} "
            f"from offset {start} on"
        )
    return asked
