"""The files of one open store: tiles written all or nothing, and made durable.

A write of tiles goes to the journal first, then to the data file in place, then its checksums to the table. At any
instant a tile is therefore whole in its place, or whole in the journal. Coroutines run in the runtime's loop; what
blocks says so.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import numpy as np

from strideweave.io.buffers import aligned_array
from strideweave.io.engine import default_engine
from strideweave.io.positioned import FileSpan, write_spans
from strideweave.runtime.workers import run_jobs
from strideweave.store.checksums import sums_of
from strideweave.store.durable_names import sync_names
from strideweave.store.journal import JournaledTile, entry_head
from strideweave.store.lock import WriterLock
from strideweave.store.manifest import LOCK, Manifest, require_plain
from strideweave.store.tile_reader import TilePlaces, TileReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    Ordinals = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]
    Sums = npt.NDArray[np.uint64]

__all__ = ["BATCH_TILES", "JOURNAL_BYTES", "TileFiles", "TileFilesStatistics", "TilePlaces"]

JOURNAL_BYTES = 64 << 20
"""Bytes: the journal is retired before it grows beyond this. One larger tile alone may make it longer."""

BATCH_TILES = 512
"""Tiles that are prepared at once, at most: that takes the runtime's loop about a millisecond."""

WAVE_BYTES = 32 << 20
"""Bytes of tiles in one entry of the journal, at most, or one tile."""


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


class TileFiles(TileReader):
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
        self._lock: WriterLock | None = None
        # Of this writer, since the journal was last retired:
        self._end = 0  # bytes of the journal
        self._sequence = 0
        self._newest: dict[int, JournaledTile] = {}
        self._unapplied: set[int] = set()  # tiles whose write in place failed
        self._names_durable = False
        self._turn: anyio.Lock | None = None
        self._written = self._retirements = 0
        if writable:
            Manifest.read(directory)  # before a lock file is made in what is no store
            lock = str(Path(directory, LOCK))
            require_plain(lock)
            self._lock = WriterLock(lock)
        complete = False
        try:
            super().__init__(directory, writable=writable)
            if writable:
                self._recover()
            complete = True
        finally:
            if not complete:
                self.close()

    def close(self) -> None:
        """Close the files and let others write; idempotent. What is in the journal stays for the next writer."""
        super().close()
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

    def _checksum_now(self, ordinal: int) -> int:
        return int(self._sums[ordinal]) if self.writable else super()._checksum_now(ordinal)

    def _read_from_journal(self, ordinal: int, wanted: int, row: Bytes) -> JournaledTile | None:
        if not self.writable:
            return super()._read_from_journal(ordinal, wanted, row)
        newest = self._newest.get(ordinal)
        return None if newest is None else self._read_newest([newest], wanted, row)

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
        self._empty_journal({ordinal: [self._newest[ordinal]] for ordinal in self._unapplied})
        self._unapplied.clear()
        self._newest.clear()
        self._retirements += self._end > 0
        self._end = 0

    def _recover(self) -> None:
        """Make whole what the last writer left half written, and empty its journal."""
        if self._the_journal.size():
            self._empty_journal(self._journaled())

    def _empty_journal(self, versions: Mapping[int, list[JournaledTile]]) -> None:
        """Write tiles that are not whole anew from the journal, have all of them safe, and empty it; blocks.

        Args:
            versions: for each tile that may not be whole its contents in the journal, the newest last.
        """
        for ordinal in sorted(versions):
            self._repair(ordinal, versions[ordinal])
        self._data.persist()
        self._table_file.persist()
        self._the_journal.truncate(0)

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
            sums = np.array([tile.checksum], np.uint64)
            write_spans(list(self._table_spans(np.array([ordinal]), sums)))
            self._sums[ordinal] = tile.checksum
