"""The tiles of one carrier on the move: fetching them, filling them, and undoing what a failed request did.

``TileTraffic`` owns what the requests of a tiled carrier share: the lock, the ledger, the residency table and
the stores of the two tiers. Its coroutines run in the runtime's loop only; other threads enter requests, read
states and write slots under the lock. Who comes and goes is in ``admission``, what bytes do in ``transfers``,
what does not stay in ``streaming``, and what leaves in ``eviction``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.tiled_evictable.admission import finish
from strideweave.carriers.tiled_evictable.eviction import Eviction
from strideweave.carriers.tiled_evictable.passages import joined
from strideweave.carriers.tiled_evictable.room import Need, make_room
from strideweave.carriers.tiled_evictable.streaming import Streaming
from strideweave.tiles.coordinates import NO_ORDINALS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.passages import Passage
    from strideweave.tiles.ledger import LedgerEntry
    from strideweave.tiles.plan import RequestPlan

    Ordinals = npt.NDArray[np.int64]

__all__ = ["Changes", "TileTraffic"]

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


class TileTraffic(Streaming, Eviction):
    """The tiles of one carrier: who needs them, where they are, and how they move."""

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
                await self.restore(entry, changes.dropped)

    def has_all(self, plan: RequestPlan) -> bool:
        """Tell whether a request finds every tile resident and leaves all as it is; counts the hits then."""
        if len(plan.passing) or len(plan.extra) or len(plan.early) or self.counters.put_off:
            return False
        if not self.table.are_resident(plan.required):
            return False
        with self.lock:
            self.counters.hits += len(plan.required)
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
        if not len(todo) and not len(plan.extra):
            return
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
                transfers = self._transfers(
                    self.secondary.place_arrays(stored), self.primary.place_arrays(stored)
                )
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
        reserved, filled = 0, False

        async def reserve_and_fill(batch: Ordinals) -> None:
            nonlocal reserved
            self.primary.make_room(len(batch))  # outside the lock: that is for a few plain statements
            with self.lock:
                self.primary.reserve(batch)
                self._note_places(batch, placed=True)
            reserved += len(batch)
            await fill(batch)

        with self._passage(ordinals):
            with self.lock:
                self.ledger.begin_move(entry, ordinals)
            try:
                await self._in_batches(ordinals, reserve_and_fill)
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

    async def undo(self, entry: LedgerEntry, changes: Changes) -> None:
        """After a failure, put residency back as far as other requests and the secondary tier allow."""
        with self.lock:
            self.ledger.drop_needs(entry)
            freed = self.ledger.take_freed()
            # What others have come to want stays: they would have made it primary themselves.
            promoted = [ordinal for ordinal in changes.promoted if ordinal in self._provisional]
        finish(freed)
        await self.drop_unneeded(entry, np.array(promoted, np.int64), put_off=False)
        await self.restore(entry, changes.dropped)
        await self.finish_with(entry, NO_ORDINALS)

    async def restore(self, entry: LedgerEntry, dropped: list[int]) -> None:
        """Make tiles primary again that a failed request has evicted, as far as nobody minds."""
        gone = np.array([ordinal for ordinal in dropped if ordinal not in self._passages], np.int64)
        with self.lock:
            others = self.ledger.changing[gone] & ~np.isin(gone, entry.changes)
            gone = gone[~self.table.is_resident(gone) & ~others]
            if self.budget is not None:
                gone = self.budget.exchange(entry, gone)
            # Under the same lock, so that no residency request takes them.
            self.ledger.begin_move(entry, gone)
        if len(gone):
            try:
                await self.fetch(entry, gone)
            except BaseException as error:  # the request's own error is the one to report
                # A handler that keeps records must not keep tiles: traceback, frames, carrier.
                reason = str(error)
                _logger.warning("%d tiles could not be made primary again: %s", len(gone), reason)
