"""The matrix product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strideweave.operations.definition import Inferred, OperationDefinition, Signature, apply
from strideweave.operations.promotion import promote
from strideweave.operations.shapes import broadcast_shapes

if TYPE_CHECKING:
    from strideweave.tensor import Tensor

__all__ = ["DEFINITIONS", "matmul"]


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Matrix product by the rules of ``numpy.matmul``.

    Matrices are the last two axes and the axes before them broadcast; a vector on the left is a row, on the
    right a column, and its axis is absent from the result. Transposed views are multiplied where they lie.

    Args:
        x: a Tensor of at least one axis, ``(..., n, k)`` or ``(k,)``.
        y: a Tensor of at least one axis, ``(..., k, m)`` or ``(k,)``.

    Returns:
        A Tensor of the promoted dtype. Floats below 32 bits are multiplied in Float32 and rounded once.

    Raises:
        TypeError: an operand is no Tensor (an AwaitResult is not: call ``wait()`` first), or they lie on
            different carrier classes.
        ValueError: an operand has no axes, or the shapes do not fit.
        ReleasedError: a carrier was released.
    """
    return apply("matmul", x, y)


def _infer_matmul(x: Signature, y: Signature) -> Inferred:
    if not x.shape or not y.shape:
        raise ValueError(f"matmul: shapes {x.shape} and {y.shape}; both need at least one axis")
    rows, columns = x.shape[-2:-1], y.shape[-1:] if len(y.shape) > 1 else ()
    inner = y.shape[-2] if len(y.shape) > 1 else y.shape[0]
    if x.shape[-1] != inner:
        raise ValueError(
            f"matmul: shapes {x.shape} and {y.shape} do not fit; "
            f"the inner extents are {x.shape[-1]} and {inner}"
        )
    stack = broadcast_shapes("matmul", x.shape[:-2], y.shape[:-2])
    return Inferred(Signature((*stack, *rows, *columns), promote(x, y)))


DEFINITIONS = (OperationDefinition("matmul", (("tensor", "tensor"),), _infer_matmul),)
