"""``carrier.project``: gather the tiles of a selection into one compact dense Tensor.

Spec: *Project eagerly returns a completion handle for a compact Tensor*; *Gather preserves public
TileSelection ordering*; *Projection is an autograd-visible gather*. Validation and the conflict check run on the
caller's thread and change nothing when they raise; the rest is one task in the carrier's task group.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from strideweave.autograd import is_grad_enabled
from strideweave.autograd.graph import Node, attach
from strideweave.carriers.base import Carrier
from strideweave.carriers.tiled_evictable.gathering import (
    copy_inline,
    copy_resident,
    copy_streamed,
    loop_bytes,
)
from strideweave.carriers.tiled_evictable.gradient import TileContribution
from strideweave.carriers.tiled_evictable.traffic import Changes
from strideweave.errors import ImmutableError, OwnershipError, ReleasedError
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.request import Request
from strideweave.tensor import Tensor
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.ledger import LedgerEntry
from strideweave.tiles.plan import RequestPlan, plan_request
from strideweave.tiles.selection import TileSelection

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.tiles.gather import CompactGeometry

    Ordinals = npt.NDArray[np.int64]
    Flat = npt.NDArray[np.unsignedinteger]

__all__ = ["AwaitProjection", "start_backward_projection", "start_projection"]


class AwaitProjection(AwaitResult[Tensor]):
    """The completion handle of one projection; its value is the compact Tensor.

    Not a Tensor itself: operations refuse it, call ``wait()`` or await it first.

    Spec: *Project eagerly returns a completion handle for a compact Tensor*.
    """

    __slots__ = ()


def start_projection(
    carrier: TiledEvictable, tensor: Tensor, selection: TileSelection, destination: Carrier | None
) -> AwaitProjection:
    """Validate a projection, admit it and start its task; see ``TiledEvictable.project``."""
    traffic = carrier._traffic
    placement = carrier._place(tensor)
    if not isinstance(selection, TileSelection):
        raise TypeError(
            f"selection must be a TileSelection, found {type(selection).__name__}; "
            "carrier.select({axis: coordinates}) makes one"
        )
    required = selection.bind(traffic.grid)
    geometry = carrier._geometry(placement, selection)
    if destination is not None:
        _check_destination(carrier, destination, geometry.size)
    policy = carrier.residency_policy
    if policy is None:
        plan = RequestPlan(required)
    else:
        # A policy believes that its plans are carried out, so it is not asked for what would be refused.
        traffic.check_data("project", required)
        plan = plan_request(policy, traffic.grid, required, selection.tile_set, "projection")
    source = _Source(tensor, selection) if tensor.requires_grad and is_grad_enabled() else None
    return _Projection(carrier, plan, geometry, destination=destination, source=source).start()


def start_backward_projection(
    carrier: TiledEvictable, tensor: Tensor, selection: TileSelection
) -> AwaitProjection:
    """Start gathering tiles of a full cotangent for a pullback; what is an implicit zero is read as zeros.

    Without a policy it leaves residency as it finds it.

    Raises:
        InvalidTileError: a selected tile has no value.
        TileConflictError: an unfinished residency request covers one of the tiles.
    """
    traffic = carrier._traffic
    required = selection.bind(traffic.grid)
    geometry = carrier._geometry(carrier._place(tensor), selection)
    plan = RequestPlan(required, passing=required)
    policy = carrier.residency_policy
    if policy is not None:
        traffic.check_data("backward", required)
        plan = plan_request(policy, traffic.grid, required, selection.tile_set, "backward")
    work = _Projection(carrier, plan, geometry, kind="backward", keeps=policy is None)
    return work.start()


def _check_destination(carrier: TiledEvictable, destination: Carrier, size: int) -> None:
    kind = carrier._compute_class
    if type(destination) is not kind:
        raise TypeError(
            f"destination must be a {kind.__name__}, the class of the primary tier, "
            f"found {type(destination).__name__}"
        )
    if destination.is_released():
        raise ReleasedError("destination was released; pass a live carrier")
    if destination.is_owned():
        raise OwnershipError("destination is owned by a composite or an unfinished request; wait for it")
    if not destination.is_mutable():
        raise ImmutableError("destination is not publicly mutable; make it with mutable=True")
    if destination.dtype() is not carrier.dtype():
        raise TypeError(
            f"destination holds {destination.dtype().name}, the tensor {carrier.dtype().name}; "
            "they must be the same"
        )
    if destination.size() < size and not (destination.size() == 0 and destination._can_allocate()):
        raise ValueError(
            f"destination has {destination.size()} slots, the selection needs {size}; "
            "pass a larger carrier, or an empty one to be allocated"
        )
    if destination._shares_memory(carrier.primary) or destination._shares_memory(carrier.secondary):
        raise ValueError(
            "destination lies in the memory of a tier, so tiles would be written over before they are read; "
            "pass memory of its own"
        )


@dataclass(slots=True, eq=False)
class _Source:
    """What a projection that is differentiated goes back to."""

    tensor: Tensor
    selection: TileSelection
    version: int = 0  # of the carrier, at the call

    def node(self) -> Node:
        """The one visible node, which refers to the source and not to the compact Tensor."""
        saved = [(self.tensor.carrier, self.version)]
        return Node("project", (self.tensor,), partial(_pull_back, self.tensor, self.selection), saved)


def _pull_back(source: Tensor, selection: TileSelection, cotangent: Tensor) -> tuple[TileContribution]:
    return (TileContribution(source, selection, cotangent),)


class _Projection(Request):
    """One projection, from its admission through the runtime's loop; it keeps its carrier alive.

    Args:
        carrier: the tiled carrier.
        plan: its tiles.
        geometry: where they go.
        destination: the caller's, or None.
        source: what it is differentiated with respect to; None attaches no node.
        kind: its name, for messages.
        keeps: whether it leaves residency as it finds it.
    """

    __slots__ = (
        "carrier",
        "destination",
        "entry",
        "geometry",
        "keeps",
        "kind",
        "plan",
        "source",
        "staging",
        "token",
        "traffic",
    )

    def __init__(
        self,
        carrier: TiledEvictable,
        plan: RequestPlan,
        geometry: CompactGeometry,
        *,
        destination: Carrier | None = None,
        source: _Source | None = None,
        kind: str = "project",
        keeps: bool = False,
    ) -> None:
        super().__init__(carrier._scope, AwaitProjection())
        self.carrier = carrier
        self.traffic = carrier._traffic
        self.plan = plan
        self.geometry = geometry
        self.destination = destination
        self.token = None if destination is None else object()
        self.source = source
        self.kind = kind
        self.keeps = keeps
        self.staging = 0  # bytes to reserve for tiles that stream
        self.entry = LedgerEntry(kind)

    def start(self) -> AwaitProjection:
        """Refuse what the memory limit could never hold; else admit the request and start its task."""
        if self.traffic.budget is not None:
            self.staging = self.traffic.check_plan(self.kind, self.plan, in_place=self.geometry.contiguous)
        return self.scope.admit(self, cast("AwaitProjection", self.handle))

    def enter(self) -> None:
        """Take the destination and the tiles, or raise; under the lock."""
        destination = self.destination
        if destination is not None:
            _check_destination(self.carrier, destination, self.geometry.size)  # again: it may be in use now
            destination._claim(self.token)
        self.traffic.enter_data(self.entry, self.plan)
        if self.source is not None:
            self.source.version = self.carrier.version

    def leave(self) -> None:
        """Let go of the tiles and of the destination, whatever became of the request; never blocks."""
        self.traffic.leave(self.entry)
        if self.destination is not None:
            self.destination._abandon(self.token)

    def drop(self) -> None:
        """Let go of what never begins; a task that has begun still works with it."""
        if not self.begun:
            del self.carrier, self.traffic, self.plan, self.geometry, self.destination, self.source

    async def _gather_resident(self, entry: LedgerEntry) -> Carrier | None:
        """Gather tiles that are there and stay where they are; None where there is more to do."""
        plan, traffic, geometry = self.plan, self.traffic, self.geometry
        required = plan.required
        count = len(required)
        few = count * traffic.tile_bytes <= loop_bytes(geometry)
        # With a memory limit, tiles stay for sure only once the request had its turn; few are copied before any leaves.
        if not (few or traffic.budget is None) or not traffic.has_all(plan):
            return None
        target = self._allocate() if self.destination is None else self._open_destination()
        compact = self._flat(target)
        if not few:
            try:
                await copy_resident(traffic, geometry, required, None, compact)
            finally:
                await traffic.finish_with(entry, NO_ORDINALS)  # others may have put off an eviction meanwhile
        elif count > 1:
            copy_inline(traffic, geometry, required, None, compact)
        elif geometry.contiguous:  # the smallest request pays for nothing that only others need
            compact[:] = traffic.rows(required)[0]
        else:
            geometry.copy_in(traffic.rows(required), (0,), compact)
        return target

    async def work(self) -> Tensor:
        """Bring the tiles, gather them, publish the compact Tensor, then let go of the tiles."""
        entry = self.entry
        gathered = await self._gather_resident(entry)
        if gathered is not None:
            return self._publish(gathered)
        changes = Changes()
        try:
            await self.traffic.reserve_plan(entry, self.plan, self.staging, changes)
            await self.traffic.bring(entry, self.plan, changes)
            gathered = await self._gather(entry)
        finally:
            if gathered is None:
                await self.traffic.undo(entry, changes)
        await self.traffic.finish_with(entry, NO_ORDINALS if self.keeps else self.plan.passing)
        return self._publish(gathered)

    def _publish(self, gathered: Carrier) -> Tensor:
        if self.destination is not None:
            self.destination._advance_version(self.token)
        source = self.source
        compact = Tensor._of(gathered, 0, self.geometry.layout, source is not None)
        return compact if source is None else attach(compact, source.node())

    async def _gather(self, entry: LedgerEntry) -> Carrier:
        at_hand, streamed = self._positions()
        if self.destination is None or not len(streamed):
            target = self._allocate() if self.destination is None else self._open_destination()
            await self._fill(entry, target, at_hand, streamed)
            return target
        # A read may still fail, and a failed request leaves the destination's values as they were.
        with self._aside() as target:
            await self._fill(entry, target, at_hand, streamed)
            if not self.destination._take_over(target):
                await self.traffic.copy([(self._flat(self._open_destination()), self._flat(target))])
        return self.destination

    async def _fill(self, entry: LedgerEntry, target: Carrier, at_hand: Ordinals, streamed: Ordinals) -> None:
        """Copy tiles at these positions from the primary tier, and read those at the others past it."""
        traffic, geometry, required = self.traffic, self.geometry, self.plan.required
        if len(at_hand):
            all_of_it = len(at_hand) == len(required)
            resident, places = (required, None) if all_of_it else (required[at_hand], at_hand)
            await copy_resident(traffic, geometry, resident, places, self._flat(target))
        if len(streamed):
            passing = required if len(streamed) == len(required) else required[streamed]
            await copy_streamed(traffic, geometry, passing, streamed, target, entry=entry)

    @contextmanager
    def _aside(self) -> Iterator[Carrier]:
        """Memory for the result beside its destination, which statistics name for as long as the block lasts."""
        target = self._allocate()
        nbytes = self.geometry.size * target.dtype().itemsize
        with self.traffic.lock:
            self.traffic.counters.note_aside(nbytes)
        try:
            yield target
        finally:
            with self.traffic.lock:
                self.traffic.counters.note_aside(-nbytes)

    def _positions(self) -> tuple[Ordinals, Ordinals]:
        """The positions of the tiles to copy from the primary tier, and of those to stream past it."""
        plan = self.plan
        if len(plan.passing) and not self.traffic.table.are_resident(plan.passing):
            if plan.passing is plan.required:
                return NO_ORDINALS, np.arange(len(plan.required))
            passing = plan.is_passing()
            return np.flatnonzero(~passing), np.flatnonzero(passing)
        self.traffic.count(hits=len(plan.passing))  # those that stay are counted where they are brought
        return np.arange(len(plan.required)), NO_ORDINALS

    def _allocate(self) -> Carrier:
        return self.traffic.prototype._allocate_result(self.geometry.size)

    def _flat(self, carrier: Carrier) -> Flat:
        size, flat = self.geometry.size, carrier._units(self.traffic.unit)
        return flat if len(flat) == size else flat[:size]

    def _open_destination(self) -> Carrier:
        destination = self.destination
        if destination is None:
            raise RuntimeError("this projection has no destination; this is a defect")
        if destination.size() == 0:
            destination._allocate_in_place(self.geometry.size)
        return destination
