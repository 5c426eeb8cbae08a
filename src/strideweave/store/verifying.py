"""Reading every tile of a store to see whether it is what its checksum says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strideweave.io.buffers import aligned_array
from strideweave.store.opening import store_path
from strideweave.store.tile_files import TileFiles

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from strideweave.errors import DamagedTileError

__all__ = ["Verified", "verify_tiles"]

_STEP_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Verified:
    """How far the reading of a store has come.

    Attributes:
        tiles: tiles read so far.
        tile_count: tiles of the store.
        nbytes: bytes read so far.
        damaged: what is wrong with the damaged ones among the tiles of the last step.
    """

    tiles: int
    tile_count: int
    nbytes: int
    damaged: tuple[DamagedTileError, ...]


def verify_tiles(path: str | os.PathLike[str]) -> Iterator[Verified]:
    """Read every tile of a store, some megabytes at a time; each step blocks, and nothing is written.

    A store that is being written may be read at the same time.

    Raises:
        FileNotFoundError, FormatError, OSError, ImportError: as ``open_store``; all of it at the first step.
    """
    files = TileFiles(store_path(path), writable=False)
    try:
        count, nbytes = files.manifest.grid.tile_count, files.manifest.tile_bytes
        step = min(count, max(1, _STEP_BYTES // nbytes))
        try:
            memory = aligned_array(step * nbytes)
        except MemoryError as error:
            error.add_note(f"one tile of {files.directory!r} has {nbytes} bytes, and is read whole")
            raise
        for first in range(0, count, step):
            tiles = np.arange(first, min(first + step, count))
            damaged = files.damaged_among(tiles, memory)
            done = first + len(tiles)
            yield Verified(done, count, done * nbytes, tuple(damaged))
    finally:
        files.close()
