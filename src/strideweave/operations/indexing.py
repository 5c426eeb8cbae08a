"""Operations that find elements by number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strideweave.dtype import DType
from strideweave.operations.definition import Inferred, OperationDefinition, Signature, apply
from strideweave.operations.promotion import promote
from strideweave.operations.rules import TENSORS
from strideweave.operations.shapes import broadcast_shapes, normal_axis

if TYPE_CHECKING:
    from strideweave.tensor import Tensor

__all__ = ["DEFINITIONS", "gather", "scatter_add"]


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


def scatter_add(x: Tensor, indices: Tensor, values: Tensor, axis: int = 0) -> Tensor:
    """Add slices to ``x`` at the places ``indices`` along ``axis``; slices for the same place add up.

    It is the adjoint of ``gather`` and what ``numpy.add.at`` does to a copy of ``x``.

    Args:
        x: a Tensor of at least one axis, which stays as it is.
        indices: an integer Tensor of any shape; negative numbers count from the end.
        values: a Tensor that broadcasts to the shape of ``gather(x, indices, axis)``.
        axis: the axis that the numbers count along, itself counted from the end when negative.

    Returns:
        A Tensor of the shape of ``x`` and the promoted dtype of ``x`` and ``values``. Floats below 32 bits are
        added up in Float32 and rounded once.

    Raises:
        TypeError: an operand is no Tensor, ``indices`` does not hold integers, or ``axis`` is no integer.
        ValueError: there is no such axis, or ``values`` does not broadcast.
        IndexError: a number is outside the axis.
        ReleasedError: a carrier was released.
    """
    return apply("scatter_add", x, indices, values, axis=axis)


def _infer_gather(x: Signature, indices: Signature, *, axis: object = 0) -> Inferred:
    shape, place = _picked("gather", x, indices, axis)
    return Inferred(Signature(shape, x.dtype), {"axis": place})


def _infer_scatter_add(x: Signature, indices: Signature, values: Signature, *, axis: object = 0) -> Inferred:
    shape, place = _picked("scatter_add", x, indices, axis)
    if broadcast_shapes("scatter_add", shape, values.shape) != shape:
        raise ValueError(
            f"scatter_add: values of shape {values.shape} do not broadcast to {shape}, the shape of "
            f"gather(x, indices, axis={place})"
        )
    return Inferred(Signature(x.shape, promote(x, values)), {"axis": place})


def _picked(name: str, x: Signature, indices: Signature, axis: object) -> tuple[tuple[int, ...], int]:
    """Give the shape of what ``indices`` names in ``x``, and the axis counted from the front."""
    if indices.dtype.is_differentiable or indices.dtype is DType.Bool:
        raise TypeError(f"{name}: indices must be integers, found {indices.dtype.name}")
    place = normal_axis(name, axis, len(x.shape))
    return (*x.shape[:place], *indices.shape, *x.shape[place + 1 :]), place


DEFINITIONS = (
    OperationDefinition("gather", TENSORS, _infer_gather),
    OperationDefinition("scatter_add", (("tensor", "tensor", "tensor"),), _infer_scatter_add),
)
