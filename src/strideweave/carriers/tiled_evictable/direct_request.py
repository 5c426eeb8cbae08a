"""One blocking request over the full Tensors of one or several tiled carriers.

Spec: *Residency remains valid while tiled work needs it*; *Residency policy can optimize but cannot define
correctness*. The request is a task of the first carrier; each other one has a companion, which keeps its tiles in
its own ledger, and the carrier from being released, until the task has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from strideweave.carriers.tiled_evictable.traffic import Changes
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.thread_role import waiting_is_forbidden
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.plan import RequestPlan, plan_request
from strideweave.tiles.selection import TileSelection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.tensor import Tensor
    from strideweave.tiles.ledger import LedgerEntry

__all__ = ["run_request"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Hold:
    """All tiles of one carrier, as the request holds them."""

    carrier: TiledEvictable
    plan: RequestPlan = field(default_factory=lambda: RequestPlan(NO_ORDINALS))
    admitted: LedgerEntry | None = None
    version: int = 0
    changes: Changes = field(default_factory=Changes)

    @property
    def traffic(self) -> TileTraffic:
        return self.carrier._traffic

    @property
    def entry(self) -> LedgerEntry:
        if self.admitted is None:
            raise RuntimeError("this request was not admitted; this is a defect")
        return self.admitted

    def ask_policy(self, purpose: str) -> None:
        """Make the plan; without a policy no tile is promoted, and none leaves."""
        grid, policy = self.traffic.grid, self.carrier.residency_policy
        everything = TileSelection([range(extent) for extent in grid.grid_shape])
        required = everything.bind(grid)
        if policy is None:
            self.plan = RequestPlan(required, passing=required)
        else:
            self.plan = plan_request(policy, grid, required, everything.tile_set, purpose)

    def enter(self, purpose: str) -> LedgerEntry:
        """Take the tiles, and note the version that they have; under the lock."""
        self.admitted = self.traffic.enter_data(purpose, self.plan)
        self.version = self.carrier.version
        return self.admitted

    @property
    def leaving(self) -> Any:
        """The tiles that are evicted in the end, if nobody else needs them."""
        return NO_ORDINALS if self.carrier.residency_policy is None else self.plan.passing


def run_request(
    tensors: Iterable[Tensor], purpose: str, work: Callable[[], Awaitable[T]], *, host: TiledEvictable
) -> tuple[T, dict[TiledEvictable, int]]:
    """Run a coroutine in the runtime's loop while it holds every tile of some tensors, and wait for it.

    Without a policy it leaves the residency that it finds. With one, what the plan promotes is primary before
    ``work`` begins, and what it evicts leaves when ``work`` has ended.

    Args:
        tensors: full tiled Tensors, of any number of carriers.
        purpose: ``"operation"`` or ``"backward"``.
        work: the coroutine function.
        host: whose task it is if there are no tensors.

    Returns:
        What ``work`` gave, and the version that each carrier had when the request was admitted.

    Raises:
        RuntimeError: called inside the runtime, where waiting would deadlock.
        ReleasedError, InvalidTileError, TileConflictError: the tiles cannot be read; nothing has changed.
        TypeError, ValueError: a policy answered what is no plan for its carrier; likewise.
        BaseException: what ``work`` or a transfer raised; residency is what it was.
    """
    if waiting_is_forbidden():
        raise RuntimeError(
            f"this {purpose} waits for tiles, which would deadlock inside the runtime; run it in a thread of "
            "your own, or project the tiles and await them"
        )
    holds = [
        _Hold(cast("TiledEvictable", carrier)) for carrier in {tensor.carrier: None for tensor in tensors}
    ]
    for hold in holds:
        hold.carrier._require_live()
        # A policy believes that its plans are carried out, so it is not asked for what would be refused.
        hold.traffic.check_data(purpose, np.arange(hold.traffic.grid.tile_count))
    for hold in holds:
        hold.ask_policy(purpose)
    if not holds:
        alone: AwaitResult[T] = AwaitResult()
        return host._scope.start(alone, work).wait(), {}
    return _run_holding(holds, purpose, work), {hold.carrier: hold.version for hold in holds}


def _run_holding(holds: list[_Hold], purpose: str, work: Callable[[], Awaitable[T]]) -> T:
    over: AwaitResult[None] = AwaitResult()
    companions: list[AwaitResult[None]] = []

    async def accompany(_: LedgerEntry) -> None:
        await over

    def let_go() -> None:
        over._finish()

    handle: AwaitResult[T] = AwaitResult()
    started = False
    try:
        for hold in holds[1:]:
            enter = partial(hold.enter, purpose)
            companions.append(hold.carrier._start_work(AwaitResult(), enter, accompany))
        first = holds[0]
        first.carrier._start_work(
            handle, partial(first.enter, purpose), lambda _: _run(holds, work), then=let_go
        )
        started = True
        return handle.wait()
    finally:
        if not started:
            let_go()
        if handle.done or not started:  # else the thread was interrupted, and the work goes on
            for companion in companions:
                companion.wait()


async def _run(holds: list[_Hold], work: Callable[[], Awaitable[T]]) -> T:
    complete = False
    try:
        for hold in holds:
            await hold.traffic.bring(hold.entry, hold.plan, hold.changes)
        value = await work()
        complete = True
    finally:
        if not complete:
            for hold in holds:
                await hold.traffic.undo(hold.entry, hold.changes)
    for hold in holds:
        await hold.traffic.finish_with(hold.entry, hold.leaving)
    return value
