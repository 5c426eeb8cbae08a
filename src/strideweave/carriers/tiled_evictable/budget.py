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
from dataclasses import dataclass, field
from mmap import PAGESIZE
from typing import TYPE_CHECKING, NamedTuple

import anyio
import numpy as np

from strideweave.layout.int_tuple import as_integer
from strideweave.runtime.thread_role import waiting_is_forbidden
from strideweave.tiles.coordinates import NO_ORDINALS

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.statistics import TrafficCounters
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.tiles.ledger import Ledger, LedgerEntry
    from strideweave.tiles.residency import ResidencyTable

    Ordinals = npt.NDArray[np.int64]

__all__ = ["Budget", "Grant", "Need", "check_memory_limit", "make_room", "warm_bytes"]


def check_memory_limit(limit: object, tile_bytes: int, resident_bytes: int) -> int | None:
    """Give a memory limit as an integer, or None where there is none.

    Args:
        limit: what the caller wrote.
        tile_bytes: bytes of one tile.
        resident_bytes: bytes of the tiles that start in the primary tier.

    Raises:
        TypeError: it is not an integer.
        ValueError: it holds no tile, or less than what starts in the primary tier.
    """
    if limit is None:
        return None
    nbytes = as_integer(limit, "memory_limit")
    if nbytes < tile_bytes:
        raise ValueError(
            f"memory_limit={nbytes} is less than one tile of {tile_bytes} bytes; nothing could ever be read"
        )
    if resident_bytes > nbytes:
        raise ValueError(
            f"the primary tier comes with {resident_bytes} bytes of tiles, more than memory_limit={nbytes}; "
            "let the tiles start in the secondary tier (tiled(..., resident=False)), or raise the limit"
        )
    return nbytes


def warm_bytes(limit: int, tile_bytes: int) -> int:
    """How much memory may stay warm for the next tiles under a limit: all, where no two tiles share a page.

    Elsewhere a free place may keep more pages than its tile has bytes, so none is kept.
    """
    return 0 if tile_bytes % PAGESIZE else limit


@dataclass(slots=True, eq=False)
class Grant:
    """What one request may use.

    Attributes:
        pinned: the tiles that stay where they are while it lasts, if they are primary.
        staying: those among them that it makes primary, and for which it has room.
        staging: bytes that it may stage.
        used: bytes that it stages now, what it has left to others counted.
        closed: whether the request has ended, or needs nothing more.
    """

    pinned: Ordinals
    staying: Ordinals
    staging: int
    used: int = 0
    closed: bool = False


@dataclass(slots=True, eq=False)
class Need:
    """What a request asks for.

    Attributes:
        entry: the request; the tiles that it holds in the ledger are pinned.
        staying: tiles that have to be primary.
        staging: bytes to stage.
        passing: tiles that need no staging where all of them are primary; None takes it in any case.
        first: tiles that make room before any other.
    """

    entry: LedgerEntry
    staying: Ordinals
    staging: int
    passing: Ordinals | None = None
    first: Ordinals = field(default_factory=lambda: NO_ORDINALS)
    _woken: anyio.Event | None = None

    @property
    def held(self) -> Ordinals:
        """Every tile that the request holds."""
        return self.entry.needs if len(self.entry.needs) else self.entry.changes

    async def sleep(self) -> None:
        """Wait until there may be room."""
        self._woken = anyio.Event()
        await self._woken.wait()

    def wake(self) -> None:
        """Look again."""
        if self._woken is not None:
            self._woken.set()


class Step(NamedTuple):
    """What a request in the queue does next: it goes ahead, evicts, gives warm places up, or else waits."""

    granted: bool = False
    victims: Ordinals = NO_ORDINALS
    trim: int = 0


_WAIT = Step()


class Budget:
    """The memory of one tiled carrier under its limit; plain bookkeeping under the carrier's lock.

    Args:
        limit: bytes.
        tile_bytes: bytes of one tile.
        table: where tiles are.
        ledger: who holds tiles.
        counters: what is in use.
    """

    def __init__(
        self, limit: int, tile_bytes: int, table: ResidencyTable, ledger: Ledger, counters: TrafficCounters
    ) -> None:
        self.limit = limit
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
            parts = f"{tiles} tiles of {self._tile_bytes} bytes" + (
                f" and {staging} to stage" if staging else ""
            )
            raise MemoryError(
                f"{kind} needs {need} bytes at once ({parts}), more than memory_limit={self.limit}; take fewer "
                "tiles at a time, let a policy evict what need not stay, or raise the limit"
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
            return _WAIT
        staying = need.staying
        new = int(np.count_nonzero((self._staying[staying] == 0) & ~self._placed[staying]))
        passing = need.passing
        at_hand = passing is not None and bool(self._table.is_resident(passing).all())
        staging = 0 if at_hand else need.staging  # what is at hand is pinned from now on
        counters = self._counters
        short = new * self._tile_bytes + staging - self._room()
        if short > 0:
            victims = self._victims(need, -(-(short - counters.leaving_bytes) // self._tile_bytes))
            return _WAIT if victims is None else Step(victims=victims)
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


async def make_room(traffic: TileTraffic, budget: Budget, need: Need, evicted: list[int]) -> None:
    """Wait until a request is granted all that it needs, and evict what has to go for it when it is its turn.

    Args:
        traffic: the carrier's tiles.
        budget: their limit.
        need: the request.
        evicted: filled with the tiles that left the primary tier for it, also when the call fails.

    Raises:
        OSError, MemoryError, RuntimeError: a tile that was to make room could not be written back; it stays.
    """
    try:
        with traffic.lock:
            budget.join(need)
        while True:
            with traffic.lock:
                step = budget.step(need, traffic.primary.recycled_bytes)
                if len(step.victims):
                    traffic.ledger.begin_move(need.entry, step.victims)
            if step.granted:
                return
            if len(step.victims):
                evicted += await traffic.displace(need.entry, step.victims)
            elif step.trim:
                await traffic.trim(step.trim)
            else:
                await need.sleep()
    finally:
        with traffic.lock:
            budget.quit(need.entry)
