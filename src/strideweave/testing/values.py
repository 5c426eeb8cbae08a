"""Values that storage likes to damage, and a way to read back every bit of a carrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.dtype import DType
from strideweave.layout import row_major
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.carriers.base import Carrier

__all__ = ["bit_patterns", "values_of"]

SMALLEST_COUNT = 8


def bit_patterns(dtype: DType, count: int = 256, *, seed: int = 0) -> NDArray[Any]:
    """Make values of every kind that a dtype has, for comparing bit by bit.

    The types of one byte give all their 256 patterns in turn (Bool its two). Wider ones begin with zero, negative
    zero, the smallest denormal, the largest denormal, infinity or the integer that has its bits, two NaNs with
    payloads, and all bits set; random bits follow.

    Args:
        dtype: type of the values.
        count: how many, at least 8.
        seed: decides the random bits.

    Returns:
        A fresh 1-D array of ``dtype.numpy``.

    Raises:
        ValueError: ``count`` is below 8.
    """
    if count < SMALLEST_COUNT:
        raise ValueError(
            f"count must be at least {SMALLEST_COUNT} to hold every kind of value, found {count}"
        )
    width = dtype.itemsize
    if width == 1:
        patterns = 2 if dtype is DType.Bool else 256
        return (np.arange(count) % patterns).astype(np.uint8).view(dtype.numpy)
    raw = np.random.default_rng(seed).integers(0, 256, count * width, dtype=np.uint8)
    words = raw.view(f"<u{width}")
    top = 1 << (dtype.bits - 1)
    fraction = {"BFloat16": 7, "Float16": 10, "Float32": 23, "Float64": 52}.get(dtype.name, dtype.bits - 2)
    one, infinity = 1 << fraction, (top - 1) - ((1 << fraction) - 1)
    words[:SMALLEST_COUNT] = [0, top, 1, one - 1, infinity, infinity | 1, top | infinity | 5, 2 * top - 1]
    return raw.view(dtype.numpy)


def values_of(carrier: Carrier) -> NDArray[Any]:
    """Copy all slots of a carrier to a fresh 1-D array, bit by bit.

    Raises:
        ReleasedError: the carrier was released. EvictedError: its values are not at hand.
    """
    return Tensor(carrier, 0, row_major(carrier.size()), requires_grad=False).numpy(copy=True)
