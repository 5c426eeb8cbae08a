"""A tiled Tensor in a directory: saved whole, opened at once, changed tile by tile, and checked whenever read."""

from strideweave.store import moves  # the moves are registered with it
from strideweave.store.carrier import StoreBacked, StoreBackedStatistics
from strideweave.store.manifest import Manifest
from strideweave.store.opening import is_store, open_store, read_manifest
from strideweave.store.saving import save_tiled, save_tiled_async
from strideweave.store.verifying import Verified, verify_tiles

__all__ = [
    "Manifest",
    "StoreBacked",
    "StoreBackedStatistics",
    "Verified",
    "is_store",
    "moves",
    "open_store",
    "read_manifest",
    "save_tiled",
    "save_tiled_async",
    "verify_tiles",
]
