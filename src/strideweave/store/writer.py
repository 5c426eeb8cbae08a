"""A store in the making: written beside its place, and put there when it is complete."""

from __future__ import annotations

import errno
import os
import re
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strideweave.errors import FormatError
from strideweave.io.engine import default_engine
from strideweave.io.files import OpenFile
from strideweave.io.positioned import FileSpan, write_spans
from strideweave.runtime.workers import run_jobs
from strideweave.store.checksums import checksum_function, sums_of
from strideweave.store.durable_names import sync_directory
from strideweave.store.lock import WriterLock
from strideweave.store.manifest import DATA, FILES, JOURNAL, LOCK, MANIFEST, MOST_TILES, TABLE, Manifest
from strideweave.store.replacing import exchange, remove_tree
from strideweave.store.tile_files import BATCH_TILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from strideweave.dtype import DType
    from strideweave.layout import Layout
    from strideweave.tiles.grid import TileGrid

    Ordinals = npt.NDArray[np.int64]

__all__ = ["StoreWriter", "check_target"]

_UNFINISHED = ".saving"
_NAME_BYTES = 6  # of the random part of an unfinished store's name


class StoreWriter:
    """Makes one store; what was begun and is not finished leaves nothing at its place.

    ``begin``, ``finish`` and ``abandon`` block.

    Args:
        path: where the store is to be.
        dtype: element type.
        grid: the tile grid.
        layout: from a coordinate to a slot.
        overwrite: replace the store that is there.
        durable: have it on the device before it is at its place.

    Raises:
        ValueError: the grid has more tiles than a store can have.
    """

    def __init__(
        self, path: str, dtype: DType, grid: TileGrid, layout: Layout, *, overwrite: bool, durable: bool
    ) -> None:
        if grid.tile_count > MOST_TILES:
            raise ValueError(
                f"a store has at most {MOST_TILES} tiles, found {grid.tile_count} in the grid {grid.grid_shape}; "
                "cut the tensor into larger tiles"
            )
        self.manifest = Manifest(dtype, grid, layout, secrets.token_hex(8))
        self._path = Path(path)
        self._overwrite = overwrite
        self._durable = durable
        self._directory: Path | None = None
        self._lock: WriterLock | None = None
        self._files: dict[str, OpenFile] = {}
        self._sums: npt.NDArray[np.uint64] = np.zeros(grid.tile_count, np.uint64)

    def begin(self) -> None:
        """Make the directory beside the place, and its files, sparse.

        Raises:
            FileExistsError, FormatError: as ``check_target``.
            OSError: the system refused.
        """
        check_target(self._path, overwrite=self._overwrite)
        _remove_unfinished(self._path)
        while self._lock is None:
            made = self._path.parent / f".{self._path.name}.{secrets.token_hex(_NAME_BYTES)}{_UNFINISHED}"
            made.mkdir()
            self._directory = made
            try:
                self._lock = WriterLock(str(made / LOCK))
            except OSError as error:
                # Until it is locked it looks like what a killed save has left, and another save may remove it.
                if error.errno not in (errno.EBUSY, errno.ENOENT):
                    raise
        for file, size in ((DATA, self.manifest.data_bytes), (TABLE, 0), (JOURNAL, 0)):
            self._files[file] = _create(self._place / file, size)

    async def write(self, ordinals: Ordinals, rows: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Write some tiles and remember their checksums.

        Raises:
            OSError: the system failed, such as on a full disk.
        """
        file, nbytes = self._files[DATA], self.manifest.tile_bytes
        for first in range(0, len(rows), BATCH_TILES):
            tiles, contents = ordinals[first : first + BATCH_TILES], rows[first : first + BATCH_TILES]
            self._sums[tiles] = await sums_of(contents)
            await default_engine().write(
                list(map(partial(FileSpan, file), (tiles * nbytes).tolist(), contents))
            )

    def leave_zero(self, ordinals: Ordinals) -> None:
        """These tiles are zeros: they are holes in the file, and have the checksum of zeros. Blocks for one tile."""
        if len(ordinals):
            self._sums[ordinals] = checksum_function()(np.zeros(self.manifest.tile_bytes, np.uint8))

    async def finish(self) -> None:
        """Put the complete store at its place.

        Raises:
            FileExistsError: something came there meanwhile.
            OSError: the system failed, or the store that is to be replaced is open for writing (``EBUSY``).
        """
        await run_jobs([self._finish_blocking])

    def _finish_blocking(self) -> None:
        directory = self._place
        write_spans([FileSpan(self._files[TABLE], 0, self._sums.astype("<u8").view(np.uint8))])
        self._files[MANIFEST] = _create(directory / MANIFEST, 0)
        content = np.frombuffer(self.manifest.encode(), np.uint8)
        write_spans([FileSpan(self._files[MANIFEST], 0, content)])
        if self._durable:
            for file in self._files.values():
                file.persist()
            sync_directory(directory)
        if self._overwrite and os.path.lexists(self._path):
            self._replace(directory)
        else:
            check_target(self._path, overwrite=False)
            directory.rename(self._path)
        self._directory = None
        if self._durable:
            sync_directory(self._path.absolute().parent)
        self._close()

    def _replace(self, directory: Path) -> None:
        check_target(self._path, overwrite=True)
        old = WriterLock(str(self._path / LOCK))
        try:
            exchange(str(directory), str(self._path))
            remove_tree(str(directory))  # which is the old one by now
        finally:
            old.close()

    def abandon(self) -> None:
        """Remove what is not at its place; idempotent, and nothing after ``finish``."""
        self._close()
        directory, self._directory = self._directory, None
        if directory is not None:
            remove_tree(str(directory))

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._lock is not None:
            self._lock.close()

    @property
    def _place(self) -> Path:
        if self._directory is None:
            raise ValueError(f"the store for {str(self._path)!r} is not being made")
        return self._directory

    async def begin_async(self) -> None:
        """``begin`` in a worker thread."""
        await run_jobs([self.begin])

    async def abandon_async(self) -> None:
        """``abandon`` in a worker thread."""
        await run_jobs([partial(self.abandon)])


def check_target(path: Path, *, overwrite: bool) -> None:
    """Refuse to save where something else than a store is, or a store that is not to be replaced.

    Raises:
        FileExistsError: something is there.
        FormatError: it is to be replaced, and is no store.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        message = "something is there already; overwrite=True replaces a store"
        raise FileExistsError(errno.EEXIST, message, str(path))
    manifest = path / MANIFEST
    if path.is_symlink() or manifest.is_symlink() or not manifest.is_file():
        raise FormatError(
            "only a store can be replaced; remove what is there, or save to another place",
            path=str(path),
            wanted=f"a directory with {MANIFEST}",
            found="something else",
        )
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in FILES)
    if others:
        raise FormatError(
            "a store with other files in it is not replaced, for they would be gone; move them away",
            path=str(path),
            found=", ".join(others),
        )


def _create(path: Path, size: int) -> OpenFile:
    """Make a file that others may read as the process's mask says, and open it."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    file = OpenFile.open(path, writable=True, private=True)
    file.truncate(size)
    return file


def _remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed have left of stores for this place, and nothing that looks alike."""
    name = re.compile(
        re.escape(f".{path.name}.") + f"[0-9a-f]{{{2 * _NAME_BYTES}}}" + re.escape(_UNFINISHED), re.DOTALL
    )
    left = [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]
    for entry in left:
        try:
            if entry.is_symlink() or {inside.name for inside in entry.iterdir()} - FILES:
                continue  # which no save has made
            lock = WriterLock(str(entry / LOCK))
        except OSError:  # somebody is at it, or it is not ours to remove
            continue
        remove_tree(str(entry))
        lock.close()
