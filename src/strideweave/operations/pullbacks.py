"""The vector-Jacobian products of the operations, written with operations on tensors.

Each takes a ``Pullback`` and the cotangent of the result and gives a share for each operand, or None where there
is none or nobody asks. Because they are written with operations, whichever carrier class computed forward
computes backward too, and gradients lie on the same class. They run without gradients of their own; ``fit`` then
sums a share over broadcast axes and gives it the operand's dtype.

A rule that takes several steps takes them in Float32 where the cotangent is narrower, so that a share is rounded
as often as a result: once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from strideweave.dtype import DType
from strideweave.layout import row_major
from strideweave.operations.definition import RESULT, Operand, Pullback, apply

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.tensor import Tensor

    Shares: TypeAlias = Sequence[Tensor | None]

__all__ = ["PULLBACKS", "Rule", "fit"]


class Rule(NamedTuple):
    """How an operation is differentiated.

    Attributes:
        vjp: gives a share for each operand from a ``Pullback`` and a cotangent.
        saves: for each operand, the positions of the operands whose values its share is made from, ``RESULT``
            for the result's; shorter where the rest needs none.
    """

    vjp: Callable[[Pullback, Tensor], Shares]
    saves: tuple[tuple[int, ...], ...] = ()


def fit(share: Tensor, operand: Tensor) -> Tensor:
    """Sum a share over the axes along which its operand was repeated, and give it the operand's dtype."""
    if share.shape != operand.shape:
        ahead = len(share.shape) - len(operand.shape)
        repeated = [
            ahead + axis
            for axis, extent in enumerate(operand.shape)
            if extent == 1 and share.shape[ahead + axis] != 1
        ]
        share = _summed(share, (*range(ahead), *repeated))
        share = apply("reshape", share, shape=operand.shape)
    if share.dtype is not operand.dtype:
        share = _on(operand, share.numpy().astype(operand.dtype.numpy), operand.dtype)
    return share


def _summed(share: Tensor, axes: tuple[int, ...]) -> Tensor:
    if share.carrier.operation_capabilities("reduce_sum"):
        return apply("reduce_sum", share, axis=axes, keepdims=True)
    # A carrier that only keeps values, such as a file: its tensors are differentiated through views and moves.
    values = share.numpy()
    wide = np.float32 if _is_narrow(share.dtype) else values.dtype
    return _on(share, values.sum(axes, wide, keepdims=True).astype(values.dtype), share.dtype)


def _on(tensor: Tensor, values: NDArray[Any], dtype: DType) -> Tensor:
    """A tensor of ``values`` on a fresh carrier of the kind that ``tensor`` stands on."""
    carrier = tensor.carrier._adopt_like(np.ascontiguousarray(values).reshape(-1), dtype)
    return type(tensor)._of(carrier, 0, row_major(values.shape), False)


def _zeros(tensor: Tensor) -> Tensor:
    return _on(tensor, np.zeros(tensor.shape, tensor.dtype.numpy), tensor.dtype)


def _one(tensor: Tensor, dtype: DType) -> Tensor:
    """A one without axes, which unlike a Python scalar takes part in promotion."""
    return _on(tensor, np.ones((), dtype.numpy), dtype)


def _is_narrow(dtype: DType) -> bool:
    return dtype.is_differentiable and dtype.itemsize < DType.Float32.itemsize


def _widely(rule: Rule) -> Rule:
    """Have a rule of several steps take them in Float32 at least."""

    def widened(value: Any) -> Any:
        if not isinstance(value, Operand) or not _is_narrow(value.dtype):
            return value
        tensor: Any = value
        return apply("mul", tensor, _one(tensor, DType.Float32))

    def vjp(pullback: Pullback, g: Tensor) -> Shares:
        if not _is_narrow(g.dtype):
            return rule.vjp(pullback, g)
        wanted = zip(pullback.wanted, rule.saves, strict=False)
        read = {position for asked, positions in wanted if asked for position in positions}
        operands = [
            widened(operand) if position in read else operand
            for position, operand in enumerate(pullback.operands)
        ]
        wide = replace(pullback, operands=tuple(operands), result=widened(pullback.result))
        return rule.vjp(wide, widened(g))

    return Rule(vjp, rule.saves)


