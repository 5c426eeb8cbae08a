"""The vector-Jacobian products of the operations, written with operations on tensors.

Each takes a ``Pullback`` and the cotangent of the result and gives a share for each operand, or None where there
is none or nobody asks. Because they are written with operations, whichever carrier class computed forward
computes backward too, and gradients lie on the same class. They run without gradients of their own; ``fit`` then
sums a share over broadcast axes and gives it the operand's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strideweave.dtype import DType
from strideweave.layout import row_major
from strideweave.operations.definition import RESULT, Pullback, apply

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.tensor import Tensor

__all__ = ["PULLBACKS", "Rule", "fit"]


class Rule(NamedTuple):
    """How an operation is differentiated.

    Attributes:
        vjp: gives a share for each operand from a ``Pullback`` and a cotangent.
        saves: positions of the operands whose values it reads, ``RESULT`` for the result's.
    """

    vjp: Callable[[Pullback, Any], Sequence[Any]]
    saves: tuple[int, ...] = ()


def fit(share: Tensor, operand: Tensor) -> Tensor:
    """Sum a share over the axes along which its operand was repeated, and give it the operand's dtype."""
    if share.shape != operand.shape:
        ahead = len(share.shape) - len(operand.shape)
        repeated = [
            ahead + axis
            for axis, extent in enumerate(operand.shape)
            if extent == 1 and share.shape[ahead + axis] != 1
        ]
        share = apply("reduce_sum", share, axis=(*range(ahead), *repeated), keepdims=True)
        share = apply("reshape", share, shape=operand.shape)
    if share.dtype is not operand.dtype:
        share = _on(operand, share.numpy().astype(operand.dtype.numpy), operand.dtype)
    return share


def _on(tensor: Tensor, values: NDArray[Any], dtype: DType) -> Tensor:
    """A tensor of ``values`` on a fresh carrier of the kind that ``tensor`` stands on."""
    carrier = tensor.carrier._adopt_like(np.ascontiguousarray(values).reshape(-1), dtype)
    return type(tensor)._of(carrier, 0, row_major(values.shape), False)


def _zeros(tensor: Tensor) -> Tensor:
    return _on(tensor, np.zeros(tensor.shape, tensor.dtype.numpy), tensor.dtype)


# Arithmetic


def _add(_: Pullback, g: Tensor) -> Sequence[Any]:
    return g, g


