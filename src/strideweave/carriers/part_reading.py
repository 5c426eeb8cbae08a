"""Reading slots of a tiled array out of the parts it is stored in, batch by batch.

A batch is arrays: the runs that the asked slots consist of, where each lies, and where its bytes go. It is sorted by
file and offset, so that what is adjacent in a file is read in one system call, and cut so that neither the arrays nor
the files open at once grow with what is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from strideweave.errors import FileChangedError
from strideweave.io.buffers import aligned_array
from strideweave.io.engine import ShortFileError, default_engine
from strideweave.io.file_pool import ChangedFile, FilePool, KnownFile, still_known
from strideweave.io.positioned import SpanBatch, SpanBlock
from strideweave.runtime.event_loop import current_runtime
from strideweave.runtime.workers import INLINE_BYTES, run_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from strideweave.io.files import OpenFile
    from strideweave.tiles.part_map import PartMap

    Integers = NDArray[np.int64]
    _Group = Sequence[tuple[int, slice]]

__all__ = ["PartTable", "SlotRuns", "changed", "read_parts", "slot_runs"]

MOST_RUNS = 4096
"""Runs that are looked for at once, at most: it takes about a fifth of a millisecond. Small ones that are read as
ranges take up to twice their size in memory meanwhile, which is 8 MiB."""

MOST_SPANS = 256
"""Spans that the engine is given at once, at most, as of tiles: more would hold up the loop by a millisecond."""

SMALL_PIECE = 1024
"""Bytes: pieces shorter than this that lie close together are read as one range, into memory beside, and copied."""

SPREAD_BYTES = 256 << 10
"""Bytes that such pieces are copied by at once."""

FEWEST_PIECES = 4
"""Such pieces to a range, at least, on average: for fewer the copy is not worth it."""


@dataclass(frozen=True, eq=False)
class PartTable:
    """Where a tiled array lies: which file each part is in, and where there.

    Attributes:
        name: the tensor, for errors.
        map: how runs of slots lie in the parts.
        itemsize: bytes of a slot.
        files: the files.
        file_of: for each part the place of its file in ``files``, row-major over ``map.parts_shape``; -1 for one that
            is nowhere, whose slots have the value ``fill``.
        offset_of: for each part its first byte in that file.
        fill: the bytes of that value.
    """

    name: str
    map: PartMap
    itemsize: int
    files: tuple[KnownFile, ...]
    file_of: NDArray[np.int32]
    offset_of: Integers
    fill: bytes = b""

    def find(self, runs: Integers) -> tuple[NDArray[np.int32], Integers]:
        """For each run its file, and its first byte there."""
        parts, elements = self.map.locate(runs)
        return self.file_of[parts], self.offset_of[parts] + elements * self.itemsize

    def tile_at(self, slot: int) -> tuple[int, ...]:
        """The coordinate of the tile that owns a slot."""
        grid = self.map.grid
        return grid.coordinate(grid.tile_of(slot))


class SlotRuns(NamedTuple):
    """Slots to read that lie in one piece each, all equally many.

    Attributes:
        slots: the first slot of each.
        places: the byte of memory that each begins at.
        length: slots of each; they are all of one run.
    """

    slots: Integers
    places: Integers
    length: int


class _Pieces(NamedTuple):
    """``SlotRuns`` that were found, sorted by file and offset."""

    files: NDArray[np.int32]
    offsets: Integers
    slots: Integers
    places: Integers
    nbytes: int


def slot_runs(table: PartTable, starts: Integers, slots: int, places: Integers) -> Iterator[SlotRuns]:
    """Cut spans of slots at the borders of runs, a bounded number at a time.

    Args:
        table: the parts.
        starts: first slot of each span.
        slots: slots of every span, at least 1.
        places: the byte of memory that each span begins at.
    """
    size, width = table.map.run_size, table.itemsize
    if slots % size == 0 and not (starts % size).any():  # whole tiles, nearly always
        if len(starts) * (slots // size) > MOST_RUNS:
            # In the order in which they lie, so that one batch has what is adjacent, which tile numbers need not be.
            files, offsets = table.find(starts // size)
            order = np.lexsort((offsets, files))
            starts, places = starts[order], places[order]
        yield from _whole(starts, slots // size, places, size, width)
        return
    for start, place in zip(starts.tolist(), places.tolist(), strict=True):
        first, end = np.array([start], np.int64), start + slots
        head = min(-start % size, slots)
        if head:
            yield SlotRuns(first, np.array([place], np.int64), head)
        count = (slots - head) // size
        if count:
            yield from _whole(first + head, count, np.array([place + head * width], np.int64), size, width)
        tail = slots - head - count * size
        if tail:
            at = np.array([place + (slots - tail) * width], np.int64)
            yield SlotRuns(np.array([end - tail], np.int64), at, tail)


def _whole(starts: Integers, count: int, places: Integers, size: int, width: int) -> Iterator[SlotRuns]:
    """Spans of ``count`` whole runs each."""
    spans = max(1, MOST_RUNS // count)
    for first in range(0, len(starts), spans):
        for step in range(0, count, MOST_RUNS):
            along = np.arange(step, min(count, step + MOST_RUNS), dtype=np.int64) * size
            yield SlotRuns(
                np.add.outer(starts[first : first + spans], along).reshape(-1),
                np.add.outer(places[first : first + spans], along * width).reshape(-1),
                size,
            )


async def read_parts(
    table: PartTable, starts: Integers, slots: int, memory: NDArray[np.uint8], places: Integers
) -> tuple[int, int]:
    """Read spans of slots into memory.

    Args:
        table: the parts.
        starts: first slot of each span.
        slots: slots of every span.
        memory: contiguous one-dimensional bytes.
        places: the byte of ``memory`` that each span goes to.

    Returns:
        How many bytes were read from the files, and in how many pieces.

    Raises:
        FileChangedError: a file is not what it was when it was opened; names file, tensor and tile.
        OSError: the system failed, with the path.
    """
    nbytes = pieces = 0
    if slots:
        pool = current_runtime().service(FilePool)
        for runs in slot_runs(table, starts, slots, places):
            found = _find(table, runs)
            absent = int(np.searchsorted(found.files, 0))
            if absent:
                found = await _fill_absent(table, found, absent, memory)
            for group in _groups(found, pool.capacity):
                nbytes += await _read_group(table, pool, found, group, memory)
            pieces += len(found.slots)
    return nbytes, pieces


def _find(table: PartTable, runs: SlotRuns) -> _Pieces:
    numbers, skipped = np.divmod(runs.slots, table.map.run_size)
    files, offsets = table.find(numbers)
    offsets = offsets + skipped * table.itemsize
    order = np.lexsort((offsets, files))
    nbytes = runs.length * table.itemsize
    return _Pieces(files[order], offsets[order], runs.slots[order], runs.places[order], nbytes)


async def _fill_absent(table: PartTable, pieces: _Pieces, absent: int, memory: NDArray[np.uint8]) -> _Pieces:
    """Fill in the first pieces, which lie in no file; gives the others."""
    value = np.frombuffer(table.fill, np.uint8)

    def fill(places: list[int]) -> None:
        for place in places:
            memory[place : place + pieces.nbytes].reshape(-1, table.itemsize)[...] = value

    await run_jobs([partial(fill, pieces.places[:absent].tolist())])
    files, offsets, slots, places, nbytes = pieces
    return _Pieces(files[absent:], offsets[absent:], slots[absent:], places[absent:], nbytes)


def _groups(pieces: _Pieces, most_files: int) -> Iterator[_Group]:
    """Which pieces are in which file, for as many files at a time as may be open."""
    if not len(pieces.files):
        return
    firsts = np.flatnonzero(np.append(True, np.diff(pieces.files))).tolist()
    bounds = zip(firsts, [*firsts[1:], len(pieces.files)], strict=True)
    entries = [(int(pieces.files[first]), slice(first, end)) for first, end in bounds]
    for first in range(0, len(entries), most_files):
        yield entries[first : first + most_files]


async def _read_group(
    table: PartTable, pool: FilePool, pieces: _Pieces, group: _Group, memory: NDArray[np.uint8]
) -> int:
    """Read the pieces in some files, and see that these are what they were all the while; gives the bytes read."""
    known = {table.files[number]: part for number, part in group}
    nbytes = 0
    try:
        async with pool.hold(list(known)) as files:
            blocks: list[SpanBlock] = []
            covers: list[tuple[_Cover, NDArray[np.uint8], slice]] = []
            for file, part in known.items():
                cover = _cover(pieces.offsets[part], pieces.nbytes)
                if cover is None:
                    offsets, places = pieces.offsets[part], pieces.places[part]
                    blocks.append(SpanBlock(files[file], offsets, memory, places, pieces.nbytes))
                else:
                    staging = aligned_array(cover.nbytes)
                    covers.append((cover, staging, part))
                    blocks += cover.blocks(files[file], staging)
            try:
                for batch in _batches(blocks):
                    await default_engine().read(batch)
                    nbytes += batch.total
            except ShortFileError as error:
                _check_all(files)  # which knows better what has happened
                raise _short(table, pieces, known, error) from error
            _check_all(files)
        for cover, staging, part in covers:
            await cover.spread(staging, memory, pieces.places[part])
    except ChangedFile as change:
        part = known[change.file]
        slot, offset = int(pieces.slots[part.start]), int(pieces.offsets[part.start])
        raise changed(table, change, slot, offset) from change.__cause__
    except OSError as error:
        error.add_note(f"while reading tensor {table.name!r}")
        raise
    return nbytes


def _batches(blocks: Sequence[SpanBlock]) -> Iterator[SpanBatch]:
    """Cut blocks into batches of a bounded number of spans."""
    batch: list[SpanBlock] = []
    room = MOST_SPANS
    for file, offsets, memory, starts, nbytes in [
        (block.file, block.offsets, block.memory, block.starts, block.nbytes) for block in blocks
    ]:
        first = 0
        while first < len(offsets):
            part = slice(first, first + room)
            batch.append(SpanBlock(file, offsets[part], memory, starts[part], nbytes))
            first += room
            room = MOST_SPANS - sum([len(block.offsets) for block in batch])
            if not room:
                yield SpanBatch(batch)
                batch, room = [], MOST_SPANS
    if batch:
        yield SpanBatch(batch)


class _Cover(NamedTuple):
    """Ranges of a file that small pieces lie in close together, read instead of the pieces.

    Attributes:
        starts: first byte of each range.
        lengths: bytes of each.
        sources: for each piece its first byte in the ranges, one after the other.
        piece: bytes of every piece.
    """

    starts: Integers
    lengths: Integers
    sources: Integers
    piece: int

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return int(self.lengths.sum())

    def blocks(self, file: OpenFile, staging: NDArray[np.uint8]) -> list[SpanBlock]:
        """What reads the ranges one after the other into memory."""
        places = np.cumsum(self.lengths) - self.lengths
        found = []
        for length in np.unique(self.lengths).tolist():
            which = np.flatnonzero(self.lengths == length)
            found.append(SpanBlock(file, self.starts[which], staging, places[which], length))
        return found

    async def spread(self, staging: NDArray[np.uint8], memory: NDArray[np.uint8], places: Integers) -> None:
        """Copy the pieces out of what was read to their places."""
        work = partial(self._spread, staging, memory, places)
        if len(places) * self.piece <= INLINE_BYTES:
            work()
        else:
            await run_jobs([work])

    def _spread(self, staging: NDArray[np.uint8], memory: NDArray[np.uint8], places: Integers) -> None:
        # Every run of so many bytes, as a row: fancy indexing then copies rows, a few at a time by way of the cache.
        from_ = sliding_window_view(staging, self.piece)
        to = sliding_window_view(memory, self.piece, writeable=True)
        step = max(1, SPREAD_BYTES // self.piece)
        for first in range(0, len(places), step):
            some = slice(first, first + step)
            to[places[some]] = from_[self.sources[some]]


def _cover(offsets: Integers, nbytes: int) -> _Cover | None:
    """The ranges that sorted pieces of one length lie in, where reading these is worth a copy; else None.

    A range goes on where the next piece is no further away than a piece is long, so less than twice the bytes of the
    pieces are read.
    """
    if nbytes >= SMALL_PIECE or len(offsets) < FEWEST_PIECES:
        return None
    begins = np.flatnonzero(np.append(True, np.diff(offsets) > 2 * nbytes))
    if len(begins) * FEWEST_PIECES > len(offsets):
        return None
    ends = np.append(begins[1:], len(offsets)) - 1
    starts = offsets[begins]
    lengths = offsets[ends] + nbytes - starts
    before = np.cumsum(lengths) - lengths
    counts = ends - begins + 1
    return _Cover(starts, lengths, offsets - np.repeat(starts - before, counts), nbytes)


def _check_all(files: Mapping[KnownFile, OpenFile]) -> None:
    for known, file in files.items():
        still_known(known, file.fd)


def changed(table: PartTable, change: ChangedFile, slot: int, offset: int) -> FileChangedError:
    """The error of a file that has changed, for whoever wanted a slot at an offset of it."""
    return FileChangedError(
        change.what,
        path=change.file.path,
        tensor=table.name,
        tile=table.tile_at(slot),
        offset=offset,
        wanted=change.wanted,
        found=change.found,
    )


def _short(
    table: PartTable, pieces: _Pieces, known: Mapping[KnownFile, slice], error: ShortFileError
) -> FileChangedError:
    """A file that ended early although its size says otherwise."""
    part = next((part for file, part in known.items() if file.path == error.path), slice(0, 1))
    inside = int(np.searchsorted(pieces.offsets[part], error.offset, side="right")) - 1
    return FileChangedError(
        "the file ended early",
        path=error.path,
        tensor=table.name,
        tile=table.tile_at(int(pieces.slots[part.start + max(inside, 0)])),
        offset=error.offset,
        wanted=f"{error.wanted} bytes",
        found=f"{error.got} bytes",
    )
