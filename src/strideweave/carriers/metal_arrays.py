"""MLX arrays as storage: one buffer that MLX computes on and that NumPy sees, without a copy between them.

MLX shares its memory with the processor, on Apple silicon as on Linux, and documents that a NumPy array made
from an MLX array without a copy may be written to. That holds for evaluated arrays, so nothing here is lazy:
an array is evaluated before anybody gets it, and an operation before it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strideweave.dtype import DType
from strideweave.layout import row_major

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.operations.operand import Operand

__all__ = ["MLX_DTYPES", "Unified", "around", "as_mlx", "copied", "load_mlx", "stand_in"]

MLX_DTYPES = frozenset(
    [
        DType.Bool,
        DType.Int8,
        DType.UInt8,
        DType.Int16,
        DType.Int32,
        DType.Int64,
        DType.Float16,
        DType.BFloat16,
        DType.Float32,
    ]
)
"""What MLX computes with on every device. Float64 is left out: a GPU has none, and the processor's functions of
it are accurate to 32 bits only. The 8-bit floats are left out: MLX has no such arrays."""


class Unified(NamedTuple):
    """One buffer, seen from both sides.

    Attributes:
        values: the evaluated 1-D ``mlx.core.array`` that owns it.
        slots: the same memory as a writable NumPy array of the carrier's dtype, which keeps ``values`` alive.
    """

    values: Any
    slots: NDArray[Any]


def load_mlx() -> Any:
    """Import ``mlx.core``.

    Raises:
        RuntimeError: it is not installed, or not for this machine.
    """
    try:
        import mlx.core  # noqa: PLC0415 - optional library
    except ImportError as error:
        raise RuntimeError(
            "a Metal carrier stores its values in MLX arrays, and MLX cannot be imported "
            f"({error}); pip install 'strideweave[metal]' brings it"
        ) from error
    return mlx.core


def copied(values: NDArray[Any], dtype: DType) -> Unified:
    """Copy a C-contiguous 1-D array of ``dtype``, bit for bit, to a fresh buffer."""
    # As unsigned integers, which MLX takes over unchanged; this needs neither a stream nor a device.
    return around(load_mlx().array(values.view(_bits(dtype))), dtype)


def around(values: Any, dtype: DType) -> Unified:
    """See an evaluated contiguous 1-D array of MLX as slots of ``dtype``."""
    if values.size == 0:
        return Unified(values, np.empty(0, dtype.numpy))
    return Unified(values, np.frombuffer(values, dtype.numpy))


def as_mlx(mx: Any, values: Any, tensor: Operand) -> Any:
    """View the elements of a tensor over ``values`` as an MLX array of its shape and dtype."""
    layout, offset, shape = tensor.layout, tensor.offset, tensor.shape
    flat = values.view(stand_in(mx, tensor.dtype))
    if layout == row_major(*shape):
        if offset or layout.size != flat.size:
            flat = flat[offset : offset + layout.size]
        return flat.reshape(shape)
    leaves = [digit for mode in layout.digits() for digit in reversed(mode)]
    if any(stride < 0 for _, stride in leaves):
        # MLX does not promise that its kernels walk backwards.
        array = tensor.carrier._gather_array(tensor).view(_bits(tensor.dtype))
        return mx.array(array).view(flat.dtype)
    extents, strides = [extent for extent, _ in leaves], [stride for _, stride in leaves]
    return mx.as_strided(flat, extents, strides, offset).reshape(shape)


def stand_in(mx: Any, dtype: DType, *, bits: bool = False) -> Any:
    """The MLX dtype for one of ``MLX_DTYPES``, or with ``bits`` the unsigned integer of any dtype's width."""
    if bits:
        return getattr(mx, f"uint{8 * dtype.itemsize}")
    return mx.bool_ if dtype is DType.Bool else getattr(mx, dtype.name.lower())


def _bits(dtype: DType) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")
