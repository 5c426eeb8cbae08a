"""``DefinedCarrier``: a carrier class whose storage its definition provides."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strideweave.carriers.base import Carrier, CarrierStatistics
from strideweave.carriers.extension.storage import ProvidedStorage, StorageProvider
from strideweave.carriers.lifecycle import check_slot_count
from strideweave.carriers.memory import slots_from
from strideweave.dtype import DType, check_dtype
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.event_loop import current_runtime
from strideweave.runtime.thread_role import waiting_is_forbidden
from strideweave.runtime.workers import WorkerPool, run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

    from numpy.typing import NDArray

__all__ = ["DefinedCarrier", "DefinedStatistics"]


@dataclass(frozen=True, slots=True)
class DefinedStatistics(CarrierStatistics):
    """What a carrier with a provider is and has under way.

    Attributes:
        is_allocated: whether the provider has been asked for storage.
        reads: completed calls of the provider's ``read``.
        writes: completed calls of its ``write``.
        bytes_read: what the former gave.
        bytes_written: what the latter took.
    """

    is_allocated: bool
    reads: int
    writes: int
    bytes_read: int
    bytes_written: int


class DefinedCarrier(Carrier):
    """Base of carrier classes that consist of a ``StorageProvider``: subclass it, and register a definition.

    The subclass needs no method. It has slots, factories, a lifecycle and a version as every carrier, runs the
    layout-only operations and those that its definition installs, and moves to and from carriers in memory and in
    files, so that it can be a tier of ``Evictable`` and ``TiledEvictable``. Empty ones take storage later, once.

    A subclass that has a constructor of its own keeps these parameters: the factories call it.

    Args:
        size: number of slots, which read zero at first.
        mutable: whether public writes are allowed.
        dtype: type of every slot.

    Raises:
        RuntimeError: the exact class has no definition with a StorageProvider.
        TypeError: ``size`` is not an integer, or ``dtype`` no DType that the provider supports.
        ValueError: ``size`` is negative.
    """

    _slots_do_io: ClassVar[bool] = True

    def __init__(self, size: int = 0, *, mutable: bool = True, dtype: DType = DType.Float32) -> None:
        self._check_provided(dtype)
        super().__init__(0, dtype=dtype, mutable=mutable)
        self._provided: ProvidedStorage | None = None
        self._finalizer: weakref.finalize[[], DefinedCarrier] | None = None
        count = check_slot_count(size)
        if count:
            self._allocate_in_place(count)

    def new_like(self, values: Iterable[Any], *, mutable: bool = True, dtype: DType | None = None) -> Self:
        """Write ``values`` to a fresh carrier of this class. Works after release too; not for the runtime's thread.

        Raises:
            TypeError: ``values`` is not an iterable of real numbers, or ``dtype`` no DType of this class.
            OverflowError: an integer does not fit the dtype.
            ValueError: NaN was to become an integer.
            Exception: the provider's own; nothing is left then.
        """
        return super().new_like(values, mutable=mutable, dtype=dtype)

    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> Self:
        """Make a fresh carrier of this class, zero whether ``empty`` or not. Works after release too.

        The provider is asked for the storage when it is first used.

        Raises:
            TypeError: ``size`` is not an integer, or ``dtype`` no DType of this class.
            ValueError: ``size`` is negative.
        """
        return super().allocate_like(size, mutable=mutable, dtype=dtype, empty=empty)

    def statistics(self) -> DefinedStatistics:
        """A frozen record of size, version, ownership and what the provider has done for this carrier."""
        provided = self._provided
        return DefinedStatistics(
            **self._statistics_fields(),
            is_allocated=provided is not None and provided.is_allocated,
            reads=0 if provided is None else provided.reads,
            writes=0 if provided is None else provided.writes,
            bytes_read=0 if provided is None else provided.bytes_read,
            bytes_written=0 if provided is None else provided.bytes_written,
        )

    @classmethod
    def _provider(cls) -> StorageProvider:
        definition = cls._installed()
        if definition is None or not isinstance(definition.storage, StorageProvider):
            raise RuntimeError(
                f"{cls.__name__} has no storage yet; register_carrier(CarrierDefinition({cls.__name__}, "
                "storage=...)) gives it a StorageProvider, before the first one is made"
            )
        return definition.storage

    @classmethod
    def _check_provided(cls, dtype: DType) -> None:
        """Refuse a dtype that the provider does not store."""
        provider = cls._provider()
        check_dtype(dtype)
        if not provider.supports_dtype(dtype):
            raise TypeError(f"{type(provider).__name__} does not store {dtype.name}")

    def _storage(self) -> ProvidedStorage:
        """The storage of the slots; ReleasedError once it is gone."""
        provided = self._provided  # first: release marks the carrier before it lets go of it
        self._require_live()
        if provided is None:
            raise ValueError(f"this {type(self).__name__} has no slots")
        return provided

    def _load_slot(self, i: int) -> bool | int | float:
        slot = np.empty(1, self._dtype.numpy)
        self._storage().read(i, slot)
        return self._dtype.to_python(slot[0])

    def _store_slot(self, i: int, value: NDArray[Any]) -> None:
        self._storage().write(i, value.reshape(1))

    def _read_slots(self, start: int, slots: int) -> NDArray[Any]:
        self._require_live()
        values = np.empty(slots, self._dtype.numpy)
        if slots:
            job = partial(self._storage().read, start, values)
            self._scope.start(AwaitResult[None](), self._in_worker, job).wait()
        return values

    def _write_slots(self, values: NDArray[Any]) -> None:
        """Write values of the dtype from slot 0 on; waits for the provider."""
        if len(values):
            job = partial(self._storage().write, 0, values)
            self._scope.start(AwaitResult[None](), self._in_worker, job).wait()

    async def _in_worker(self, job: Callable[[], None]) -> None:
        """Have a worker do a job of the provider.

        A method, because the request then keeps the carrier: whoever waits may be interrupted and let go of it, and
        the provider is to free nothing that it is reading or writing.
        """
        await run_jobs([job])

    def _filled_like(self, values: Iterable[Any], mutable: bool, dtype: DType) -> Self:
        """What ``new_like`` is to give, with everything about ``dtype`` decided."""
        slots = slots_from(values, dtype)
        carrier = type(self)(len(slots), mutable=mutable, dtype=dtype)
        try:
            carrier._write_slots(slots)
        except BaseException:  # whatever ended the write, nobody has the carrier that owns this storage
            with suppress(Exception):
                carrier.release()
            raise
        return carrier

    def _can_allocate(self) -> bool:
        return self._size == 0 and not self._released

    def _allocate_in_place(self, size: int) -> None:
        count = check_slot_count(size)
        provided = ProvidedStorage(self._provider(), self._dtype, count, type(self).__name__)
        with self._lock:
            self._require_live()
            if self._size:
                super()._allocate_in_place(size)
            self._provided, self._size = provided, count
            self._finalizer = weakref.finalize(self, provided.free_or_log)

    def _free_storage(self) -> None:
        provided = self._provided
        if provided is None or self._finalizer is None:
            return
        if waiting_is_forbidden():  # the runtime's own thread, maybe, which must not block
            current_runtime().service(WorkerPool).post(provided.free_or_log)
        else:
            provided.free()
        self._finalizer.detach()
        self._provided = None
