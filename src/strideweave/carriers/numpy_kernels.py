"""What CPU computes with: one function per operation, from arrays to a fresh array.

A kernel gets the operands as arrays (a scalar as an array of shape ``()`` and the result's dtype) and the
bound operation, whose shapes and dtypes have been checked. It returns a C-ordered array that shares no
memory with an operand. Floats below 32 bits are computed in float32 and rounded once, by ``_narrowed``.
"""

from __future__ import annotations

from functools import partial
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from strideweave.carriers import numpy_special
from strideweave.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from strideweave.operations.definition import BoundOperation

    Array: TypeAlias = NDArray[Any]
    Kernel: TypeAlias = Callable[..., Array]

__all__ = ["KERNELS", "counted"]

_SMALL_FLOATS = (DType.Float16, DType.BFloat16, DType.Float8E4M3FN, DType.Float8E5M2)


def _working(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype in which results of ``dtype`` are computed."""
    return DType.Float32.numpy if dtype in _SMALL_FLOATS else dtype.numpy


def _narrowed(values: Array, bound: BoundOperation) -> Array:
    return values.astype(bound.result.dtype.numpy, copy=False)


def _ufunc(function: Kernel, bound: BoundOperation, *operands: Array) -> Array:
    working = _working(bound.result.dtype)
    out = np.empty(bound.result.shape, working)
    # Casting inside the ufunc runs through a small buffer, without a converted copy of the operand.
    function(*operands, out=out, dtype=working, casting="unsafe")
    return _narrowed(out, bound)


def _rsqrt(bound: BoundOperation, x: Array) -> Array:
    out = np.empty(bound.result.shape, _working(bound.result.dtype))
    np.sqrt(x, out=out, dtype=out.dtype, casting="unsafe")
    return _narrowed(np.reciprocal(out, out=out), bound)


def _function(function: Kernel, bound: BoundOperation, x: Array) -> Array:
    """Run one of ``numpy_special``'s functions of a float32 or float64 array."""
    return _narrowed(function(x.astype(_working(bound.result.dtype), copy=False)), bound)


def _relu(bound: BoundOperation, x: Array) -> Array:
    out = np.empty(bound.result.shape, _working(bound.result.dtype))
    np.maximum(x, 0, out=out, dtype=out.dtype, casting="unsafe")
    return _narrowed(out, bound)


def _compare(function: Kernel, bound: BoundOperation, x: Array, y: Array) -> Array:
    working = _working(DType.from_numpy(np.result_type(x.dtype, y.dtype)))
    out = np.empty(bound.result.shape, np.bool_)
    function(x, y, out=out, signature=(working, working, out.dtype), casting="unsafe")
    return out


def _select(bound: BoundOperation, condition: Array, x: Array, y: Array) -> Array:
    chosen = condition
    if condition.dtype != np.bool_:
        chosen = condition.astype(_working(DType.from_numpy(condition.dtype)), copy=False) != 0
    out = np.empty(bound.result.shape, bound.result.dtype.numpy)
    np.copyto(out, y, casting="unsafe")
    np.copyto(out, x, casting="unsafe", where=chosen)
    return out


def _clamp(bound: BoundOperation, x: Array) -> Array:
    dtype = bound.result.dtype
    out = x.astype(_working(dtype), order="C")
    for function, name in ((np.maximum, "min"), (np.minimum, "max")):
        if bound.options[name] is not None:
            function(out, dtype.convert(bound.options[name]).astype(out.dtype), out=out)
    return _narrowed(out, bound)


def _gelu(bound: BoundOperation, x: Array) -> Array:
    wide = x.astype(_working(bound.result.dtype), copy=False)
    return _narrowed(numpy_special.gelu(wide, approximate=bound.options["approximate"]), bound)


def _softmax(bound: BoundOperation, x: Array) -> Array:
    out = x.astype(_working(bound.result.dtype), order="C")
    if out.size:
        axis = bound.options["axis"]
        out -= out.max(axis=axis, keepdims=True)
        np.exp(out, out=out)
        out /= out.sum(axis=axis, keepdims=True)
    return _narrowed(out, bound)


def _reduce(function: Kernel, bound: BoundOperation, x: Array) -> Array:
    """Sum or average; ``dtype`` is also what NumPy accumulates in."""
    out = np.empty(bound.result.shape, _working(bound.result.dtype))
    function(x, out=out, dtype=out.dtype, **bound.options)
    return _narrowed(out, bound)


def _extreme(function: Kernel, bound: BoundOperation, x: Array) -> Array:
    """Give the largest or smallest element over axes."""
    out = np.empty(bound.result.shape, _working(bound.result.dtype))
    if out.size:
        function(x.astype(out.dtype, copy=False), out=out, **bound.options)
    return _narrowed(out, bound)


def _place(function: Kernel, bound: BoundOperation, x: Array) -> Array:
    """Say where the largest or smallest element is."""
    out = np.empty(bound.result.shape, np.int64)
    if out.size:
        out[...] = function(x.astype(_working(DType.from_numpy(x.dtype)), copy=False), **bound.options)
    return out


def _cumsum(bound: BoundOperation, x: Array) -> Array:
    out = np.empty(bound.result.shape, _working(bound.result.dtype))
    np.cumsum(x, dtype=out.dtype, out=out, **bound.options)
    return _narrowed(out, bound)


def _matmul(bound: BoundOperation, x: Array, y: Array) -> Array:
    working = _working(bound.result.dtype)
    # "K" order in both: a transposed operand stays one, and BLAS reads it where it lies.
    left, right = x.astype(working, copy=False), y.astype(working, copy=False)
    if left.ndim > 2 and right.ndim == 2:
        left = left.reshape(prod(left.shape[:-1]), left.shape[-1])  # one product instead of one per matrix
    return _narrowed(np.asarray(np.matmul(left, right)).reshape(bound.result.shape), bound)


def _gather(bound: BoundOperation, x: Array, indices: Array) -> Array:
    axis = bound.options["axis"]
    if x.flags.c_contiguous:
        return np.take(x, indices, axis=axis)
    # numpy.take would copy all of x first.
    picked: Array = x[(slice(None),) * axis + (indices,)]
    return np.ascontiguousarray(picked).reshape(bound.result.shape)


def _scatter_add(bound: BoundOperation, x: Array, indices: Array, values: Array) -> Array:
    axis, shape = bound.options["axis"], bound.result.shape
    out = x.astype(_working(bound.result.dtype), order="C")
    rows, extent, width = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
    numbers = counted(indices, extent, axis).reshape(-1)
    # Places in the flattened result: numpy.add.at is ten times faster on one axis than on rows.
    places = np.arange(rows)[:, None, None] * extent + numbers[:, None]
    places = places * width + np.arange(width)
    picked = (*shape[:axis], *indices.shape, *shape[axis + 1 :])
    added = np.broadcast_to(values, picked).astype(out.dtype, copy=False)
    np.add.at(out.reshape(-1), places.reshape(-1), added.reshape(-1))
    return _narrowed(out, bound)


def counted(indices: Array, extent: int, axis: int) -> Array:
    """Count negative numbers from the end, and refuse those outside the axis as ``numpy.take`` does."""
    numbers = indices.astype(np.int64, copy=False)
    outside = (numbers < -extent) | (numbers >= extent)
    if outside.any():
        found = numbers[outside][0]
        raise IndexError(f"index {found} is out of bounds for axis {axis} with size {extent}")
    return np.where(numbers < 0, numbers + extent, numbers)


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "add": partial(_ufunc, np.add),
        "sub": partial(_ufunc, np.subtract),
        "mul": partial(_ufunc, np.multiply),
        "elementwise_mul": partial(_ufunc, np.multiply),
        "div": partial(_ufunc, np.true_divide),
        "pow": partial(_ufunc, np.power),
        "maximum": partial(_ufunc, np.maximum),
        "minimum": partial(_ufunc, np.minimum),
        "eq": partial(_compare, np.equal),
        "ne": partial(_compare, np.not_equal),
        "lt": partial(_compare, np.less),
        "le": partial(_compare, np.less_equal),
        "select": _select,
        "clamp": _clamp,
        "neg": partial(_ufunc, np.negative),
        "sqrt": partial(_ufunc, np.sqrt),
        "rsqrt": _rsqrt,
        "exp": partial(_ufunc, np.exp),
        "abs": partial(_ufunc, np.absolute),
        "sign": partial(_ufunc, np.sign),
        "recip": partial(_ufunc, np.reciprocal),
        "log": partial(_ufunc, np.log),
        "sin": partial(_ufunc, np.sin),
        "cos": partial(_ufunc, np.cos),
        "erf": partial(_function, numpy_special.erf),
        "relu": _relu,
        "sigmoid": partial(_function, numpy_special.sigmoid),
        "silu": partial(_function, numpy_special.silu),
        "softplus": partial(_function, numpy_special.softplus),
        "tanh": partial(_ufunc, np.tanh),
        "gelu": _gelu,
        "softmax": _softmax,
        "reduce_sum": partial(_reduce, np.sum),
        "reduce_mean": partial(_reduce, np.mean),
        "reduce_max": partial(_extreme, np.max),
        "reduce_min": partial(_extreme, np.min),
        "argmax": partial(_place, np.argmax),
        "argmin": partial(_place, np.argmin),
        "cumsum": _cumsum,
        "matmul": _matmul,
        "gather": _gather,
        "scatter_add": _scatter_add,
    }
)
"""The kernel of every operation that computes, by name."""
