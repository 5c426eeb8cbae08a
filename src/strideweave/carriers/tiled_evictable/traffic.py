"""The tiles of one carrier on the move: fetching, streaming, writing back, dropping.

``TileTraffic`` owns what the requests of a tiled carrier share: the lock, the ledger, the residency table and
the stores of the two tiers. Its coroutines run in the runtime's loop only; other threads enter requests, read
states and write slots under the lock.

A fetch in progress is announced in ``_passages`` before its first await. Whoever needs one of its tiles waits
for the passage instead of reading again, so a missing tile is read once however many requests want it. A
passage also announces tiles whose pages are on their way back to the system, since they may not be filled
again before that is over.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.move.operations import Transfer, run_transfers
from strideweave.carriers.move.registry import dispatch_move
from strideweave.carriers.tiled_evictable.budget import Budget, Need, make_room
from strideweave.carriers.tiled_evictable.passages import Passage, Staging, joined
from strideweave.carriers.tiled_evictable.statistics import TrafficCounters
from strideweave.carriers.tiled_evictable.store import tile_rows
from strideweave.errors import InvalidTileError
from strideweave.runtime.locks import short_lock
from strideweave.runtime.workers import INLINE_BYTES, run_jobs
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.ledger import Ledger, LedgerEntry
from strideweave.tiles.residency import Location, ResidencyTable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.budget import Grant
    from strideweave.carriers.tiled_evictable.store import Leftovers, PrimaryStore, SecondaryStore
    from strideweave.runtime.await_result import AwaitResult
    from strideweave.tiles.grid import TileGrid
    from strideweave.tiles.plan import RequestPlan

    Ordinals = npt.NDArray[np.int64]
    TileRow = npt.NDArray[np.unsignedinteger]
    Places = Iterator[tuple[Carrier, int]]
    Consumer = Callable[[Ordinals, list[TileRow]], Awaitable[None]]
    Landing = Callable[[Ordinals], tuple[Carrier, list[int]]]

__all__ = ["STAGING_BYTES", "Changes", "TileTraffic"]

STAGING_BYTES = (
    8 << 20
)  # a request stages at most this much, or one tile, of what streams past the primary tier
# Large sets move in batches: preparing one takes about 2 ms, in which no other thread has the interpreter.
_BATCH_TILES = 256
_BATCH_BYTES = 32 << 20
_RELEASE_PIECE = 4 << 20  # returning more bytes than this to the system is work for a worker thread

_logger = logging.getLogger("strideweave")


@dataclass(slots=True, eq=False)
class Changes:
    """What one data request did to residency, so that its failure can be undone.

    Attributes:
        promoted: tiles it made primary.
        dropped: tiles it evicted before it fetched.
    """

    promoted: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


class TileTraffic:
    """The tiles of one carrier: who needs them, where they are, and how they move.

    Args:
        grid: the tile grid.
        prototype: a carrier of the primary tier's kind, which allocates staging memory.
        primary: where tiles lie in the primary tier.
        secondary: where tiles lie in the secondary tier.
        classes: the exact classes of the primary and the secondary tier, for the move registry.
        start: where every tile is at the beginning.
        memory_limit: bytes that tiles may take in memory, or None.
    """

    def __init__(
        self,
        grid: TileGrid,
        *,
        prototype: Carrier,
        primary: PrimaryStore,
        secondary: SecondaryStore,
        classes: tuple[type[Carrier], type[Carrier]],
        start: Location,
        memory_limit: int | None = None,
    ) -> None:
        self.lock = short_lock  # what a request's cleanup touches has to be whole in a forked child
        self.grid = grid
        self.prototype = prototype
        self.tile_bytes = grid.tile_size * prototype.dtype().itemsize
        self.primary = primary
        self.secondary = secondary
        self.table = ResidencyTable(grid.tile_count, start)
        self.ledger = Ledger(grid)
        self.counters = TrafficCounters()
        self.counters.note_reserved(self.table.resident_count)
        self.counters.note_memory(self.memory_bytes)
        self.budget: Budget | None = None
        if memory_limit is not None:
            self.budget = Budget(memory_limit, self.tile_bytes, self.table, self.ledger, self.counters)
        self._classes = classes
        self.unit = np.dtype(f"u{prototype.dtype().itemsize}")
        self._passages: dict[int, Passage] = {}
        self._provisional: set[int] = (
            set()
        )  # fetched by one request only, whose failure takes them away again

    # Entering and leaving: any thread

    def enter_data(self, kind: str, plan: RequestPlan) -> LedgerEntry:
        """Admit a data request, or raise with nothing changed.

        Raises:
            InvalidTileError: a required tile has no value yet.
            TileConflictError: a required tile is covered by an unfinished residency request.
        """
        with self.lock:
            if plan.reads:
                self.require_valid(kind, plan.required)
            held = plan.required
            if len(plan.extra) or len(plan.retain):
                changing = self.ledger.changing
                extra = plan.extra[self.table.is_valid(plan.extra) & ~changing[plan.extra]]
                retain = plan.retain[self.table.is_resident(plan.retain) & ~changing[plan.retain]]
                held = np.unique(np.concatenate((held, extra, retain)))
            entry = self.ledger.enter_data(kind, held)
            if self.counters.put_off or self._provisional:
                self.keep(set(held.tolist()) - set(plan.passing.tolist()))
            return entry

    def keep(self, ordinals: Iterable[int]) -> None:
        """Somebody wants these tiles primary: neither a planned eviction nor a failure takes them away any more.

        Called under the lock.
        """
        self.counters.put_off.difference_update(ordinals)
        self._provisional.difference_update(ordinals)

    def cover(self, kind: str, ordinals: Ordinals) -> LedgerEntry:
        """Admit a request that changes all of these tiles, or raise with nothing changed; under the lock.

        Raises:
            TileConflictError: unfinished work needs, moves or covers one of the tiles.
        """
        entry = self.ledger.enter_residency(kind, ordinals, np.ones(len(ordinals), np.bool_))
        self.keep(ordinals.tolist())
        return entry

    def check_data(self, kind: str, required: Ordinals, *, reads: bool = True) -> None:
        """Raise what ``enter_data`` would raise now, and admit nothing."""
        with self.lock:
            if reads:
                self.require_valid(kind, required)
            self.ledger.check_data(kind, required)

    def leave(self, entry: LedgerEntry) -> None:
        """Strike a request off, whatever became of it; never blocks, and a second call does nothing."""
        with self.lock:
            freed = self.ledger.leave(entry)
            if self.budget is not None:
                self.budget.release(entry)
                self._wake()
            if self.ledger.is_empty:
                self._come_to_rest()
        finish(freed)

    def _come_to_rest(self) -> None:
        """No request is left, so nothing is under way: forget what the tasks of cut-off requests left behind.

        A task ends what it began, but not where its request is cut off, in the child of a fork or by the end of
        the loop. Places it had reserved then stay unused: a thread of that loop may still write to them.
        """
        self._passages.clear()
        self._provisional.clear()
        self.counters.in_flight_bytes = self.counters.staging_bytes = self.counters.leaving_bytes = 0
        self.counters.reserved_tiles = self.table.resident_count
        if self.budget is not None:
            self.budget.come_to_rest()

    def require_valid(self, kind: str, ordinals: Ordinals) -> None:
        """Refuse tiles without a value; call it under the lock.

        Raises:
            InvalidTileError: as said.
        """
        valid = self.table.is_valid(ordinals)
        if np.count_nonzero(valid) < len(ordinals):
            missing = self.grid.coordinates(ordinals[~valid][:4])
            raise InvalidTileError(
                f"{kind} needs {np.count_nonzero(~valid)} tiles that have no value yet, such as "
                f"{', '.join(map(str, missing))}; give them values first"
            )

    # The memory limit

    @property
    def memory_bytes(self) -> int:
        """Bytes of tiles in memory: with a place or on the way from one, kept warm, or staged. Under the lock."""
        counters = self.counters
        places = counters.reserved_tiles * self.tile_bytes + counters.leaving_bytes
        return places + self.primary.recycled_bytes + counters.staging_bytes

    def check_fits(self, kind: str, tiles: int, staging_bytes: int) -> None:
        """Refuse, before any work, a request that the memory limit could never hold.

        Args:
            kind: the name of the request, for messages.
            tiles: how many tiles it needs primary at once.
            staging_bytes: what it has to stage besides, at the least.

        Raises:
            MemoryError: as said.
        """
        if self.budget is not None:
            self.budget.check(kind, tiles, staging_bytes)

    def staging_room(self, most: int, tiles: int = 0) -> int:
        """How many bytes a request is to stage, a tile at the least and no more than a quarter of the limit.

        Args:
            most: what it could make use of.
            tiles: how many tiles it needs primary besides.
        """
        if self.budget is None:
            return most
        limit = self.budget.limit
        room = max(self.tile_bytes, min(limit // 4, limit - tiles * self.tile_bytes))
        return min(most, room // self.tile_bytes * self.tile_bytes)

    def check_plan(self, kind: str, plan: RequestPlan, *, in_place: bool = False) -> int:
        """Refuse a plan that the memory limit could never hold, and say what it is to stage.

        Args:
            kind: the name of the request, for messages.
            plan: its tiles.
            in_place: whether tiles that stream are read to where they are wanted, so that none are staged.

        Returns:
            The bytes for ``reserve_plan``.

        Raises:
            MemoryError: as said.
        """
        if self.budget is None:
            return 0
        tiles = len(plan.staying)
        if len(plan.extra):
            with self.lock:
                promoted = self.table.is_valid(plan.extra) & ~self.ledger.changing[plan.extra]
            tiles += int(np.count_nonzero(promoted))
        staged = 0 if in_place else len(plan.passing)
        self.check_fits(kind, tiles, self.tile_bytes if staged else 0)
        most = min(staged * self.tile_bytes, max(STAGING_BYTES, self.tile_bytes))
        return self.staging_room(most, tiles) if staged else 0

    async def reserve_plan(
        self, entry: LedgerEntry, plan: RequestPlan, staging_bytes: int, changes: Changes
    ) -> None:
        """``reserve`` what a plan needs; tiles that it evicts early make room before others.

        Raises:
            OSError, MemoryError, RuntimeError: as ``reserve``.
        """
        if self.budget is not None:
            staying = plan.staying
            if len(plan.extra):
                staying = np.concatenate((staying, self._planned(entry, plan)))
            await self.reserve(
                entry, staying, staging_bytes, passing=plan.passing, first=plan.early, changes=changes
            )

    async def reserve(
        self,
        entry: LedgerEntry,
        staying: Ordinals,
        staging_bytes: int,
        *,
        passing: Ordinals | None = None,
        first: Ordinals = NO_ORDINALS,
        changes: Changes | None = None,
    ) -> None:
        """Wait until the memory limit has room for all that a request needs, and take it, until it leaves.

        Requests get their turn in the order in which they ask. To make room, tiles leave that no granted request
        holds, the least recently used first. Without a limit this returns at once.

        Args:
            entry: the request. The other tiles that it holds stay primary too from then on, where they are.
            staying: distinct tiles, held by it, that it makes primary.
            staging_bytes: what it stages.
            passing: tiles that are staged if any of them is missing when it is the request's turn, and else need
                no staging; None takes the staging in any case.
            first: tiles to evict first.
            changes: where to note the tiles that left, of a request whose failure is to be undone.

        Raises:
            OSError, MemoryError, RuntimeError: a tile could not be written back; it stays as it was.
        """
        if self.budget is not None:
            evicted = [] if changes is None else changes.dropped
            need = Need(entry, staying, staging_bytes, passing=passing, first=first)
            await make_room(self, self.budget, need, evicted)

    def touch(self, ordinals: Ordinals) -> None:
        """Tiles were used, which counts under a memory limit only. Under the lock."""
        if self.budget is not None:
            self.budget.touch(ordinals)

    def _wake(self) -> None:
        """Whoever waits for room looks again."""
        if self.budget is not None:
            self.budget.wake()

    def _release_room(self, entry: LedgerEntry) -> None:
        """A request makes no more use of what was reserved for it. Under the lock."""
        if self.budget is not None:
            self.budget.release(entry)

    # Fetching: loop thread

    async def bring_all(self, entry: LedgerEntry, ordinals: Ordinals) -> None:
        """Make every tile of a residency request primary, all or none, and leave the others as they were.

        Raises:
            OSError, MemoryError, RuntimeError: the transfer's own error.
        """
        changes, complete = Changes(), False
        try:
            await self.reserve(entry, ordinals, 0, changes=changes)
            missing = ordinals[~self.table.is_resident(ordinals)]
            if len(missing):
                await self.fetch(entry, missing)
            complete = True
        finally:
            if not complete and changes.dropped:
                await self._restore(entry, changes.dropped)

    def has_all(self, plan: RequestPlan) -> bool:
        """Tell whether a request finds every tile resident and leaves all as it is; counts the hits then."""
        if len(plan.passing) or len(plan.extra) or len(plan.early) or self.counters.put_off:
            return False
        hits = len(plan.required)
        if np.count_nonzero(self.table.is_resident(plan.required)) < hits:
            return False
        with self.lock:
            self.counters.hits += hits
            self.touch(plan.required)
        return True

    async def bring(self, entry: LedgerEntry, plan: RequestPlan, changes: Changes) -> None:
        """Make every required tile that stays, and every planned one, primary.

        Args:
            entry: the request.
            plan: its tiles.
            changes: filled with what was done, also when the call fails.

        Raises:
            OSError, MemoryError, RuntimeError: the transfer's own error.
        """
        if len(plan.early):
            changes.dropped += await self.drop_unneeded(entry, plan.early)
        todo = plan.staying
        resident = self.table.is_resident(todo)
        hits = int(np.count_nonzero(resident))
        with self.lock:
            self.counters.hits += hits
        missing = len(todo) - hits
        if not missing and not len(plan.extra):
            return
        todo = todo[~resident]
        if len(plan.extra):
            todo = np.concatenate((todo, self._planned(entry, plan)))
        misses, counted = 0, plan.required if plan.reads else NO_ORDINALS
        while len(todo := todo[~self.table.is_resident(todo)]):
            passages, mine = self._sort_out(todo)
            with joined(passages, self._unstage) as arriving:
                if len(mine):
                    await self.fetch(entry, mine, changes)
                    misses += int(np.count_nonzero(np.isin(mine, counted))) if len(plan.extra) else len(mine)
                for passage in arriving:
                    await passage.done.wait()
                    await self._adopt_staged(entry, passage, todo, changes)
        self.count(misses=misses, shared=missing - misses)

    def _planned(self, entry: LedgerEntry, plan: RequestPlan) -> Ordinals:
        """The tiles that a plan promotes besides; one that the request does not hold is somebody else's."""
        return plan.extra[np.isin(plan.extra, entry.needs) & self.table.is_valid(plan.extra)]

    async def fetch(self, entry: LedgerEntry, ordinals: Ordinals, changes: Changes | None = None) -> None:
        """Make missing tiles primary, all or none; ``entry`` holds them and nobody else moves them.

        Args:
            entry: the request.
            ordinals: the tiles.
            changes: where to note them, of a request whose failure is to be undone.
        """

        async def fill(batch: Ordinals) -> None:
            implicit = self.table.is_implicit(batch)
            stored = batch[~implicit]
            with self.lock:
                transfers = self._transfers(self.secondary.places(stored), self.primary.places(stored))
            await self._transfer(transfers, inbound=True)
            if implicit.any():
                zero = np.broadcast_to(np.zeros(1, self.unit), self.grid.tile_size)
                await self.copy([(row, zero) for row in self.rows(batch[implicit])])

        await self._promote(entry, np.sort(ordinals), fill, changes)

    async def _adopt_staged(
        self, entry: LedgerEntry, passage: Passage, todo: Ordinals, changes: Changes
    ) -> None:
        """Make tiles primary from rows that another request streamed, instead of reading them again."""
        wanted = [o for o in todo.tolist() if o in passage.staged and o not in self._passages]
        ordinals = np.array(wanted, np.int64)
        ordinals = ordinals[~self.table.is_resident(ordinals)]
        if len(ordinals):

            async def fill(batch: Ordinals) -> None:
                rows = [passage.staged[ordinal] for ordinal in batch.tolist()]
                await self.copy(list(zip(self.rows(batch), rows, strict=True)))

            await self._promote(entry, ordinals, fill, changes)

    async def _promote(
        self,
        entry: LedgerEntry,
        ordinals: Ordinals,
        fill: Callable[[Ordinals], Awaitable[None]],
        changes: Changes | None,
    ) -> None:
        """Reserve places and fill them, batch by batch, and commit all, or give the places back."""

        def commit() -> None:
            self.table.commit_promotion(ordinals)
            if changes is not None:
                promoted = ordinals.tolist()
                changes.promoted += promoted
                self._provisional.difference_update(promoted)
                self._provisional.update(ordinals[self.ledger.needed[ordinals] == 1].tolist())

        await self.install(entry, ordinals, fill, commit)

    async def install(
        self,
        entry: LedgerEntry,
        ordinals: Ordinals,
        fill: Callable[[Ordinals], Awaitable[None]],
        commit: Callable[[], None],
        *,
        complete: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Give tiles that are not primary a place and a value there, all or none.

        Args:
            entry: the request, which holds the tiles.
            ordinals: the tiles, ascending.
            fill: gives a batch of them its values, at places that were reserved for it.
            commit: says that they are primary now; called under the lock.
            complete: what has to be done once every tile is filled, still before the commit.
        """
        with self._passage(ordinals):
            with self.lock:
                self.ledger.begin_move(entry, ordinals)
            reserved, filled = 0, False
            try:
                for batch in self._batches(ordinals):
                    self.primary.make_room(len(batch))  # outside the lock: that is for a few plain statements
                    with self.lock:
                        self.primary.reserve(batch)
                        self._note_places(batch, placed=True)
                    reserved += len(batch)
                    await fill(batch)
                if complete is not None:
                    await complete()
                filled = True
            finally:
                if not filled:
                    await self._vacate(entry, ordinals[:reserved])
                    with self.lock:
                        self.ledger.end_move(entry, ordinals[reserved:])
                        freed = self.ledger.take_freed()
                    finish(freed)
            with self.lock:
                commit()
                if self.budget is not None:
                    self.budget.note_promoted(ordinals)
                self.ledger.end_move(entry, ordinals)
                self.counters.promotions += len(ordinals)

    def _note_places(self, ordinals: Ordinals, *, placed: bool) -> None:
        """Tiles were given a place in the primary tier, or it was taken back. Under the lock."""
        self.counters.note_reserved(len(ordinals) if placed else -len(ordinals))
        if self.budget is not None:
            self.budget.note_places(ordinals, placed)
        if placed:
            self.counters.note_memory(self.memory_bytes)

    async def stream(
        self,
        ordinals: Ordinals,
        consume: Consumer,
        landing: Landing | None = None,
        *,
        entry: LedgerEntry | None = None,
    ) -> None:
        """Hand over the values of tiles that do not stay, wave by wave, without making them primary.

        Tiles that are primary by now are handed over from there.

        Args:
            ordinals: distinct tiles that the calling request holds.
            consume: called with ordinals and one row of values for each, which are valid until it returns.
            landing: gives for tiles the carrier and the first slots where the caller wants them, if that is one
                run of slots for each. Tiles that have to be read are then read to there, and not handed over.
            entry: the calling request, which has reserved its staging; only a memory limit asks for it.
        """
        at_hand = int(np.count_nonzero(self.table.is_resident(ordinals) | self.table.is_implicit(ordinals)))
        missing = len(ordinals) - at_hand
        missed: set[int] = set()

        async def hand_over(wave: Ordinals, rows: list[TileRow]) -> None:
            nonlocal ordinals
            await consume(wave, rows)
            ordinals = ordinals[~np.isin(ordinals, wave)]

        while len(ordinals):
            resident = ordinals[self.table.is_resident(ordinals)]
            implicit = ordinals[self.table.is_implicit(ordinals)]
            if len(resident):
                await hand_over(resident, self.rows(resident))
            elif len(implicit):
                await hand_over(implicit, [np.zeros(self.grid.tile_size, self.unit)] * len(implicit))
            else:
                passages, mine = self._sort_out(ordinals)
                if len(mine) and landing is not None:
                    landed = await self._read_in_place(np.sort(mine), landing)
                    missed.update(landed)
                    ordinals = ordinals[~np.isin(ordinals, landed)]
                elif len(mine):
                    await self._read_waves(entry, np.sort(mine), missed, hand_over)
                else:
                    with joined(passages, self._unstage) as arriving:
                        for passage in arriving:
                            await passage.done.wait()
                            ready = [ordinal for ordinal in ordinals.tolist() if ordinal in passage.staged]
                            rows = [passage.staged[ordinal] for ordinal in ready]
                            await hand_over(np.array(ready, np.int64), rows)
        self.count(hits=at_hand, misses=len(missed), streamed=len(missed), shared=missing - len(missed))

    async def _read_in_place(self, ordinals: Ordinals, landing: Landing) -> list[int]:
        """Read missing tiles to where they are wanted; gives those that no other request has claimed."""
        landed: list[int] = []
        lent: list[Passage] = []
        for batch in self._batches(ordinals):
            wave = self._unclaimed(batch)
            if not len(wave):
                continue
            with self._passage(wave) as passage:
                rows = await self._read(wave, *landing(wave))
                # Whose place this is may write to it before the others have read.
                if passage.readers and self.budget is None:
                    rows = await self._copies(passage, rows)
                elif passage.readers:  # no room for copies: so it is not given back before they have
                    lent.append(passage)
                passage.staged = dict(zip(wave.tolist(), rows, strict=True))
            landed += wave.tolist()
        for passage in lent:
            await passage.empty()
        return landed

    async def _copies(self, passage: Passage, rows: list[TileRow]) -> list[TileRow]:
        """Copy rows that others have joined in for, and leave the copies to them."""
        staging = self._stage(len(rows))
        try:
            passage.stage_in(staging)
            copies = list(tile_rows(staging.carrier, self.grid.tile_size))
            await self.copy(list(zip(copies, rows, strict=True)))
        finally:
            self._unstage(staging)
        return copies

    async def _read_waves(
        self, entry: LedgerEntry | None, ordinals: Ordinals, missed: set[int], hand_over: Consumer
    ) -> None:
        grant = None if self.budget is None else self.budget.grant_of(entry)
        most = STAGING_BYTES if grant is None else grant.staging - grant.used
        per_wave = min(len(ordinals), max(1, most // self.tile_bytes))
        staging: Staging | None = None
        try:
            for first in range(0, len(ordinals), per_wave):
                wave = self._unclaimed(ordinals[first : first + per_wave])
                if not len(wave):
                    continue
                if staging is None:
                    staging = self._stage(per_wave, grant)
                with self._passage(wave, staging) as passage:
                    size = self.grid.tile_size
                    starts = [index * size for index in range(len(wave))]
                    rows = await self._read(wave, staging.carrier, starts)
                    passage.staged = dict(zip(wave.tolist(), rows, strict=True))
                missed.update(wave.tolist())
                await hand_over(wave, rows)
                if passage.readers and grant is None:  # leave that memory to those who still read these rows
                    self._unstage(staging)
                    staging = None
                elif passage.readers and first + per_wave < len(ordinals):  # there is room for no other
                    await passage.empty()
        finally:
            if staging is not None:
                self._unstage(staging)

    def stage(self, entry: LedgerEntry, slots: int) -> Staging:
        """Stage some slots of what a request has reserved; ``_unstage`` gives them back.

        Raises:
            MemoryError: the system has no such memory.
        """
        return self._stage_for(slots, None if self.budget is None else self.budget.grant_of(entry))

    def _stage(self, tiles: int, grant: Grant | None = None) -> Staging:
        return self._stage_for(tiles * self.grid.tile_size, grant)

    def _stage_for(self, slots: int, grant: Grant | None) -> Staging:
        staging = Staging(self.stage_slots(slots), slots * self.tile_bytes // self.grid.tile_size, grant)
        if grant is not None:
            with self.lock:
                grant.used += staging.nbytes
        return staging

    def _unstage(self, staging: Staging) -> None:
        """Staged memory has a user less; the last one gives it back."""
        staging.users -= 1
        if staging.users:
            return
        self.unstage(staging.carrier)
        if self.budget is not None and staging.grant is not None:
            with self.lock:
                self.budget.unstage(staging.grant, staging.nbytes)

    def stage_slots(self, slots: int) -> Carrier:
        """Take memory on the compute class that counts as staging until ``unstage``; reserve it before."""
        if self.budget is None:
            carrier = self.prototype._allocate_result(slots)
        else:  # in a mapping of its own, which goes back to the system
            carrier = self.prototype.allocate_like(slots, mutable=True, empty=True)
        with self.lock:
            self.counters.note_staging(slots * carrier.dtype().itemsize)
            self.counters.note_memory(self.memory_bytes)
        return carrier

    def unstage(self, carrier: Carrier) -> None:
        """Give staged memory back, which nobody reads any more."""
        slots = carrier.size()
        if self.budget is not None:  # an error's traceback may refer to it for long
            carrier._discard(0, slots)
        with self.lock:
            self.counters.note_staging(-slots * carrier.dtype().itemsize)

    def _unclaimed(self, ordinals: Ordinals) -> Ordinals:
        """Those tiles that no other request has made primary, or put on their way, since they were sorted out."""
        missing = ordinals[~self.table.is_resident(ordinals)].tolist()
        return np.array([ordinal for ordinal in missing if ordinal not in self._passages], np.int64)

    async def _read(self, wave: Ordinals, carrier: Carrier, starts: list[int]) -> list[TileRow]:
        """Read tiles from the secondary tier to these slots of a carrier; gives them as rows there."""
        with self.lock:
            places = ((carrier, start) for start in starts)
            transfers = self._transfers(self.secondary.places(wave), places)
        await self._transfer(transfers, inbound=True)
        flat, size = carrier._bytes().view(self.unit), self.grid.tile_size
        return [flat[start : start + size] for start in starts]

    # Dropping: loop thread

    async def finish_with(self, entry: LedgerEntry, passing: Ordinals) -> None:
        """The request needs its tiles no longer: run the evictions that nobody else forbids any more.

        Without any, there is nothing to do but to ``leave``, which the request is about to.
        """
        if not len(passing) and not self.counters.put_off:
            return
        with self.lock:
            self.ledger.drop_needs(entry)
            self._release_room(entry)
            freed = self.ledger.take_freed()
            put_off = [ordinal for ordinal in self.counters.put_off if not self.ledger.needed[ordinal]]
        finish(freed)
        if put_off:
            passing = np.union1d(passing, np.array(put_off, np.int64))
        await self.drop_unneeded(entry, passing)

    async def undo(self, entry: LedgerEntry, changes: Changes) -> None:
        """After a failure, put residency back as far as other requests and the secondary tier allow."""
        with self.lock:
            self.ledger.drop_needs(entry)
            freed = self.ledger.take_freed()
            # What others have come to want stays: they would have made it primary themselves.
            promoted = [ordinal for ordinal in changes.promoted if ordinal in self._provisional]
        finish(freed)
        await self.drop_unneeded(entry, np.array(promoted, np.int64), put_off=False)
        await self._restore(entry, changes.dropped)
        await self.finish_with(entry, NO_ORDINALS)

    async def _restore(self, entry: LedgerEntry, dropped: list[int]) -> None:
        """Make tiles primary again that a failed request has evicted, as far as nobody minds."""
        gone = np.array([ordinal for ordinal in dropped if ordinal not in self._passages], np.int64)
        with self.lock:
            gone = gone[~self.table.is_resident(gone) & ~self.ledger.changing[gone]]
            if self.budget is not None:
                gone = self.budget.exchange(entry, gone)
            # Under the same lock, so that no residency request takes them.
            self.ledger.begin_move(entry, gone)
        if len(gone):
            try:
                await self.fetch(entry, gone)
            except BaseException as error:  # the request's own error is the one to report
                _logger.warning("%d tiles could not be made primary again: %s", len(gone), error)

    async def drop_unneeded(
        self, entry: LedgerEntry, ordinals: Ordinals, *, put_off: bool = True
    ) -> list[int]:
        """Carry out planned evictions; what other live work needs is put off, what fails is counted.

        A planned eviction never fails the request: a tile whose write-back fails stays primary and dirty.

        Args:
            entry: the request.
            ordinals: the tiles to evict.
            put_off: False leaves what other live work needs to that work, for good.

        Returns:
            The tiles that left the primary tier.
        """
        if not len(ordinals):
            return []
        with self.lock:
            leaving = self._droppable(ordinals, put_off)
            dirty = leaving[self.table.is_dirty(leaving)]
            self.ledger.begin_move(entry, leaving)
        if len(dirty):
            try:
                await self.write_back(dirty)
            except BaseException as error:  # whatever a tier raises, the request itself is fine
                with self.lock:
                    self.counters.failed_evictions += len(dirty)
                    self.counters.put_off.difference_update(dirty.tolist())
                    self.ledger.end_move(entry, dirty)
                    freed = self.ledger.take_freed()
                    self._wake()
                finish(freed)
                _logger.warning("eviction of %d tiles failed, they stay primary: %s", len(dirty), error)
                leaving = leaving[~np.isin(leaving, dirty)]
        return await self.drop(entry, leaving, put_off=put_off)

    async def write_back(self, ordinals: Ordinals) -> None:
        """Copy dirty tiles to the secondary tier, all or none; they stay primary, and clean."""
        ordinals = np.sort(ordinals)
        self.secondary.prepare_write()
        for batch in self._batches(ordinals):
            with self.lock:
                transfers = self._transfers(self.primary.places(batch), self.secondary.write_places(batch))
            await self._transfer(transfers, inbound=False)
        with self.lock:
            self.secondary.commit_write(ordinals)
            self.table.commit_clean(ordinals)

    async def drop(self, entry: LedgerEntry, ordinals: Ordinals, *, put_off: bool = True) -> list[int]:
        """Take clean tiles out of the primary tier and give their memory back.

        The tiles are marked as moving by ``entry``. One that other work began to need since stays, and is put off
        if that is asked for.

        Returns:
            The tiles that left the primary tier.
        """
        with self.lock:
            wanted = self.ledger.needed[ordinals] > 0
            gone = ordinals[~wanted]
            if put_off:
                self.counters.put_off.update(ordinals[wanted].tolist())
            self.counters.put_off.difference_update(gone.tolist())
            self.ledger.end_move(entry, ordinals[wanted])
            self._commit_drop(gone)
        await self._vacate(entry, gone)
        left: list[int] = gone.tolist()
        return left

    def _commit_drop(self, gone: Ordinals) -> None:
        self.table.commit_drop(gone)
        self.counters.evictions += len(gone)
        if self.budget is not None:
            self.budget.note_dropped(gone)
            self._wake()

    async def displace(self, entry: LedgerEntry, victims: Ordinals) -> list[int]:
        """Evict tiles to make room under the memory limit; ``entry`` moves them, and no granted request holds them.

        Returns:
            The tiles that left the primary tier, which are all of them.

        Raises:
            OSError, MemoryError, RuntimeError: a dirty one could not be written back, and all stay.
        """
        safe = False
        try:
            dirty = victims[self.table.is_dirty(victims)]
            if len(dirty):
                await self.write_back(dirty)
            safe = True
        finally:
            if not safe:
                with self.lock:
                    self.ledger.end_move(entry, victims)
                    freed = self.ledger.take_freed()
                finish(freed)
        with self.lock:
            self._commit_drop(victims)
            # What waiting work needs it will fetch again, and a planned eviction of it is still put off.
            unneeded = victims[self.ledger.needed[victims] == 0].tolist()
            self.counters.put_off.difference_update(unneeded)
            self._provisional.difference_update(victims.tolist())
        await self._vacate(entry, victims)
        left: list[int] = victims.tolist()
        return left

    async def trim(self, tiles: int) -> None:
        """Give places of so many tiles back that were kept warm."""
        with self.lock:
            recycled = self.primary.recycled_bytes
            leftovers = self.primary.trim(tiles)
            leaving = recycled - self.primary.recycled_bytes
            self.counters.leaving_bytes += leaving
        await self._give_back(leftovers, leaving)

    async def _give_back(
        self,
        leftovers: Leftovers,
        leaving: int,
        entry: LedgerEntry | None = None,
        ordinals: Ordinals = NO_ORDINALS,
    ) -> None:
        """Return storage to the system, and then say so; tiles that ``entry`` moves are at rest then."""
        try:
            if leftovers and max(leaving, len(ordinals) * self.tile_bytes) > _RELEASE_PIECE:
                await run_jobs([leftovers.give_back])
            else:
                leftovers.give_back()
        finally:
            with self.lock:
                self.primary.reclaim(leftovers)
                self.counters.leaving_bytes -= leaving
                if entry is not None:
                    self.ledger.end_move(entry, ordinals)
                freed = self.ledger.take_freed()
                self._wake()
            finish(freed)

    async def _vacate(self, entry: LedgerEntry, ordinals: Ordinals) -> None:
        """Give back the places of tiles that are not primary; the tiles count as moving until then."""
        with self._passage(ordinals):
            for batch in self._batches(ordinals):
                with self.lock:
                    recycled = self.primary.recycled_bytes
                    leftovers = self.primary.discard(batch)
                    kept = self.primary.recycled_bytes - recycled
                    leaving = max(0, len(batch) * self.tile_bytes - kept)
                    self.counters.leaving_bytes += leaving
                    self._note_places(batch, placed=False)
                await self._give_back(leftovers, leaving, entry, batch)

    def _droppable(self, ordinals: Ordinals, put_off: bool) -> Ordinals:
        """Resident tiles that nobody holds; those that data requests need may be put off. Under the lock.

        A needed tile that is not resident yet is put off too: the request that needs it is about to fetch it.
        """
        resident = self.table.is_resident(ordinals)
        held = self.ledger.changing[ordinals] | self.ledger.moving[ordinals]
        needed = self.ledger.needed[ordinals] > 0
        self.counters.put_off.difference_update(ordinals[~resident & ~needed].tolist())
        if put_off:
            self.counters.put_off.update(ordinals[needed & ~(resident & held)].tolist())
        return ordinals[resident & ~needed & ~held]

    # Copies, transfers and passages

    def block(self, ordinals: Ordinals) -> tuple[npt.NDArray[np.unsignedinteger], Ordinals] | None:
        """The one array that all of these primary tiles are rows of, and which rows; None for several."""
        with self.lock:
            return self.primary.block(ordinals)

    def rows(self, ordinals: Ordinals) -> list[TileRow]:
        """The places of tiles in the primary tier, as rows of unsigned integers."""
        with self.lock:
            return self.rows_locked(ordinals)

    def rows_locked(self, ordinals: Ordinals) -> list[TileRow]:
        """As ``rows``, for a caller that holds the lock."""
        return self.primary.rows(ordinals)

    async def copy(self, pairs: Sequence[tuple[TileRow, TileRow]]) -> None:
        """Copy rows, ``(to, from)``: at once when they are small together, else in worker threads."""
        if sum(to.nbytes for to, _ in pairs) > INLINE_BYTES:
            await run_jobs([partial(np.copyto, to, from_) for to, from_ in pairs])
            return
        for to, from_ in pairs:
            np.copyto(to, from_)

    def _transfers(self, sources: Places, destinations: Places) -> list[Transfer]:
        size = self.grid.tile_size
        return [
            Transfer(source, source_start, destination, destination_start, size)
            for (source, source_start), (destination, destination_start) in zip(
                sources, destinations, strict=True
            )
        ]

    async def _transfer(self, transfers: list[Transfer], *, inbound: bool) -> None:
        """Run one batch through the registered move, which is looked up anew each time."""
        if not transfers:
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

    def count(self, **amounts: int) -> None:
        """Add to the running counts of these names."""
        with self.lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    def _sort_out(self, ordinals: Ordinals) -> tuple[list[Passage], Ordinals]:
        """The passages that some of these tiles are on, and the tiles that are on none."""
        if not self._passages:
            return [], ordinals
        passages: dict[Passage, None] = {}
        mine: list[int] = []
        for ordinal in ordinals.tolist():
            passage = self._passages.get(ordinal)
            if passage is None:
                mine.append(ordinal)
            else:
                passages[passage] = None
        return list(passages), np.array(mine, np.int64)

    @contextmanager
    def _passage(self, ordinals: Ordinals, staging: Staging | None = None) -> Iterator[Passage]:
        """Announce that tiles are on their way until the block ends, however it ends."""
        passage = Passage(staging)
        keys = ordinals.tolist()
        outer = {key: self._passages[key] for key in keys if key in self._passages}
        self._passages.update(dict.fromkeys(keys, passage))
        try:
            yield passage
        finally:
            for key in keys:
                self._passages.pop(key, None)  # None: the request was cut off meanwhile
            self._passages.update(outer)
            passage.done.set()


def finish(handles: Sequence[AwaitResult[None]]) -> None:
    """End the ``free`` handles of conflict errors; not under the lock, because their waiters wake."""
    for handle in handles:
        handle._finish()
