"""What Metal computes with: one function per operation, from MLX arrays to an MLX array.

A kernel gets the module ``mlx.core``, the bound operation and the operands as arrays of their own dtypes (a
scalar as an array of shape ``()`` and the dtype that scalars take on). It may leave the result lazy, in the
working dtype and in any order; whoever called it converts, evaluates and makes sure that no memory is shared.
Float16 and BFloat16 are computed in float32 and rounded once.

``computes`` says what MLX runs. The rest runs on NumPy, over the same memory:

- everything with a Float64 or 8-bit float among operands or result, which integer quotients and means,
  functions of Int32 and Int64, and Float32 beside Int32 or Int64 make of themselves;
- ``pow`` of integers, which MLX does not refuse for negative exponents, and ``matmul`` of integers, which MLX
  does not have;
- ``scatter_add`` of Bool and Int64, which not every device adds at one place;
- anything without elements.
"""

from __future__ import annotations

import math
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from strideweave.carriers.metal_arrays import MLX_DTYPES, stand_in
from strideweave.carriers.numpy_kernels import counted
from strideweave.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strideweave.operations.definition import BoundOperation

    Array: TypeAlias = Any
    Kernel: TypeAlias = Callable[..., Any]

__all__ = ["METAL_KERNELS", "computes"]

_COMPARISONS = frozenset(["eq", "ne", "lt", "le"])
_FLOATS_ONLY = frozenset(["matmul", "pow"])
_ADDED_IN_PLACE = frozenset(
    [DType.Int8, DType.UInt8, DType.Int16, DType.Int32, DType.Float16, DType.BFloat16, DType.Float32]
)


def computes(bound: BoundOperation) -> bool:
    """Whether MLX runs this call; see the module's own words."""
    name, result = bound.definition.name, bound.result
    dtypes = {result.dtype, *(tensor.dtype for tensor in bound.tensors)}
    if name in _COMPARISONS:
        dtypes.add(_common(bound))
    if not dtypes <= MLX_DTYPES or 0 in result.shape or any(0 in tensor.shape for tensor in bound.tensors):
        return False
    if name in _FLOATS_ONLY:
        return result.dtype.is_differentiable
    return name != "scatter_add" or result.dtype in _ADDED_IN_PLACE


def _common(bound: BoundOperation) -> DType:
    """The dtype in which operands are compared."""
    dtypes = [tensor.dtype.numpy for tensor in bound.tensors]
    if len(bound.tensors) < len(bound.operands):
        dtypes.append(bound.scalar_dtype.numpy)
    return DType.from_numpy(np.result_type(*dtypes))


def _working(mx: Any, dtype: DType) -> Any:
    """The MLX dtype in which results of ``dtype`` are computed."""
    return mx.float32 if dtype.is_differentiable else stand_in(mx, dtype)


def _number(mx: Any, value: Any, dtype: DType) -> Array:
    """A scalar as it is in ``dtype``, in the working dtype."""
    return mx.array(dtype.to_python(dtype.convert(value)), _working(mx, dtype))


def _elementwise(function: Callable[..., Array], mx: Any, bound: BoundOperation, *operands: Array) -> Array:
    """Run a function of ``mlx.core`` and of arrays in the working dtype."""
    working = _working(mx, bound.result.dtype)
    return function(mx, *(operand.astype(working) for operand in operands))


def _named(name: str) -> Kernel:
    """The elementwise function that MLX has under this name."""
    return partial(_elementwise, lambda mx, *operands: getattr(mx, name)(*operands))


def _sign(mx: Any, x: Array) -> Array:
    return mx.where(mx.isnan(x), x, mx.sign(x)) if x.dtype == mx.float32 else mx.sign(x)


def _compare(name: str, mx: Any, bound: BoundOperation, x: Array, y: Array) -> Array:
    working = _working(mx, _common(bound))
    return getattr(mx, name)(x.astype(working), y.astype(working))


def _select(mx: Any, bound: BoundOperation, condition: Array, x: Array, y: Array) -> Array:
    dtype = stand_in(mx, bound.result.dtype)
    bits = stand_in(mx, bound.result.dtype, bits=True)  # so that every bit of an element is kept
    chosen = mx.where(condition != 0, x.astype(dtype).view(bits), y.astype(dtype).view(bits))
    return chosen.view(dtype)


def _clamp(mx: Any, bound: BoundOperation, x: Array) -> Array:
    dtype = bound.result.dtype
    out = x.astype(_working(mx, dtype))
    for function, name in ((mx.maximum, "min"), (mx.minimum, "max")):
        if bound.options[name] is not None:
            out = function(out, _number(mx, bound.options[name], dtype))
    return out


def _gelu(mx: Any, bound: BoundOperation, x: Array) -> Array:
    wide = x.astype(mx.float32)
    if bound.options["approximate"]:
        inner = mx.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide))
    else:
        inner = mx.erf(wide * math.sqrt(0.5))
    return 0.5 * (wide * (1 + inner))


