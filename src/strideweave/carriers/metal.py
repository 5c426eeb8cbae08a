"""Memory that MLX computes on: the GPU of Apple silicon, or MLX's processor backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import numpy as np

from strideweave.carriers.lifecycle import check_slot_count
from strideweave.carriers.memory import MemoryCarrier, slots_from
from strideweave.carriers.metal_arrays import Unified, copied, load_mlx
from strideweave.carriers.metal_kernels import METAL_KERNELS
from strideweave.carriers.metal_operations import MetalOperation
from strideweave.dtype import DType
from strideweave.flags import as_flag
from strideweave.operations.table import OPERATIONS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.operations.definition import Operation

__all__ = ["Metal"]


@final
class Metal(MemoryCarrier):
    """Storage in an MLX array, whose memory the processor shares; operations run on MLX's default device.

    It needs MLX, the extra ``strideweave[metal]``: on Apple silicon that is the GPU, on Linux MLX's processor
    backend. Every dtype is stored bit for bit. MLX computes with Bool, the integers, Float16, BFloat16 and
    Float32; Float64 and the 8-bit floats, which a GPU does not have, are computed by NumPy on the same memory.
    Results agree with CPU within the rounding of another library's functions.

    ``numpy()`` views need no copy, and moves and tiles are plain copies of memory. Operations are evaluated
    before they return, so carriers may be used from any thread. MLX keeps one stream for each thread that ever
    computed, and the memory of released carriers in a cache of its own (``mlx.core.clear_cache``); after
    ``fork()`` a child must not compute with MLX if its parent did.

    ``Metal(0)`` is empty and can be given storage once, as a destination.

    Args:
        size: number of slots.
        mutable: whether public writes are allowed.
        dtype: type of every slot.
        empty: True leaves the values unspecified, False makes them zero.

    Raises:
        RuntimeError: MLX is not installed.
        TypeError: ``size`` is not an integer, or ``dtype`` no DType.
        ValueError: ``size`` is negative.
        MemoryError: the system has no such memory.
    """

    _values: Any  # the mlx.core.array whose memory self._slots is

    def __init__(
        self, size: int, *, mutable: bool = True, dtype: DType = DType.Float32, empty: bool = False
    ) -> None:
        load_mlx()
        self.supports_storage_dtype(dtype)
        self._values, slots = _fresh(check_slot_count(size), dtype, empty=as_flag(empty, "empty"))
        super().__init__(slots, dtype=dtype, mutable=mutable)

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Metal is final; subclass Carrier to write a carrier")

    def new_like(self, values: Iterable[Any], *, mutable: bool = True, dtype: DType | None = None) -> Self:
        """Make a fresh carrier of this class that holds ``values``. Works after release too.

        Raises:
            TypeError: ``values`` is not an iterable of real numbers, or ``dtype`` no DType.
            OverflowError: an integer does not fit the dtype.
            ValueError: NaN was to become an integer.
        """
        chosen = self._choose_dtype(dtype)
        converted = np.ascontiguousarray(slots_from(values, chosen))
        return self._holding(copied(converted, chosen), chosen, mutable=mutable)

    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> Self:
        """Make a fresh carrier of this class with ``size`` slots, zero unless ``empty``.

        Raises:
            TypeError: ``size`` is not an integer, or ``dtype`` no DType.
            ValueError: ``size`` is negative.
            MemoryError: the system has no such memory.
        """
        chosen = self._choose_dtype(dtype)
        unified = _fresh(check_slot_count(size), chosen, empty=as_flag(empty, "empty"))
        return self._holding(unified, chosen, mutable=mutable)

    @classmethod
    def _computing(cls, name: str) -> Operation | None:
        return MetalOperation(OPERATIONS[name], cls) if name in METAL_KERNELS else None

    @classmethod
    def _holding(cls, unified: Unified, dtype: DType, *, mutable: bool) -> Self:
        """A carrier around a fresh buffer."""
        carrier = cls._around(unified.slots, dtype=dtype, mutable=mutable)
        carrier._values = unified.values
        return carrier

    def _adopt_like(self, values: NDArray[Any], dtype: DType) -> Self:
        # NumPy's memory is not MLX's; this is the one place where "adopt" is a copy.
        return self._holding(copied(np.ascontiguousarray(values), dtype), dtype, mutable=True)

    def _allocate_in_place(self, size: int) -> None:
        unified = _fresh(check_slot_count(size), self._dtype)
        with self._lock:
            self._require_live()
            if self._size:
                super(MemoryCarrier, self)._allocate_in_place(size)  # which refuses
            self._values, self._slots = unified
            self._size = len(self._slots)

    def _live_values(self) -> Any:
        """The MLX array, whole even if another thread releases this carrier now."""
        values = self._values  # first: release marks the carrier before it lets go of them
        self._require_live()
        return values

    def _free_storage(self) -> None:
        super()._free_storage()
        self._values = None  # views that callers hold keep it


def _fresh(size: int, dtype: DType, *, empty: bool = False) -> Unified:
    # MLX takes its memory from an array that is there; the pages of a used one cost no faults.
    return copied((np.empty if empty else np.zeros)(size, dtype.numpy), dtype)
