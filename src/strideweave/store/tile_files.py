"""The files of one open store: tiles read and checked, written all or nothing, made durable.

A write of tiles goes to the journal first, then to the data file in place, then its checksums to the table. At any
instant a tile is therefore whole in its place, or whole in the journal. A reader that finds a tile in its place that
has not the checksum of the table looks for it in the journal, and begins anew, before it calls the tile damaged.
Coroutines run in the runtime's loop; what blocks says so.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
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
    write_spans,
)
from strideweave.runtime.workers import run_jobs
from strideweave.store.checksums import checksum_function, digits, sums_of
from strideweave.store.journal import JournaledTile, entry_head, newest_tiles
from strideweave.store.lock import WriterLock
from strideweave.store.manifest import DATA, JOURNAL, LOCK, MANIFEST, TABLE, Manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    Ordinals = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]
    Sums = npt.NDArray[np.uint64]

__all__ = ["BATCH_TILES", "JOURNAL_BYTES", "TileFiles", "TileFilesStatistics", "TilePlaces", "sync_names"]

JOURNAL_BYTES = 64 << 20
"""Bytes: the journal is retired before it grows beyond this. One larger tile alone may make it longer."""

BATCH_TILES = 512
"""Tiles that are prepared at once, at most: that takes the runtime's loop about a millisecond."""

WAVE_BYTES = 32 << 20
"""Bytes of tiles in one entry of the journal, at most, or one tile."""

ATTEMPTS = 16
"""How often a tile that is being overwritten is looked for. Each attempt that fails means that a writer has ended a
whole write meanwhile, or that the tile is damaged."""


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


@dataclass(frozen=True, slots=True)
class TileFilesStatistics:
    """What one open store has done.

    Attributes:
        tiles_read: tiles read and found right.
        tiles_written: tiles written.
        tiles_damaged: reads that found a tile damaged.
        tiles_from_journal: reads that took a tile from the journal.
        journal_bytes: bytes of the journal that are not retired.
        retirements: how often the journal was retired.
    """

    tiles_read: int = 0
    tiles_written: int = 0
    tiles_damaged: int = 0
    tiles_from_journal: int = 0
    journal_bytes: int = 0
    retirements: int = 0


