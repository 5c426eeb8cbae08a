"""What is measured: one module a peer, imported only in the process that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from benchmarks.peers.base import Peer

__all__ = ["DEFAULT", "ENVIRONMENTS", "NAMES", "OURS", "TWO_UNDER_WAY", "load"]

OURS = "strideweave"

TWO_UNDER_WAY = "two requests under way"
"""In the names of contenders that do not wait for one request before they begin the next."""

_PLACES = {
    OURS: "strideweave_peer:StrideWeave",
    "strideweave-threads": "strideweave_peer:StrideWeave",
    "strideweave-aiofiles": "strideweave_peer:StrideWeave",
    "fio": "fio_peer:Fio",
    "system": "system_peer:System",
    "numpy": "numpy_peer:NumPy",
    "memmap": "memmap_peer:MemoryMap",
    "anyio": "anyio_peer:AnyIO",
    "torch": "torch_peer:Torch",
    "safetensors": "safetensors_peer:SafeTensors",
    "h5py": "h5py_peer:HDF5",
    "tensorstore": "tensorstore_peer:TensorStore",
    "zarr": "zarr_peer:Zarr",
}

ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "strideweave-threads": {"STRIDEWEAVE_IO": "threads"},
    "strideweave-aiofiles": {"STRIDEWEAVE_IO": "aiofiles"},
}
"""What the process of a peer finds in its environment besides the rest."""

NAMES = tuple(_PLACES)
"""Every peer that there is."""

DEFAULT = tuple(name for name in NAMES if not name.startswith(f"{OURS}-"))
"""Those that run unless others are asked for."""


def load(name: str) -> Peer:
    """Make a peer, without what it needs installed being touched."""
    module, _, kind = _PLACES[name].partition(":")
    made: Peer = getattr(import_module(f"benchmarks.peers.{module}"), kind)()
    return made
