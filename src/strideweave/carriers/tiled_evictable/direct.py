"""Operations on full tiled Tensors, block by block, with a dense result.

Spec: *A direct tiled operand means the full logical Tensor*. An operation reads every tile, resident or not, and
takes no more memory beside its result than a bounded number of tiles. What it computes with are the compute
class's own operations, on regions; see ``regions`` for how they are cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strideweave.carriers.tiled_evictable.blocks import cut_operation
from strideweave.carriers.tiled_evictable.direct_gradient import attach_backward
from strideweave.carriers.tiled_evictable.direct_pass import Pass
from strideweave.carriers.tiled_evictable.direct_request import Holding
from strideweave.carriers.tiled_evictable.operands import DirectOperands
from strideweave.carriers.tiled_evictable.targets import DenseTarget, is_narrow, widened
from strideweave.carriers.view_operations import CarrierOperation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strideweave.carriers.tiled_evictable.regions import Region
    from strideweave.operations.definition import BoundOperation
    from strideweave.tensor import Tensor

__all__ = ["DIRECT_OPERATIONS", "TiledOperation"]

DIRECT_OPERATIONS = ("add", "elementwise_mul", "mul", "relu", "reduce_sum", "matmul")
"""The operations that take a full tiled Tensor as it is."""


class TiledOperation(CarrierOperation):
    """A central operation on full tiled Tensors, beside dense ones of the compute class and scalars.

    Spec: *A direct tiled operand means the full logical Tensor*.
    """

    def forward(self, *inputs: object, **options: object) -> Tensor:
        """Compute the operation; blocks the calling thread until every tile was read.

        The result is dense, row-major, on a fresh carrier of the compute class. Without a policy the tiles stay
        where they are.

        Raises:
            TypeError: an operand or option is of a wrong kind, or a dense one lies on another class than the
                primary tiers; also where a policy answers no plan.
            ValueError: the shapes do not fit, or a Tensor is not the full Tensor of its carrier.
            ReleasedError: the carrier of an operand was released.
            InvalidTileError: a tile has no value yet.
            TileConflictError: an unfinished residency request covers one of the tiles.
            RuntimeError: called inside the runtime.
        """
        return self._run(self._definition.bind(*inputs, **options))

    def _run(self, bound: BoundOperation) -> Tensor:
        operands = DirectOperands.of(bound, self._carrier_class)
        wants_grad = self._wants_grad(bound)
        dense_versions = {tensor.carrier: tensor.carrier.version for tensor in operands.dense}
        target = DenseTarget(operands.prototype, bound.result.shape, bound.result.dtype)
        holding = Holding(operands.tiled(range(len(bound.operands))), "operation")
        holding.run(_forward(operands, target, holding).run, host=operands.host)
        result = target.tensor(wants_grad)
        if wants_grad:
            attach_backward(operands, result, {**dense_versions, **holding.versions})
        return result


def _forward(operands: DirectOperands, target: DenseTarget, holding: Holding) -> Pass:
    bound = operands.bound
    space, dtype = operands.space, bound.result.dtype
    present = [position for position, axes in enumerate(space.operands) if axes is not None]
    footprints = [operands.footprint(position) for position in present]
    cut = cut_operation(space.extents, operands.result_footprint, footprints, holding.budget)
    # Parts that are added up must not be rounded before.
    wide = is_narrow(dtype) and cut.parts > 1
    operation = operands.prototype.dispatch_op(bound.definition.name)

    def compute(_: Region, regions: Sequence[Tensor]) -> Tensor:
        inputs: list[Any] = list(bound.operands)
        for position, region in zip(present, regions, strict=True):
            inputs[position] = widened(region) if wide else region
        return operation.forward(*inputs, **bound.options)

    readings = [operands.reading(position, holding, cut) for position in present]
    return Pass(cut, readings, compute, target, space.result, overlaps=holding.overlaps)