class TileFiles:
    """One open store.

    Attributes:
        directory: where it is.
        manifest: what it is.
        writable: whether this object has the right to write.

    Args:
        directory: the store's directory.
        writable: take the right to write, and finish what a writer that was killed had begun.

    Raises:
        FileNotFoundError: one of its files is missing.
        FormatError: the manifest is none, or a file of the store is no regular file, or a symbolic link.
        OSError: another open store has the right to write (``EBUSY``), or the system refused.
        ImportError: the library for checksums is missing.
    """

    def __init__(self, directory: str, *, writable: bool) -> None:
        checksum_function()
        self.directory = directory
        self.writable = writable
        self.manifest = Manifest.read(directory)  # before a lock file is made in what is no store
        self._lock: WriterLock | None = None
        if writable:
            _require_plain(self._path(LOCK))
            self._lock = WriterLock(self._path(LOCK))
        complete = False
        try:
            # Whoever has the lock keeps others from replacing the store; a reader looks whether somebody did.
            opened = False
            while not opened:
                before = Manifest.read(directory)
                self._open_files()
                self.manifest = Manifest.read(directory)
                opened = self.manifest == before
            self._prepare()
            if writable:
                self._recover()
            complete = True
        finally:
            if not complete:
                self.close()

    def _open_files(self) -> None:
        for name in (DATA, TABLE, JOURNAL):
            _require_plain(self._path(name))
        self._data, self._table_file = self._open(DATA), self._open(TABLE)
        self._journal: OpenFile | None = self._open_journal()

    def _prepare(self) -> None:
        """Read the table, and begin to count."""
        count = self.manifest.grid.tile_count
        _require_no_longer(self._data, self.manifest.data_bytes)
        _require_no_longer(self._table_file, 8 * count)
        self._sums = np.zeros(count, np.uint64)
        self._read_table(self._table_file, 0, self._sums.view(np.uint8))
        # Of this writer, since the journal was last retired:
        self._end = 0  # bytes of the journal
        self._sequence = 0
        self._newest: dict[int, JournaledTile] = {}
        self._unapplied: set[int] = set()  # tiles whose write in place failed
        self._names_durable = False
        self._turn: anyio.Lock | None = None
        self._read = self._written = self._damaged = self._rescued = self._retirements = 0

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
        """Close the files and let others write; idempotent. What is in the journal stays for the next writer."""
        for name in ("_data", "_table_file", "_journal"):
            file: OpenFile | None = getattr(self, name, None)
            if file is not None:
                file.close()
        if self._lock is not None:
            self._lock.close()

    def statistics(self) -> TileFilesStatistics:
        """A frozen record of what was done."""
        return TileFilesStatistics(
            tiles_read=self._read,
            tiles_written=self._written,
            tiles_damaged=self._damaged,
            tiles_from_journal=self._rescued,
            journal_bytes=self._end,
            retirements=self._retirements,
        )

    def require_writable(self) -> None:
        """Raise unless this process may write.

        Raises:
            PermissionError: it was opened for reading, or by the parent of this process.
            ValueError: it is closed.
        """
        self._data.require_writable()
        self._data.descriptor()

    # Reading

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

    def _checksum_now(self, ordinal: int) -> int:
        """The checksum of a tile; another process may have written it since the table was read."""
        if not self.writable:
            self._read_table(self._table_file, ordinal, self._sums[ordinal : ordinal + 1].view(np.uint8))
        return int(self._sums[ordinal])

    def _read_from_journal(self, ordinal: int, wanted: int, row: Bytes) -> JournaledTile | None:
        """Read the newest content of a tile that the journal has whole; None where it has none.

        Args:
            ordinal: the tile.
            wanted: its checksum in the table. What the journal has from before that one is too old.
            row: memory for it.
        """
        newest = self._newest.get(ordinal)
        versions = (
            [newest] if newest is not None else [] if self.writable else self._journaled().get(ordinal, [])
        )
        return self._read_newest(versions, wanted, row)

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

    # Writing

    @property
    def _the_journal(self) -> OpenFile:
        if self._journal is None:  # of a store that is open for reading, when it was looked for
            raise FormatError("the store has no journal", path=self._path(JOURNAL))
        return self._journal

    async def write(self, places: Sequence[TilePlaces]) -> None:
        """Write tiles, each of them all or nothing; when this returns every other opener sees them.

        After an error some of them may be new and the others are what they were.

        Args:
            places: which tiles, and where their contents are. Of a tile that comes twice the last counts.

        Raises:
            OSError: the system failed, such as on a full disk.
            PermissionError: as ``require_writable``.
        """
        self.require_writable()
        nbytes = self.manifest.tile_bytes
        rows = {
            ordinal: row
            for one in places
            for ordinal, row in zip(one.ordinals.tolist(), one.rows(nbytes), strict=True)
        }
        tiles = sorted(rows)
        step = min(BATCH_TILES, max(1, WAVE_BYTES // nbytes))
        for first in range(0, len(tiles), step):
            wave = tiles[first : first + step]
            contents = [rows[ordinal] for ordinal in wave]
            sums = await sums_of(contents)
            async with self._one_at_a_time():
                await self._write_wave(np.array(wave, np.int64), sums, contents)

    def _one_at_a_time(self) -> anyio.Lock:
        """The turn of one write; made in the runtime's loop, whose kind of lock it must be."""
        if self._turn is None:
            self._turn = anyio.Lock()
        return self._turn

    async def persist(self) -> None:
        """Make everything that was written durable: it survives the loss of power from here on.

        Raises:
            OSError: the system failed; what was written is visible, and not known to be durable.
            PermissionError: as ``require_writable``.
        """
        self.require_writable()
        async with self._one_at_a_time():
            await self._retire(always=True)
            if not self._names_durable:
                await run_jobs([partial(sync_names, self.directory)])
                self._names_durable = True

    async def _write_wave(self, ordinals: Ordinals, sums: Sums, rows: list[Bytes]) -> None:
        """Write some ascending tiles: to the journal, in place, and their checksums."""
        nbytes = self.manifest.tile_bytes
        head = entry_head(self.manifest.identity, self._sequence + 1, ordinals, sums, nbytes)
        full = self._end + head.nbytes + len(ordinals) * nbytes > JOURNAL_BYTES
        if full or self._unapplied:  # a write that failed half way is ended first, or the journal only grows
            await self._retire()
        contents = self._end + head.nbytes
        places = contents + np.arange(len(ordinals), dtype=np.int64) * nbytes
        journal, engine = self._the_journal, default_engine()
        complete = False
        try:
            spans = map(partial(FileSpan, journal), places.tolist(), rows)
            await engine.write([FileSpan(journal, self._end, head), *spans])
            # Else a loss of power could leave a tile that was durable torn, with no other version of it.
            await engine.persist(journal)
            complete = True
        finally:
            if not complete:
                with suppress(OSError):  # what stays there is overwritten, or not whole
                    journal.truncate(self._end)
        self._sequence += 1
        self._end = contents + len(ordinals) * nbytes
        tiles = ordinals.tolist()
        for ordinal, place, checksum in zip(tiles, places.tolist(), sums.tolist(), strict=True):
            self._newest[ordinal] = JournaledTile(place, checksum)
        self._unapplied.update(tiles)
        await engine.write(list(map(partial(FileSpan, self._data), (ordinals * nbytes).tolist(), rows)))
        await engine.write(list(self._table_spans(ordinals, sums)))
        self._sums[ordinals] = sums
        self._unapplied.difference_update(tiles)
        self._written += len(tiles)

    def _table_spans(self, ordinals: Ordinals, sums: Sums) -> Iterator[FileSpan]:
        """One span for each run of neighbours among ascending tiles."""
        stored = sums.astype("<u8").view(np.uint8)
        borders = [0, *(np.flatnonzero(np.diff(ordinals) != 1) + 1).tolist(), len(ordinals)]
        for first, last in pairwise(borders):
            if first < last:
                yield FileSpan(self._table_file, 8 * int(ordinals[first]), stored[8 * first : 8 * last])

    async def _retire(self, *, always: bool = False) -> None:
        """Have everything that the journal guards safe in its place, and empty it."""
        if self._end or always:
            await run_jobs([self._retire_blocking])

    def _retire_blocking(self) -> None:
        for ordinal in sorted(self._unapplied):
            self._repair(ordinal, [self._newest[ordinal]])
        self._unapplied.clear()
        self._data.persist()
        self._table_file.persist()
        if self._end:
            self._the_journal.truncate(0)
            self._end = 0
            self._retirements += 1
        self._newest.clear()

    def _recover(self) -> None:
        """Make whole what the last writer left half written, and empty its journal."""
        journal = self._the_journal
        if not journal.size():
            return
        found = self._journaled()
        for ordinal in sorted(found):
            self._repair(ordinal, found[ordinal])
        if found:
            self._data.persist()
            self._table_file.persist()
        journal.truncate(0)

    def _repair(self, ordinal: int, versions: list[JournaledTile]) -> None:
        """Write a tile that is not whole in its place anew from the journal, and its checksum; blocks.

        One that is whole is left alone, whatever the journal has: it is of a write that has ended, or it is what it
        was before one that had not begun here.
        """
        nbytes = self.manifest.tile_bytes
        row, wanted = aligned_array(nbytes), int(self._sums[ordinal])
        if self._read_in_place(ordinal, row) == wanted:
            return
        tile = self._read_newest(versions, wanted, row)
        if tile is not None:
            write_spans([FileSpan(self._data, ordinal * nbytes, row)])
            stored = np.array([tile.checksum], "<u8").view(np.uint8)
            write_spans([FileSpan(self._table_file, 8 * ordinal, stored)])
            self._sums[ordinal] = tile.checksum


def sync_names(directory: str) -> None:
    """Make a store's manifest, the names of its files and its own name durable; blocks."""
    place = Path(directory).absolute()
    for path in (place / MANIFEST, place, place.parent):
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; it was to be made durable", str(path)) from error
        finally:
            os.close(number)


def _require_plain(path: str) -> None:
    """Refuse a symbolic link: a store's files are in its directory, and nowhere else."""
    if Path(path).is_symlink():
        found = str(Path(path).readlink())
        raise FormatError("a file of a store must not be a symbolic link", path=path, found=found)


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
