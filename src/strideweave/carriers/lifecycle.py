"""The life of a carrier: mutability, version, owner, release. Nothing here knows what a slot holds.

A carrier is in one of three conditions: live and unowned (anyone may write if it is mutable), live and owned
(a composite or an unfinished request has it; others may only read), or released.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strideweave.dtype import DType, check_dtype
from strideweave.errors import ImmutableError, OwnershipError, PendingWorkError, ReleasedError
from strideweave.flags import as_flag
from strideweave.layout.int_tuple import as_integer
from strideweave.operations.operand import Storage
from strideweave.runtime.locks import short_lock
from strideweave.runtime.task_scope import TaskScope

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

__all__ = ["CarrierLifecycle", "CarrierStatistics", "check_slot_count", "end_block"]


@dataclass(frozen=True, slots=True)
class CarrierStatistics:
    """What a carrier is and has under way.

    Attributes:
        slots: number of slots; 0 after release.
        nbytes: bytes that the slots stand for.
        version: how often the values changed, see ``Carrier.version``.
        is_owned: whether a composite or a request owns the carrier.
        is_released: whether the storage is gone.
        pending: unfinished requests in the carrier's task scope.
    """

    slots: int
    nbytes: int
    version: int
    is_owned: bool
    is_released: bool
    pending: int


class CarrierLifecycle(Storage):
    """The part of ``Carrier`` that says who may change it, and ends it.

    Spec: *Child ownership makes retained aliases externally read-only*; *Release ends the whole hierarchy
    lifecycle*.
    """

    #: True on every exact class that was observed; ``strideweave.carriers.extension`` says what that means.
    _sealed: ClassVar[bool]

    # What every carrier begins with: a result that is made in a microsecond sets nothing that it need not.
    _mutable: bool = True
    _version: int = 0
    _owner: object | None = None
    _released: bool = False
    _writes: set[object] | None = None  # begun and not ended, in the process below
    _writing_process: int = 0
    _task_scope: TaskScope | None = None
    # The runtime's one short lock: a request's cleanup relinquishes carriers, in a forked child too.
    _lock = short_lock

    def __init__(self, size: int, *, dtype: DType = DType.Float32, mutable: bool = True) -> None:
        self._dtype = check_dtype(dtype)
        self._size = check_slot_count(size)
        self._mutable = as_flag(mutable, "mutable")
        self._seal()

    @classmethod
    def _seal(cls) -> None:
        """From now on this exact class has the definition that it has, or none."""
        if "_sealed" not in cls.__dict__:
            with short_lock:  # who registers a definition looks and installs in one step
                cls._sealed = True

    @classmethod
    def _is_sealed(cls) -> bool:
        return "_sealed" in cls.__dict__

    def size(self) -> int:
        """Number of slots; 0 after release."""
        return self._size

    def dtype(self) -> DType:
        """Type of every slot. Answers after release too."""
        return self._dtype

    @property
    def version(self) -> int:
        """A count that every successful public write advances by one.

        What changes slots otherwise advances it too: a move to this carrier, one that failed included, and the
        composite that owns it. Where the version is what it was, the values are.
        """
        return self._version

    def is_mutable(self) -> bool:
        """Whether a public write would be allowed now: made mutable, live and unowned."""
        return self._mutable and self._owner is None and not self._released

    def is_owned(self) -> bool:
        """Whether a composite or an unfinished request owns this carrier."""
        return self._owner is not None

    def is_released(self) -> bool:
        """Whether ``release()`` ended this carrier."""
        return self._released

    def increment_version(self) -> None:
        """Advance the version by one, as a caller does who wrote through ``Tensor.numpy(writable=True)``.

        Raises:
            ReleasedError: the carrier was released.
            OwnershipError: a composite or an unfinished request owns the carrier.
            ImmutableError: the carrier is not publicly mutable.
        """
        with self._lock:
            self._require_mutable()
            self._version += 1

    def release(self) -> None:
        """Give the storage back. A second call does nothing.

        Afterwards ``size()`` is 0 and every access raises; ``dtype()``, ``supports_storage_dtype`` and the
        factories keep working.

        Raises:
            OwnershipError: a composite or an unfinished request owns the carrier.
            PendingWorkError: requests of this carrier are unfinished; nothing was released.
        """
        self._end(None)

    def __enter__(self) -> Self:
        """Begin a ``with`` block, whose end releases the carrier; what it gives is the carrier itself.

        Raises:
            ReleasedError: the carrier was released.
        """
        self._require_live()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """``release()``, which raises what it raises unless the block has raised: that error stays."""
        end_block(self.release, error)

    def statistics(self) -> CarrierStatistics:
        """A frozen record of size, version, ownership and unfinished requests."""
        return CarrierStatistics(**self._statistics_fields())

    # Ownership (internal). The owner is an identity token, nothing thread-local. It must not be the
    # composite itself where that has a finalizer: a retained alias of the carrier would keep it alive.

    def _claim(self, owner: object) -> None:
        """Take exclusive ownership.

        ReleasedError, OwnershipError or PendingWorkError leave everything as it was.
        """
        with self._lock:
            self._require_live()
            self._require_unowned()
            self._require_no_writes()
            self._owner = owner

    def _relinquish(self, owner: object) -> None:
        """Give ownership back, or do nothing on a released carrier; OwnershipError when another has it."""
        with self._lock:
            if self._released:
                return
            self._require_owner(owner)
            self._owner = None

    def _abandon(self, owner: object) -> None:
        """As ``_relinquish``, but takes no lock, and does nothing where another is the owner, or nobody.

        For finalizers, which run in any thread at any statement, also in a thread that somebody waits for who holds
        the lock, and for requests, which may have been interrupted before they claimed. Nobody but the owner that
        ends could change the owner meanwhile.
        """
        if self._owner is owner:
            self._owner = None

    def _release_as(self, owner: object) -> None:
        """Release as the owner and end the ownership; a released carrier is left as it is."""
        self._end(owner)

    def _advance_version(self, owner: object) -> None:
        """Advance the version as the owner (None: of an unowned carrier), mutable or not."""
        with self._lock:
            self._require_live()
            self._require_owner(owner)
            self._version += 1

    @abstractmethod
    def _free_storage(self) -> None:
        """Give the storage back; called when the carrier counts as released already.

        Once, and once more where that was interrupted.
        """

    @property
    def _scope(self) -> TaskScope:
        """The task group of this carrier in the runtime's loop, made on first use."""
        if self._task_scope is not None:  # it stays the same one for good
            return self._task_scope
        with self._lock:
            if self._task_scope is None:
                self._require_live()
                self._task_scope = TaskScope(type(self).__name__)
            return self._task_scope

    def _statistics_fields(self) -> dict[str, Any]:
        """The fields of ``CarrierStatistics``, for subclasses whose record has more."""
        with self._lock:
            return {
                "slots": self._size,
                "nbytes": self._size * self._dtype.itemsize,
                "version": self._version,
                "is_owned": self._owner is not None,
                "is_released": self._released,
                "pending": (self._task_scope.pending if self._task_scope else 0) + self._writes_in_flight(),
            }

    def _end(self, owner: object) -> None:
        ends = False
        try:
            with self._lock:
                if self._released:
                    return
                self._require_owner(owner)
                self._require_idle()
                ends = True
                self._mark_released()
            self._free_storage()
        except BaseException:  # such as Ctrl-C: there will be no second chance, so this is done to its end
            if ends:
                with self._lock:
                    self._mark_released()
                self._free_storage()
            raise

    def _require_idle(self) -> None:
        """Refuse with PendingWorkError while something uses the storage; called under the lock."""
        self._require_no_writes()
        pending = self._task_scope.pending if self._task_scope is not None else 0
        if pending:
            raise PendingWorkError(
                f"this {type(self).__name__} has unfinished requests: {pending}; wait for their "
                "handles first",
                pending=pending,
            )

    def _mark_released(self) -> None:
        """End an idle carrier; called under the lock that ``_require_idle`` was called under.

        Whoever calls it calls ``_free_storage`` after the lock.
        """
        if self._task_scope is not None:
            self._task_scope.close()
        self._released, self._owner, self._size = True, None, 0

    def _require_live(self) -> None:
        if self._released:
            raise ReleasedError(f"this {type(self).__name__} was released; its values are gone")

    def _require_unowned(self) -> None:
        self._require_owner(None)

    def _require_owner(self, owner: object) -> None:
        if self._owner is owner:
            return
        name = type(self).__name__
        if self._owner is None:
            raise OwnershipError(f"this {name} is not owned, so nobody may act as its owner")
        raise OwnershipError(
            f"this {name} is owned by a composite or an unfinished request; only its owner may change it"
        )

    def _require_mutable(self) -> None:
        self._require_live()
        self._require_unowned()
        if not self._mutable:
            raise ImmutableError(f"this {type(self).__name__} was made with mutable=False")

    def _require_no_writes(self) -> None:
        count = self._writes_in_flight()
        if count:
            raise PendingWorkError(f"{count} writes of slots are unfinished; wait for them", pending=count)

    def _writes_in_flight(self) -> int:
        """How many writes threads of this process are at; a forked child has none of its parent's threads."""
        return len(self._writes) if self._writes and self._writing_process == os.getpid() else 0

    def _begin_write(self, write: object) -> None:
        """Note a write that holds no lock; called under the lock."""
        process = os.getpid()
        if self._writes is None or self._writing_process != process:
            self._writes, self._writing_process = set(), process
        self._writes.add(write)

    def _end_write(self, write: object) -> None:
        """Forget a write, whether or not it was noted; takes no lock."""
        if self._writes is not None:
            self._writes.discard(write)

    def __del__(self) -> None:
        # A carrier whose constructor raised has no attributes.
        scope = self.__dict__.get("_task_scope")
        if scope is not None:
            scope.abandon()


def end_block(end: Callable[[], None], error: BaseException | None) -> None:
    """End what a ``with`` block was about; an error of the block is not replaced, and gets a note instead.

    Args:
        end: ends it, or raises.
        error: what the block raised; None if nothing.
    """
    if error is None:
        end()
        return
    try:
        end()
    except Exception as refusal:  # whatever it is, the block's error came first
        error.add_note(f"at the end of its with block: {refusal}")


def check_slot_count(size: object) -> int:
    """Check a number of slots: an integer, not a bool, not negative."""
    count = as_integer(size, "size")
    if count < 0:
        raise ValueError(f"size must not be negative, found {count}")
    return count