# Arithmetic


def _add(_: Pullback, g: Tensor) -> Shares:
    return g, g


def _sub(pullback: Pullback, g: Tensor) -> Shares:
    return g, -g if pullback.wanted[1] else None


def _mul(pullback: Pullback, g: Tensor) -> Shares:
    (x, y), (for_x, for_y) = pullback.operands, pullback.wanted
    return g * y if for_x else None, g * x if for_y else None


def _div(pullback: Pullback, g: Tensor) -> Shares:
    (x, y), (for_x, for_y) = pullback.operands, pullback.wanted
    # Divided twice rather than by the square, which leaves the range of the dtype long before the quotient does.
    return g / y if for_x else None, -g * (x / y / y) if for_y else None


def _pow(pullback: Pullback, g: Tensor) -> Shares:
    (x, y), (for_x, for_y) = pullback.operands, pullback.wanted
    return _pow_base(x, y, g) if for_x else None, _pow_exponent(x, y, pullback.result, g) if for_y else None


def _pow_base(x: Tensor, y: Any, g: Tensor) -> Tensor:
    # x ** 0 is 1 everywhere, so its slope is 0, also where x ** -1 is infinite.
    if isinstance(y, int | float):
        return g * (y * apply("pow", x, y - 1)) if y else _zeros(x)
    return apply("select", apply("eq", y, 0), 0, g * y * apply("pow", x, y - 1))


def _pow_exponent(x: Any, y: Tensor, result: Tensor, g: Tensor) -> Tensor:
    """As in PyTorch: 0 ** y stays 0 for positive y, and counts as flat where y is 0."""
    if isinstance(x, int | float):
        slope = g * result * _log(x)
        return apply("select", apply("le", 0, y), 0, slope) if x == 0 else slope
    if not x.dtype.is_differentiable:
        x = x * _one(x, g.dtype)  # the logarithm of a small integer would have 16 bits
    slope = g * result * apply("log", x)
    flat = apply("select", apply("le", 0, y), 0, slope)
    return apply("select", apply("eq", x, 0), flat, slope)


def _log(x: float) -> float:
    if x > 0:
        return math.log(x)
    return -math.inf if x == 0 else math.nan


# Functions of one operand: the cotangent times the slope


def _from_operand(slope: Callable[[Any], Any]) -> Rule:
    """The rule of an elementwise function whose slope follows from its operand."""
    return Rule(lambda pullback, g: (g * slope(pullback.operands[0]),), ((0,),))


def _from_result(slope: Callable[[Any], Any]) -> Rule:
    """The rule of an elementwise function whose slope follows from its result."""
    return Rule(lambda pullback, g: (g * slope(pullback.result),), ((RESULT,),))


def _relu(pullback: Pullback, g: Tensor) -> Shares:
    return (apply("select", apply("lt", 0, pullback.result), g, 0),)


def _sign(pullback: Pullback, _: Tensor) -> Shares:
    return (_zeros(pullback.operands[0]),)


