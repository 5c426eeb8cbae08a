"""Reading slots of a tiled array out of the parts it is stored in, batch by batch.

A batch is arrays: the runs that the asked slots consist of, where each lies, and where its bytes go. It is sorted by
file and offset, so that what is adjacent in a file is read in one system call, and cut so that neither the arrays nor
the files open at once grow with what is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strideweave.carriers.part_cover import find_covers
from strideweave.errors import FileChangedError
from strideweave.io.engine import ShortFileError, default_engine
from strideweave.io.file_pool import ChangedFile, FilePool, KnownFile, still_known
from strideweave.io.positioned import SpanBatch, SpanBlock
from strideweave.runtime.event_loop import current_runtime
from strideweave.runtime.workers import run_jobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from strideweave.carriers.part_cover import Cover, StagingArea
    from strideweave.io.files import OpenFile
    from strideweave.tiles.part_map import PartMap

    Integers: TypeAlias = NDArray[np.int64]
    _Group: TypeAlias = Sequence[tuple[int, "_Pieces"]]

__all__ = ["PartTable", "SlotRuns", "SlotSpans", "changed", "read_parts", "slot_runs"]

MOST_RUNS = 4096
"""Runs that are looked for at once, at most: it takes about a fifth of a millisecond."""

MOST_BESIDE = 16
"""Tiles that are looked for together though each of them alone has more runs than are looked for at once."""

MOST_SPANS = 256
"""Spans that the engine is given at once, at most, as of tiles: more would hold up the loop by a millisecond."""


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


class SlotSpans(NamedTuple):
    """Spans of slots to read into one memory.

    Attributes:
        starts: first slot of each span.
        slots: slots of every span.
        memory: contiguous one-dimensional bytes.
        places: the byte of ``memory`` that each span goes to.
    """

    starts: Integers
    slots: int
    memory: NDArray[np.uint8]
    places: Integers


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
    memory: NDArray[np.uint8]

    def part(self, part: slice) -> _Pieces:
        """Some of them, neighbours in this order."""
        files, offsets, slots, places, nbytes, memory = self
        return _Pieces(files[part], offsets[part], slots[part], places[part], nbytes, memory)


class _Covered(NamedTuple):
    """Pieces of one file that are read as ranges."""

    file: OpenFile
    cover: Cover
    pieces: _Pieces


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
    """Spans of ``count`` whole runs each; of long ones a part of many, whose runs may lie beside each other."""
    spans = min(len(starts), max(MOST_BESIDE, MOST_RUNS // count))
    length = MOST_RUNS // spans
    for first in range(0, len(starts), spans):
        for step in range(0, count, length):
            along = np.arange(step, min(count, step + length), dtype=np.int64) * size
            yield SlotRuns(
                np.add.outer(starts[first : first + spans], along).reshape(-1),
                np.add.outer(places[first : first + spans], along * width).reshape(-1),
                size,
            )


async def read_parts(table: PartTable, spans: Iterable[SlotSpans], area: StagingArea) -> tuple[int, int]:
    """Read spans of slots into memory.

    Args:
        table: the parts.
        spans: the spans, memory by memory; together they are as few batches as their number allows.
        area: memory for small pieces that are read as ranges.

    Returns:
        How many bytes were read from the files, and in how many pieces.

    Raises:
        FileChangedError: a file is not what it was when it was opened; names file, tensor and tile.
        OSError: the system failed, with the path.
    """
    nbytes = pieces = waiting = 0
    batch: list[_Pieces] = []
    for starts, slots, memory, places in spans:
        for runs in slot_runs(table, starts, slots, places) if slots else ():
            batch.append(await _fill_absent(table, _find(table, runs, memory)))
            pieces += len(runs.slots)
            waiting += len(runs.slots)
            if waiting >= MOST_RUNS:
                nbytes += await _read_batch(table, batch, area)
                batch, waiting = [], 0
    if batch:
        nbytes += await _read_batch(table, batch, area)
    return nbytes, pieces


async def _read_batch(table: PartTable, batch: Sequence[_Pieces], area: StagingArea) -> int:
    """Read pieces, from as many files at a time as may be open; gives the bytes read."""
    pool = current_runtime().service(FilePool)
    return sum([await _read_group(table, pool, group, area) for group in _groups(batch, pool.capacity)])


def _find(table: PartTable, runs: SlotRuns, memory: NDArray[np.uint8]) -> _Pieces:
    numbers, skipped = np.divmod(runs.slots, table.map.run_size)
    files, offsets = table.find(numbers)
    offsets = offsets + skipped * table.itemsize
    order = np.lexsort((offsets, files))
    nbytes = runs.length * table.itemsize
    return _Pieces(files[order], offsets[order], runs.slots[order], runs.places[order], nbytes, memory)


async def _fill_absent(table: PartTable, pieces: _Pieces) -> _Pieces:
    """Fill in the pieces that lie in no file, which are the first; gives the others."""
    absent = int(np.searchsorted(pieces.files, 0))
    if not absent:
        return pieces
    value = np.frombuffer(table.fill, np.uint8)

    def fill(places: list[int]) -> None:
        for place in places:
            pieces.memory[place : place + pieces.nbytes].reshape(-1, table.itemsize)[...] = value

    await run_jobs([partial(fill, pieces.places[:absent].tolist())])
    return pieces.part(slice(absent, None))


def _groups(batch: Sequence[_Pieces], most_files: int) -> Iterator[_Group]:
    """The pieces of a batch file by file, for as many files at a time as may be open."""
    entries: list[tuple[int, _Pieces]] = []
    for pieces in batch:
        borders = (np.flatnonzero(np.diff(pieces.files)) + 1).tolist()
        for first, end in pairwise([0, *borders, len(pieces.files)]):
            if first < end:
                entries.append((int(pieces.files[first]), pieces.part(slice(first, end))))
    entries.sort(key=itemgetter(0))
    group: list[tuple[int, _Pieces]] = []
    for number, entry in entries:
        if group and number != group[-1][0] and len({place for place, _ in group}) == most_files:
            yield group
            group = []
        group.append((number, entry))
    if group:
        yield group


async def _read_group(table: PartTable, pool: FilePool, group: _Group, area: StagingArea) -> int:
    """Read the pieces in some files, and see that these are what they were all the while; gives the bytes read."""
    parts = [(table.files[number], pieces) for number, pieces in group]
    nbytes = 0
    try:
        async with pool.hold(list(dict.fromkeys([known for known, _ in parts]))) as files:
            direct: list[SpanBlock] = []
            covered: list[_Covered] = []
            for known, pieces in parts:
                for part, cover in find_covers(pieces.offsets, pieces.nbytes, area.load_bytes):
                    if cover is None:
                        _, offsets, _, places, length, memory = pieces.part(part)
                        direct.append(SpanBlock(files[known], offsets, memory, places, length))
                    else:
                        covered.append(_Covered(files[known], cover, pieces.part(part)))
            try:
                nbytes += await _read_blocks(direct)
                for load in _loads(covered, area.load_bytes):
                    async with area.hold(sum([one.cover.nbytes for one in load])) as staging:
                        lying = list(zip(load, _portions(staging, load), strict=True))
                        nbytes += await _read_blocks(
                            [block for one, there in lying for block in one.cover.blocks(one.file, there)]
                        )
                        _check_all(files)
                        for one, there in lying:
                            await one.cover.spread(there, one.pieces.memory, one.pieces.places)
            except ShortFileError as error:
                _check_all(files)  # which knows better what has happened
                raise _short(table, parts, error) from error
            _check_all(files)
    except ChangedFile as change:
        pieces = next(pieces for known, pieces in parts if known is change.file)
        raise changed(table, change, int(pieces.slots[0]), int(pieces.offsets[0])) from change.__cause__
    except OSError as error:
        error.add_note(f"while reading tensor {table.name!r}")
        raise
    return nbytes


def _loads(covered: Sequence[_Covered], most: int) -> Iterator[list[_Covered]]:
    """Covers of at most so many bytes together, each of which has no more."""
    load: list[_Covered] = []
    nbytes = 0
    for one in covered:
        if nbytes + one.cover.nbytes > most:
            yield load
            load, nbytes = [], 0
        load.append(one)
        nbytes += one.cover.nbytes
    if load:
        yield load


def _portions(staging: NDArray[np.uint8], load: Sequence[_Covered]) -> Iterator[NDArray[np.uint8]]:
    """The memory of each cover of a load."""
    first = 0
    for one in load:
        yield staging[first : first + one.cover.nbytes]
        first += one.cover.nbytes


async def _read_blocks(blocks: Sequence[SpanBlock]) -> int:
    """Read blocks, some spans at a time; gives the bytes read."""
    nbytes = 0
    for batch in _batches(blocks):
        await default_engine().read(batch)
        nbytes += batch.total
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
    table: PartTable, parts: Sequence[tuple[KnownFile, _Pieces]], error: ShortFileError
) -> FileChangedError:
    """A file that ended early although its size says otherwise."""
    pieces = next((pieces for known, pieces in parts if known.path == error.path), parts[0][1])
    inside = int(np.searchsorted(pieces.offsets, error.offset, side="right")) - 1
    return FileChangedError(
        "the file ended early",
        path=error.path,
        tensor=table.name,
        tile=table.tile_at(int(pieces.slots[max(inside, 0)])),
        offset=error.offset,
        wanted=f"{error.wanted} bytes",
        found=f"{error.got} bytes",
    )
