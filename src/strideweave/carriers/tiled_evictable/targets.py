"""What a pass makes, region by region: a dense tensor, or the gradient of a tiled one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.carriers.tiled_evictable.filling import start_filling
from strideweave.carriers.tiled_evictable.gradient import gradient_like
from strideweave.carriers.tiled_evictable.regions import covering, slices
from strideweave.dtype import DType
from strideweave.layout import row_major
from strideweave.tensor import Tensor
from strideweave.tiles.selection import TileSelection

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.regions import Region

    Array = npt.NDArray[Any]

__all__ = ["DenseTarget", "Target", "TiledTarget", "adopted", "is_narrow", "widened"]


class Target(ABC):
    """What a pass makes."""

    @abstractmethod
    def take(self, region: Region, part: Tensor) -> None:
        """Note the values of a region, in a worker thread; ``part`` is nobody else's to change."""

    def budget(self, most: int) -> int:
        """How many bytes of it may be at hand at once, or one tile."""
        return most

    @abstractmethod
    async def settle(self) -> None:
        """Do what is left to be done in the loop."""


class DenseTarget(Target):
    """A dense tensor, row-major on a fresh carrier.

    Args:
        prototype: a carrier of the class.
        shape: of the tensor.
        dtype: of the tensor, to which parts are rounded.
    """

    def __init__(self, prototype: Carrier, shape: tuple[int, ...], dtype: DType) -> None:
        self._prototype, self._shape, self._dtype = prototype, shape, dtype
        self._tensor: Tensor | None = None
        self._values: Array = np.empty(0)

    def take(self, region: Region, part: Tensor) -> None:
        """Write a region; a part that is all of it, as it should be, is the tensor."""
        if part.shape == self._shape and part.dtype is self._dtype and _fills(part):
            self._tensor = part
            return
        self._allocate()
        index: Any = (*slices(region), ...)  # an array, not a number, where there are no axes
        # Where that rounds, it rounds what was computed in Float32.
        np.copyto(self._values[index], part.numpy(), casting="unsafe")

    async def settle(self) -> None:
        """Nothing is left to be done."""

    def tensor(self, requires_grad: bool) -> Tensor:
        """The tensor, once every region was taken; where there was none it is zero."""
        if self._tensor is None:
            self._allocate()
        carrier: Any = self._tensor.carrier if self._tensor is not None else None
        return Tensor._of(carrier, 0, row_major(self._shape), requires_grad)

    def _allocate(self) -> None:
        if self._tensor is None:
            layout = row_major(self._shape)
            carrier = self._prototype.allocate_like(layout.size, mutable=True, dtype=self._dtype)
            self._values = carrier._bytes().view(self._dtype.numpy).reshape(self._shape)
            self._tensor = Tensor._of(carrier, 0, layout, False)


class TiledTarget(Target):
    """The gradient of a full tiled Tensor, to which whole tiles are written.

    Args:
        template: the Tensor.
        total: the gradient so far, to be added to; None for a fresh one.
    """

    def __init__(self, template: Tensor, total: Tensor | None) -> None:
        self.tensor = gradient_like(template) if total is None else total
        self._carrier: TiledEvictable = self.tensor.carrier  # type: ignore[assignment]
        self._is_fresh = total is None
        self._taken: tuple[TileSelection, Tensor] | None = None

    @property
    def carrier(self) -> TiledEvictable:
        """The carrier of the gradient."""
        return self._carrier

    def budget(self, most: int) -> int:
        """No more than what its own memory limit would have it stage."""
        return self._carrier._traffic.staging_room(most)

    def take(self, region: Region, part: Tensor) -> None:
        """Keep a region, which is of whole tiles, until it is settled."""
        if part.dtype is not self.tensor.dtype:
            values = np.ascontiguousarray(part.numpy().astype(self.tensor.dtype.numpy))
            part = adopted(part.carrier, values, self.tensor.dtype)
        self._taken = TileSelection(covering(region, self._carrier.tile_shape)), part

    async def settle(self) -> None:
        """Write the tiles of the region that was taken, if one was."""
        if self._taken is not None:
            selection, part = self._taken
            self._taken = None
            reduction: Any = "replace" if self._is_fresh else "add"
            await start_filling(
                self._carrier, self.tensor, selection, part, reduction=reduction, kind="backward"
            )


def is_narrow(dtype: DType) -> bool:
    """Whether the dtype is a float that is computed in Float32 and rounded once."""
    return dtype.is_differentiable and dtype.itemsize < DType.Float32.itemsize


def widened(tensor: Tensor) -> Tensor:
    """A narrow float in Float32, every value exactly; anything else as it is."""
    if not is_narrow(tensor.dtype):
        return tensor
    values = tensor.numpy().astype(DType.Float32.numpy, order="C")
    return adopted(tensor.carrier, values, DType.Float32)


def adopted(prototype: Carrier, values: Array, dtype: DType) -> Tensor:
    """A tensor around a fresh array, on a carrier of the kind of ``prototype``."""
    carrier = prototype._adopt_like(values.reshape(-1), dtype)
    return Tensor._of(carrier, 0, row_major(values.shape), False)


def _fills(part: Tensor) -> bool:
    """Whether a tensor is all of its carrier, row-major."""
    return (
        part.offset == 0 and part.layout == row_major(part.shape) and part.carrier.size() == part.layout.size
    )