def _gelu(pullback: Pullback, g: Tensor) -> Shares:
    # Beyond 40 the slope is 0 or 1 in any dtype, and the powers of large numbers would overflow on the way.
    x: Any = apply("clamp", pullback.operands[0], min=-40.0, max=40.0)
    if pullback.options["approximate"]:
        scale = math.sqrt(2 / math.pi)
        tanh: Any = apply("tanh", scale * (x + 0.044715 * x * x * x))
        inner = scale * (1 + 3 * 0.044715 * x * x)
        return (g * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner),)
    below = 0.5 * (1 + apply("erf", x * math.sqrt(0.5)))
    density = apply("exp", -0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return (g * (below + x * density),)


def _silu_slope(x: Any) -> Any:
    sigmoid: Any = apply("sigmoid", x)
    return sigmoid * (1 + x * (1 - sigmoid))


def _softmax(pullback: Pullback, g: Tensor) -> Shares:
    result = pullback.result
    weighted = apply("reduce_sum", g * result, axis=pullback.options["axis"], keepdims=True)
    return (result * (g - weighted),)


# Choices


def _extreme(larger: bool, pullback: Pullback, g: Tensor) -> Shares:
    """Where two are equal each gets half, as in PyTorch."""
    (x, y), (for_x, for_y) = pullback.operands, pullback.wanted
    won = apply("select", apply("eq", x, y), 0.5 * g, g)
    x_lost, y_lost = (x, y) if larger else (y, x), (y, x) if larger else (x, y)
    return (
        apply("select", apply("lt", *x_lost), 0, won) if for_x else None,
        apply("select", apply("lt", *y_lost), 0, won) if for_y else None,
    )


def _select(pullback: Pullback, g: Tensor) -> Shares:
    condition, (_, for_x, for_y) = pullback.operands[0], pullback.wanted
    return (
        None,
        apply("select", condition, g, 0) if for_x else None,
        apply("select", condition, 0, g) if for_y else None,
    )


def _clamp(pullback: Pullback, g: Tensor) -> Shares:
    """The cotangent where the operand lies within the bounds, them included."""
    x, options = pullback.operands[0], pullback.options
    if options["min"] is not None:
        g = apply("select", apply("le", options["min"], x), g, 0)
    if options["max"] is not None:
        g = apply("select", apply("le", x, options["max"]), g, 0)
    return (g,)


# Reductions


def _kept(pullback: Pullback, reduced: Tensor) -> Tensor:
    """Give back the axes that a reduction dropped, with extent 1."""
    axes = pullback.options["axis"]
    shape = [1 if axis in axes else extent for axis, extent in enumerate(pullback.operands[0].shape)]
    return apply("reshape", reduced, shape=tuple(shape))


def _reduce_sum(pullback: Pullback, g: Tensor) -> Shares:
    return (apply("broadcast_to", _kept(pullback, g), shape=pullback.operands[0].shape),)


def _reduce_mean(pullback: Pullback, g: Tensor) -> Shares:
    x = pullback.operands[0]
    count = prod(x.shape[axis] for axis in pullback.options["axis"])
    return _reduce_sum(pullback, g / count) if count else (_zeros(x),)


def _reduce_extreme(pullback: Pullback, g: Tensor) -> Shares:
    """Equal extremes share the cotangent evenly, as in PyTorch."""
    x = pullback.operands[0]
    chosen = apply("eq", x, _kept(pullback, pullback.result))
    ones = apply("select", chosen, _one(g, g.dtype), 0)
    count = apply("reduce_sum", ones, axis=pullback.options["axis"], keepdims=True)
    return (apply("select", chosen, _kept(pullback, g) / count, 0),)


def _cumsum(pullback: Pullback, g: Tensor) -> Shares:
    """The running sum from the other end."""
    axis = pullback.options["axis"] or 0  # None flattens, so that the cotangent has one axis
    backwards = _on(g, np.arange(g.shape[axis])[::-1], DType.Int64)
    running = apply("cumsum", apply("gather", g, backwards, axis=axis), axis=axis)
    share = apply("gather", running, backwards, axis=axis)
    return (apply("reshape", share, shape=pullback.operands[0].shape),)


# Contraction and indexing


def _matmul(pullback: Pullback, g: Tensor) -> Shares:
    (x, y), (for_x, for_y) = pullback.operands, pullback.wanted
    # A vector takes part as a matrix of one row or one column, and its missing axis comes back first.
    if x.ndim == 1:
        g = apply("unsqueeze", g, axis=g.ndim if y.ndim == 1 else g.ndim - 1)
    if y.ndim == 1:
        g = apply("unsqueeze", g, axis=g.ndim)
    return _left_share(y, g) if for_x else None, _right_share(x, y, g) if for_y else None


def _left_share(y: Tensor, g: Tensor) -> Tensor:
    column = y if y.ndim > 1 else apply("unsqueeze", y, axis=1)
    return apply("matmul", g, _transposed(column))


def _right_share(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    row = x if x.ndim > 1 else apply("unsqueeze", x, axis=0)
    if row.ndim > 2 and y.ndim <= 2:
        # One product over all rows, instead of one for each matrix and then their sum.
        row = apply("reshape", row, shape=(prod(row.shape[:-1]), row.shape[-1]))
        g = apply("reshape", g, shape=(prod(g.shape[:-1]), g.shape[-1]))
    share = apply("matmul", _transposed(row), g)
    return apply("squeeze", share, axis=-1) if y.ndim == 1 else share


def _transposed(x: Tensor) -> Tensor:
    return apply("permute", x, axes=(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _gather(pullback: Pullback, g: Tensor) -> Shares:
    x, indices = pullback.operands
    return apply("scatter_add", _zeros(x), indices, g, axis=pullback.options["axis"]), None


def _scatter_add(pullback: Pullback, g: Tensor) -> Shares:
    indices = pullback.operands[1]
    return g, None, apply("gather", g, indices, axis=pullback.options["axis"]) if pullback.wanted[2] else None


# Views


def _permute(pullback: Pullback, g: Tensor) -> Shares:
    axes = pullback.options["axes"]
    return (apply("permute", g, axes=tuple(sorted(range(len(axes)), key=axes.__getitem__))),)


def _reshape(pullback: Pullback, g: Tensor) -> Shares:
    return (apply("reshape", g, shape=pullback.operands[0].shape),)


def _identity(_: Pullback, g: Tensor) -> Shares:
    return (g,)


PULLBACKS: Mapping[str, Rule] = MappingProxyType(
    {
        "add": Rule(_add),
        "sub": Rule(_sub),
        "mul": Rule(_mul, ((1,), (0,))),
        "elementwise_mul": Rule(_mul, ((1,), (0,))),
        "div": _widely(Rule(_div, ((1,), (0, 1)))),
        "pow": _widely(Rule(_pow, ((0, 1), (0, 1, RESULT)))),
        "neg": Rule(lambda _, g: (-g,)),
        "abs": _from_operand(partial(apply, "sign")),
        "sign": Rule(_sign),
        "recip": _widely(_from_result(lambda result: -result * result)),
        "sqrt": _widely(_from_result(lambda result: 0.5 / result)),
        "rsqrt": _widely(_from_result(lambda result: -0.5 * result * result * result)),
        "exp": _from_result(lambda result: result),
        "log": Rule(lambda pullback, g: (g / pullback.operands[0],), ((0,),)),
        "sin": _widely(_from_operand(partial(apply, "cos"))),
        "cos": _widely(_from_operand(lambda x: -apply("sin", x))),
        "erf": _widely(_from_operand(lambda x: 2 / math.sqrt(math.pi) * apply("exp", -x * x))),
        "tanh": _widely(_from_result(lambda result: 1 - result * result)),
        "sigmoid": _widely(_from_result(lambda result: result * (1 - result))),
        "relu": Rule(_relu, ((RESULT,),)),
        "gelu": _widely(Rule(_gelu, ((0,),))),
        "silu": _widely(_from_operand(_silu_slope)),
        "softplus": _widely(_from_operand(partial(apply, "sigmoid"))),
        "softmax": _widely(Rule(_softmax, ((RESULT,),))),
        "maximum": Rule(partial(_extreme, True), ((0, 1), (0, 1))),
        "minimum": Rule(partial(_extreme, False), ((0, 1), (0, 1))),
        "select": Rule(_select, ((), (0,), (0,))),
        "clamp": Rule(_clamp, ((0,),)),
        "reduce_sum": Rule(_reduce_sum),
        "reduce_mean": _widely(Rule(_reduce_mean)),
        "reduce_max": _widely(Rule(_reduce_extreme, ((0, RESULT),))),
        "reduce_min": _widely(Rule(_reduce_extreme, ((0, RESULT),))),
        "cumsum": Rule(_cumsum),
        "matmul": Rule(_matmul, ((1,), (0,))),
        "gather": Rule(_gather, ((1,),)),
        "scatter_add": Rule(_scatter_add, ((), (), (1,))),
        "permute": Rule(_permute),
        "reshape": Rule(_reshape),
        "broadcast_to": Rule(_identity),
        "squeeze": Rule(_reshape),
        "unsqueeze": Rule(_reshape),
    }
)
"""The rule of every operation whose result can have a gradient, by name."""
