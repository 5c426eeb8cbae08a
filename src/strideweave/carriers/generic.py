"""The reference carrier: a private copy of the values in plain Python memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from strideweave.carriers.memory import MemoryCarrier, slots_from
from strideweave.dtype import DType

__all__ = ["Generic"]


@final
class Generic(MemoryCarrier):
    """Storage that copies its values one by one into a ``bytearray``: simple, portable, slow to fill.

    It runs every operation, and other carriers are compared with it. ``Generic([])`` is empty and can be
    given storage once, as a destination.

    Args:
        values: a finite iterable of numbers, one a slot.
        mutable: whether public writes are allowed.
        dtype: type of every slot.

    Raises:
        TypeError: ``values`` is not an iterable of real numbers, or ``dtype`` no DType.
        OverflowError: an integer does not fit the dtype.
        ValueError: NaN was to become an integer.
    """

    def __init__(self, values: Iterable[Any], *, mutable: bool = True, dtype: DType = DType.Float32) -> None:
        self.supports_storage_dtype(dtype)
        converted = slots_from(values, dtype)
        slots = self._make_slots(len(converted), dtype)
        for position, value in enumerate(converted):
            slots[position] = value
        super().__init__(slots, dtype=dtype, mutable=mutable)

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Generic is final; subclass Carrier to write a carrier")

    def _adopt_like(self, values: NDArray[Any], dtype: DType) -> Generic:
        return self.new_like(values, dtype=dtype)

    @classmethod
    def _make_slots(cls, size: int, dtype: DType) -> NDArray[Any]:
        return np.frombuffer(bytearray(size * dtype.itemsize), dtype.numpy)
