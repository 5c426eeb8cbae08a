"""Slots in extents of a block device, or of a regular file in the place of one."""

from __future__ import annotations

import errno
import weakref
from typing import TYPE_CHECKING, NoReturn, final

from strideweave.carriers.block_device_statistics import BlockDeviceCarrierStatistics, BlockDeviceStatistics
from strideweave.carriers.file_slots import FileCarrier
from strideweave.carriers.lifecycle import check_slot_count, end_block
from strideweave.dtype import DType
from strideweave.errors import ReleasedError
from strideweave.flags import as_flag
from strideweave.io.devices import HeldDevice
from strideweave.io.extents import ExtentPool, Lease
from strideweave.layout.int_tuple import as_integer
from strideweave.runtime.uncopied import Uncopied

if TYPE_CHECKING:
    import os
    from types import TracebackType
    from typing import Self

    from strideweave.io.files import OpenFile

__all__ = ["BlockDevice", "BlockDeviceCarrier"]


class BlockDevice(Uncopied):
    """A block device, or a regular file in the place of one, that carriers get their storage from.

    Everything on it is overwritten as carriers come and go: nothing says afterwards what lay where. It is held by
    this object alone, so a second BlockDevice on it is refused, in this process and any other, and so is a device
    on which a file system is mounted. What carriers read and write in aligned pieces goes past the page cache
    (``O_DIRECT``), the rest through it.

    A context manager that closes at the end of the block. A forked child may read the carriers it inherits; it can
    neither write nor allocate.

    Args:
        path: a block-special node or a regular file. Where nothing is and ``size`` is given, a file is made, which
            stays after the end.
        direct: go past the page cache. Where the system refuses that, everything goes through it, and
            ``statistics()`` says why.
        queue_depth: operations of one request that io_uring has at the device at once, at most. More than its ring
            holds gain nothing; the engines with threads never have more than four.
        size: bytes of a file that is made here, or that what is there must have. A fresh file is sparse: it takes up
            space as carriers are written.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: ``queue_depth`` or ``size`` is less than 1, the device is smaller than one block or has another
            size than ``size`` says, or ``path`` leads to something else than a device or a file.
        FileNotFoundError: nothing is there, and ``size`` was not given.
        OSError: somebody else holds it (``EBUSY``), or the system refused; with the path.
    """

    _instead = "it alone holds its device: pass on the path, and open that once this one is closed"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        direct: bool = True,
        queue_depth: int = 128,
        size: int | None = None,
    ) -> None:
        self._asks_direct = as_flag(direct, "direct")
        self._queue_depth = _positive(queue_depth, "queue_depth")
        asked = None if size is None else _positive(size, "size")
        self._held = HeldDevice.open(path, direct=self._asks_direct, size=asked)
        self._held.file.queue_depth = self._queue_depth
        geometry = self._held.geometry
        self._pool = ExtentPool(geometry.capacity, geometry.granularity)
        self._closed = False

    @property
    def path(self) -> str:
        """Where it was opened."""
        return self._held.path

    @property
    def capacity(self) -> int:
        """Bytes that extents can have together: all of the device but a part of a block at its end."""
        return self._pool.capacity

    def allocate(
        self, size: int, *, mutable: bool = True, dtype: DType = DType.Float32, empty: bool = False
    ) -> BlockDeviceCarrier:
        """Make a carrier on a fresh extent, the lowest free one that is long enough.

        ``allocate(0)`` makes one without storage, which can be given some later, once: a destination, or the slow
        tier of a hierarchy.

        Args:
            size: number of slots.
            mutable: whether public writes are allowed.
            dtype: type of every slot.
            empty: True leaves the values unspecified, whatever lay there. False makes them zero, which takes its
                time where the device cannot do that by itself.

        Raises:
            TypeError: ``size`` is not an integer, or ``dtype`` no DType.
            ValueError: ``size`` is negative.
            MemoryError: no free run is long enough; the message says how long the longest is.
            ReleasedError: the device was closed.
            PermissionError: the parent of this process opened it.
            OSError: the extent could not be zeroed.
        """
        count, zero = check_slot_count(size), not as_flag(empty, "empty")
        carrier = BlockDeviceCarrier(self, mutable=mutable, dtype=dtype)
        if count:
            carrier._allocate_in_place(count)
        if count and zero:
            zeroed = False
            try:
                carrier._zero()
                zeroed = True
            finally:
                if not zeroed:
                    carrier.release()
        return carrier

    def close(self) -> None:
        """Let go of the device; a second call does nothing. A file that was made stays.

        A block-special node that a forked child has inherited stays held until that child ends.

        Raises:
            RuntimeError: carriers have extents; release them first. Nothing has changed.
        """
        with self._pool.settled() as extents:
            if extents.live and not self._closed:
                raise RuntimeError(
                    f"{self.path!r} has extents in use: {extents.live}; release their carriers, then close the device"
                )
            self._closed = True
        self._held.close()

    def is_closed(self) -> bool:
        """Whether ``close()`` ended it."""
        return self._closed

    def statistics(self) -> BlockDeviceStatistics:
        """A frozen record of geometry, free space and what was moved."""
        held = self._held
        obstacle = held.file.direct_obstacle
        with self._pool.settled() as extents:
            return BlockDeviceStatistics(
                path=held.path,
                is_block_special=held.geometry.is_block_special,
                capacity=extents.capacity,
                free_bytes=extents.free_bytes,
                largest_free=extents.largest_free,
                extents=extents.live,
                logical_block=held.geometry.logical_block,
                physical_block=held.geometry.physical_block,
                alignment=extents.granularity,
                queue_depth=self._queue_depth,
                is_direct=obstacle is None,
                direct_obstacle=obstacle if self._asks_direct else None,
                is_closed=self._closed,
                file=held.file.statistics(),
            )

    def __enter__(self) -> Self:
        """Begin a ``with`` block, whose end closes the device; what it gives is the device itself.

        Raises:
            ReleasedError: the device was closed.
        """
        if self._closed:
            raise ReleasedError(f"the BlockDevice on {self.path!r} was closed; open it again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """``close()``; an error of the block stays, also where carriers that it has left keep the device open."""
        end_block(self.close, error)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.statistics().free_bytes} of {self.capacity} bytes free"
        return f"<{type(self).__name__} {self.path!r}, {state}>"

    def _take(self, nbytes: int, lease: Lease) -> None:
        """Take an extent, or say why there is none."""
        if self._held.is_inherited():
            reason = "the device belongs to the parent of this process; what a fork inherits can only be read"
            raise PermissionError(errno.EACCES, reason, self.path)
        with self._pool.settled() as extents:
            if self._closed:
                raise ReleasedError(
                    f"the BlockDevice on {self.path!r} was closed; it gives no storage any more"
                )
            extents.take(nbytes, lease)

    def _give(self, lease: Lease) -> None:
        """Take an extent back, whose storage the device may reuse first; for finalizers too."""
        if lease.extent is not None:
            self._held.discard(*lease.extent)
            self._pool.give(lease)


@final
class BlockDeviceCarrier(FileCarrier):
    """Storage in one extent of a ``BlockDevice``; it is read and written at offsets and computes nothing.

    ``device.allocate(size)`` makes one. ``BlockDeviceCarrier(device)`` is ``device.allocate(0)``: empty, and can be
    given storage once, as a destination or a secondary tier. Release and garbage collection give the extent back;
    ``new_like`` and ``allocate_like`` take another one of the same device.

    Args:
        device: where storage comes from.
        mutable: whether public writes are allowed.
        dtype: type of every slot.

    Raises:
        TypeError: ``device`` is no BlockDevice, or ``dtype`` no DType.
        ReleasedError: the device was closed.
    """

    def __init__(self, device: BlockDevice, *, mutable: bool = True, dtype: DType = DType.Float32) -> None:
        if not isinstance(device, BlockDevice):
            raise TypeError(f"device must be a BlockDevice, found {type(device).__name__}")
        if device.is_closed():
            raise ReleasedError(f"the BlockDevice on {device.path!r} was closed; it has no carriers any more")
        super().__init__(0, dtype=dtype, mutable=mutable)
        self._device = device
        self._lease = Lease()
        finalizer = weakref.finalize(self, device._give, self._lease)
        finalizer.atexit = False  # pending work may still use the storage, and nothing has to be tidied

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("BlockDeviceCarrier is final; subclass Carrier to write a carrier")

    @property
    def device(self) -> BlockDevice:
        """Where the storage comes from."""
        return self._device

    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> BlockDeviceCarrier:
        """``device.allocate``, with this carrier's dtype if none is given. Works after release too.

        Raises:
            TypeError, ValueError, MemoryError, ReleasedError, OSError: as for ``BlockDevice.allocate``.
        """
        chosen = self._dtype if dtype is None else dtype
        return self._device.allocate(size, mutable=mutable, dtype=chosen, empty=empty)

    def statistics(self) -> BlockDeviceCarrierStatistics:
        """A frozen record of size, version, ownership and place."""
        extent = None if self._released else self._lease.extent
        return BlockDeviceCarrierStatistics(
            **self._statistics_fields(),
            path=self._device.path,
            offset=None if extent is None else extent.offset,
            occupied_bytes=0 if extent is None else extent.nbytes,
        )

    def _file(self) -> tuple[OpenFile, int]:
        self._require_live()
        extent = self._lease.extent
        return self._device._held.file, 0 if extent is None else extent.offset

    def _load_slot(self, i: int) -> bool | int | float:
        value = super()._load_slot(i)
        self._require_live()  # another thread may have released the extent, and another carrier have it by now
        return value

    def _can_allocate(self) -> bool:
        return self._size == 0 and not self._released

    def _allocate_in_place(self, size: int) -> None:
        count = check_slot_count(size)
        with self._lock:
            self._require_live()
            if self._size:
                super()._allocate_in_place(size)
            if count:
                self._device._give(self._lease)  # what an interrupted call has taken
                self._device._take(count * self._dtype.itemsize, self._lease)
                self._size = count

    def _zero(self) -> None:
        if self._lease.extent is not None:
            self._device._held.zero(*self._lease.extent)

    def _discard(self, start: int, slots: int) -> None:
        _, base = self._file()
        width = self._dtype.itemsize
        if slots:
            self._device._held.discard(base + start * width, slots * width)

    def _free_storage(self) -> None:
        self._device._give(self._lease)


def _positive(value: object, name: str) -> int:
    number = as_integer(value, name)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, found {number}")
    return number
