"""Carriers: one-dimensional storage of one dtype, in memory, in files, or composed of other carriers."""

from strideweave.carriers.base import Carrier
from strideweave.carriers.block_device import BlockDevice, BlockDeviceCarrier
from strideweave.carriers.block_device_statistics import BlockDeviceStatistics
from strideweave.carriers.cpu import CPU
from strideweave.carriers.dependent import DependentCarrier
from strideweave.carriers.evictable import Evictable
from strideweave.carriers.file_backed import FileBacked
from strideweave.carriers.file_parts import FileParts
from strideweave.carriers.generic import Generic
from strideweave.carriers.metal import Metal
from strideweave.carriers.tiled_evictable.carrier import TiledEvictable

# What ships without a definition stays without one.
for _plain in (BlockDeviceCarrier, CPU, Evictable, FileBacked, FileParts, Generic, Metal):
    _plain._seal()

__all__ = [
    "BlockDevice",
    "BlockDeviceCarrier",
    "BlockDeviceStatistics",
    "CPU",
    "Carrier",
    "DependentCarrier",
    "Evictable",
    "FileBacked",
    "FileParts",
    "Generic",
    "Metal",
    "TiledEvictable",
]
