"""Elementwise functions beside the basic arithmetic: powers, signs, logarithms, sines and activations.

Each gives what NumPy's function of the element gives; the activations are computed so that neither large
nor small elements overflow on the way.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from strideweave.dtype import DType
from strideweave.operations.definition import Inferred, OperationDefinition, Signature, apply
from strideweave.operations.rules import (
    BINARY,
    UNARY,
    infer_binary,
    infer_float,
    infer_same,
    numeric,
    quotient,
    same,
)

if TYPE_CHECKING:
    from strideweave.operations.definition import Scalar
    from strideweave.tensor import Tensor

__all__ = [
    "DEFINITIONS",
    "abs",
    "cos",
    "erf",
    "log",
    "pow",
    "recip",
    "relu",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softplus",
]


def pow(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:  # noqa: A001
    """Raise ``x`` to the power ``y`` elementwise, as ``numpy.power`` does.

    Args:
        x: a Tensor, or a Python scalar.
        y: likewise; at least one of the two is a Tensor.

    Returns:
        A Tensor of the broadcast shape and the promoted dtype; booleans give Int8.

    Raises:
        TypeError: an operand is neither, or the tensors lie on different carrier classes.
        ValueError: the shapes do not broadcast, or an integer is to be raised to a negative integer power.
        OverflowError: an integer scalar does not fit the dtype.
        ReleasedError: a carrier was released.
    """
    return apply("pow", x, y)


def abs(x: Tensor) -> Tensor:  # noqa: A001
    """Magnitude of every element, in its dtype; the smallest signed integer stays as it is.

    Raises:
        TypeError: ``x`` is no Tensor.
        ReleasedError: its carrier was released.
    """
    return apply("abs", x)


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1 by the sign of every element, in its dtype; NaN for NaN.

    Raises:
        TypeError: ``x`` is no Tensor, or holds booleans.
        ReleasedError: its carrier was released.
    """
    return apply("sign", x)


def recip(x: Tensor) -> Tensor:
    """One over every element; integers and booleans give Float64, as ``div(1, x)`` does.

    Raises:
        TypeError: ``x`` is no Tensor.
        ReleasedError: its carrier was released.
    """
    return apply("recip", x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of every element; minus infinity for 0, NaN for negative ones.

    Floats keep their dtype; Bool, Int8 and UInt8 give Float16, Int16 gives Float32, wider integers Float64.

    Raises:
        TypeError: ``x`` is no Tensor.
        ReleasedError: its carrier was released.
    """
    return apply("log", x)


def sin(x: Tensor) -> Tensor:
    """Sine of every element, in radians; dtypes and errors as for ``log``."""
    return apply("sin", x)


def cos(x: Tensor) -> Tensor:
    """Cosine of every element, in radians; dtypes and errors as for ``log``."""
    return apply("cos", x)


def erf(x: Tensor) -> Tensor:
    """Error function of every element; dtypes and errors as for ``log``."""
    return apply("erf", x)


def relu(x: Tensor) -> Tensor:
    """The larger of every element and 0, in its dtype; NaN for NaN.

    Raises:
        TypeError: ``x`` is no Tensor, or holds booleans.
        ReleasedError: its carrier was released.
    """
    return apply("relu", x)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function, ``1 / (1 + exp(-x))``; dtypes and errors as for ``log``.

    It never overflows, and far below 0 it keeps the relative accuracy of ``exp``.
    """
    return apply("sigmoid", x)


def silu(x: Tensor) -> Tensor:
    """Sigmoid linear unit, ``x * sigmoid(x)``; dtypes and errors as for ``log``. NaN for minus infinity.

    Source: S. Elfwing, E. Uchibe, K. Doya, *Sigmoid-Weighted Linear Units*, 2017.
    """
    return apply("silu", x)


def softplus(x: Tensor) -> Tensor:
    """Smooth ramp ``log(1 + exp(x))``; dtypes and errors as for ``log``.

    It is computed as ``max(x, 0) + log1p(exp(-abs(x)))``, so that it never overflows and keeps its relative
    accuracy far below 0.
    """
    return apply("softplus", x)


def _infer_pow(x: Signature | Scalar, y: Signature | Scalar) -> Inferred:
    inferred = infer_binary("pow", _power, x, y)
    if isinstance(y, int) and y < 0 and not inferred.result.dtype.is_differentiable:
        raise ValueError(
            f"pow: integers cannot be raised to the negative power {y}; make one of them a float"
        )
    return inferred


def _power(name: str, dtype: DType) -> DType:
    del name
    return DType.Int8 if dtype is DType.Bool else dtype


DEFINITIONS = (
    OperationDefinition("pow", BINARY, _infer_pow),
    OperationDefinition("abs", UNARY, partial(infer_same, "abs", same)),
    OperationDefinition("sign", UNARY, partial(infer_same, "sign", numeric)),
    OperationDefinition("recip", UNARY, partial(infer_same, "recip", quotient)),
    OperationDefinition("log", UNARY, infer_float),
    OperationDefinition("sin", UNARY, infer_float),
    OperationDefinition("cos", UNARY, infer_float),
    OperationDefinition("erf", UNARY, infer_float),
    OperationDefinition("relu", UNARY, partial(infer_same, "relu", numeric)),
    OperationDefinition("sigmoid", UNARY, infer_float),
    OperationDefinition("silu", UNARY, infer_float),
    OperationDefinition("softplus", UNARY, infer_float),
)
