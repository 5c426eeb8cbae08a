"""Operations that compare elements, and those that choose among them by a comparison."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from strideweave.dtype import DType
from strideweave.operations.definition import Inferred, OperationDefinition, Signature, apply
from strideweave.operations.promotion import promote
from strideweave.operations.rules import BINARY, UNARY, infer_binary, numeric, same
from strideweave.operations.shapes import broadcast_shapes

if TYPE_CHECKING:
    from strideweave.operations.definition import Scalar
    from strideweave.tensor import Tensor

__all__ = ["DEFINITIONS", "clamp", "eq", "le", "lt", "maximum", "minimum", "ne", "select"]


def eq(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """Whether ``x`` equals ``y``, elementwise; NaN equals nothing.

    Args:
        x: a Tensor, or a Python scalar. Integer tensors are compared with any 64-bit integer exactly.
        y: likewise; at least one of the two is a Tensor.

    Returns:
        A Tensor of the broadcast shape and dtype Bool.

    Raises:
        TypeError: an operand is neither, or the tensors lie on different carrier classes.
        ValueError: the shapes do not broadcast.
        OverflowError: an integer scalar has more than 64 bits.
        ReleasedError: a carrier was released.
    """
    return apply("eq", x, y)


def ne(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """Whether ``x`` differs from ``y``, elementwise; operands, result and errors as for ``eq``."""
    return apply("ne", x, y)


def lt(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """Whether ``x`` is less than ``y``, elementwise; operands, result and errors as for ``eq``."""
    return apply("lt", x, y)


def le(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """Whether ``x`` is at most ``y``, elementwise; operands, result and errors as for ``eq``."""
    return apply("le", x, y)


def maximum(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """The larger of ``x`` and ``y``, elementwise; a NaN wins.

    Args:
        x: a Tensor, or a Python scalar.
        y: likewise; at least one of the two is a Tensor.

    Returns:
        A Tensor of the broadcast shape and the promoted dtype.

    Raises:
        TypeError: an operand is neither, or the tensors lie on different carrier classes.
        ValueError: the shapes do not broadcast.
        OverflowError: an integer scalar does not fit the dtype.
        ReleasedError: a carrier was released.
    """
    return apply("maximum", x, y)


def minimum(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """The smaller of ``x`` and ``y``, elementwise; a NaN wins. Everything else as for ``maximum``."""
    return apply("minimum", x, y)


def select(condition: Tensor, x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """Take the element of ``x`` where ``condition`` is not zero and that of ``y`` elsewhere.

    It is ``numpy.where``. Every bit of an element is kept where the dtype stays.

    Args:
        condition: a Tensor of any dtype; NaN is not zero.
        x: a Tensor, or a Python scalar.
        y: likewise.

    Returns:
        A Tensor of the shape that all three broadcast to and the promoted dtype of ``x`` and ``y``.

    Raises:
        TypeError: ``condition`` is no Tensor, ``x`` or ``y`` neither a Tensor nor a scalar, or the tensors
            lie on different carrier classes.
        ValueError: the shapes do not broadcast.
        OverflowError: an integer scalar does not fit the dtype.
        ReleasedError: a carrier was released.
    """
    return apply("select", condition, x, y)


def clamp(x: Tensor, min: Scalar | None = None, max: Scalar | None = None) -> Tensor:  # noqa: A002
    """Limit every element to ``[min, max]``; NaN stays, and ``max`` wins where it is below ``min``.

    Args:
        x: a Tensor.
        min: the lower bound, a Python scalar; None sets none. It is weak, as an operand of ``maximum``.
        max: the upper bound, likewise.

    Returns:
        A fresh Tensor of the shape of ``x`` and the promoted dtype.

    Raises:
        TypeError: ``x`` is no Tensor, holds booleans, or a bound is no scalar (``maximum`` and ``minimum``
            take Tensors as bounds).
        OverflowError: an integer bound does not fit the dtype.
        ReleasedError: the carrier was released.
    """
    return apply("clamp", x, min=min, max=max)


def _infer_comparison(name: str, x: Signature | Scalar, y: Signature | Scalar) -> Inferred:
    common = promote(x, y)
    for item in (x, y):
        if not isinstance(item, Signature) and isinstance(item, int) and not common.is_differentiable:
            common = _holding(item, common)
    shapes = (item.shape for item in (x, y) if isinstance(item, Signature))
    return Inferred(Signature(broadcast_shapes(name, *shapes), DType.Bool), scalar_dtype=common)


def _holding(scalar: int, dtype: DType) -> DType:
    """Give an integer dtype that holds both the scalar and every value of ``dtype``."""
    if dtype is DType.Bool or np.iinfo(dtype.numpy).min <= scalar <= np.iinfo(dtype.numpy).max:
        return dtype
    DType.Int64.convert(scalar)  # OverflowError here rather than in the middle of a computation
    return DType.Int64


def _infer_select(condition: Signature, x: Signature | Scalar, y: Signature | Scalar) -> Inferred:
    shapes = (item.shape for item in (x, y) if isinstance(item, Signature))
    shape = broadcast_shapes("select", condition.shape, *shapes)
    dtype = promote(x, y)
    for item in (x, y):
        if not isinstance(item, Signature):
            dtype.convert(item)
    return Inferred(Signature(shape, dtype))


def _infer_clamp(x: Signature, *, min: object = None, max: object = None) -> Inferred:  # noqa: A002
    low, high = _bound("min", min), _bound("max", max)
    bounds = [bound for bound in (low, high) if bound is not None]
    dtype = numeric("clamp", promote(x, *bounds))
    for bound in bounds:
        dtype.convert(bound)
    return Inferred(Signature(x.shape, dtype), {"min": low, "max": high})


def _bound(name: str, value: object) -> Scalar | None:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(
        f"clamp: {name} must be a Python scalar or None, found {type(value).__name__}; "
        "maximum and minimum take Tensors"
    )


_SELECTIONS = tuple(
    ("tensor", left, right) for left in ("tensor", "scalar") for right in ("tensor", "scalar")
)

DEFINITIONS = (
    OperationDefinition("eq", BINARY, partial(_infer_comparison, "eq")),
    OperationDefinition("ne", BINARY, partial(_infer_comparison, "ne")),
    OperationDefinition("lt", BINARY, partial(_infer_comparison, "lt")),
    OperationDefinition("le", BINARY, partial(_infer_comparison, "le")),
    OperationDefinition("maximum", BINARY, partial(infer_binary, "maximum", same)),
    OperationDefinition("minimum", BINARY, partial(infer_binary, "minimum", same)),
    OperationDefinition("select", _SELECTIONS, _infer_select),
    OperationDefinition("clamp", UNARY, _infer_clamp),
)