def _sub(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    return g, -g if pullback.wanted[1] else None


def _mul(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    (x, y), (for_x, for_y) = pullback.operands, pullback.wanted
    return g * y if for_x else None, g * x if for_y else None


def _div(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    (x, y), (for_x, for_y) = pullback.operands, pullback.wanted
    return g / y if for_x else None, -g * x / (y * y) if for_y else None


def _pow(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    (x, y), (for_x, for_y) = pullback.operands, pullback.wanted
    return _pow_base(x, y, g) if for_x else None, _pow_exponent(x, y, pullback.result, g) if for_y else None


def _pow_base(x: Any, y: Any, g: Tensor) -> Tensor:
    if isinstance(y, int | float):
        return g * (y * apply("pow", x, y - 1)) if y else _zeros(x)
    # x ** 0 is 1 everywhere, so its slope is 0, at x = 0 too, where x ** -1 is not to be computed.
    slope: Tensor = y * apply("pow", x, apply("select", apply("eq", y, 0), 1, y - 1))
    return g * slope


def _pow_exponent(x: Any, y: Any, result: Any, g: Tensor) -> Tensor:
    if isinstance(x, int | float):
        return g * result * math.log(x) if x else _zeros(y)
    zero = apply("eq", x, 0)  # 0 ** y stays 0 for every positive y; its logarithm is not to be computed
    return apply("select", zero, 0.0, g * result * apply("log", apply("select", zero, 1.0, x)))


# Functions of one operand: the cotangent times the slope


def _slope(of: Callable[[Any], Any], saved: int) -> Rule:
    """The rule of an elementwise function whose slope follows from its operand (0) or its result (RESULT)."""

    def vjp(pullback: Pullback, g: Tensor) -> Sequence[Any]:
        return (g * of(pullback.result if saved == RESULT else pullback.operands[saved]),)

    return Rule(vjp, (saved,))


def _relu(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    return (apply("select", apply("lt", 0, pullback.result), g, 0),)


def _sign(pullback: Pullback, _: Tensor) -> Sequence[Any]:
    return (_zeros(pullback.operands[0]),)


def _gelu(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    x = pullback.operands[0]
    if pullback.options["approximate"]:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        tanh = apply("tanh", inner)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
        return (g * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope),)
    below = 0.5 * (1 + apply("erf", x * math.sqrt(0.5)))
    density = apply("exp", -0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return (g * (below + x * density),)


def _silu_slope(x: Any) -> Any:
    sigmoid = apply("sigmoid", x)
    return sigmoid * (1 + x * (1 - sigmoid))


def _softmax(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    result: Any = pullback.result
    weighted = apply("reduce_sum", g * result, axis=pullback.options["axis"], keepdims=True)
    return (result * (g - weighted),)


# Choices


def _extreme(larger: bool, pullback: Pullback, g: Tensor) -> Sequence[Any]:
    """Where two are equal each gets half, as in PyTorch."""
    x, y = pullback.operands
    x_wins = apply("lt", y, x) if larger else apply("lt", x, y)
    half = apply("select", apply("eq", x, y), 0.5 * g, 0)
    for_x = apply("select", x_wins, g, half)
    return for_x, g - for_x


def _select(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    condition = pullback.operands[0]
    return None, apply("select", condition, g, 0), apply("select", condition, 0, g)


def _clamp(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    """The cotangent where the operand lies within the bounds, them included."""
    x, options = pullback.operands[0], pullback.options
    if options["min"] is not None:
        g = apply("select", apply("le", options["min"], x), g, 0)
    if options["max"] is not None:
        g = apply("select", apply("le", x, options["max"]), g, 0)
    return (g,)


# Reductions


def _spread(pullback: Pullback, reduced: Tensor) -> Tensor:
    """Repeat something of the shape of a reduction's result along the axes that were reduced."""
    shape, axes = pullback.operands[0].shape, pullback.options["axis"]
    kept = tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))
    return apply("broadcast_to", apply("reshape", reduced, shape=kept), shape=shape)


def _reduce_sum(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    return (_spread(pullback, g),)


def _reduce_mean(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    x = pullback.operands[0]
    count = math.prod(x.shape[axis] for axis in pullback.options["axis"])
    return (_spread(pullback, g) / count if count else _zeros(x),)


def _reduce_extreme(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    """Equal extremes share the cotangent evenly, as in PyTorch."""
    x, result = pullback.operands[0], pullback.result
    if result is None:
        raise RuntimeError("the result of an extreme was not saved")
    chosen = apply("eq", x, _spread(pullback, result))
    count = apply("reduce_sum", chosen, axis=pullback.options["axis"], keepdims=True)
    return (apply("select", chosen, _spread(pullback, g) / count, 0),)


def _cumsum(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    """The running sum from the other end."""
    x, axis = pullback.operands[0], pullback.options["axis"] or 0
    backwards = _on(g, np.arange(g.shape[axis])[::-1], DType.Int64)
    running = apply("cumsum", apply("gather", g, backwards, axis=axis), axis=axis)
    return (apply("reshape", apply("gather", running, backwards, axis=axis), shape=x.shape),)


# Contraction and indexing


def _matmul(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    (x, y), (for_x, for_y) = pullback.operands, pullback.wanted
    # A vector takes part as a matrix of one row or one column; so does its share, until ``fit`` drops the axis.
    row = x if x.ndim > 1 else apply("unsqueeze", x, axis=0)
    column = y if y.ndim > 1 else apply("unsqueeze", y, axis=1)
    if x.ndim == 1:
        g = apply("unsqueeze", g, axis=-1 if y.ndim == 1 else -2)
    if y.ndim == 1:
        g = apply("unsqueeze", g, axis=-1)
    share_x = apply("matmul", g, _transposed(column)) if for_x else None
    share_y = apply("matmul", _transposed(row), g) if for_y else None
    if share_y is not None and y.ndim == 1:
        share_y = apply("squeeze", share_y, axis=-1)
    return share_x, share_y


def _transposed(x: Tensor) -> Tensor:
    return apply("permute", x, axes=(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _gather(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    x, indices = pullback.operands
    return apply("scatter_add", _zeros(x), indices, g, axis=pullback.options["axis"]), None


def _scatter_add(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    return g, None, apply("gather", g, pullback.operands[1], axis=pullback.options["axis"])


# Views


def _permute(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    axes = pullback.options["axes"]
    return (apply("permute", g, axes=tuple(sorted(range(len(axes)), key=axes.__getitem__))),)


def _reshape(pullback: Pullback, g: Tensor) -> Sequence[Any]:
    return (apply("reshape", g, shape=pullback.operands[0].shape),)


def _identity(_: Pullback, g: Tensor) -> Sequence[Any]:
    return (g,)


PULLBACKS: Mapping[str, Rule] = {
    "add": Rule(_add),
    "sub": Rule(_sub),
    "mul": Rule(_mul, (0, 1)),
    "elementwise_mul": Rule(_mul, (0, 1)),
    "div": Rule(_div, (0, 1)),
    "pow": Rule(_pow, (0, 1, RESULT)),
    "neg": Rule(lambda _, g: (-g,)),
    "abs": _slope(partial(apply, "sign"), 0),
    "sign": Rule(_sign),
    "recip": _slope(lambda result: -result * result, RESULT),
    "sqrt": _slope(lambda result: 0.5 / result, RESULT),
    "rsqrt": _slope(lambda result: -0.5 * result * result * result, RESULT),
    "exp": _slope(lambda result: result, RESULT),
    "log": _slope(lambda x: 1 / x, 0),
    "sin": _slope(partial(apply, "cos"), 0),
    "cos": _slope(lambda x: -apply("sin", x), 0),
    "erf": _slope(lambda x: 2 / math.sqrt(math.pi) * apply("exp", -x * x), 0),
    "tanh": _slope(lambda result: 1 - result * result, RESULT),
    "sigmoid": _slope(lambda result: result * (1 - result), RESULT),
    "relu": Rule(_relu, (RESULT,)),
    "gelu": Rule(_gelu, (0,)),
    "silu": _slope(_silu_slope, 0),
    "softplus": _slope(partial(apply, "sigmoid"), 0),
    "softmax": Rule(_softmax, (RESULT,)),
    "maximum": Rule(partial(_extreme, True), (0, 1)),
    "minimum": Rule(partial(_extreme, False), (0, 1)),
    "select": Rule(_select, (0,)),
    "clamp": Rule(_clamp, (0,)),
    "reduce_sum": Rule(_reduce_sum),
    "reduce_mean": Rule(_reduce_mean),
    "reduce_max": Rule(_reduce_extreme, (0, RESULT)),
    "reduce_min": Rule(_reduce_extreme, (0, RESULT)),
    "cumsum": Rule(_cumsum),
    "matmul": Rule(_matmul, (0, 1)),
    "gather": Rule(_gather, (1,)),
    "scatter_add": Rule(_scatter_add, (1,)),
    "permute": Rule(_permute),
    "reshape": Rule(_reshape),
    "broadcast_to": Rule(_identity),
    "squeeze": Rule(_reshape),
    "unsqueeze": Rule(_reshape),
}
"""The rule of every operation whose result can have a gradient, by name."""
