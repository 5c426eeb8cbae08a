"""The tiles on disk that every peer reads: one file that is also a valid safetensors file."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.task import MIB, Picks, Task

__all__ = ["Dataset", "cached_share", "drop_cache", "sync_file_system", "sync_tree"]

_PAGE = 4096
_BLOCK = 4 * MIB
_TRIES = 5
_MOST_TENSORS = 1 << 16


class Dataset:
    """Tiles of random bits in one file, after a header that ends with a page.

    Args:
        task: says how many tiles of which size there are, and where.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.path = Path(task.folder) / "tiles.safetensors"
        self._header = _header(task)

    @property
    def offset(self) -> int:
        """Byte at which the first tile begins."""
        return len(self._header)

    @property
    def nbytes(self) -> int:
        """Bytes from the first tile's begin to the last one's end, holes included."""
        return self.task.grid * self.task.tile_bytes

    def create(self) -> None:
        """Write the file; what lies between tiles with values stays a hole."""
        task, random = self.task, np.random.default_rng(0)
        step = task.tile_bytes * task.spread
        together = max(1, _BLOCK // step) if task.spread == 1 else 1
        with self.path.open("wb") as file:
            file.write(self._header)
            for first in range(0, task.count, together):
                tiles = min(together, task.count - first)
                file.seek(self.offset + first * step)
                file.write(random.bytes(tiles * task.tile_bytes))
            file.truncate(self.offset + self.nbytes)
            file.flush()
            os.fsync(file.fileno())

    def place(self, tile: int) -> int:
        """Byte at which a tile with values begins."""
        return self.offset + int(tile) * self.task.tile_bytes * self.task.spread

    def read(self, picks: Iterable[int], into: NDArray[Any] | None = None) -> NDArray[Any]:
        """The tiles as rows, read the plain way."""
        chosen = list(picks)
        rows = np.empty((len(chosen), self.task.values), np.float32) if into is None else into
        with self.path.open("rb", buffering=0) as file:
            for row, tile in zip(rows, chosen, strict=True):
                file.seek(self.place(tile))
                if file.readinto(row) != self.task.tile_bytes:
                    raise EOFError(f"tile {tile} is shorter than {self.task.tile_bytes} bytes")
        return rows

    def load(self, into: NDArray[Any] | None = None) -> NDArray[Any]:
        """All tiles as rows."""
        return self.read(range(self.task.count), into)

    def changed(self, picks: Picks, into: NDArray[Any] | None = None) -> NDArray[Any]:
        """What the tiles are to become in a case that writes: each one with another first value."""
        rows = self.read(picks, into)
        rows[:, 0] = self.new_values(picks)
        return rows

    @staticmethod
    def new_values(picks: Picks) -> NDArray[np.float32]:
        """The first value of each tile after a write."""
        return (picks + 1).astype(np.float32)

    def copy(self, name: str) -> Path:
        """A raw file of the tiles alone, for a peer that writes, on the disk for good."""
        path = self.path.with_name(name)
        with self.path.open("rb") as source, path.open("wb") as target:
            source.seek(self.offset)
            while block := source.read(_BLOCK):
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
        return path


def _header(task: Task) -> bytes:
    """A safetensors header with one tensor a tile, padded to a page; a page of nothing for a huge grid."""
    if task.grid > _MOST_TENSORS:
        return bytes(_PAGE)
    size = task.tile_bytes
    tensors = {
        str(k): {"dtype": "F32", "shape": [task.values], "data_offsets": [k * size, (k + 1) * size]}
        for k in range(task.grid)
    }
    text = json.dumps(tensors, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text


def drop_cache(paths: Iterable[Path]) -> None:
    """Have the pages of files dropped from the page cache."""
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        try:
            for _ in range(_TRIES):  # pages on their way between the kernel's lists stay the first time
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                if _share(number) < 0.001:
                    break
        finally:
            os.close(number)


def cached_share(paths: Iterable[Path]) -> float:
    """How much of files is in the page cache, from 0 to 1; of the fullest one where there are several."""
    shares = []
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        try:
            shares.append(_share(number))
        finally:
            os.close(number)
    return max(shares, default=0.0)


def _share(number: int) -> float:
    nbytes = os.fstat(number).st_size
    if nbytes == 0:
        return 0.0
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    with mmap.mmap(number, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        start = np.frombuffer(memory, np.uint8)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)
        )
        del start  # or the mapping could not be closed
    return float("nan") if failed else float((pages & 1).mean())


def sync_file_system(folder: str | Path) -> None:
    """Have everything of the file system that holds ``folder`` written to its disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(number):
            raise OSError(ctypes.get_errno(), "syncfs failed")
    finally:
        os.close(number)


def sync_tree(path: Path) -> None:
    """Have a file, or everything below a folder, written to its disk for good, and its name."""
    every = [path, *path.rglob("*")] if path.is_dir() else [path]
    for place in (*every, path.parent):
        number = os.open(place, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