def _softmax(mx: Any, bound: BoundOperation, x: Array) -> Array:
    return mx.softmax(x.astype(mx.float32), axis=bound.options["axis"])


def _sum(mx: Any, bound: BoundOperation, x: Array) -> Array:
    axes, keepdims = list(bound.options["axis"]), bound.options["keepdims"]
    return mx.sum(x.astype(_working(mx, bound.result.dtype)), axis=axes, keepdims=keepdims)


def _mean(mx: Any, bound: BoundOperation, x: Array) -> Array:
    return _sum(mx, bound, x) / math.prod(x.shape[axis] for axis in bound.options["axis"])


def _extreme(name: str, mx: Any, bound: BoundOperation, x: Array) -> Array:
    axes, keepdims = list(bound.options["axis"]), bound.options["keepdims"]
    return getattr(mx, name)(x.astype(_working(mx, bound.result.dtype)), axis=axes, keepdims=keepdims)


def _place(name: str, mx: Any, bound: BoundOperation, x: Array) -> Array:
    """Say where the largest or smallest element is; a NaN is both, as NumPy has it."""
    axis = bound.options["axis"]
    flat, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    find = getattr(mx, name)
    if not bound.tensors[0].dtype.is_differentiable:
        return find(flat.astype(mx.uint8) if flat.dtype == mx.bool_ else flat, axis=axis)
    missing = mx.isnan(flat)
    first_missing = mx.argmax(missing.astype(mx.uint8), axis=axis)
    return mx.where(mx.any(missing, axis=axis), first_missing, find(flat, axis=axis))


def _cumsum(mx: Any, bound: BoundOperation, x: Array) -> Array:
    axis = bound.options["axis"]
    flat, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    return mx.cumsum(flat.astype(_working(mx, bound.result.dtype)), axis=axis)


def _matmul(mx: Any, bound: BoundOperation, x: Array, y: Array) -> Array:
    return mx.matmul(x.astype(mx.float32), y.astype(mx.float32)).reshape(bound.result.shape)


def _indices(mx: Any, bound: BoundOperation) -> Array:
    """The second operand's numbers counted from the front, checked because MLX reads outside an axis."""
    axis, indices = bound.options["axis"], bound.tensors[1].numpy()
    return mx.array(counted(indices, bound.tensors[0].shape[axis], axis))


def _gather(mx: Any, bound: BoundOperation, x: Array, _: Array) -> Array:
    dtype = bound.result.dtype
    bits = x.view(stand_in(mx, dtype, bits=True))  # so that every bit of an element is kept
    return mx.take(bits, _indices(mx, bound), axis=bound.options["axis"]).view(stand_in(mx, dtype))


def _scatter_add(mx: Any, bound: BoundOperation, x: Array, _: Array, values: Array) -> Array:
    axis, working = bound.options["axis"], _working(mx, bound.result.dtype)
    indices = _indices(mx, bound)
    picked = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    added = mx.broadcast_to(values.astype(working), picked)
    return x.astype(working).at[(slice(None),) * axis + (indices,)].add(added)


METAL_KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "add": _named("add"),
        "sub": _named("subtract"),
        "mul": _named("multiply"),
        "elementwise_mul": _named("multiply"),
        "div": _named("divide"),
        "pow": _named("power"),
        "maximum": _named("maximum"),
        "minimum": _named("minimum"),
        "eq": partial(_compare, "equal"),
        "ne": partial(_compare, "not_equal"),
        "lt": partial(_compare, "less"),
        "le": partial(_compare, "less_equal"),
        "select": _select,
        "clamp": _clamp,
        "neg": _named("negative"),
        "sqrt": _named("sqrt"),
        "rsqrt": _named("rsqrt"),
        "exp": _named("exp"),
        "abs": _named("abs"),
        "sign": partial(_elementwise, _sign),
        "recip": _named("reciprocal"),
        "log": _named("log"),
        "sin": _named("sin"),
        "cos": _named("cos"),
        "erf": _named("erf"),
        "relu": partial(_elementwise, lambda mx, x: mx.maximum(x, 0)),
        "sigmoid": _named("sigmoid"),
        "silu": partial(_elementwise, lambda mx, x: x * mx.sigmoid(x)),
        "softplus": partial(_elementwise, lambda mx, x: mx.logaddexp(x, 0)),
        "tanh": _named("tanh"),
        "gelu": _gelu,
        "softmax": _softmax,
        "reduce_sum": _sum,
        "reduce_mean": _mean,
        "reduce_max": partial(_extreme, "max"),
        "reduce_min": partial(_extreme, "min"),
        "argmax": partial(_place, "argmax"),
        "argmin": partial(_place, "argmin"),
        "cumsum": _cumsum,
        "matmul": _matmul,
        "gather": _gather,
        "scatter_add": _scatter_add,
    }
)
"""The kernel of every operation that computes, by name."""
