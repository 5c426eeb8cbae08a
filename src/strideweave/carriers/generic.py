"""The reference carrier: a private copy of the values in plain Python memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, cast, final

import numpy as np
from numpy.typing import NDArray

from strideweave.carriers.generic_kernels import GENERIC_KERNELS
from strideweave.carriers.generic_operations import GenericOperation
from strideweave.carriers.generic_values import slots_of
from strideweave.carriers.memory import MemoryCarrier, slots_from
from strideweave.dtype import DType
from strideweave.operations.table import OPERATIONS

if TYPE_CHECKING:
    from strideweave.layout import Layout
    from strideweave.operations.definition import Operation
    from strideweave.operations.operand import Operand

__all__ = ["Generic"]


@final
class Generic(MemoryCarrier):
    """Storage that copies its values one by one into a ``bytearray``: simple, portable, slow to fill.

    It runs every operation, element by element in plain Python and without warnings, so that other carriers
    can be compared with it. ``Generic([])`` is empty and can be
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

    @classmethod
    def _computing(cls, name: str) -> Operation | None:
        return GenericOperation(OPERATIONS[name], cls) if name in GENERIC_KERNELS else None

    def _items(self, layout: Layout, offset: int) -> list[Any]:
        """The stored elements of a layout in C order, each with all its bits."""
        self._require_live()
        return [self._slots[slot] for slot in slots_of(layout, offset)]

    def _store_layout(self, source: Operand, layout: Layout, first: int) -> None:
        items = cast("Generic", source.carrier)._items(source.layout, source.offset)
        for slot, item in zip(slots_of(layout, first), items, strict=True):
            self._slots[slot] = item

    def _gather_array(self, tensor: Operand) -> NDArray[Any]:
        values = np.empty(tensor.layout.size, self._dtype.numpy)
        for place, item in enumerate(self._items(tensor.layout, tensor.offset)):
            values[place] = item
        return values.reshape(tensor.shape)

    def _adopt_like(self, values: NDArray[Any], dtype: DType) -> Generic:
        return self.new_like(values, dtype=dtype)

    @classmethod
    def _make_slots(cls, size: int, dtype: DType) -> NDArray[Any]:
        return np.frombuffer(bytearray(size * dtype.itemsize), dtype.numpy)
