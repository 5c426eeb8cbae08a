"""What a block device and its carriers say about themselves."""

from __future__ import annotations

from dataclasses import dataclass

from strideweave.carriers.lifecycle import CarrierStatistics
from strideweave.io.files import FileStatistics

__all__ = ["BlockDeviceCarrierStatistics", "BlockDeviceStatistics"]


@dataclass(frozen=True, slots=True)
class BlockDeviceStatistics:
    """What a BlockDevice is, and how much of it is in use.

    Attributes:
        path: where it was opened.
        is_block_special: whether it is a device, and not a regular file in the place of one.
        capacity: bytes that extents can have together.
        free_bytes: bytes in no extent.
        largest_free: bytes of the longest free run, the most that one carrier can get now.
        extents: extents that carriers have.
        logical_block: bytes; the least that the device addresses.
        physical_block: bytes; the least that it writes without reading first.
        alignment: bytes; what extents begin at a multiple of, and have a multiple of.
        queue_depth: operations of one request that io_uring has at the device at once, at most.
        is_direct: whether what is aligned goes past the page cache.
        direct_obstacle: why not, where it was asked for and does not.
        is_closed: whether ``close()`` ended it.
        file: bytes and system calls of all its carriers.
    """

    path: str
    is_block_special: bool
    capacity: int
    free_bytes: int
    largest_free: int
    extents: int
    logical_block: int
    physical_block: int
    alignment: int
    queue_depth: int
    is_direct: bool
    direct_obstacle: str | None
    is_closed: bool
    file: FileStatistics


@dataclass(frozen=True, slots=True)
class BlockDeviceCarrierStatistics(CarrierStatistics):
    """What a BlockDeviceCarrier is and has under way.

    Attributes:
        path: the device.
        offset: first byte of slot 0 on the device; None where there is no storage.
        occupied_bytes: bytes of the extent; 0 where there is none.
    """

    path: str
    offset: int | None
    occupied_bytes: int
