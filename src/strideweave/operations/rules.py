"""Rules that several definitions share: which operands an operation takes, and what comes out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strideweave.dtype import DType
from strideweave.operations.definition import Inferred, Signature
from strideweave.operations.promotion import as_float, promote
from strideweave.operations.shapes import broadcast_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from strideweave.operations.definition import Scalar

__all__ = [
    "BINARY",
    "TENSORS",
    "UNARY",
    "infer_binary",
    "infer_float",
    "infer_same",
    "numeric",
    "quotient",
    "same",
]

UNARY = (("tensor",),)
TENSORS = (("tensor", "tensor"),)
BINARY = (*TENSORS, ("tensor", "scalar"), ("scalar", "tensor"))


def infer_binary(
    name: str, rule: Callable[[str, DType], DType], x: Signature | Scalar, y: Signature | Scalar
) -> Inferred:
    """Broadcast the shapes, promote the dtypes, and let ``rule`` say what the operation makes of the dtype.

    Raises:
        ValueError: the shapes do not broadcast.
        TypeError: the rule refuses the dtype.
        OverflowError: an integer scalar does not fit it.
    """
    dtype = rule(name, promote(x, y))
    for item in (x, y):
        if not isinstance(item, Signature):
            dtype.convert(item)  # OverflowError here rather than in the middle of a computation
    shapes = (item.shape for item in (x, y) if isinstance(item, Signature))
    return Inferred(Signature(broadcast_shapes(name, *shapes), dtype))


def infer_same(name: str, rule: Callable[[str, DType], DType], x: Signature) -> Inferred:
    """Keep the shape, and the dtype where ``rule`` allows it."""
    return Inferred(Signature(x.shape, rule(name, x.dtype)))


def infer_float(x: Signature) -> Inferred:
    """Keep the shape; the dtype is that of NumPy's floating functions."""
    return Inferred(Signature(x.shape, as_float(x.dtype)))


def same(name: str, dtype: DType) -> DType:
    """Let any dtype pass as it is."""
    del name
    return dtype


def numeric(name: str, dtype: DType) -> DType:
    """Refuse booleans.

    Raises:
        TypeError: the dtype is Bool.
    """
    if dtype is DType.Bool:
        raise TypeError(f"{name} is not defined for Bool; convert to an integer or floating dtype first")
    return dtype


def quotient(name: str, dtype: DType) -> DType:
    """Let floats pass; everything else divides in Float64."""
    del name
    return dtype if dtype.is_differentiable else DType.Float64
