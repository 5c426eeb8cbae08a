"""Opening a store as a tiled Tensor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from strideweave.carriers.cpu import CPU
from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
from strideweave.store.carrier import StoreBacked
from strideweave.store.manifest import MANIFEST, Manifest
from strideweave.store.tile_files import TileFiles
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from strideweave.tiles.policy import ResidencyPolicy

__all__ = ["is_store", "open_store", "read_manifest", "store_path"]


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether there is a directory with a manifest; what it says is looked at when it is opened."""
    return os.path.lexists(Path(store_path(path), MANIFEST))


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read what a store is, and none of its other files; blocks.

    Raises:
        FileNotFoundError: there is no manifest.
        FormatError: it is not one, or contradicts itself.
    """
    return Manifest.read(store_path(path))


def open_store(
    path: str | os.PathLike[str],
    mode: str = "r",
    *,
    residency_policy: ResidencyPolicy | None = None,
    memory_limit: int | None = None,
) -> Tensor:
    """Open a store that ``save_tiled`` made, without reading any tile; blocks.

    Args:
        path: the directory.
        mode: ``"r"`` for a Tensor that cannot be changed, which any number of openers may have at once, beside a
            writer too; nothing is written. ``"r+"`` for one whose tiles are written back to the store when they
            leave the primary tier; one opener has that right at a time. What a killed writer had begun is
            finished then.
        residency_policy: decides what stays primary.
        memory_limit: bytes that tiles may take in memory at any instant; None is no limit.

    Returns:
        The full Tensor; every tile starts in the secondary tier. Releasing its carrier closes the store. What is
        dirty in memory then is lost.

    Raises:
        TypeError: ``path`` is no path, the policy has no method ``plan``, or the limit is not an integer.
        ValueError: there is no such mode, or the limit is less than a tile.
        FileNotFoundError: there is no store, or one of its files is missing.
        FormatError: the manifest is none or contradicts itself, or a file is not what it says.
        OSError: another opener has the right to write (``EBUSY``), or the system refused; with the path.
        NotImplementedError: this machine is big-endian and the elements are wider than a byte.
        ImportError: the extra ``strideweave[store]`` is not installed.
    """
    name = store_path(path)
    if mode not in {"r", "r+"}:
        raise ValueError(f"mode must be 'r' or 'r+', found {mode!r}")
    files = TileFiles(name, writable=mode == "r+")
    manifest = files.manifest
    complete = False
    try:
        if sys.byteorder != "little" and manifest.dtype.itemsize > 1:
            raise NotImplementedError(
                f"{manifest.dtype.name} elements in a store are little-endian and this machine is not"
            )
        carrier = TiledEvictable(
            CPU(0, dtype=manifest.dtype, mutable=files.writable),
            StoreBacked(files),
            manifest.grid.grid_shape,
            manifest.grid.tile_shape,
            residency_policy=residency_policy,
            memory_limit=memory_limit,
        )
        complete = True
    finally:
        if not complete:
            files.close()
    return Tensor(carrier, 0, manifest.layout)


def store_path(path: str | os.PathLike[str]) -> str:
    """The path of a store as a string.

    Raises:
        TypeError: it is neither ``str`` nor ``os.PathLike[str]``.
    """
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"a store's path must be str or os.PathLike[str], not {type(name).__name__}")
    return name
