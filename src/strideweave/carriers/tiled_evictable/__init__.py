"""Tiles of one logical array in two tiers: residency, projection and the policy that steers them."""

import strideweave.carriers.tiled_evictable.definition  # noqa: F401  installs it
from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
from strideweave.carriers.tiled_evictable.projection import AwaitProjection
from strideweave.carriers.tiled_evictable.residency import AwaitResidency, TiledResidencyFacet
from strideweave.carriers.tiled_evictable.statistics import TiledStatistics
from strideweave.tiles.policy import (
    LRU,
    KeepResident,
    PolicyStatistics,
    ResidencyPlan,
    ResidencyPolicy,
    Streaming,
)
from strideweave.tiles.residency import TileState
from strideweave.tiles.s3fifo import S3FIFO
from strideweave.tiles.selection import TileSelection, TileSet
from strideweave.tiles.trace import Trace, TraceRequest
from strideweave.tiles.trace_recorder import TraceRecorder
from strideweave.tiles.trace_replay import ReplayReport, replay

__all__ = [
    "LRU",
    "S3FIFO",
    "AwaitProjection",
    "AwaitResidency",
    "KeepResident",
    "PolicyStatistics",
    "ReplayReport",
    "ResidencyPlan",
    "ResidencyPolicy",
    "Streaming",
    "TileSelection",
    "TileSet",
    "TileState",
    "TiledEvictable",
    "TiledResidencyFacet",
    "TiledStatistics",
    "Trace",
    "TraceRecorder",
    "TraceRequest",
    "replay",
]
