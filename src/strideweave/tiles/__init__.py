"""What tiles are: grids, selections, residency plans and policies, and the copies between tiles and arrays.

Nothing here knows files, carriers or tensors, and only `gather` moves bytes.
"""

from strideweave.tiles.gather import CompactGeometry
from strideweave.tiles.grid import TileGrid, TilePlacement
from strideweave.tiles.policy import (
    LRU,
    KeepResident,
    PolicyStatistics,
    ResidencyPlan,
    ResidencyPolicy,
    Streaming,
)
from strideweave.tiles.s3fifo import S3FIFO
from strideweave.tiles.selection import TileSelection, TileSet

__all__ = [
    "CompactGeometry",
    "KeepResident",
    "LRU",
    "PolicyStatistics",
    "ResidencyPlan",
    "ResidencyPolicy",
    "S3FIFO",
    "Streaming",
    "TileGrid",
    "TilePlacement",
    "TileSelection",
    "TileSet",
]
