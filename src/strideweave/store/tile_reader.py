"""The files of one open store, as they are read: no tile is given out that has not the checksum of the table.

A reader that finds a tile in its place that has another one looks for it in the journal, and begins anew, before it
calls the tile damaged. Coroutines run in the runtime's loop; what blocks says so.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strideweave.errors import DamagedTileError, FormatError
from strideweave.io.buffers import aligned_array
from strideweave.io.engine import default_engine
from strideweave.io.files import OpenFile
from strideweave.io.positioned import (
    FileSpan,
    ShortFileError,
    SpanBatch,
    SpanBlock,
    raise_first,
    read_spans,
)
from strideweave.runtime.workers import run_jobs
from strideweave.store.checksums import checksum_function, digits, sums_of
from strideweave.store.journal import JournaledTile, newest_tiles
from strideweave.store.manifest import DATA, JOURNAL, TABLE, Manifest, require_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Ordinals = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]

__all__ = ["TilePlaces", "TileReader"]

ATTEMPTS = 16
"""How often a tile that is being overwritten is looked for. Each attempt that fails means that a writer has ended a
whole write meanwhile, or that the tile is damaged."""

_MOST_MISSING = 64 << 20
"""Bytes that a damaged table of checksums may be too short by."""


class TilePlaces(NamedTuple):
    """Some tiles, and where they are in memory.

    Attributes:
        ordinals: the tiles.
        memory: contiguous bytes.
        starts: the first byte of each tile in it.
    """

    ordinals: Ordinals
    memory: Bytes
    starts: Ordinals

    def rows(self, nbytes: int) -> list[Bytes]:
        """The memory of each tile."""
        return [self.memory[start : start + nbytes] for start in self.starts.tolist()]


class TileReader:
    """One open store, and what reading it takes.

    Attributes:
        directory: where it is.
        manifest: what it is.
        writable: whether its files are open for writing too.

    Args:
        directory: the store's directory.
        writable: open the files for writing too, as only who has the lock may.

    Raises:
        FileNotFoundError: one of its files is missing.
        FormatError: the manifest is none, or a file of the store is no regular file, or a symbolic link.
        OSError: the system refused.
        ImportError: the library for checksums is missing.
    """

    def __init__(self, directory: str, *, writable: bool) -> None:
        checksum_function()
        self.directory = directory
        self.writable = writable
        # Whoever has the lock keeps others from replacing the store; a reader looks whether somebody did.
        opened = False
        while not opened:
            before = Manifest.read(directory)
            self._open_files()
            self.manifest = Manifest.read(directory)
            opened = self.manifest == before
        count = self.manifest.grid.tile_count
        _require_no_longer(self._data, self.manifest.data_bytes)
        _require_no_longer(self._table_file, 8 * count)
        _require_no_tiny(self._table_file, 8 * count)
        self._sums = np.zeros(count, np.uint64)
        self._read_table(self._table_file, 0, self._sums.view(np.uint8))
        self._read = self._damaged = self._rescued = 0

    def _open_files(self) -> None:
        for name in (DATA, TABLE, JOURNAL):
            require_plain(self._path(name))
        self._data, self._table_file = self._open(DATA), self._open(TABLE)
        self._journal: OpenFile | None = self._open_journal()

    def _path(self, name: str) -> str:
        return str(Path(self.directory, name))

    def _open(self, name: str) -> OpenFile:
        return OpenFile.open(self._path(name), writable=self.writable, private=True)

    def _open_journal(self) -> OpenFile | None:
        """A store whose journal was lost when it was copied has an empty one."""
        try:
            return self._open(JOURNAL)
        except FileNotFoundError:
            if not self.writable:
                return None
        os.close(os.open(self._path(JOURNAL), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        return self._open(JOURNAL)

    def close(self) -> None:
        """Close the files; idempotent."""
        for name in ("_data", "_table_file", "_journal"):
            file: OpenFile | None = getattr(self, name, None)
            if file is not None:
                file.close()

    async def read(self, places: Sequence[TilePlaces]) -> None:
        """Read tiles, every one with the right checksum, as one batch.

        Args:
            places: which tiles, and where they go.

        Raises:
            DamagedTileError: a tile is neither right in its place nor in the journal; with notes on the others. The
                memory may hold parts of it, which the caller must not give out.
            OSError: the system failed.
        """
        nbytes = self.manifest.tile_bytes
        ordinals = np.concatenate([one.ordinals for one in places])
        rows = [row for one in places for row in one.rows(nbytes)]
        try:
            await default_engine().read(
                SpanBatch(
                    [
                        SpanBlock(self._data, one.ordinals * nbytes, one.memory, one.starts, nbytes)
                        for one in places
                    ]
                )
            )
            wrong = np.flatnonzero(await sums_of(rows) != self._sums[ordinals])
        except ShortFileError:  # one of them lies behind the end; memory that was not filled may look right
            wrong = np.arange(len(ordinals))
        if len(wrong):
            tiles = ordinals[wrong].tolist()
            await run_jobs([partial(self._settle_all, tiles, [rows[place] for place in wrong.tolist()])])
        self._read += len(ordinals)

    def read_blocking(self, ordinal: int) -> Bytes:
        """Read one tile in the calling thread.

        Raises:
            DamagedTileError, OSError: as ``read``.
        """
        row = aligned_array(self.manifest.tile_bytes)
        self._settle(ordinal, row)
        self._read += 1
        return row

    def damaged_among(self, ordinals: Ordinals, memory: Bytes) -> list[DamagedTileError]:
        """Read consecutive tiles into memory and say which are damaged; blocks.

        Args:
            ordinals: ascending neighbours.
            memory: bytes for them.

        Raises:
            OSError: the system failed.
        """
        nbytes = self.manifest.tile_bytes
        memory = memory[: len(ordinals) * nbytes]
        checksum, damaged = checksum_function(), []
        is_filled = True
        try:
            read_spans([FileSpan(self._data, int(ordinals[0]) * nbytes, memory)])
        except ShortFileError:
            is_filled = False
        for ordinal, row in zip(ordinals.tolist(), memory.reshape(-1, nbytes), strict=True):
            if is_filled and checksum(row) == int(self._sums[ordinal]):
                continue
            try:
                self._settle(ordinal, row)
            except DamagedTileError as error:
                damaged.append(error.with_traceback(None))
        return damaged

    def _settle_all(self, ordinals: list[int], rows: list[Bytes]) -> None:
        errors: list[BaseException] = []
        for ordinal, row in zip(ordinals, rows, strict=True):
            try:
                self._settle(ordinal, row)
            except DamagedTileError as error:
                errors.append(error)
        raise_first(errors)

    def _settle(self, ordinal: int, row: Bytes) -> None:
        """Read a tile that may be on its way: from its place, else from the journal, until one of them is whole."""
        before: tuple[int, int | None] | None = None
        for _ in range(ATTEMPTS):
            wanted, found = self._checksum_now(ordinal), self._read_in_place(ordinal, row)
            if found == wanted:
                return
            tile = self._read_from_journal(ordinal, wanted, row)
            # If the table moved on, this may be the content after the next, and a later look would find an older one.
            if tile is not None and self._checksum_now(ordinal) == wanted:
                self._rescued += 1
                return
            if tile is None and before == (wanted, found):
                break  # nobody is at it
            before = wanted, found
        self._damaged += 1
        nbytes = self.manifest.tile_bytes
        raise DamagedTileError(
            path=self._data.path,
            tile=self.coordinate(ordinal),
            ordinal=ordinal,
            offset=ordinal * nbytes,
            wanted=digits(wanted),
            found="the end of the file" if found is None else f"checksum {digits(found)}",
        )

    def _read_in_place(self, ordinal: int, row: Bytes) -> int | None:
        """Read a tile from its place; gives the checksum of what is there, or None where the file ends before."""
        try:
            read_spans([FileSpan(self._data, ordinal * self.manifest.tile_bytes, row)])
        except ShortFileError:
            return None
        return checksum_function()(row)

    def _read_newest(self, versions: list[JournaledTile], wanted: int, row: Bytes) -> JournaledTile | None:
        for tile in reversed(versions):
            if self._read_journaled(tile, row):
                return tile
            if tile.checksum == wanted:
                break
        return None

    def _journaled(self) -> dict[int, list[JournaledTile]]:
        """What is in the journal now, which another process may be writing."""
        if self._journal is None:
            self._journal = self._open_journal()
        if self._journal is None:
            return {}
        manifest = self.manifest
        return newest_tiles(self._journal, manifest.identity, manifest.tile_bytes, manifest.grid.tile_count)[
            0
        ]

    def _read_journaled(self, tile: JournaledTile, row: Bytes) -> bool:
        try:
            read_spans([FileSpan(self._the_journal, tile.offset, row)])
        except ShortFileError:  # retired meanwhile
            return False
        return checksum_function()(row) == tile.checksum

    def _read_table(self, file: OpenFile, first: int, buffer: Bytes) -> None:
        """Read checksums; those behind the end of a table that is too short are zero, which no tile has."""
        try:
            read_spans([FileSpan(file, 8 * first, buffer)])
        except ShortFileError as error:
            buffer[error.got // 8 * 8 :] = 0

    def coordinate(self, ordinal: int) -> tuple[int, ...]:
        """The coordinate of a tile in the grid."""
        coordinate = []
        for extent in self.manifest.grid.grid_shape:
            ordinal, index = divmod(ordinal, extent)
            coordinate.append(index)
        return tuple(coordinate)

    def _checksum_now(self, ordinal: int) -> int:
        """The checksum of a tile; another process may have written it since the table was read."""
        self._read_table(self._table_file, ordinal, self._sums[ordinal : ordinal + 1].view(np.uint8))
        return int(self._sums[ordinal])

    def _read_from_journal(self, ordinal: int, wanted: int, row: Bytes) -> JournaledTile | None:
        """Read the newest content of a tile that the journal has whole; None where it has none.

        Args:
            ordinal: the tile.
            wanted: its checksum in the table. What the journal has from before that one is too old.
            row: memory for it.
        """
        return self._read_newest(self._journaled().get(ordinal, []), wanted, row)

    @property
    def _the_journal(self) -> OpenFile:
        if self._journal is None:  # of a store that is open for reading, when it was looked for
            raise FormatError("the store has no journal", path=self._path(JOURNAL))
        return self._journal


def _require_no_tiny(file: OpenFile, nbytes: int) -> None:
    """Refuse a table that lacks so much that memory for what the manifest says would be given for nothing."""
    found = file.size()
    if nbytes - found > _MOST_MISSING:
        raise FormatError(
            "the table of checksums is much shorter than the manifest says",
            path=file.path,
            wanted=f"{nbytes} bytes",
            found=f"{found} bytes",
        )


def _require_no_longer(file: OpenFile, nbytes: int) -> None:
    """Refuse a file that the manifest does not describe; one that is too short has damaged tiles, and others."""
    found = file.size()
    if found > nbytes:
        raise FormatError(
            "the file is longer than the manifest says",
            path=file.path,
            wanted=f"{nbytes} bytes",
            found=f"{found} bytes",
        )
