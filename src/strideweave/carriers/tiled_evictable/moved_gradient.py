"""The gradient of a tiled tensor that was moved to another carrier: tiled again, as the tensor was.

Contract: the gradient crosses back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.array_views import scattered
from strideweave.carriers.move.operations import Transfer, run_transfers
from strideweave.carriers.move.registry import dispatch_move
from strideweave.carriers.tiled_evictable.filling import start_filling
from strideweave.layout import row_major
from strideweave.runtime.await_result import AwaitResult
from strideweave.tensor import Tensor
from strideweave.tiles.residency import Location
from strideweave.tiles.selection import TileSelection

if TYPE_CHECKING:
    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.layout import Layout

__all__ = ["gradient_of_moved"]


def gradient_of_moved(source: TiledEvictable, offset: int, layout: Layout, cotangent: Tensor) -> Tensor:
    """Make the tiled gradient of a Tensor that was moved off a carrier; waits until it is there.

    A cotangent whose elements lie at the same slots as the Tensor's is moved tile by tile, from tiles or from a
    dense carrier. Of any other one the values of each tile are gathered; one that is not in memory is read to
    memory first.

    Args:
        source: the carrier, which was released since.
        offset: of the Tensor.
        layout: of the Tensor.
        cotangent: of its shape and dtype, on any carrier.

    Returns:
        A Tensor of that Layout and offset on a fresh carrier of the source's geometry, tier kinds and memory limit.
    """
    fresh = source._fresh(Location.NONE)
    gradient = Tensor._of(fresh, offset, layout, False)
    if (cotangent.layout, cotangent.offset, cotangent.carrier.size()) == (layout, offset, fresh.size()):
        _transfer(cotangent.carrier, fresh)
    elif _is_full(source, offset, layout):
        every = TileSelection([range(extent) for extent in source.grid_shape])
        compact = _in_memory(source, cotangent)
        start_filling(fresh, gradient, every, compact, reduction="replace", kind="backward").wait()
    elif not layout.is_injective:
        raise ValueError(
            "the tensor that was moved repeats slots, so no tiled gradient has its layout; move under no_grad()"
        )
    else:  # of some slots only, or across tiles: slot by slot
        dense = source.primary.allocate_like(fresh.size(), mutable=True)
        slots = dense._bytes().view(cotangent.dtype.numpy)
        scattered(slots, layout, offset, cotangent.numpy())
        _transfer(dense, fresh)
    return gradient


def _is_full(source: TiledEvictable, offset: int, layout: Layout) -> bool:
    """Whether a Tensor is a full one, every tile of it in the tile of the same coordinate."""
    try:
        source._traffic.grid.place(layout, offset)
    except ValueError:
        return False
    return True


def _in_memory(source: TiledEvictable, cotangent: Tensor) -> Tensor:
    try:
        cotangent.carrier._bytes()
    except NotImplementedError:
        values = np.ascontiguousarray(cotangent.numpy()).reshape(-1)
        carrier = source.primary._adopt_like(values, cotangent.dtype)
        return Tensor._of(carrier, 0, row_major(cotangent.shape), False)
    return cotangent


def _transfer(carrier: Carrier, fresh: TiledEvictable) -> None:
    transfers = [Transfer(carrier, 0, fresh, 0, fresh.size())]
    operation = dispatch_move(type(carrier), type(fresh))
    fresh._scope.start(AwaitResult[None](), run_transfers, operation, transfers).wait()
