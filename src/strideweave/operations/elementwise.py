"""Operations that treat every element alike: sums, products, quotients, roots and activations.

Binary functions take Tensors and Python scalars on either side. Shapes broadcast as in NumPy; a scalar is
weak, so it does not promote the dtype, and must fit it. Mixed dtypes promote as ``numpy.result_type`` does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from strideweave.flags import as_flag
from strideweave.operations.definition import (
    Inferred,
    OperationDefinition,
    Signature,
    apply,
)
from strideweave.operations.promotion import as_float
from strideweave.operations.rules import (
    BINARY,
    TENSORS,
    UNARY,
    infer_binary,
    infer_float,
    infer_same,
    numeric,
    quotient,
    same,
)
from strideweave.operations.shapes import normal_axis

if TYPE_CHECKING:
    from strideweave.operations.definition import Scalar
    from strideweave.tensor import Tensor

__all__ = [
    "DEFINITIONS",
    "add",
    "div",
    "elementwise_mul",
    "exp",
    "gelu",
    "mul",
    "neg",
    "rsqrt",
    "softmax",
    "sqrt",
    "sub",
    "tanh",
]


def add(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """Add elementwise.

    Args:
        x: a Tensor, or a Python scalar.
        y: likewise; at least one of the two is a Tensor.

    Returns:
        A Tensor of the broadcast shape and the promoted dtype.

    Raises:
        TypeError: an operand is neither (an AwaitResult is not: call ``wait()`` first), or the tensors lie on
            different carrier classes.
        ValueError: the shapes do not broadcast.
        OverflowError: an integer scalar does not fit the dtype.
        ReleasedError: a carrier was released.
    """
    return apply("add", x, y)


def sub(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """Subtract ``y`` from ``x`` elementwise; as ``add``, but booleans are a TypeError."""
    return apply("sub", x, y)


def mul(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """Multiply elementwise; operands and errors as for ``add``.

    Spec: *A direct tiled operand means the full logical Tensor* (the tensor and weak-scalar overloads).
    """
    return apply("mul", x, y)


def elementwise_mul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply two Tensors elementwise; as ``mul`` but a scalar is a TypeError."""
    return apply("elementwise_mul", x, y)


def div(x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """Divide ``x`` by ``y`` elementwise; operands and errors as for ``add``. Integers give Float64."""
    return apply("div", x, y)


def neg(x: Tensor) -> Tensor:
    """Negate every element.

    Raises:
        TypeError: ``x`` is no Tensor, or holds booleans.
        ReleasedError: its carrier was released.
    """
    return apply("neg", x)


def sqrt(x: Tensor) -> Tensor:
    """Square root of every element; NaN for negative ones.

    Floats keep their dtype; Bool, Int8 and UInt8 give Float16, Int16 gives Float32, wider integers Float64.

    Raises:
        TypeError: ``x`` is no Tensor.
        ReleasedError: its carrier was released.
    """
    return apply("sqrt", x)


def rsqrt(x: Tensor) -> Tensor:
    """One over the square root of every element; dtypes and errors as for ``sqrt``."""
    return apply("rsqrt", x)


def exp(x: Tensor) -> Tensor:
    """E to the power of every element; dtypes and errors as for ``sqrt``."""
    return apply("exp", x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent of every element; dtypes and errors as for ``sqrt``."""
    return apply("tanh", x)


def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """Gaussian error linear unit, ``x * (1 + erf(x / sqrt(2))) / 2``; dtypes and errors as for ``sqrt``.

    Source: D. Hendrycks, K. Gimpel, *Gaussian Error Linear Units*, 2016.

    Args:
        x: a Tensor.
        approximate: use ``tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))`` for the error function.

    Raises:
        TypeError: ``x`` is no Tensor, or ``approximate`` no bool.
    """
    return apply("gelu", x, approximate=approximate)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Exponentials that sum to one along ``axis``, computed relative to the largest element.

    Args:
        x: a Tensor of at least one axis. Dtypes as for ``sqrt``.
        axis: the axis to normalise, counted from the end when negative.

    Raises:
        TypeError: ``x`` is no Tensor, or ``axis`` no integer.
        ValueError: there is no such axis.
    """
    return apply("softmax", x, axis=axis)


def _infer_gelu(x: Signature, *, approximate: bool = False) -> Inferred:
    approximate = as_flag(approximate, "gelu: approximate")
    return Inferred(Signature(x.shape, as_float(x.dtype)), {"approximate": approximate})


def _infer_softmax(x: Signature, *, axis: int = -1) -> Inferred:
    return Inferred(
        Signature(x.shape, as_float(x.dtype)), {"axis": normal_axis("softmax", axis, len(x.shape))}
    )


DEFINITIONS = (
    OperationDefinition("add", BINARY, partial(infer_binary, "add", same)),
    OperationDefinition("sub", BINARY, partial(infer_binary, "sub", numeric)),
    OperationDefinition("mul", BINARY, partial(infer_binary, "mul", same)),
    OperationDefinition("elementwise_mul", TENSORS, partial(infer_binary, "elementwise_mul", same)),
    OperationDefinition("div", BINARY, partial(infer_binary, "div", quotient)),
    OperationDefinition("neg", UNARY, partial(infer_same, "neg", numeric)),
    OperationDefinition("sqrt", UNARY, infer_float),
    OperationDefinition("rsqrt", UNARY, infer_float),
    OperationDefinition("exp", UNARY, infer_float),
    OperationDefinition("tanh", UNARY, infer_float),
    OperationDefinition("gelu", UNARY, _infer_gelu),
    OperationDefinition("softmax", UNARY, _infer_softmax),
)
