"""Operations run by NumPy: operands become arrays, a kernel computes, the result goes onto fresh storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from strideweave.carriers.numpy_kernels import KERNELS
from strideweave.carriers.view_operations import CarrierOperation
from strideweave.layout import row_major
from strideweave.operations.definition import Operand
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.carriers.base import Carrier
    from strideweave.operations.definition import BoundOperation

__all__ = ["NumpyOperation"]


class NumpyOperation(CarrierOperation):
    """An operation on a carrier class whose tensors are arrays in memory.

    Each operand is read where it lies if its Layout has one stride per mode, else through one copy.
    """

    def _run(self, bound: BoundOperation) -> Tensor:
        arrays = [self._array(operand, bound) for operand in bound.operands]
        values = KERNELS[bound.definition.name](bound, *arrays)
        carrier = bound.tensors[0].carrier._adopt_like(values.reshape(-1), bound.result.dtype)
        layout = row_major(bound.result.shape)
        return Tensor._of(carrier, 0, layout, self._wants_grad(bound))

    @staticmethod
    def _array(operand: Any, bound: BoundOperation) -> NDArray[Any]:
        if isinstance(operand, Operand):
            return cast("Carrier", operand.carrier)._operand_array(operand)
        return bound.scalar_dtype.convert(operand)
