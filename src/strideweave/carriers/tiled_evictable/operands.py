"""The operands of a direct operation: which are tiled, what they are cut into, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, cast

from strideweave.carriers.tiled_evictable.blocks import Footprint
from strideweave.carriers.tiled_evictable.direct_pass import Reading
from strideweave.carriers.tiled_evictable.regions import IndexSpace, index_space
from strideweave.carriers.tiled_evictable.targets import is_narrow
from strideweave.dtype import DType
from strideweave.operations.operand import Operand

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.blocks import Cut
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.direct_request import Holding
    from strideweave.carriers.tiled_evictable.regions import Axes
    from strideweave.operations.definition import BoundOperation
    from strideweave.tensor import Tensor

__all__ = ["DirectOperands"]


@dataclass(frozen=True, slots=True, eq=False)
class DirectOperands:
    """A bound operation with at least one full tiled Tensor among its operands.

    Attributes:
        bound: the operation with its checked operands.
        space: its index axes.
        host: the carrier of the first tiled operand.
        prototype: a carrier of the compute class.
    """

    bound: BoundOperation
    space: IndexSpace
    host: TiledEvictable
    prototype: Carrier

    @classmethod
    def of(cls, bound: BoundOperation, carrier_class: type[Carrier]) -> DirectOperands:
        """Check where the operands lie.

        Raises:
            TypeError: the tiled operands compute on several classes, or a dense one lies on another.
            ValueError: a tiled one is not the full Tensor of its carrier.
            ReleasedError: the carrier of an operand was released.
        """
        tensors = cast("tuple[Tensor, ...]", bound.tensors)
        name = bound.definition.name
        carriers: list[Any] = [tensor.carrier for tensor in tensors if type(tensor.carrier) is carrier_class]
        compute = carriers[0]._compute_class if carriers else None
        for tensor in tensors:
            carrier: Any = tensor.carrier
            is_tiled = type(carrier) is carrier_class
            found = carrier._compute_class if is_tiled else type(carrier)
            if compute is None or found is not compute:
                expected = carrier_class if compute is None else compute
                raise TypeError(
                    f"{name} runs on {carrier_class.__name__} that computes on {expected.__name__}, but an operand "
                    f"{'computes' if is_tiled else 'lies'} on {found.__name__}; bring all operands to one class"
                )
            carrier._require_live()
            if is_tiled:
                carrier._place(tensor)
        shapes = [operand.shape if isinstance(operand, Operand) else None for operand in bound.operands]
        space = index_space(name, shapes, bound.result.shape, bound.options)
        return cls(bound, space, carriers[0], carriers[0]._traffic.prototype)

    def tiled(self, positions: Iterable[int]) -> list[tuple[Tensor, Axes]]:
        """The tiled ones among the operands at these positions, each with its axes."""
        operands = self.bound.operands
        return [
            (cast("Tensor", operands[at]), self._axes(at)) for at in positions if self.is_tiled(operands[at])
        ]

    @property
    def dense(self) -> list[Tensor]:
        """The operands that are dense tensors."""
        return [tensor for tensor in self._tensors if not self.is_tiled(tensor)]

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return cast("tuple[Tensor, ...]", self.bound.tensors)

    def is_tiled(self, operand: object) -> bool:
        """Whether an operand is a full tiled Tensor."""
        return isinstance(operand, Operand) and type(operand.carrier) is type(self.host)

    @property
    def result_footprint(self) -> Footprint:
        """The result, dense."""
        return Footprint(self.space.result, _working_bytes(self.bound.result.dtype))

    def footprint(self, position: int) -> Footprint:
        """An operand that is a tensor, as far as the size of blocks is concerned."""
        tensor = cast("Tensor", self.bound.operands[position])
        tile_shape = cast("Any", tensor.carrier).tile_shape if self.is_tiled(tensor) else None
        return Footprint(self._axes(position), _working_bytes(tensor.dtype), tile_shape)

    def reading(self, position: int, holding: Holding, cut: Cut) -> Reading:
        """An operand that is a tensor, to be read by a request in these blocks.

        Raises:
            MemoryError: a memory limit could not hold what one block reads of it.
        """
        tensor, axes = cast("Tensor", self.bound.operands[position]), self._axes(position)
        if not self.is_tiled(tensor):
            return Reading(axes, tensor)
        holding.allow(tensor, prod([cut.lengths[axis] for axis in axes if axis is not None]))
        return Reading(axes, tensor, holding.source(tensor))

    def _axes(self, position: int) -> Axes:
        return self.space.operands[position] or ()


def _working_bytes(dtype: DType) -> int:
    """Bytes of an element in the dtype that it is computed in."""
    return DType.Float32.itemsize if is_narrow(dtype) else dtype.itemsize
