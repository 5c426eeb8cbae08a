"""What CPU and Generic compute with: one function per operation, from arrays to a fresh array.

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

__all__ = ["KERNELS"]

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


def _reduce_max(bound: BoundOperation, x: Array) -> Array:
    out = np.empty(bound.result.shape, _working(bound.result.dtype))
    if out.size:
        np.max(x.astype(out.dtype, copy=False), out=out, **bound.options)
    return _narrowed(out, bound)


def _argmax(bound: BoundOperation, x: Array) -> Array:
    out = np.empty(bound.result.shape, np.int64)
    if out.size:
        out[...] = np.argmax(x.astype(_working(DType.from_numpy(x.dtype)), copy=False), **bound.options)
    return out


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


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "add": partial(_ufunc, np.add),
        "sub": partial(_ufunc, np.subtract),
        "mul": partial(_ufunc, np.multiply),
        "elementwise_mul": partial(_ufunc, np.multiply),
        "div": partial(_ufunc, np.true_divide),
        "neg": partial(_ufunc, np.negative),
        "sqrt": partial(_ufunc, np.sqrt),
        "rsqrt": _rsqrt,
        "exp": partial(_ufunc, np.exp),
        "tanh": partial(_ufunc, np.tanh),
        "gelu": _gelu,
        "softmax": _softmax,
        "reduce_sum": partial(_reduce, np.sum),
        "reduce_mean": partial(_reduce, np.mean),
        "reduce_max": _reduce_max,
        "argmax": _argmax,
        "matmul": _matmul,
        "gather": _gather,
    }
)
"""The kernel of every operation that computes, by name."""
