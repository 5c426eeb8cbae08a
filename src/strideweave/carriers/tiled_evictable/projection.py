"""``carrier.project``: gather the tiles of a selection into one compact dense Tensor.

Spec: *Project eagerly returns a completion handle for a compact Tensor*; *Gather preserves public
TileSelection ordering*. Validation and the conflict check run on the caller's thread and change nothing when
they raise; the rest is one task in the carrier's task group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strideweave.autograd import is_grad_enabled
from strideweave.carriers.base import Carrier
from strideweave.carriers.tiled_evictable.traffic import Changes
from strideweave.errors import ImmutableError, OwnershipError, ReleasedError
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.workers import run_jobs
from strideweave.tensor import Tensor
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.plan import RequestPlan, plan_request
from strideweave.tiles.selection import TileSelection

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.tiles.gather import CompactGeometry
    from strideweave.tiles.ledger import LedgerEntry

    Ordinals = npt.NDArray[np.int64]
    Flat = npt.NDArray[np.unsignedinteger]

__all__ = ["AwaitProjection", "start_projection"]

_FEW_TILES = 8  # up to this many, copying tile by tile takes less time than preparing to copy them together
INLINE_BYTES = 1 << 20  # up to this much, the loop has copied before a worker would have woken up
_SHARED_BYTES = 32 << 20  # from here on two workers are done before one would be
_PIECE_BYTES = 2 << 20  # what a worker copies at once then


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
    requires_grad = tensor.requires_grad and is_grad_enabled()
    work = _Projection(carrier, plan, geometry, destination, object(), requires_grad)
    return carrier._start_work(AwaitProjection(), work.enter, work.run, then=work.let_go)


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


@dataclass(slots=True, eq=False)
class _Projection:
    """One projection, from its admission through the runtime's loop; it keeps its carrier alive."""

    carrier: TiledEvictable
    plan: RequestPlan
    geometry: CompactGeometry
    destination: Carrier | None
    token: object
    requires_grad: bool

    @property
    def traffic(self) -> TileTraffic:
        return self.carrier._traffic

    def enter(self) -> LedgerEntry:
        """Take the destination and the tiles, or raise and take nothing; under the lock."""
        if self.destination is not None:
            _check_destination(
                self.carrier, self.destination, self.geometry.size
            )  # again: it may be in use now
            self.destination._claim(self.token)
        entry: LedgerEntry | None = None
        try:
            entry = self.traffic.enter_data("project", self.plan)
        finally:
            if entry is None:
                self.let_go()
        return entry

    def let_go(self) -> None:
        """Give the destination back."""
        if self.destination is not None:
            self.destination._relinquish(self.token)

    def _gather_few(self) -> Tensor | None:
        """Gather a few resident tiles that stay where they are, at once; None where there is more to do."""
        plan, traffic = self.plan, self.traffic
        if len(plan.required) * traffic.tile_bytes > INLINE_BYTES or not traffic.has_all(plan):
            return None
        target = self._allocate() if self.destination is None else self._open_destination()
        self._copy_inline(plan.required, np.arange(len(plan.required)), self._flat(target))
        return self._publish(target)

    async def run(self, entry: LedgerEntry) -> Tensor:
        """Bring the tiles, gather them, publish the compact Tensor, then let go of the tiles."""
        few = self._gather_few()
        if few is not None:
            return few
        changes = Changes()
        gathered: Carrier | None = None
        try:
            await self.traffic.bring(entry, self.plan, changes)
            gathered = await self._gather()
        finally:
            if gathered is None:
                await self.traffic.undo(entry, changes)
        await self.traffic.finish_with(entry, self.plan.passing)
        return self._publish(gathered)

    def _publish(self, gathered: Carrier) -> Tensor:
        if self.destination is not None:
            self.destination._advance_version(self.token)
        return Tensor(gathered, 0, self.geometry.layout, requires_grad=self.requires_grad)

    async def _gather(self) -> Carrier:
        at_hand, streamed = self._positions()
        # A read may still fail, and a failed request leaves the destination's values as they were.
        aside = self.destination is None or len(streamed)
        target = self._allocate() if aside else self._open_destination()
        compact = self._flat(target)
        await self._copy_resident(at_hand, compact)
        if len(streamed):
            await self._copy_streamed(streamed, target)
            if self.destination is not None:
                target = self._open_destination()
                await self.traffic.copy([(self._flat(target), compact)])
        return target

    def _positions(self) -> tuple[Ordinals, Ordinals]:
        """The positions of the tiles to copy from the primary tier, and of those to stream past it."""
        plan = self.plan
        if len(plan.passing) and not self.traffic.table.is_resident(plan.passing).all():
            passing = plan.is_passing()
            return np.flatnonzero(~passing), np.flatnonzero(passing)
        return np.arange(len(plan.required)), NO_ORDINALS

    def _allocate(self) -> Carrier:
        return self.traffic.prototype._allocate_result(self.geometry.size)

    def _flat(self, carrier: Carrier) -> Flat:
        return carrier._bytes().view(self.traffic.unit)[: self.geometry.size]

    def _open_destination(self) -> Carrier:
        destination = self.destination
        if destination is None:
            raise RuntimeError("this projection has no destination; this is a defect")
        if destination.size() == 0:
            destination._allocate_in_place(self.geometry.size)
        return destination

    async def _copy_resident(self, positions: Ordinals, compact: Flat) -> None:
        required = self.plan.required
        ordinals = required if len(positions) == len(required) else required[positions]
        nbytes = len(ordinals) * self.traffic.tile_bytes
        if nbytes <= INLINE_BYTES:
            self._copy_inline(ordinals, positions, compact)
            return
        piece = _piece_bytes(nbytes)
        block = self.traffic.block(ordinals)
        if block is None:
            rows = self.traffic.rows(ordinals)
            await run_jobs(self.geometry.jobs(rows, positions.tolist(), compact, piece))
        else:
            await run_jobs(self.geometry.row_jobs(*block, positions, compact, piece))

    def _copy_inline(self, ordinals: Ordinals, positions: Ordinals, compact: Flat) -> None:
        block = self.traffic.block(ordinals) if len(ordinals) > _FEW_TILES else None
        if block is None:
            self.geometry.copy_in(self.traffic.rows(ordinals), positions.tolist(), compact)
        else:
            self.geometry.copy_rows(*block, positions, compact)

    async def _copy_streamed(self, positions: Ordinals, target: Carrier) -> None:
        geometry, compact = self.geometry, self._flat(target)
        ordinals = self.plan.required[positions]
        position_of = dict(zip(ordinals.tolist(), positions.tolist(), strict=True))

        def landing(wave: Ordinals) -> tuple[Carrier, list[int]]:
            return target, [geometry.start(position_of[ordinal]) for ordinal in wave.tolist()]

        async def consume(wave: Ordinals, rows: list[Flat]) -> None:
            at = [position_of[ordinal] for ordinal in wave.tolist()]
            nbytes = len(wave) * self.traffic.tile_bytes
            if nbytes > INLINE_BYTES:
                await run_jobs(geometry.jobs(rows, at, compact, _piece_bytes(nbytes)))
            else:
                geometry.copy_in(rows, at, compact)

        await self.traffic.stream(ordinals, consume, landing if geometry.contiguous else None)


def _piece_bytes(nbytes: int) -> int:
    """How much of a copy of that size a worker takes at once."""
    return nbytes if nbytes < _SHARED_BYTES else _PIECE_BYTES
