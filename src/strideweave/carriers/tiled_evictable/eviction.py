"""Tiles that leave the primary tier: planned evictions, those that make room, and places given back.

Coroutines run in the runtime's loop only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.tiled_evictable.admission import finish
from strideweave.carriers.tiled_evictable.transfers import Transfers
from strideweave.runtime.workers import run_jobs
from strideweave.tiles.coordinates import NO_ORDINALS

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.store import Leftovers
    from strideweave.tiles.ledger import LedgerEntry

    Ordinals = npt.NDArray[np.int64]

__all__ = ["Eviction"]

_RELEASE_PIECE = 4 << 20  # returning more bytes than this to the system is work for a worker thread

_logger = logging.getLogger("strideweave")


class Eviction(Transfers):
    """Takes tiles of one carrier out of the primary tier."""

    async def finish_with(self, entry: LedgerEntry, passing: Ordinals) -> None:
        """The request needs its tiles no longer: run the evictions that nobody else forbids any more.

        Without any, there is nothing to do but to ``leave``, which the request is about to.
        """
        if not self.counters.put_off and not (len(passing) and self._concerns_any(passing)):
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
            if not len(leaving):
                return []
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
                # A handler that keeps records must not keep tiles: traceback, frames, carrier.
                reason = str(error)
                _logger.warning("eviction of %d tiles failed, they stay primary: %s", len(dirty), reason)
                leaving = leaving[~np.isin(leaving, dirty)]
        return await self.drop(entry, leaving, put_off=put_off)

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

    def _concerns_any(self, passing: Ordinals) -> bool:
        """Whether any of these tiles, which a request holds, is primary, or needed by another one that may fetch it."""
        with self.lock:
            return self.table.any_resident(passing) or self.ledger.shares_any(passing)

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
