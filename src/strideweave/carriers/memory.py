"""What Generic and CPU share: slots that are one contiguous NumPy array."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strideweave.carriers.array_views import gathered, scattered, strided_view
from strideweave.carriers.base import Carrier, check_operation_name
from strideweave.carriers.lifecycle import check_slot_count
from strideweave.carriers.numpy_kernels import KERNELS
from strideweave.carriers.numpy_operations import NumpyOperation
from strideweave.carriers.scattering import run_scatter
from strideweave.dtype import DType
from strideweave.flags import as_flag
from strideweave.operations.table import OPERATIONS

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

    from strideweave.layout import Layout
    from strideweave.operations.definition import Operation, OperationCapability
    from strideweave.operations.operand import Operand

__all__ = ["MemoryCarrier", "slots_from"]


class MemoryCarrier(Carrier):
    """A carrier whose slots are ``self._slots``, a contiguous 1-D array of exactly the dtype.

    Subclasses say where that array's memory comes from: ``_make_slots`` gives fresh zeroed memory.
    """

    _slots_do_io: ClassVar[bool] = False

    def __init__(self, slots: NDArray[Any], *, dtype: DType, mutable: bool) -> None:
        super().__init__(len(slots), dtype=dtype, mutable=mutable)
        self._slots = slots

    @classmethod
    def _make_slots(cls, size: int, dtype: DType) -> NDArray[Any]:
        """Fresh zeroed memory of this class for ``size`` slots."""
        raise NotImplementedError

    @classmethod
    def _around(cls, slots: NDArray[Any], *, dtype: DType, mutable: bool) -> Self:
        """A carrier around fresh slots, without the constructor of the subclass."""
        carrier = cls.__new__(cls)
        carrier._size, carrier._dtype, carrier._mutable = len(slots), dtype, as_flag(mutable, "mutable")
        carrier._slots = slots
        if "_sealed" not in cls.__dict__:
            cls._seal()
        return carrier

    def new_like(self, values: Iterable[Any], *, mutable: bool = True, dtype: DType | None = None) -> Self:
        """Make a fresh carrier of this class that holds ``values``. Works after release too.

        Raises:
            TypeError: ``values`` is not an iterable of real numbers, or ``dtype`` no DType.
            OverflowError: an integer does not fit the dtype.
            ValueError: NaN was to become an integer.
        """
        chosen = self._choose_dtype(dtype)
        converted = slots_from(values, chosen)
        slots = self._make_slots(len(converted), chosen)
        slots[...] = converted
        return self._around(slots, dtype=chosen, mutable=mutable)

    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> Self:
        """Make a fresh carrier of this class with ``size`` slots, zero here whether ``empty`` or not.

        Raises:
            TypeError: ``size`` is not an integer, or ``dtype`` no DType.
            ValueError: ``size`` is negative.
            MemoryError: the system has no such memory.
        """
        as_flag(empty, "empty")
        chosen = self._choose_dtype(dtype)
        slots = self._make_slots(check_slot_count(size), chosen)
        return self._around(slots, dtype=chosen, mutable=mutable)

    def dispatch_op(self, name: str) -> Operation:
        """Give a fresh ``Operation`` for tensors of this carrier class.

        Raises:
            ReleasedError: the carrier was released.
            TypeError: ``name`` is not a string.
            NotImplementedError: there is no such operation.
        """
        check_operation_name(name)
        operation = self._computing(name)
        if operation is None:
            return super().dispatch_op(name)
        self._require_live()
        return operation

    def operation_capabilities(self, name: str | None = None) -> tuple[OperationCapability, ...]:
        """List every operation, or the entries of one. Answers after release too.

        Raises:
            TypeError: ``name`` is neither a string nor None.
        """
        if name is not None:
            check_operation_name(name)
        return tuple(
            capability
            for definition in OPERATIONS.values()
            if name in (None, definition.name)
            for capability in definition.capabilities()
        )

    def scatter(
        self, to_scatter: Operand, scatter_onto: Operand, mapping: Layout, mapping_offset: int = 0
    ) -> None:
        """Write a tensor's values to the slots that a Layout names, as one public write.

        The source's coordinate ``c`` lands in slot ``scatter_onto.offset + mapping_offset + mapping(c)``; all
        other slots stay. The source may lie on the same slots: it is read before anything is written. No
        graph records the write, only the version.

        Args:
            to_scatter: a Tensor on this carrier class, with this carrier's dtype.
            scatter_onto: a Tensor on this very carrier; only its offset counts.
            mapping: a Layout with the shape of ``to_scatter`` that gives every coordinate a slot of its own.
            mapping_offset: slots to add, which may be negative.

        Raises:
            TypeError: an argument is of a wrong type, or a tensor of another carrier class or dtype.
            ValueError: ``scatter_onto`` lies on another carrier, the shapes differ, a slot is outside the
                carrier, or the mapping names one twice. After this and every other error nothing changed.
            ReleasedError: this carrier or the source's was released.
            OwnershipError, ImmutableError: public writes are refused.
        """
        run_scatter(self, to_scatter, scatter_onto, mapping, mapping_offset, store=self._store_layout)

    @classmethod
    def _computing(cls, name: str) -> Operation | None:
        """The operation of that name where it computes values, as NumPy does; None for any other."""
        return NumpyOperation(OPERATIONS[name], cls) if name in KERNELS else None

    def _choose_dtype(self, dtype: DType | None) -> DType:
        chosen = self._dtype if dtype is None else dtype
        self.supports_storage_dtype(chosen)
        return chosen

    def _load_slot(self, i: int) -> bool | int | float:
        return self._dtype.to_python(self._live_slots()[i])

    def _store_slot(self, i: int, value: NDArray[Any]) -> None:
        self._slots[i] = value

    def _free_storage(self) -> None:
        # Views that callers hold keep the memory; this carrier lets go of it.
        self._slots = self._slots[:0].copy()

    def _can_allocate(self) -> bool:
        return self._size == 0 and not self._released

    def _allocate_in_place(self, size: int) -> None:
        slots = self._make_slots(check_slot_count(size), self._dtype)
        with self._lock:
            self._require_live()
            if self._size:
                super()._allocate_in_place(size)
            self._slots, self._size = slots, len(slots)

    def _bytes(self) -> NDArray[np.uint8]:
        return self._live_slots().view(np.uint8)

    def _units(self, unit: np.dtype[np.unsignedinteger[Any]]) -> NDArray[np.unsignedinteger[Any]]:
        return self._live_slots().view(unit)

    def _adopt_like(self, values: NDArray[Any], dtype: DType) -> Self:
        return self._around(values, dtype=dtype, mutable=True)

    def _array(self, layout: Layout, offset: int, writable: bool) -> NDArray[Any] | None:
        view = strided_view(self._live_slots(), layout, offset)
        if view is not None:
            view.flags.writeable = writable
        return view

    def _exported(self, layout: Layout, offset: int, writable: bool) -> NDArray[Any] | None:
        return self._array(layout, offset, writable)

    def _read_slots(self, start: int, slots: int) -> NDArray[Any]:
        return self._live_slots()[start : start + slots].copy()

    def _store_layout(self, source: Operand, layout: Layout, first: int) -> None:
        """Write a tensor's elements to the slots of an injective layout, relative to slot ``first``."""
        same = source.carrier is self
        scattered(self._live_slots(), layout, first, source.numpy(copy=True if same else None))

    def _scatter_as(self, owner: object, source: Operand, layout: Layout, first: int) -> None:
        with self._writing(partial(self._require_live_and_owner, owner)):
            self._store_layout(source, layout, first)

    def _live_slots(self) -> NDArray[Any]:
        """The slots, whole even if another thread releases this carrier now."""
        slots = self._slots  # first: release marks the carrier before it lets go of them
        self._require_live()
        return slots

    def _gather_array(self, tensor: Operand) -> NDArray[Any]:
        return gathered(self._live_slots(), tensor.layout, tensor.offset)


def slots_from(values: Iterable[Any], dtype: DType) -> NDArray[Any]:
    """Convert numbers to a 1-D array of ``dtype``, each checked as ``DType.convert`` does.

    An array of the same type keeps every bit. The result may be ``values`` itself.

    Raises:
        TypeError: ``values`` is not iterable, or one of them not a real number.
        OverflowError, ValueError: a value does not fit.
    """
    if isinstance(values, np.ndarray) and values.ndim == 1 and np.can_cast(values.dtype, dtype.numpy, "safe"):
        return np.asarray(values, dtype.numpy)
    if not isinstance(values, Iterable):
        raise TypeError(f"values must be an iterable of numbers, found {type(values).__name__}")
    converted = [dtype.convert(value) for value in values]
    return np.array(converted, dtype.numpy) if converted else np.empty(0, dtype.numpy)
