"""The vector-Jacobian products of the operations, written with operations on tensors.

Each takes a ``Pullback`` and the cotangent of the result and gives a cotangent for each operand, or None where
there is none or nobody asks. Because they are written with operations, whichever carrier class computed forward
computes backward too, and gradients lie on the same class. They run without gradients of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strideweave.operations.definition import apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strideweave.operations.definition import Pullback
    from strideweave.tensor import Tensor

    Shares = Sequence[Tensor | None]

__all__ = ["add", "mul", "unbroadcast"]


def unbroadcast(cotangent: Tensor, operand: Any) -> Tensor:
    """Sum a cotangent over the axes along which an operand was repeated, to the operand's shape and dtype."""
    shape = operand.shape
    if cotangent.shape != shape:
        ahead = len(cotangent.shape) - len(shape)
        repeated = tuple(range(ahead)) + tuple(
            ahead + axis
            for axis, extent in enumerate(shape)
            if extent == 1 and cotangent.shape[ahead + axis] != 1
        )
        cotangent = apply("reduce_sum", cotangent, axis=repeated, keepdims=True)
        cotangent = apply("reshape", cotangent, shape=shape)
    return cotangent


def add(pullback: Pullback, cotangent: Tensor) -> Shares:
    """The cotangent itself, for both."""
    return [
        unbroadcast(cotangent, operand) if wanted else None
        for operand, wanted in zip(pullback.operands, pullback.wanted, strict=True)
    ]


def mul(pullback: Pullback, cotangent: Tensor) -> Shares:
    """The cotangent times the other operand."""
    x, y = pullback.operands
    for_x, for_y = pullback.wanted
    return (
        unbroadcast(apply("mul", cotangent, y), x) if for_x else None,
        unbroadcast(apply("mul", cotangent, x), y) if for_y else None,
    )
