"""What tiles are: grids, selections, residency plans and policies, and the copies between tiles and arrays.

Nothing here knows stores, carriers or tensors, and only `gather` moves bytes. A `Trace` is kept as a text file.
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
from strideweave.tiles.trace import Trace, TraceRequest
from strideweave.tiles.trace_recorder import TraceRecorder
from strideweave.tiles.trace_replay import ReplayReport, replay

__all__ = [
    "CompactGeometry",
    "KeepResident",
    "LRU",
    "PolicyStatistics",
    "ReplayReport",
    "ResidencyPlan",
    "ResidencyPolicy",
    "S3FIFO",
    "Streaming",
    "TileGrid",
    "TilePlacement",
    "TileSelection",
    "TileSet",
    "Trace",
    "TraceRecorder",
    "TraceRequest",
    "replay",
]
