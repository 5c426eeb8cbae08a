"""The slots of a carrier, read and written one at a time, and how a class of carriers keeps them."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strideweave.carriers.array_views import gathered
from strideweave.carriers.lifecycle import CarrierLifecycle
from strideweave.layout.int_tuple import as_integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from strideweave.carriers.part_cover import StagingArea
    from strideweave.io.files import OpenFile
    from strideweave.layout import Layout
    from strideweave.operations.operand import Operand

__all__ = ["CarrierSlots"]


class CarrierSlots(CarrierLifecycle):
    """The part of ``Carrier`` that reads and writes slots.

    A class gives ``_load_slot`` and ``_store_slot``; the defaults of the rest fit storage that is not memory.
    """

    #: False promises that ``_store_slot`` is a few plain statements, so that it may run under the runtime's
    #: short lock. True lets it take its time and wait for I/O: meanwhile no lock is held, and ``release()``
    #: and a claim are refused with PendingWorkError.
    _slots_do_io: ClassVar[bool] = True

    #: Bounded memory that reading its slots takes besides that which they go to, where it takes any.
    _beside: StagingArea | None = None

    def get_value(self, i: int) -> bool | int | float:
        """Read slot ``i`` as a Python bool, int or float.

        Raises:
            ReleasedError: the carrier was released.
            TypeError: ``i`` is not an integer.
            IndexError: ``i`` is outside ``[0, size())``.
        """
        self._require_live()
        try:
            return self._load_slot(self._check_index(i))
        except Exception:  # any: if another thread released the carrier meanwhile, it comes of that
            self._require_live()
            raise

    def set_value(self, i: int, value: object) -> None:
        """Write slot ``i`` and advance the version by one; after an error nothing has changed.

        Raises:
            ReleasedError: the carrier was released.
            OwnershipError: a composite or an unfinished request owns the carrier.
            ImmutableError: the carrier is not publicly mutable.
            TypeError: ``i`` is not an integer or ``value`` not a real number.
            IndexError: ``i`` is outside ``[0, size())``.
            OverflowError: ``value`` does not fit the dtype.
            ValueError: ``value`` is NaN and the dtype an integer type.
        """
        if self._slots_do_io:
            self._set_through_io(i, value, self._require_mutable)
        else:
            self._set_at_once(i, value, self._require_mutable)

    def __getitem__(self, i: int) -> bool | int | float:
        """Read a slot: ``carrier[i]`` is ``carrier.get_value(i)``."""
        return self.get_value(i)

    def __setitem__(self, i: int, value: object) -> None:
        """Write a slot: ``carrier[i] = v`` is ``carrier.set_value(i, v)``."""
        self.set_value(i, value)

    def _set_as(self, owner: object, i: int, value: object) -> None:
        """Write a slot and advance the version as the owner (None: of an unowned carrier), mutable or not."""
        check = partial(self._require_live_and_owner, owner)
        (self._set_through_io if self._slots_do_io else self._set_at_once)(i, value, check)

    # How a class keeps its slots (internal)

    @abstractmethod
    def _load_slot(self, i: int) -> bool | int | float:
        """Read a slot whose index was checked."""

    @abstractmethod
    def _store_slot(self, i: int, value: NDArray[Any]) -> None:
        """Write a slot whose index was checked; ``value`` comes from ``_convert``."""

    def _convert(self, value: object) -> NDArray[Any]:
        """Convert a number to an array of shape ``()`` and exactly this dtype, checked as NumPy checks."""
        return self._dtype.convert(value)

    def _discard(self, start: int, slots: int) -> None:
        """Give back the storage of these slots where this carrier allocated it; undefined values follow."""

    def _bytes(self) -> NDArray[np.uint8]:
        """All slots as writable bytes, for carriers in memory; raises ReleasedError after release."""
        raise NotImplementedError(f"{type(self).__name__} does not live in memory")

    def _units(self, unit: np.dtype[np.unsignedinteger[Any]]) -> NDArray[np.unsignedinteger[Any]]:
        """All slots as writable unsigned integers of their size, for carriers in memory, as ``_bytes``."""
        return self._bytes().view(unit)

    def _file(self) -> tuple[OpenFile, int]:
        """The open file and the byte offset of slot 0, for carriers in a file."""
        raise NotImplementedError(f"{type(self).__name__} does not live in a file")

    def _array(self, layout: Layout, offset: int, writable: bool) -> NDArray[Any] | None:
        """View the slots of a layout, shaped ``layout.extents``; None where no view without a copy exists."""
        self._require_live()
        return None

    def _operand_array(self, tensor: Operand) -> NDArray[Any]:
        """The values of a tensor for a computation, which lets go of them when it ends: a view, or else a copy."""
        return tensor.numpy()

    def _exported(self, layout: Layout, offset: int, writable: bool) -> NDArray[Any] | None:
        """View the slots of a layout for a consumer that keeps them; None where no such view exists.

        BufferError for a carrier whose values may go elsewhere while the consumer holds on to the memory.
        """
        self._require_live()
        raise BufferError(
            f"a {type(self).__name__} exposes no DLPack buffer; move its tensor to a CPU carrier first"
        )

    def _read_slots(self, start: int, slots: int) -> NDArray[Any]:
        """Copy a run of slots to a fresh 1-D array of the dtype.

        May wait for I/O; not for the runtime's thread.
        """
        self._require_live()
        values = np.empty(slots, self._dtype.numpy)
        for position in range(slots):
            values[position] = self._load_slot(start + position)
        return values

    def _gather_array(self, tensor: Operand) -> NDArray[Any]:
        """Copy a tensor's values to a fresh array of its shape; by default one read of the slots it spans."""
        self._require_live()
        layout = tensor.layout
        if layout.size == 0:
            return np.empty(tensor.shape, self._dtype.numpy)
        low = tensor.offset + layout.min_index
        slots = self._read_slots(low, layout.max_index - layout.min_index + 1)
        return gathered(slots, layout, tensor.offset - low)

    # Writes (internal)

    def _require_live_and_owner(self, owner: object) -> None:
        self._require_live()
        self._require_owner(owner)

    def _set_at_once(self, i: int, value: object, check: Callable[[], None]) -> None:
        check()
        # Foreign code, such as a number's __float__, runs before the lock is taken.
        index, converted = self._check_index(i), self._convert(value)
        with self._lock:
            check()
            try:
                self._store_slot(index, converted)
            finally:  # which only an interruption ends early, and then the value may have changed
                self._version += 1

    def _set_through_io(self, i: int, value: object, check: Callable[[], None]) -> None:
        check()
        index, converted = self._check_index(i), self._convert(value)
        with self._writing(check):
            self._store_slot(index, converted)

    @contextmanager
    def _writing(self, check: Callable[[], None]) -> Iterator[None]:
        """Guard one write that holds no lock: it is in flight, and advances the version unless it fails.

        One that is interrupted, by Ctrl-C, may have changed values already, and advances it too.
        """
        write, failed = object(), False
        try:
            with self._lock:
                check()
                self._begin_write(write)
            try:
                yield
            except Exception:
                failed = True
                raise
            finally:
                if not failed:
                    with self._lock:
                        self._version += 1
        finally:
            if self._writes is not None:
                self._writes.discard(write)  # here: in a method Ctrl-C could come before its first statement

    def _check_index(self, i: int) -> int:
        index = as_integer(i, "a slot index")
        if not 0 <= index < self._size:
            raise IndexError(f"slot {index} is outside [0, {self._size})")
        return index
