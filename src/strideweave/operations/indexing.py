"""Operations that pick elements by number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strideweave.dtype import DType
from strideweave.operations.definition import Inferred, OperationDefinition, Signature, apply
from strideweave.operations.shapes import normal_axis

if TYPE_CHECKING:
    from strideweave.tensor import Tensor

__all__ = ["DEFINITIONS", "gather"]


def gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """Take slices of ``x`` along ``axis``, as ``numpy.take`` does.

    Args:
        x: a Tensor of at least one axis.
        indices: an integer Tensor of any shape; negative numbers count from the end.
        axis: the axis to pick from, counted from the end when negative.

    Returns:
        A Tensor of ``x``'s dtype, with ``axis`` replaced by the axes of ``indices``. Every bit is kept.

    Raises:
        TypeError: an operand is no Tensor, ``indices`` does not hold integers, or ``axis`` is no integer.
        ValueError: there is no such axis.
        IndexError: a number is outside the axis.
        ReleasedError: a carrier was released.
    """
    return apply("gather", x, indices, axis=axis)


def _infer_gather(x: Signature, indices: Signature, *, axis: object = 0) -> Inferred:
    if indices.dtype.is_differentiable or indices.dtype is DType.Bool:
        raise TypeError(f"gather: indices must be integers, found {indices.dtype.name}")
    place = normal_axis("gather", axis, len(x.shape))
    shape = (*x.shape[:place], *indices.shape, *x.shape[place + 1 :])
    return Inferred(Signature(shape, x.dtype), {"axis": place})


DEFINITIONS = (OperationDefinition("gather", (("tensor", "tensor"),), _infer_gather),)
