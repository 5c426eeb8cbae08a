"""One blocking request over the full Tensors of one or several tiled carriers.

Spec: *Residency remains valid while tiled work needs it*; *Residency policy can optimize but cannot define
correctness*. The request is a task of the first carrier; each other one has a companion, which keeps its tiles in
its own ledger, and the carrier from being released, until the task has ended.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import numpy as np

from strideweave.carriers.tiled_evictable.streaming import STAGING_BYTES
from strideweave.carriers.tiled_evictable.traffic import Changes
from strideweave.carriers.tiled_evictable.windows import TiledSource
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.thread_role import waiting_is_forbidden
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.plan import RequestPlan, plan_request
from strideweave.tiles.selection import TileSelection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.regions import Axes
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.layout import Layout
    from strideweave.tensor import Tensor
    from strideweave.tiles.ledger import LedgerEntry

    _Key: TypeAlias = tuple[TiledEvictable, int, Layout]

__all__ = ["Holding"]

WINDOW_BYTES = STAGING_BYTES

T = TypeVar("T")


class _Hold:
    """All tiles of one carrier, as the request holds them.

    Attributes:
        carrier: whose tiles they are.
        purpose: what for.
        windows: how many windows one block needs.
        window_bytes: how large a window may be.
        overlaps: whether there is memory for the windows of two blocks.
        version: of the carrier, when the request was admitted.
    """

    def __init__(self, carrier: TiledEvictable, purpose: str, windows: int) -> None:
        self.carrier, self.purpose, self.windows = carrier, purpose, windows
        self.window_bytes, self.overlaps = max(WINDOW_BYTES, self.traffic.tile_bytes), True
        self.version = 0
        self._plan = RequestPlan(NO_ORDINALS)
        self._primary = self._staging = 0  # tiles that have to be primary, and bytes to stage
        self._entry: LedgerEntry | None = None
        self._changes = Changes()

    @property
    def traffic(self) -> TileTraffic:
        return self.carrier._traffic

    @property
    def entry(self) -> LedgerEntry:
        """The request in this carrier's ledger."""
        if self._entry is None:
            raise RuntimeError("this request was not admitted; this is a defect")
        return self._entry

    def check(self) -> None:
        """Raise what admission would raise now.

        A policy believes that its plans are carried out, so it is not asked for what would be refused.
        """
        self.carrier._require_live()
        self.traffic.check_data(self.purpose, np.arange(self.traffic.grid.tile_count))

    def ask_policy(self) -> None:
        """Make the plan; without a policy no tile is promoted, and none leaves."""
        grid, policy = self.traffic.grid, self.carrier.residency_policy
        everything = TileSelection([range(extent) for extent in grid.grid_shape])
        required = everything.bind(grid)
        if policy is None:
            self._plan = RequestPlan(required, passing=required)
        else:
            self._plan = plan_request(policy, grid, required, everything.tile_set, self.purpose)

    def fit_limit(self) -> None:
        """Choose the size of windows so that the memory limit, if there is one, holds them.

        Raises:
            MemoryError: it could not hold one tile for each window and one on its way there.
        """
        traffic = self.traffic
        if traffic.budget is None:
            return
        self._primary = traffic.primary_count(self._plan)
        tile, few, many = traffic.tile_bytes, self.windows + 1, 2 * self.windows + 1
        room = traffic.staging_room(many * self.window_bytes, self._primary)
        self.overlaps = room // many >= tile
        self._reserve_windows(room // (many if self.overlaps else few))

    def allow(self, nbytes: int) -> None:
        """See to it that a window can hold a region that cannot be made smaller.

        Raises:
            MemoryError: the memory limit could not hold it.
        """
        if self.traffic.budget is not None and nbytes > self.window_bytes:
            self.overlaps = False
            self._reserve_windows(nbytes + self.traffic.tile_bytes - 1)

    def _reserve_windows(self, nbytes: int) -> None:
        """Have windows of so many bytes, in whole tiles, and a wave of tiles on their way."""
        tile = self.traffic.tile_bytes
        self.window_bytes = max(1, nbytes // tile) * tile
        windows = 2 * self.windows if self.overlaps else self.windows
        self._staging = windows * self.window_bytes + (self.window_bytes if self.overlaps else tile)
        self.traffic.check_fits(self.purpose, self._primary, self._staging)

    def enter(self, entry: LedgerEntry) -> None:
        """Take the tiles, and note the version that they have; under the lock."""
        self._entry = entry
        self.traffic.enter_data(entry, self._plan)
        self.version = self.carrier.version

    async def reserve(self) -> None:
        """Take the memory, if there is a limit."""
        traffic, plan = self.traffic, self._plan
        if traffic.budget is not None:
            staying = np.concatenate((plan.staying, traffic._planned(self.entry, plan)))
            await traffic.reserve(self.entry, staying, self._staging, first=plan.early, changes=self._changes)

    async def bring(self) -> None:
        """Make primary what the plan says."""
        await self.traffic.bring(self.entry, self._plan, self._changes)

    async def undo(self) -> None:
        """Put residency back."""
        await self.traffic.undo(self.entry, self._changes)

    async def finish(self) -> None:
        """Evict what the plan says, if nobody else needs it."""
        leaving: npt.NDArray[np.int64] = NO_ORDINALS
        if self.carrier.residency_policy is not None:
            leaving = self._plan.passing
        await self.traffic.finish_with(self.entry, leaving)


class Holding:
    """Every tile of some full tiled Tensors, to be held by one request.

    Making it checks and asks, and changes nothing. Without a policy the request leaves the residency that it finds.
    With one, what the plan promotes is primary before the work begins, and what it evicts leaves in the end.

    Args:
        readings: the Tensors, of any number of carriers, each with the axes that tell its regions.
        purpose: ``"operation"`` or ``"backward"``.

    Raises:
        RuntimeError: called inside the runtime, where waiting would deadlock.
        ReleasedError, InvalidTileError, TileConflictError: the tiles cannot be read.
        TypeError, ValueError: a policy answered what is no plan for its carrier.
        MemoryError: the work could not be done within a memory limit.
    """

    def __init__(self, readings: Sequence[tuple[Tensor, Axes]], purpose: str) -> None:
        if waiting_is_forbidden():
            raise RuntimeError(
                f"this {purpose} waits for tiles, which would deadlock inside the runtime; run it in a thread of "
                "your own, or project the tiles and await them"
            )
        # Tensors that are alike, and read along the same axes, share their windows.
        distinct = dict.fromkeys([(*_key(tensor), axes) for tensor, axes in readings])
        windows = Counter([carrier for carrier, *_ in distinct])
        self._holds = {carrier: _Hold(carrier, purpose, count) for carrier, count in windows.items()}
        self._sources: dict[_Key, TiledSource] = {}
        for hold in self._holds.values():
            hold.check()
        for hold in self._holds.values():
            hold.ask_policy()
        for hold in self._holds.values():
            hold.fit_limit()

    @property
    def budget(self) -> int:
        """Bytes that a region may take, or one tile."""
        return min([WINDOW_BYTES, *[hold.window_bytes for hold in self._holds.values()]])

    @property
    def overlaps(self) -> bool:
        """Whether there is memory for the windows of two blocks."""
        return all(hold.overlaps for hold in self._holds.values())

    @property
    def versions(self) -> dict[Carrier, int]:
        """The version that each carrier had when the request was admitted."""
        return {carrier: hold.version for carrier, hold in self._holds.items()}

    def allow(self, tensor: Tensor, elements: int) -> None:
        """See to it that a window can hold so many elements of one of the tensors, where these cannot be fewer.

        Raises:
            MemoryError: the carrier's memory limit could not hold them.
        """
        self._holds[_key(tensor)[0]].allow(elements * tensor.dtype.itemsize)

    def source(self, tensor: Tensor) -> TiledSource:
        """The reader of one of the tensors, the same for those that are alike."""
        key = _key(tensor)
        if key not in self._sources:
            self._sources[key] = TiledSource(tensor, self._holds[key[0]])
        return self._sources[key]

    def run(self, work: Callable[[], Awaitable[T]], *, host: TiledEvictable) -> T:
        """Run a coroutine in the runtime's loop while it holds the tiles, and wait for it.

        Args:
            work: the coroutine function.
            host: whose task it is if there are no tiles to hold.

        Returns:
            What ``work`` gave.

        Raises:
            InvalidTileError, TileConflictError, ReleasedError: the tiles cannot be read any more.
            BaseException: what ``work`` or a transfer raised; residency is what it was.
        """
        over: AwaitResult[None] = AwaitResult()
        handle: AwaitResult[T] = AwaitResult()
        companions: list[AwaitResult[None]] = []
        holds = list(self._holds.values())
        scope = (holds[0].carrier if holds else host)._scope

        async def accompany(_: LedgerEntry) -> None:
            await over

        def let_go() -> None:
            over._finish()

        try:
            if not holds:
                return scope.start(handle, work).wait()
            for hold in holds[1:]:
                companion: AwaitResult[None] = AwaitResult()
                hold.carrier._start_work(companion, hold.purpose, hold.enter, accompany)
                companions.append(companion)  # one by one: the next may be refused
            first = holds[0]
            task = partial(_run, holds, work)
            return first.carrier._start_work(
                handle, first.purpose, first.enter, lambda _: task(), then=let_go
            ).wait()
        finally:
            try:
                if handle not in scope.unfinished():  # else the thread was interrupted, and the work goes on
                    let_go()
                    for companion in companions:
                        companion.wait()
            finally:
                # An error's traceback keeps this frame: no cycle handle -> error -> frame -> handle.
                del handle, companions


def _key(tensor: Tensor) -> _Key:
    return cast("TiledEvictable", tensor.carrier), tensor.offset, tensor.layout


async def _run(holds: Sequence[_Hold], work: Callable[[], Awaitable[T]]) -> T:
    complete = False
    try:
        # In one order for all requests, so that no two wait for what the other has.
        for hold in sorted(holds, key=lambda hold: id(hold.carrier)):
            await hold.reserve()
        for hold in holds:
            await hold.bring()
        value = await work()
        complete = True
    finally:
        if not complete:
            for hold in holds:
                await hold.undo()
    for hold in holds:
        await hold.finish()
    return value
