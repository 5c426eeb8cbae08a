"""Gradients of tiled tensors: tiled themselves, tile by tile, zeros without storage where nothing arrived.

Spec: *Projection is an autograd-visible gather*. A gradient of the whole tensor never exists densely: what arrives
for some tiles is added to a fresh tiled carrier whose other tiles are implicit zeros. Whatever moves tiles is a
request of the carrier it belongs to, called ``backward``, and the thread that runs backward waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from strideweave.autograd.graph import Contribution
from strideweave.carriers.array_views import gathered
from strideweave.carriers.tiled_evictable.filling import in_waves, start_filling
from strideweave.carriers.tiled_evictable.tile_values import values_of_rows
from strideweave.carriers.tiled_evictable.traffic import Changes
from strideweave.layout import Layout
from strideweave.runtime.await_result import AwaitResult
from strideweave.tensor import Tensor
from strideweave.tiles.compact import row_major_strides
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.gather import CompactGeometry
from strideweave.tiles.plan import RequestPlan
from strideweave.tiles.residency import Location
from strideweave.tiles.selection import TileSelection

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.filling import Reduction
    from strideweave.tiles.grid import TileGrid, TilePlacement
    from strideweave.tiles.ledger import LedgerEntry

    Ordinals = npt.NDArray[np.int64]
    Flat = npt.NDArray[np.unsignedinteger]

__all__ = ["TileContribution", "check_gradient", "copy_gradient", "gradient_like", "sum_gradients"]

_KIND = "backward"


def gradient_like(tensor: Tensor) -> Tensor:
    """Make the gradient to which nothing has been added yet, every tile an implicit zero.

    Args:
        tensor: a full tiled Tensor.

    Returns:
        A full Tensor of the same dtype, Layout and offset on a fresh carrier of the same geometry and tier kinds,
        without a policy; it does not require grad.
    """
    carrier = _carrier(tensor)
    return Tensor._of(carrier._fresh(Location.IMPLICIT), tensor.offset, tensor.layout, False)


@dataclass(frozen=True, slots=True)
class TileContribution(Contribution):
    """The share of a full tiled tensor that a compact cotangent of some of its tiles stands for.

    Attributes:
        tensor: the full tensor.
        selection: which of its tiles.
        cotangent: a Tensor of the compact shape.
    """

    tensor: Tensor
    selection: TileSelection
    cotangent: Tensor

    def onto(self, total: Tensor | None) -> Tensor:
        """Add the cotangent to the selected tiles of ``total``, or of a fresh gradient; waits until that is done."""
        if total is None:
            total = gradient_like(self.tensor)
        start_filling(
            _carrier(total), total, self.selection, self.cotangent, reduction="add", kind=_KIND
        ).wait()
        return total


def check_gradient(carrier: TiledEvictable, gradient: Tensor) -> None:
    """Refuse a tiled Tensor that cannot be the gradient of a full Tensor on ``carrier``.

    Raises:
        TypeError: it computes on another carrier class.
        ValueError: its grid or tiles are others, or its Layout is not tile-footprint compatible with its carrier.
    """
    other = _carrier(gradient)
    if other._traffic.grid != carrier._traffic.grid:
        raise ValueError(
            f"the gradient's carrier is a grid {other.grid_shape} of tiles {other.tile_shape}, the tensor's a grid "
            f"{carrier.grid_shape} of tiles {carrier.tile_shape}; they must be the same"
        )
    if other._compute_class is not carrier._compute_class:
        raise TypeError(
            f"the gradient computes on {other._compute_class.__name__}, the tensor on "
            f"{carrier._compute_class.__name__}; they must be the same"
        )
    other._place(gradient)


def copy_gradient(gradient: Tensor) -> Tensor:
    """Copy a tiled gradient to a fresh carrier: only its stored tiles, one after the other."""
    fresh = gradient_like(gradient)
    _pour(gradient, fresh, "replace")
    return fresh


def sum_gradients(x: Tensor, y: Tensor) -> Tensor:
    """Add two tiled gradients of one geometry tile by tile; what is zero in both stays an implicit zero.

    The sum has the Layout of ``x``.
    """
    total = copy_gradient(x)
    _pour(y, total, "add")
    return total


def _pour(source: Tensor, target: Tensor, reduction: Reduction) -> None:
    """Write or add the stored tiles of one full tiled Tensor to another; ``target`` is nobody else's."""
    carrier, receiver = _carrier(source), _carrier(target)
    traffic = carrier._traffic
    placement, other = carrier._place(source), receiver._place(target)
    with traffic.lock:
        tiles = np.flatnonzero(~traffic.table.is_implicit(np.arange(traffic.grid.tile_count)))
    if not len(tiles):
        return
    same = placement.axes == other.axes and placement.origin == other.origin
    reorder = None if same else _Reordering(traffic.grid, placement, other)

    plan = RequestPlan(tiles, passing=tiles)
    staging = traffic.check_plan(_KIND, plan)

    def enter(entry: LedgerEntry) -> None:
        traffic.enter_data(entry, plan)

    async def consume(wave: Ordinals, rows: list[Flat]) -> None:
        ready = rows if reorder is None else [reorder(row) for row in rows]
        values = values_of_rows(wave, ready)
        await in_waves(receiver, _KIND, wave, lambda writer, part: writer.write(part, values, reduction))

    async def pour(entry: LedgerEntry) -> None:
        changes, complete = Changes(), False
        try:
            await traffic.reserve_plan(entry, plan, staging, changes)
            await traffic.stream(tiles, consume, entry=entry)
            complete = True
        finally:
            if not complete:
                await traffic.undo(entry, changes)
        await traffic.finish_with(entry, NO_ORDINALS)

    carrier._start_work(AwaitResult[None](), _KIND, enter, pour).wait()


class _Reordering:
    """Puts the elements of a tile from one order into another."""

    def __init__(self, grid: TileGrid, source: TilePlacement, target: TilePlacement) -> None:
        shape = grid.tile_shape
        self._layout = Layout(
            tuple(tuple(extent for extent, _ in axis) or 1 for axis in source.axes),
            tuple(tuple(stride for _, stride in axis) or 0 for axis in source.axes),
        )
        self._origin = source.origin
        one = TileSelection([[0]] * len(shape))
        self._geometry = CompactGeometry.over(grid, target, one, row_major_strides(shape))

    def __call__(self, source: Flat) -> Flat:
        """A copy of a row in the other order."""
        target = np.empty_like(source)
        self._geometry.copy_out([target], [0], gathered(source, self._layout, self._origin).reshape(-1))
        return target


def _carrier(tensor: Tensor) -> TiledEvictable:
    return cast("TiledEvictable", tensor.carrier)
