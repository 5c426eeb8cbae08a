"""Memory of this process: aligned and allocated here, or owned by the caller."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import numpy as np
from numpy.typing import NDArray

from strideweave.carriers.base import Carrier, CarrierStatistics
from strideweave.carriers.lifecycle import check_slot_count
from strideweave.carriers.memory import MemoryCarrier
from strideweave.dtype import DType
from strideweave.flags import as_flag, as_optional_flag
from strideweave.io.buffers import HUGE_BYTES, MAPPED_BYTES, aligned_array
from strideweave.io.recycling import exchange, scratch_array
from strideweave.layout.int_tuple import as_integer

if TYPE_CHECKING:
    from collections.abc import Callable

    from strideweave.layout import Layout
    from strideweave.operations.operand import Operand

__all__ = ["CPU", "CPUStatistics"]


@dataclass(frozen=True, slots=True)
class CPUStatistics(CarrierStatistics):
    """What a CPU carrier is and has under way.

    Attributes:
        owns_memory: whether the memory was allocated by the library, so that it can give pages back.
        discarded_bytes: bytes of whole pages given back to the system so far, before release.
    """

    owns_memory: bool
    discarded_bytes: int


@final
class CPU(MemoryCarrier):
    """Storage in the memory of this process, which NumPy computes on.

    ``CPU(size)`` allocates zeroed memory, aligned to 64 bytes (to a page from 64 KiB on). ``CPU(0)`` can be
    given storage once, as a destination. ``CPU(size, pointer)`` stands on memory that the caller owns and
    keeps alive until the carrier is released; its values stay as they are, and release does not free it.

    Args:
        size: number of slots.
        pointer: address of the caller's memory, a multiple of the item size; None allocates.
        mutable: whether public writes are allowed.
        dtype: type of every slot.
        empty: True leaves the values of fresh memory unspecified, False makes them zero.

    Raises:
        TypeError: ``size`` or ``pointer`` is not an integer, ``dtype`` no DType, or a flag no bool.
        ValueError: ``size`` is negative, or ``pointer`` is null, negative or misaligned.
        MemoryError: the system has no such memory.
    """

    _owns_memory: bool = True
    _is_shown: bool = False  # somebody may know the address
    _discarded_bytes: int = 0

    def __init__(
        self,
        size: int,
        pointer: int | None = None,
        *,
        mutable: bool = True,
        dtype: DType = DType.Float32,
        empty: bool = False,
    ) -> None:
        as_flag(empty, "empty")  # fresh memory is zero in any case: the system hands out zeroed pages
        self.supports_storage_dtype(dtype)
        count = check_slot_count(size)
        self._owns_memory = pointer is None
        slots = self._make_slots(count, dtype) if pointer is None else _slots_at(pointer, count, dtype)
        super().__init__(slots, dtype=dtype, mutable=mutable)

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("CPU is final; subclass Carrier to write a carrier")

    @classmethod
    def from_numpy(cls, array: NDArray[Any], *, mutable: bool | None = None) -> Self:
        """Share the memory of an array: writes on either side are seen on the other.

        The carrier keeps the array alive; its slots are the elements in C order.

        Args:
            array: a C-contiguous array of a dtype that a DType stands for, of any shape.
            mutable: whether public writes are allowed; None means "if the array is writeable".

        Raises:
            TypeError: ``array`` is not a NumPy array, no DType stands for its dtype, or ``mutable`` is no bool.
            ValueError: the array is not C-contiguous, has a foreign byte order, or is read-only and
                ``mutable=True`` was asked.
        """
        mutable = as_optional_flag(mutable, "mutable")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"array must be a NumPy array, found {type(array).__name__}; see asarray")
        dtype = DType.from_numpy(array.dtype)
        if not array.flags.c_contiguous:
            raise ValueError(
                f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous and cannot "
                "be shared; pass numpy.ascontiguousarray(array), which copies"
            )
        if mutable and not array.flags.writeable:
            raise ValueError("the array is read-only, so mutable=True cannot be had; pass a copy")
        writable = array.flags.writeable if mutable is None else mutable
        carrier = cls._around(array.view(np.ndarray).reshape(-1), dtype=dtype, mutable=writable)
        carrier._owns_memory = False
        return carrier

    def numpy(self, *, writable: bool = False) -> NDArray[Any]:
        """View all slots as a 1-D array, read-only unless ``writable`` is asked of a mutable carrier.

        Writes through a writable view do not advance the version; ``increment_version()`` does.

        Raises:
            TypeError: ``writable`` is no bool.
            ReleasedError: the carrier was released.
            OwnershipError, ImmutableError: ``writable`` was asked and public writes are refused.
        """
        writable = as_flag(writable, "writable")
        self._require_live()
        if writable:
            self._require_mutable()
        self._show()
        view = self._live_slots()[:]
        view.flags.writeable = writable
        return view

    def statistics(self) -> CPUStatistics:
        """A frozen record of size, version, ownership and memory given back."""
        return CPUStatistics(
            **self._statistics_fields(),
            owns_memory=self._owns_memory,
            discarded_bytes=self._discarded_bytes,
        )

    @classmethod
    def _make_slots(cls, size: int, dtype: DType) -> NDArray[Any]:
        return aligned_array(size * dtype.itemsize).view(dtype.numpy)

    def _allocate_result(self, size: int) -> Self:
        element = self._dtype.numpy
        nbytes = size * element.itemsize
        # Small ones as there, without its checks.
        slots = np.empty(size, element) if nbytes < MAPPED_BYTES else scratch_array(nbytes).view(element)
        return self._around(slots, dtype=self._dtype, mutable=True)

    def _allocate_in_place(self, size: int) -> None:
        super()._allocate_in_place(size)
        self._owns_memory = True

    def _shares_memory(self, other: Carrier) -> bool:
        return (
            isinstance(other, CPU)
            and not (self._owns_memory and other._owns_memory)
            and np.may_share_memory(self._slots, other._slots)
        )

    def _take_over(self, other: Carrier) -> bool:
        if not isinstance(other, CPU) or not other._owns_memory or other._slots.nbytes < MAPPED_BYTES:
            return False  # little memory of a result is less aligned than that of a carrier
        with self._lock:
            self._require_live()
            if self._size:
                if self._size != other._size or not self._owns_memory or self._is_shown or self._is_viewed():
                    return False
            elif not self._can_allocate():
                return False
            former = self._slots.base
            self._slots, self._size, self._owns_memory = other._slots, other._size, True
            self._is_shown = other._is_shown
        kept = other._slots.base
        if isinstance(former, np.ndarray) and isinstance(kept, np.ndarray):
            exchange(kept, former)
        other.release()
        return True

    def _array(self, layout: Layout, offset: int, writable: bool) -> NDArray[Any] | None:
        self._show()
        return super()._array(layout, offset, writable)

    def _operand_array(self, tensor: Operand) -> NDArray[Any]:
        view = super()._array(tensor.layout, tensor.offset, False)
        return self._gather_array(tensor) if view is None else view

    def _show(self) -> None:
        """From now on somebody may know the address, also when the array that gave it away is gone."""
        if not self._is_shown:
            with self._lock:
                self._is_shown = True

    def _is_viewed(self) -> bool:
        """Whether anybody may have an array on this memory besides this carrier, such as a computation under way.

        The slots are a view of the one array that owns the memory, and so is every array made of them.
        """
        if not isinstance(self._slots.base, np.ndarray):
            return True
        # One reference is held by the carrier, or by the slots, and one by the call.
        return sys.getrefcount(self._slots) > 2 or sys.getrefcount(self._slots.base) > 2

    def _discard(self, start: int, slots: int) -> None:
        self._require_live()
        if self._owns_memory:
            # Held to the end: what is advised must not be somebody else's by then.
            memory = self._live_slots()
            address, width = memory.ctypes.data, self._dtype.itemsize
            if not self._discarded_bytes and memory.nbytes >= HUGE_BYTES:
                # Else the kernel would, some day, fill up the huge page that the rest lies in.
                _advise_pages(address, memory.nbytes, "MADV_NOHUGEPAGE")
            self._discarded_bytes += _advise_pages(address + start * width, slots * width, "MADV_DONTNEED")


def _slots_at(pointer: int, size: int, dtype: DType) -> NDArray[Any]:
    """View ``size`` slots of memory at an address."""
    address = as_integer(pointer, "pointer")
    if address <= 0 or address % dtype.itemsize:
        raise ValueError(
            f"pointer must be the address of memory aligned to {dtype.itemsize} bytes for {dtype.name}, "
            f"found {address:#x}"
        )
    memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype.numpy) if size else np.empty(0, dtype.numpy)


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None  # only Linux drops the pages of MADV_DONTNEED at once
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_MADVISE = _find_madvise()  # unlike mmap.madvise, it lets go of the interpreter's lock


def _advise_pages(address: int, nbytes: int, advice: str) -> int:
    """Advise the system about the whole pages inside a range of private anonymous memory.

    ``MADV_DONTNEED`` gives them back: what is read there later is zero, and the range stays allocated.

    Returns:
        How many bytes the advice was taken for.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length <= 0 or _MADVISE is None:
        return 0
    return length if _MADVISE(first, length, getattr(mmap, advice)) == 0 else 0
