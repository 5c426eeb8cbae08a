"""Who needs which tiles of one carrier, and what they may take: entering and leaving, and the counts of both.

Any thread enters a request and strikes it off, under the one lock. What a request needs and cannot have is said here,
before it has begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.tiled_evictable.budget import Budget
from strideweave.carriers.tiled_evictable.memory_limit import share_beside
from strideweave.carriers.tiled_evictable.statistics import TrafficCounters
from strideweave.errors import InvalidTileError
from strideweave.runtime.locks import short_lock
from strideweave.tiles.ledger import Ledger, LedgerEntry
from strideweave.tiles.residency import Location, ResidencyTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.passages import Passage
    from strideweave.carriers.tiled_evictable.store import PrimaryStore, SecondaryStore
    from strideweave.runtime.await_result import AwaitResult
    from strideweave.tiles.grid import TileGrid
    from strideweave.tiles.plan import RequestPlan

    Ordinals = npt.NDArray[np.int64]

__all__ = ["Admission", "finish"]


class Admission:
    """What the requests of a tiled carrier share, and how they come and go.

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
        beside = secondary.beside
        share = None
        if memory_limit is not None:
            share = 0 if beside is None else share_beside(memory_limit, self.tile_bytes, beside.capacity)
            self.budget = Budget(
                memory_limit, self.tile_bytes, self.table, self.ledger, self.counters, beside=share
            )
        if beside is not None:
            beside.report_to(self.note_staging, share)
        self._classes = classes
        self.unit = np.dtype(f"u{prototype.dtype().itemsize}")
        self._passages: dict[int, Passage] = {}
        # Fetched by one request only, whose failure takes them away again.
        self._provisional: set[int] = set()

    def enter_data(self, entry: LedgerEntry, plan: RequestPlan) -> None:
        """Admit a data request, a new one, or raise; ``leave`` undoes what was interrupted.

        Raises:
            InvalidTileError: a required tile has no value yet.
            TileConflictError: a required tile is covered by an unfinished residency request.
        """
        with self.lock:
            held = plan.required
            if plan.reads and not self.table.are_valid(held):
                self.require_valid(entry.kind, held)
            if len(plan.extra) or len(plan.retain):
                changing = self.ledger.changing
                extra = plan.extra[self.table.is_valid(plan.extra) & ~changing[plan.extra]]
                retain = plan.retain[self.table.is_resident(plan.retain) & ~changing[plan.retain]]
                held = np.unique(np.concatenate((held, extra, retain)))
            self.ledger.enter_data(entry, held)
            if self.counters.put_off or self._provisional:
                self.keep(set(held.tolist()) - set(plan.passing.tolist()))

    def keep(self, ordinals: Iterable[int]) -> None:
        """Somebody wants these tiles primary: neither a planned eviction nor a failure takes them away any more.

        Called under the lock.
        """
        self.counters.put_off.difference_update(ordinals)
        self._provisional.difference_update(ordinals)

    def cover(self, entry: LedgerEntry, ordinals: Ordinals) -> None:
        """Admit a request, a new one, that changes all of these tiles, or raise; under the lock.

        Raises:
            TileConflictError: unfinished work needs, moves or covers one of the tiles.
        """
        self.ledger.enter_residency(entry, ordinals, np.ones(len(ordinals), np.bool_))
        if self.counters.put_off or self._provisional:
            self.keep(ordinals.tolist())

    def check_data(self, kind: str, required: Ordinals, *, reads: bool = True) -> None:
        """Raise what ``enter_data`` would raise now, and admit nothing."""
        with self.lock:
            if reads:
                self.require_valid(kind, required)
            self.ledger.check_data(kind, required)

    def leave(self, entry: LedgerEntry) -> None:
        """Strike a request off, whatever became of it; never blocks, and does nothing for one that is not in."""
        with self.lock:
            freed = self.ledger.leave(entry)
            if self.budget is not None:
                self.budget.release(entry)
                self._wake()
            if self.ledger.is_empty:
                self._come_to_rest()
        if freed:
            finish(freed)

    def _come_to_rest(self) -> None:
        """No request is left, so nothing is under way: forget what the tasks of cut-off requests left behind.

        A task ends what it began, but not where its request is cut off, in the child of a fork or by the end of
        the loop. Places it had reserved then stay unused: a thread of that loop may still write to them.
        """
        self._passages.clear()
        self._provisional.clear()
        self.counters.in_flight_bytes = self.counters.staging_bytes = self.counters.leaving_bytes = 0
        self.counters.aside_bytes = 0
        self.counters.reserved_tiles = self.table.resident_count
        if self.budget is not None:
            self.budget.come_to_rest()

    def require_valid(self, kind: str, ordinals: Ordinals) -> None:
        """Refuse tiles without a value; call it under the lock.

        Raises:
            InvalidTileError: as said.
        """
        if not self.table.are_valid(ordinals):
            valid = self.table.is_valid(ordinals)
            missing = self.grid.coordinates(ordinals[~valid][:4])
            raise InvalidTileError(
                f"{kind} needs {np.count_nonzero(~valid)} tiles that have no value yet, such as "
                f"{', '.join(map(str, missing))}; assign() gives whole tiles their values"
            )

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

    def _planned(self, entry: LedgerEntry, plan: RequestPlan) -> Ordinals:
        """The tiles that a plan promotes besides; one that the request does not hold is somebody else's."""
        return plan.extra[np.isin(plan.extra, entry.needs) & self.table.is_valid(plan.extra)]

    def note_staging(self, nbytes: int) -> None:
        """Memory for staging was taken or, negative, given back."""
        with self.lock:
            self.counters.note_staging(nbytes)
            self.counters.note_memory(self.memory_bytes)

    def count(self, **amounts: int) -> None:
        """Add to the running counts of these names."""
        with self.lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)


def finish(handles: Sequence[AwaitResult[None]]) -> None:
    """End the ``free`` handles of conflict errors; not under the lock, because their waiters wake."""
    for handle in handles:
        handle._finish()
