"""Operations run by Python: elements become numbers, a kernel computes, each result is rounded and stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from strideweave.carriers.generic_kernels import GENERIC_KERNELS
from strideweave.carriers.generic_values import Values, rounded
from strideweave.carriers.view_operations import CarrierOperation
from strideweave.layout import row_major
from strideweave.operations.definition import Operand
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from strideweave.carriers.generic import Generic
    from strideweave.operations.definition import BoundOperation

__all__ = ["GenericOperation"]


class GenericOperation(CarrierOperation):
    """An operation on the reference carrier, one element after the other. It never warns."""

    def _run(self, bound: BoundOperation) -> Tensor:
        dtype = bound.result.dtype
        with np.errstate(all="ignore"):  # a conversion that overflows is an infinity, quietly
            operands = [_values(operand, bound) for operand in bound.operands]
            items = GENERIC_KERNELS[self.name](bound, *operands)
            stored = np.empty(len(items), dtype.numpy)
            for place, item in enumerate(items):
                stored[place] = rounded(item, dtype)
        carrier = bound.tensors[0].carrier._adopt_like(stored, dtype)
        return Tensor._of(carrier, 0, row_major(bound.result.shape), self._wants_grad(bound))


def _values(operand: Any, bound: BoundOperation) -> Values:
    if isinstance(operand, Operand):
        carrier = cast("Generic", operand.carrier)
        return Values(operand.shape, operand.dtype, carrier._items(operand.layout, operand.offset))
    dtype = bound.scalar_dtype
    return Values((), dtype, [dtype.convert(operand)[()]])
