"""Where the bytes of tiles lie in files, and the plain ways of reading them there."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strideweave.store import read_manifest
from strideweave.store.manifest import DATA
from strideweave.tiles.part_map import PartMap
from strideweave.tiling import tile_grid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from strideweave.dtype import DType
    from strideweave.formats.description import StoredArray
    from strideweave.tiles.grid import TileGrid

__all__ = [
    "ByteMap",
    "OpenFiles",
    "Piece",
    "cached_share",
    "drop_cache",
    "map_pieces",
    "page_aligned",
    "read_pieces",
]

_MOST_OPEN = 64
_TRIES = 5


class Piece(NamedTuple):
    """Bytes of a tile that lie in one run.

    Attributes:
        file: the number of the file.
        offset: the first byte there.
        place: the byte of the destination that it goes to.
        nbytes: how many.
    """

    file: int
    offset: int
    place: int
    nbytes: int


@dataclass(frozen=True)
class ByteMap:
    """The bytes of a tiled array in files.

    Attributes:
        files: paths.
        dtype: element type.
        shape: extents of the array.
        grid: the tiles.
        order: which axis of a tile is contiguous.
        array: where its parts lie; None for a store, whose tiles are one after the other in its only file.
    """

    files: Sequence[str]
    dtype: DType
    shape: tuple[int, ...]
    grid: TileGrid
    order: str
    array: StoredArray | None = None

    @classmethod
    def of_store(cls, path: str) -> ByteMap:
        """The tiles of a store."""
        manifest = read_manifest(path)
        return cls([str(Path(path, DATA))], manifest.dtype, manifest.shape, manifest.grid, "C")

    @classmethod
    def of_array(cls, array: StoredArray, tile_shape: tuple[int, ...] | None) -> ByteMap:
        """The tiles of an array in place."""
        grid = tile_grid(array.shape, array.tile_shape if tile_shape is None else tile_shape)
        return cls([file.path for file in array.files], array.dtype, array.shape, grid, array.order, array)

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        return self.grid.tile_size * self.dtype.itemsize

    def clear(self, memory: NDArray[np.uint8]) -> None:
        """Give memory for tiles the value that parts have which are in no file."""
        fill = self.array.fill if self.array is not None else b""
        if any(fill):
            memory.reshape(-1, len(fill))[...] = np.frombuffer(fill, np.uint8)
        else:
            memory[...] = 0

    def pieces(self, ordinals: Sequence[int]) -> list[Piece]:
        """The runs of tiles that go one after the other to a destination; those that touch are one."""
        found = self._in_store(ordinals) if self.array is None else self._in_parts(self.array, ordinals)
        merged: list[Piece] = []
        for piece in found:
            last = merged[-1] if merged else None
            if last is not None and (piece.file, piece.offset, piece.place) == (
                last.file,
                last.offset + last.nbytes,
                last.place + last.nbytes,
            ):
                merged[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
            else:
                merged.append(piece)
        return merged

    def _in_store(self, ordinals: Sequence[int]) -> Iterator[Piece]:
        width = self.tile_bytes
        for place, ordinal in enumerate(ordinals):
            yield Piece(0, ordinal * width, place * width, width)

    def _in_parts(self, array: StoredArray, ordinals: Sequence[int]) -> Iterator[Piece]:
        map_ = PartMap(self.grid, array.part_shape, array.order)
        width = map_.run_size * self.dtype.itemsize
        along = np.arange(map_.runs_per_tile)
        for place, ordinal in enumerate(ordinals):
            parts, elements = map_.locate(ordinal * map_.runs_per_tile + along)
            offsets = array.offset_of[parts] + elements * self.dtype.itemsize
            for run, (file, offset) in enumerate(
                zip(array.file_of[parts].tolist(), offsets.tolist(), strict=True)
            ):
                if file >= 0:
                    yield Piece(file, offset, place * self.tile_bytes + run * width, width)


class OpenFiles:
    """Descriptors of files by their number, opened when they are needed, a bounded number of them at a time.

    Args:
        paths: the files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._open: dict[int, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __getitem__(self, number: int) -> int:
        if number not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._close()
            self._open[number] = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
        return self._open[number]

    def _close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def read_pieces(files: OpenFiles, pieces: Sequence[Piece], memory: NDArray[np.uint8]) -> None:
    """Read with ``preadv`` from open descriptors.

    Raises:
        OSError: the system failed, or a file has become shorter.
    """
    view = memoryview(memory.data)
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            part = view[piece.place + done : piece.place + piece.nbytes]
            got = os.preadv(files[piece.file], [part], piece.offset + done)
            if not got:
                raise OSError(f"a file ends at byte {piece.offset + done}, before the tile does")
            done += got


def map_pieces(files: Sequence[str], pieces: Sequence[Piece], memory: NDArray[np.uint8]) -> None:
    """Map the files anew with ``numpy.memmap`` and copy out of them."""
    mapped = {number: np.memmap(files[number], np.uint8, "r") for number in {piece.file for piece in pieces}}
    for piece in pieces:
        source = mapped[piece.file][piece.offset : piece.offset + piece.nbytes]
        memory[piece.place : piece.place + piece.nbytes] = source


def drop_cache(files: OpenFiles, pieces: Sequence[Piece]) -> None:
    """Ask the system to forget what it has cached of some files; what is not written yet is written before."""
    for _ in range(_TRIES):  # pages on their way between the kernel's lists stay the first time
        for number in {piece.file for piece in pieces}:
            os.fsync(files[number])
            os.posix_fadvise(files[number], 0, 0, os.POSIX_FADV_DONTNEED)
        if not cached_share(files, pieces):  # nothing, or nobody knows
            return


def cached_share(files: OpenFiles, pieces: Sequence[Piece]) -> float | None:
    """How many of the pages with some bytes are cached, from 0 to 1; None where the system does not tell.

    A read that must not wait would tell as well, but has the system fetch what it does not find.
    """
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    by_file: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece)
    there = total = 0
    for number, some in by_file.items():
        with mmap.mmap(files[number], 0, access=mmap.ACCESS_READ) as mapped:
            memory = np.frombuffer(mapped, np.uint8)
            start = memory.ctypes.data
            del memory  # or the mapping could not be closed
            for piece in some:
                first = piece.offset // mmap.PAGESIZE * mmap.PAGESIZE
                nbytes = piece.offset + piece.nbytes - first
                pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
                addresses = ctypes.c_void_p(start + first), ctypes.c_size_t(nbytes)
                if mincore is None or mincore(*addresses, ctypes.c_void_p(pages.ctypes.data)):
                    return None
                there += int((pages & 1).sum())
                total += len(pages)
    return there / total if total else None


def page_aligned(nbytes: int) -> NDArray[np.uint8]:
    """Bytes that begin with a page and were written to before."""
    memory = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
    memory[...] = 0
    return memory[:nbytes]
