"""The bytes of tiles: where they lie, how they are copied, and the passages that announce them.

A fetch in progress is announced in ``_passages`` before its first await. Whoever needs one of its tiles waits
for the passage instead of reading again, so a missing tile is read once however many requests want it. A
passage also announces tiles whose pages are on their way back to the system, since they may not be filled
again before that is over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import numpy as np

from strideweave.carriers.move.operations import Transfer, run_transfers
from strideweave.carriers.move.planning import TransferBatch, TransferBlock
from strideweave.carriers.move.registry import dispatch_move
from strideweave.carriers.tiled_evictable.admission import Admission
from strideweave.carriers.tiled_evictable.passages import Passage, Staging
from strideweave.io.positioned import raise_first
from strideweave.io.scattered import ScatteredMemory
from strideweave.runtime.workers import INLINE_BYTES, run_jobs, share_bytes
from strideweave.tiles.compact import parts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.store import Places

    Ordinals = npt.NDArray[np.int64]
    TileRow = npt.NDArray[np.unsignedinteger]

__all__ = ["Transfers"]

# Large sets move in batches: preparing one takes about 2 ms, in which no other thread has the interpreter. More bytes,
# too: each batch takes the loop 0.3 ms and more, for which a worker lacks a processor.
_BATCH_TILES = 256
_BATCH_BYTES = 256 << 20
_BATCHES_AT_ONCE = 2  # so that workers and devices have the next one at hand when they are done with one


class Transfers(Admission):
    """The bytes of the tiles of one carrier."""

    def block(self, ordinals: Ordinals) -> tuple[npt.NDArray[np.unsignedinteger], Ordinals] | None:
        """The one array that all of these primary tiles are rows of, and which rows; None for several."""
        with self.lock:
            return self.primary.block(ordinals)

    def pieces(self, ordinals: Ordinals) -> ScatteredMemory | None:
        """These primary tiles, to be copied together; None where they lie so that this is not quick."""
        if not len(ordinals):
            return None
        with self.lock:
            addresses, owner = self.primary.addresses(ordinals)
        return ScatteredMemory.of(addresses, self.tile_bytes, self.unit, owner)

    def rows(self, ordinals: Ordinals) -> list[TileRow]:
        """The places of tiles in the primary tier, as rows of unsigned integers."""
        with self.lock:
            return self.rows_locked(ordinals)

    def rows_locked(self, ordinals: Ordinals) -> list[TileRow]:
        """As ``rows``, for a caller that holds the lock."""
        return self.primary.rows(ordinals)

    async def copy(self, pairs: Sequence[tuple[TileRow, TileRow]]) -> None:
        """Copy rows, ``(to, from)``: at once when they are small together, else in worker threads."""
        nbytes = sum([to.nbytes for to, _ in pairs])
        if nbytes > INLINE_BYTES:
            piece = share_bytes(nbytes)
            await run_jobs(
                [
                    partial(np.copyto, to[part], from_[part])
                    for to, from_ in pairs
                    for part in parts(len(to), max(1, -(-to.nbytes // piece)))
                ]
            )
            return
        for to, from_ in pairs:
            np.copyto(to, from_)

    async def write_back(self, ordinals: Ordinals, *, durable: bool = False) -> None:
        """Copy dirty tiles to the secondary tier, all or none; they stay primary, and clean.

        They are clean only once they are durable, where that is asked for.
        """
        ordinals = np.sort(ordinals)
        self.secondary.prepare_write()
        with self.secondary.writing(durable=durable):
            await self._in_batches(ordinals, self._write)
        if durable:
            await self.secondary.persist()
        with self.lock:
            self.secondary.commit_write(ordinals)
            self.table.commit_clean(ordinals)

    async def _write(self, ordinals: Ordinals) -> None:
        """Copy tiles to the places in the secondary tier that are theirs from the commit on."""
        with self.lock:
            transfers = self._transfers(
                self.primary.place_arrays(ordinals), self.secondary.write_places(ordinals)
            )
        await self._transfer(transfers, inbound=False)

    def _transfers(self, sources: Sequence[Places], destinations: Sequence[Places]) -> TransferBatch:
        """What copies the same tiles from some places to others."""
        return TransferBatch(
            [
                TransferBlock(source, starts, destination, at, self.grid.tile_size)
                for source, starts, destination, at in _matched(sources, destinations)
            ]
        )

    async def _transfer(self, transfers: Sequence[Transfer], *, inbound: bool) -> None:
        """Run one batch through the registered move, which is looked up anew each time."""
        if not len(transfers):
            return
        primary, secondary = self._classes
        operation = dispatch_move(secondary, primary) if inbound else dispatch_move(primary, secondary)
        nbytes = len(transfers) * self.tile_bytes
        self.count(in_flight_bytes=nbytes)
        try:
            await run_transfers(operation, transfers)
        finally:
            self.count(in_flight_bytes=-nbytes)
        if inbound:
            self.count(bytes_read=nbytes)
        else:
            self.count(bytes_written=nbytes)

    def _batches(self, ordinals: Ordinals) -> Iterator[Ordinals]:
        length = min(_BATCH_TILES, max(1, _BATCH_BYTES // self.tile_bytes))
        return (ordinals[first : first + length] for first in range(0, len(ordinals), length))

    async def _in_batches(self, ordinals: Ordinals, work: Callable[[Ordinals], Awaitable[None]]) -> None:
        """Have ``work`` done for tiles batch by batch, a few batches at a time, begun in order.

        Returns, or raises, when nothing of it is under way any more.

        Raises:
            BaseException: what went wrong first, with a note on what else did; what had not begun by then is left out.
        """
        todo = deque(self._batches(ordinals))
        errors: list[BaseException] = []

        async def lane() -> None:
            while todo:
                batch = todo.popleft()
                try:
                    await work(batch)
                except BaseException as error:  # whatever it is, it is not to come out in a group
                    todo.clear()
                    errors.append(error)
                    if isinstance(error, asyncio.CancelledError):
                        raise

        if len(todo) < 2:
            for batch in todo:
                await work(batch)
            return
        async with anyio.create_task_group() as lanes:
            for _ in range(_BATCHES_AT_ONCE):
                lanes.start_soon(lane)
        raise_first(errors)

    def _note_places(self, ordinals: Ordinals, *, placed: bool) -> None:
        """Tiles were given a place in the primary tier, or it was taken back. Under the lock."""
        self.counters.note_reserved(len(ordinals) if placed else -len(ordinals))
        if self.budget is not None:
            self.budget.note_places(ordinals, placed)
        self.counters.note_memory(self.memory_bytes)  # a small tile that leaves may keep a whole page warm

    def _sort_out(self, ordinals: Ordinals) -> tuple[dict[Passage, list[int]], Ordinals]:
        """The passages that some of these tiles are on, each with those tiles, and the tiles that are on none."""
        wanted = ordinals.tolist()
        if self._passages.keys().isdisjoint(wanted):
            return {}, ordinals
        passages: dict[Passage, list[int]] = {}
        mine: list[int] = []
        for ordinal in wanted:
            passage = self._passages.get(ordinal)
            if passage is None:
                mine.append(ordinal)
            else:
                passages.setdefault(passage, []).append(ordinal)
        return passages, np.array(mine, np.int64)

    @contextmanager
    def _passage(self, ordinals: Ordinals, staging: Staging | None = None) -> Iterator[Passage]:
        """Announce that tiles are on their way until the block ends, however it ends."""
        passage = Passage(staging)
        keys = ordinals.tolist()
        passages = self._passages
        outer = {key: passages[key] for key in passages.keys() & keys}
        passages.update(dict.fromkeys(keys, passage))
        try:
            yield passage
        finally:
            for key in keys:
                passages.pop(key, None)  # None: the request was cut off meanwhile
            passages.update(outer)
            passage.done.set()


def _matched(
    sources: Sequence[Places], destinations: Sequence[Places]
) -> Iterator[tuple[Carrier, Ordinals, Carrier, Ordinals]]:
    """Pair the places of the same tiles in two tiers, for each pair of carriers those that they have in common."""
    for which, source, starts in sources:
        for others, destination, places in destinations:
            if which is None and others is None:
                yield source, starts, destination, places
            elif others is None:
                yield source, starts, destination, places[which]
            elif which is None:
                yield source, starts[others], destination, places
            else:
                _, mine, theirs = np.intersect1d(which, others, assume_unique=True, return_indices=True)
                if len(mine):
                    yield source, starts[mine], destination, places[theirs]
