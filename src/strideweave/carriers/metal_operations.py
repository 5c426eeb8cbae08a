"""Operations on tensors over a Metal carrier: MLX computes, and what it does not have NumPy does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from strideweave.carriers.metal_arrays import Unified, around, as_mlx, copied, load_mlx, stand_in
from strideweave.carriers.metal_kernels import METAL_KERNELS, computes
from strideweave.carriers.numpy_operations import NumpyOperation
from strideweave.layout import row_major
from strideweave.operations.operand import Operand
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from strideweave.carriers.metal import Metal
    from strideweave.operations.definition import BoundOperation

__all__ = ["MetalOperation"]


class MetalOperation(NumpyOperation):
    """An operation on Metal carriers, complete when ``forward`` returns.

    It is evaluated at once: MLX must not look at a carrier's memory later, when somebody may have written to it.
    """

    def _run(self, bound: BoundOperation) -> Tensor:
        if not computes(bound):
            return super()._run(bound)
        mx = load_mlx()
        operands = [_operand(mx, operand, bound) for operand in bound.operands]
        found = METAL_KERNELS[self.name](mx, bound, *operands)
        flat = mx.contiguous(found.astype(stand_in(mx, bound.result.dtype)).reshape(-1))
        mx.eval(flat)
        carriers = [cast("Metal", tensor.carrier) for tensor in bound.tensors]
        unified = _unshared(around(flat, bound.result.dtype), carriers, bound)
        carrier = carriers[0]._holding(unified, bound.result.dtype, mutable=True)
        return Tensor._of(carrier, 0, row_major(bound.result.shape), self._wants_grad(bound))


def _operand(mx: Any, operand: Any, bound: BoundOperation) -> Any:
    if isinstance(operand, Operand):
        return as_mlx(mx, cast("Metal", operand.carrier)._live_values(), operand)
    dtype = bound.scalar_dtype
    return mx.array(dtype.to_python(dtype.convert(operand)), stand_in(mx, dtype))


def _unshared(unified: Unified, carriers: list[Metal], bound: BoundOperation) -> Unified:
    """Copy a result that MLX left in an operand's own memory, as a conversion to the same dtype does."""
    if any(np.may_share_memory(unified.slots, carrier._slots) for carrier in carriers):
        return copied(unified.slots, bound.result.dtype)
    return unified
