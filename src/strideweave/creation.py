"""Making tensors: row-major, on a CPU carrier, as NumPy users expect."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.carriers.cpu import CPU
from strideweave.dtype import DType, as_numbers, check_dtype
from strideweave.layout import row_major
from strideweave.layout.int_tuple import as_integer
from strideweave.tensor import Tensor
from strideweave.tiling import tiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from strideweave.operations.definition import Scalar

__all__ = ["arange", "asarray", "from_numpy", "full", "ones", "tiled", "zeros"]


def asarray(values: ArrayLike | Tensor, *, dtype: DType | None = None) -> Tensor:
    """Make a row-major tensor of anything that NumPy makes an array of. Copies; ``from_numpy`` shares.

    A Tensor of the asked dtype is given back as it is.

    Args:
        values: numbers, nested sequences of numbers, an array of any layout, or a Tensor.
        dtype: the element type, converted to as NumPy does; None keeps NumPy's choice (Float64 for Python
            floats, Int64 for integers, Bool for booleans).

    Raises:
        TypeError: the values are no real numbers, no DType stands for their type and none is asked for, or ``dtype``
            is no DType.
        ValueError: nested sequences are ragged.
        OverflowError: a Python integer does not fit.
    """
    if isinstance(values, Tensor) and dtype in (None, values.dtype):
        return values
    array, chosen = as_numbers(values, dtype)
    return _filled(array.shape, chosen, array)


def from_numpy(array: NDArray[Any]) -> Tensor:
    """Share the memory of a C-contiguous array; the carrier is mutable if the array is writeable.

    Raises:
        TypeError: ``array`` is not a NumPy array, or no DType stands for its dtype.
        ValueError: it is not C-contiguous or has a foreign byte order; the message says what to do.
    """
    carrier = CPU.from_numpy(array)
    return Tensor(carrier, 0, row_major(array.shape))


def zeros(shape: int | Sequence[int], *, dtype: DType = DType.Float64) -> Tensor:
    """Make a row-major tensor of zeros; large ones take no memory until they are written.

    Args:
        shape: an integer or a sequence of integers, none negative.
        dtype: the element type.

    Raises:
        TypeError: an extent is no integer, or ``dtype`` no DType.
        ValueError: an extent is negative.
    """
    layout = row_major(_extents(shape))
    return Tensor(CPU(layout.size, dtype=dtype), 0, layout)


def ones(shape: int | Sequence[int], *, dtype: DType = DType.Float64) -> Tensor:
    """Make a row-major tensor of ones; arguments and errors as for ``zeros``."""
    return full(shape, 1, dtype=dtype)


def full(shape: int | Sequence[int], fill_value: Scalar, *, dtype: DType | None = None) -> Tensor:
    """Make a row-major tensor of one value.

    Args:
        shape: an integer or a sequence of integers, none negative.
        fill_value: the value of every element.
        dtype: the element type; None follows the value (Bool, Int64 or Float64).

    Raises:
        TypeError: an extent is no integer, ``fill_value`` no real number, or ``dtype`` no DType.
        ValueError: an extent is negative.
        OverflowError: the value does not fit.
    """
    chosen = _checked(dtype) or DType.from_numpy(np.asarray(fill_value).dtype)
    return _filled(_extents(shape), chosen, chosen.convert(fill_value))


def arange(
    start: int | float, stop: int | float | None = None, step: int | float = 1, *, dtype: DType | None = None
) -> Tensor:
    """Make a 1-D tensor of evenly spaced numbers from ``start`` up to but not ``stop``, as ``numpy.arange``.

    Args:
        start: the first number; with ``stop`` left out it is the stop, and the first number 0.
        stop: the end, which is not included.
        step: the spacing.
        dtype: the element type that the numbers are converted to; None gives Int64, or Float64 if one of the
            arguments is a float.

    Raises:
        TypeError: an argument is no real number, or ``dtype`` no DType.
        ValueError, ZeroDivisionError: ``step`` is NaN or zero.
        OverflowError: a number does not fit.
    """
    for name, number in (("start", start), ("stop", 0 if stop is None else stop), ("step", step)):
        if not isinstance(number, Real | np.generic | np.ndarray):
            raise TypeError(f"{name} of arange must be a real number, found {type(number).__name__}")
    numbers = np.arange(start, stop, step) if stop is not None else np.arange(0, start, step)
    chosen = _checked(dtype) or DType.from_numpy(numbers.dtype)
    for end in numbers[:1], numbers[-1:]:  # monotonic, so the ends speak for all
        if end.size:
            chosen.convert(end[0])
    return _filled(numbers.shape, chosen, numbers)


def _filled(shape: tuple[int, ...], dtype: DType, values: NDArray[Any]) -> Tensor:
    layout = row_major(shape)
    carrier = CPU(layout.size, dtype=dtype, empty=True)
    carrier.numpy(writable=True).reshape(shape)[...] = values
    return Tensor(carrier, 0, layout)


def _checked(dtype: DType | None) -> DType | None:
    return None if dtype is None else check_dtype(dtype)


def _extents(shape: int | Sequence[int]) -> tuple[int, ...]:
    extents = shape if isinstance(shape, tuple | list) else (shape,)
    return tuple(as_integer(extent, "an extent") for extent in extents)
