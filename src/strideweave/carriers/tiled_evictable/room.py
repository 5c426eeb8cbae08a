"""Room under a memory limit: what one request asks for, how it waits for it, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import anyio
import numpy as np

from strideweave.tiles.coordinates import NO_ORDINALS

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.budget import Budget
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.tiles.ledger import LedgerEntry

    Ordinals = npt.NDArray[np.int64]

__all__ = ["WAIT", "Grant", "Need", "Step", "make_room"]


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


WAIT = Step()


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
