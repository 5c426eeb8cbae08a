"""``carrier.scatter``: a fresh full Tensor that has the values of a compact one at the selected tiles.

Spec: *Scatter is the asynchronous projection counterpart*; *Scatter participates in autograd*. Validation and the
conflict check run on the caller's thread and change nothing when they raise; the rest is one task in the task group
of the template's carrier. The result is nobody else's until it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from anyio.lowlevel import checkpoint

from strideweave.autograd import is_grad_enabled
from strideweave.autograd.graph import Node, attach
from strideweave.carriers.move.request import AwaitMove
from strideweave.carriers.tiled_evictable.filling import BATCH_TILES, in_waves
from strideweave.carriers.tiled_evictable.gradient import TileContribution
from strideweave.carriers.tiled_evictable.projection import start_backward_projection
from strideweave.carriers.tiled_evictable.tile_values import CompactValues, add_tiles, block_of
from strideweave.carriers.tiled_evictable.traffic import Changes
from strideweave.errors import OwnershipError, ReleasedError
from strideweave.tensor import Tensor
from strideweave.tiles.compact import groups
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.plan import plan_request
from strideweave.tiles.residency import Location
from strideweave.tiles.selection import TileSelection

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from strideweave.autograd.graph import Share
    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.filling import Reduction
    from strideweave.carriers.tiled_evictable.tile_values import Block, Views
    from strideweave.tiles.ledger import LedgerEntry
    from strideweave.tiles.plan import RequestPlan

    Ordinals = npt.NDArray[np.int64]
    Flat = npt.NDArray[np.unsignedinteger]

__all__ = ["check_compact", "start_scatter"]

_REDUCTIONS = ("replace", "add")


def start_scatter(
    carrier: TiledEvictable, compact: Tensor, template: Tensor, selection: TileSelection, reduction: Reduction
) -> AwaitMove:
    """Validate a scatter, admit it and start its task; see ``TiledEvictable.scatter``."""
    traffic = carrier._traffic
    check_compact(carrier, compact, template, selection, "template")
    if reduction not in _REDUCTIONS:
        raise ValueError(f'reduction must be "replace" or "add", found {reduction!r}')
    required = selection.bind(traffic.grid)
    reads = reduction == "add"
    if carrier.residency_policy is not None:
        # A policy believes that its plans are carried out, so it is not asked for what would be refused.
        traffic.check_data("scatter", required, reads=reads)
    plan = plan_request(
        carrier.residency_policy, traffic.grid, required, selection.tile_set, "scatter", reads=reads
    )
    enabled = is_grad_enabled()
    wanted = (enabled and compact.requires_grad, enabled and reads and template.requires_grad)
    staging = traffic.check_plan("scatter", plan, in_place=not reads)
    work = _Scatter(carrier, compact, template, selection, plan, wanted, object(), staging)
    return carrier._start_work(AwaitMove(), "scatter", work.enter, work.run, then=work.let_go)


def check_compact(
    carrier: TiledEvictable, compact: object, tensor: object, selection: object, name: str
) -> None:
    """Check that a compact Tensor can give the selected tiles of a full Tensor their values.

    Args:
        carrier: the carrier that the full Tensor must be backed by.
        compact: must be a live Tensor on the compute class, free of owners, of the compact shape.
        tensor: must be a full Tensor of ``carrier``.
        selection: must be a TileSelection that fits the grid.
        name: what the full Tensor is called.

    Raises:
        ReleasedError, OwnershipError, TypeError, ValueError: as ``TiledEvictable.scatter`` says.
    """
    carrier._require_live()
    for label, value in (("compact", compact), (name, tensor)):
        if not isinstance(value, Tensor):
            hint = "; wait() for the handle first" if hasattr(value, "wait") else ""
            raise TypeError(f"{label} must be a Tensor, found {type(value).__name__}{hint}")
    if not isinstance(compact, Tensor):  # seen above; for the type checker
        return
    kind = carrier._compute_class
    if type(compact.carrier) is not kind:
        raise TypeError(
            f"compact must be backed by a {kind.__name__}, the class of the primary tier, "
            f"found {type(compact.carrier).__name__}"
        )
    if not isinstance(selection, TileSelection):
        raise TypeError(
            f"selection must be a TileSelection, found {type(selection).__name__}; "
            "carrier.select({axis: coordinates}) makes one"
        )
    if compact.dtype is not carrier.dtype():
        raise TypeError(
            f"compact holds {compact.dtype.name}, the {name} {carrier.dtype().name}; they must be the same"
        )
    placement = carrier._place(tensor)
    check_free(compact.carrier)
    selection.bind(carrier._traffic.grid)
    shape = carrier._geometry(placement, selection).shape
    if compact.shape != shape:
        raise ValueError(
            f"compact has shape {compact.shape}, the {len(selection)} selected tiles make {shape}"
        )


def check_free(carrier: Carrier) -> None:
    """Check that the carrier of a compact Tensor is live and nobody's.

    Raises:
        ReleasedError, OwnershipError: as said.
    """
    if carrier.is_released():
        raise ReleasedError("compact's carrier was released; pass a live Tensor")
    if carrier.is_owned():
        raise OwnershipError(
            "compact's carrier is owned by a composite or an unfinished request; wait for that first"
        )


@dataclass(slots=True, eq=False)
class _Scatter:
    """One scatter, from its admission through the runtime's loop; it keeps both inputs alive."""

    carrier: TiledEvictable
    compact: Tensor
    template: Tensor
    selection: TileSelection
    plan: RequestPlan
    wanted: tuple[bool, bool]
    token: object
    staging: int  # bytes to reserve for tiles that stream

    def enter(self, entry: LedgerEntry) -> None:
        """Take compact and the template's tiles, or raise; under the lock."""
        self.compact.carrier._claim(self.token)
        self.carrier._traffic.enter_data(entry, self.plan)

    def let_go(self) -> None:
        """Give compact back, if it was taken."""
        self.compact.carrier._abandon(self.token)

    async def run(self, entry: LedgerEntry) -> Tensor:
        """Bring what is read, fill a fresh carrier, let go of the template's tiles, and publish."""
        traffic, changes = self.carrier._traffic, Changes()
        fresh: TiledEvictable | None = None
        complete = False
        try:
            await traffic.reserve_plan(entry, self.plan, self.staging, changes)
            await traffic.bring(entry, self.plan, changes)
            fresh = self.carrier._fresh(Location.NONE)
            await self._fill(entry, fresh)
            complete = True
        finally:
            if not complete:
                if fresh is not None:
                    fresh.release()
                await traffic.undo(entry, changes)
        await traffic.finish_with(entry, self.plan.passing)
        return self._publish(fresh)

    async def _fill(self, entry: LedgerEntry, fresh: TiledEvictable) -> None:
        grid, placement = fresh._traffic.grid, self.carrier._place(self.template)
        values = await CompactValues.of(grid, placement, self.selection, self.compact)
        if self.plan.reads:
            await self._add(entry, fresh, values)
        else:
            await in_waves(
                fresh,
                "scatter",
                self.plan.required,
                lambda writer, wave: writer.write(wave, values, "replace"),
            )
        fresh._version = 1  # nobody has seen it change, however many steps that took

    async def _add(self, entry: LedgerEntry, fresh: TiledEvictable, values: CompactValues) -> None:
        """Store the sums of the template's tiles and the compact ones, which are at hand or stream past."""
        traffic, plan = self.carrier._traffic, self.plan

        async def store(ordinals: Ordinals, rows: list[Flat]) -> None:
            base_of = dict(zip(ordinals.tolist(), rows, strict=True))

            def sums(wave: Ordinals, block: Block) -> list[Views]:
                base, starts = block_of([base_of[ordinal] for ordinal in wave.tolist()])
                return values.onto(wave, block, (base.view(block[0].dtype), starts))

            await in_waves(
                fresh, "scatter", ordinals, lambda writer, wave: writer.store(wave, sums, add_tiles)
            )

        if traffic.table.is_resident(plan.required).all():
            traffic.count(hits=len(plan.passing))  # those that stay are counted where they are brought
            at_hand, streamed = plan.required, NO_ORDINALS
        else:
            at_hand, streamed = plan.staying, plan.required[plan.is_passing()]
        for part in groups(len(at_hand), BATCH_TILES):
            await store(at_hand[part], traffic.rows(at_hand[part]))
            if len(at_hand) > BATCH_TILES:
                await checkpoint()
        await traffic.stream(streamed, store, entry=entry)

    def _publish(self, fresh: TiledEvictable) -> Tensor:
        result = Tensor._of(fresh, self.template.offset, self.template.layout, any(self.wanted))
        if not any(self.wanted):
            return result
        inputs = (self.compact, self.template)
        return attach(
            result, Node("scatter", inputs, partial(_pull_back, inputs, self.selection, self.wanted))
        )


def _pull_back(
    inputs: tuple[Tensor, Tensor], selection: TileSelection, wanted: tuple[bool, bool], cotangent: Tensor
) -> list[Share]:
    """Project the cotangent for compact, and give a template that was added to the same tiles of it."""
    carrier: TiledEvictable = cotangent.carrier  # type: ignore[assignment]  # as the result's
    share = start_backward_projection(carrier, cotangent, selection).wait()
    return [
        share if wanted[0] else None,
        TileContribution(inputs[1], selection, share) if wanted[1] else None,
    ]
