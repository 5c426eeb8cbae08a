"""A hard limit on the memory of one tiled carrier: who is granted what, and which tiles make room.

Counted are the places of tiles in the primary tier, with those being filled or given back, the places that are
kept warm for the next tiles, and the memory that tiles are staged in. Not counted are results, destinations and
compact inputs, which are the caller's.

A request asks once, inside its task, for everything that it will need. Requests are granted in the order in
which they ask, each as a whole, so one that was granted never waits for another, and one that waits holds
nothing: the tiles that only waiting requests need may leave the primary tier meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.tiled_evictable.room import WAIT, Grant, Step
from strideweave.runtime.thread_role import waiting_is_forbidden

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.room import Need
    from strideweave.carriers.tiled_evictable.statistics import TrafficCounters
    from strideweave.tiles.ledger import Ledger, LedgerEntry
    from strideweave.tiles.residency import ResidencyTable

    Ordinals = npt.NDArray[np.int64]

__all__ = ["Budget"]


class Budget:
    """The memory of one tiled carrier under its limit; plain bookkeeping under the carrier's lock.

    Args:
        memory_limit: bytes.
        tile_bytes: bytes of one tile.
        table: where tiles are.
        ledger: who holds tiles.
        counters: what is in use.
        beside: bytes of the limit that are set aside, for what reading takes beside tiles and their staging.

    Attributes:
        memory_limit: as given.
        limit: bytes that tiles and their staging may take.
    """

    def __init__(
        self,
        memory_limit: int,
        tile_bytes: int,
        table: ResidencyTable,
        ledger: Ledger,
        counters: TrafficCounters,
        *,
        beside: int = 0,
    ) -> None:
        self.memory_limit = memory_limit
        self.limit = memory_limit - beside
        self._tile_bytes = tile_bytes
        self._table, self._ledger, self._counters = table, ledger, counters
        every = np.arange(len(ledger.needed))
        self._placed: npt.NDArray[np.bool_] = table.is_resident(every)
        # Primary tiles, the least recently used first; not a dict, whose oldest keys take long to find.
        self._recency: OrderedDict[int, None] = OrderedDict.fromkeys(every[self._placed].tolist())
        self._pins: npt.NDArray[np.int32] = np.zeros(len(every), np.int32)
        self._staying: npt.NDArray[np.int32] = np.zeros(len(every), np.int32)
        self._yielding: npt.NDArray[np.bool_] = np.zeros(len(every), np.bool_)
        self._promised = 0  # tiles that somebody has room for and that have no place
        self._staging = 0  # bytes of all grants, and those that ended requests have left to others
        self._grants: dict[LedgerEntry, Grant] = {}
        self._queue: OrderedDict[LedgerEntry, Need] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many requests wait for room."""
        return len(self._queue)

    @property
    def promised(self) -> tuple[int, int, int]:
        """Requests with a grant, tiles that they have room for without a place, and bytes that they may stage."""
        return len(self._grants), self._promised, self._staging

    def check(self, kind: str, tiles: int, staging: int) -> None:
        """Refuse what could not fit if the carrier held nothing else.

        Raises:
            MemoryError: as said.
        """
        need = tiles * self._tile_bytes + staging
        if need > self.limit:
            size = f"tiles of {self._tile_bytes} bytes"
            if tiles:
                parts = f"{tiles} {size} and {staging} to stage" if staging else f"{tiles} {size}"
                remedy = "take fewer tiles at a time, let a policy evict what need not stay"
            else:  # an operation on all tiles, which keeps none
                parts, remedy = f"to stage {size}", "cut the array into smaller tiles"
            beside = self.memory_limit - self.limit
            spared = f", of which reading small pieces of files takes {beside}" if beside else ""
            raise MemoryError(
                f"{kind} needs {need} bytes at once ({parts}), more than memory_limit={self.memory_limit}"
                f"{spared}; {remedy}, or raise the limit"
            )

    # What happens to tiles

    def touch(self, ordinals: Ordinals) -> None:
        """Tiles were used; the last of them most recently."""
        recency = self._recency
        for ordinal in ordinals.tolist():
            if ordinal in recency:
                recency.move_to_end(ordinal)

    def note_places(self, ordinals: Ordinals, placed: bool) -> None:
        """Tiles were given a place, or it was taken back."""
        self._placed[ordinals] = placed
        promised = int(np.count_nonzero(self._staying[ordinals]))
        self._promised += -promised if placed else promised

    def note_promoted(self, ordinals: Ordinals) -> None:
        """Tiles are primary now."""
        for ordinal in ordinals.tolist():
            self._recency[ordinal] = None
            self._recency.move_to_end(ordinal)

    def note_dropped(self, ordinals: Ordinals) -> None:
        """Tiles are primary no longer."""
        for ordinal in ordinals.tolist():
            self._recency.pop(ordinal, None)

    # The queue

    def join(self, need: Need) -> None:
        """Ask, behind everybody who asks already."""
        self._queue[need.entry] = need
        self._yielding[need.entry.changes] = True
        self.wake()  # what it holds, as long as it waits, makes room for others

    def quit(self, entry: LedgerEntry) -> None:
        """Ask no longer."""
        need = self._queue.pop(entry, None)
        if need is not None:
            self._yielding[entry.changes] = False
            self.wake()

    def wake(self) -> None:
        """There may be more room: whose turn it is looks again; not in a forked child, where nobody does."""
        if self._queue and waiting_is_forbidden():
            next(iter(self._queue.values())).wake()

    def step(self, need: Need, recycled_bytes: int) -> Step:
        """Say what a request that asks is to do next."""
        if next(iter(self._queue)) is not need.entry:
            return WAIT
        staying = need.staying
        new = int(np.count_nonzero((self._staying[staying] == 0) & ~self._placed[staying]))
        passing = need.passing
        at_hand = passing is not None and bool(self._table.is_resident(passing).all())
        staging = 0 if at_hand else need.staging  # what is at hand is pinned from now on
        counters = self._counters
        short = new * self._tile_bytes + staging - self._room()
        if short > 0:
            victims = self._victims(need, -(-(short - counters.leaving_bytes) // self._tile_bytes))
            return WAIT if victims is None else Step(victims=victims)
        in_use = counters.reserved_tiles * self._tile_bytes + counters.leaving_bytes
        surplus = in_use + recycled_bytes + self._staging + staging - self.limit
        if surplus > 0 and recycled_bytes:
            return Step(trim=-(-surplus // self._tile_bytes))
        self._admit(need.entry, Grant(need.held, staying, staging))
        self.touch(need.held)
        return Step(granted=True)

    def _room(self) -> int:
        counters = self._counters
        places = (counters.reserved_tiles + self._promised) * self._tile_bytes + counters.leaving_bytes
        return self.limit - places - self._staging

    def _victims(self, need: Need, count: int) -> Ordinals | None:
        """So many tiles to evict; None where there are not enough, or what is leaving already will do."""
        if count <= 0:
            return None
        staying = set(need.staying.tolist())
        own = set(need.held.tolist()) - staying
        found = {ordinal: None for ordinal in need.first.tolist() if self._is_free(ordinal)}
        spared = []
        for ordinal in self._recency:
            if len(found) >= count:
                break
            if ordinal in staying or not self._is_free(ordinal):
                continue
            if ordinal in own:  # it had better stay, but the limit comes first
                spared.append(ordinal)
            else:
                found[ordinal] = None
        victims = [*found, *spared][:count]
        return np.array(victims, np.int64) if len(victims) == count else None

    def _is_free(self, ordinal: int) -> bool:
        """Whether a primary tile is at rest and only requests that wait, if any, hold it."""
        ledger = self._ledger
        return bool(
            ordinal in self._recency
            and not self._pins[ordinal]
            and not ledger.moving[ordinal]
            and (self._yielding[ordinal] or not ledger.changing[ordinal])
        )

    # Grants

    def _admit(self, entry: LedgerEntry, grant: Grant) -> None:
        self._grants[entry] = grant
        self._pins[grant.pinned] += 1
        staying = grant.staying
        self._promised += int(np.count_nonzero((self._staying[staying] == 0) & ~self._placed[staying]))
        self._staying[staying] += 1
        self._staging += grant.staging

    def release(self, entry: LedgerEntry) -> None:
        """A request needs nothing more; what others still read of what it staged counts until they have."""
        self.quit(entry)
        grant = self._grants.pop(entry, None)
        if grant is None:
            return
        grant.closed = True
        self._pins[grant.pinned] -= 1
        staying = grant.staying
        self._staying[staying] -= 1
        self._promised -= int(np.count_nonzero((self._staying[staying] == 0) & ~self._placed[staying]))
        self._staging -= grant.staging - grant.used
        self.wake()

    def exchange(self, entry: LedgerEntry, ordinals: Ordinals) -> Ordinals:
        """Instead of what a failed request had, give it room to make tiles primary that it had evicted.

        Returns:
            Those of them for which there is room.
        """
        self.release(entry)
        ordinals = ordinals[self._staying[ordinals] == 0][: max(0, self._room() // self._tile_bytes)]
        self._admit(entry, Grant(ordinals, ordinals, 0))
        return ordinals

    def grant_of(self, entry: LedgerEntry | None) -> Grant:
        """What a request that is about to stage was granted.

        Raises:
            RuntimeError: nothing; it should have asked.
        """
        grant = None if entry is None else self._grants.get(entry)
        if grant is None:
            raise RuntimeError("a request stages tiles that it has reserved no memory for; this is a defect")
        return grant

    def unstage(self, grant: Grant, nbytes: int) -> None:
        """Bytes that a grant used are free."""
        grant.used -= nbytes
        if grant.closed:
            self._staging -= nbytes
        self.wake()

    def come_to_rest(self) -> None:
        """No request is left: forget what was cut off, where anything was."""
        self._queue.clear()
        if not self._grants and not self._promised and not self._staging:
            return
        for grant in self._grants.values():
            grant.closed = True
        self._grants.clear()
        self._promised = self._staging = 0
        self._placed = self._table.is_resident(np.arange(len(self._placed)))
        for counts in (self._pins, self._staying, self._yielding):
            counts[:] = 0
