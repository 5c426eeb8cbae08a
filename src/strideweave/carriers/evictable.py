"""``Evictable``: one carrier whose values are, all together, in a fast tier or in a slow one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, final

from strideweave.carriers.base import CarrierStatistics, check_operation_name
from strideweave.carriers.block_device import BlockDeviceCarrier
from strideweave.carriers.cpu import CPU
from strideweave.carriers.dependent import DependentCarrier, check_distinct, check_free, free_storages
from strideweave.carriers.evictable_operations import EvictableOperation, on_primary
from strideweave.carriers.file_backed import FileBacked
from strideweave.carriers.file_parts import FileParts
from strideweave.carriers.generic import Generic
from strideweave.carriers.metal import Metal
from strideweave.carriers.move.operations import Transfer, run_transfers
from strideweave.carriers.move.registry import dispatch_move, register_move_operation
from strideweave.carriers.move.through import MoveThroughTiers
from strideweave.carriers.scattering import run_scatter
from strideweave.errors import EvictedError, ImmutableError, PendingWorkError, ReleasedError
from strideweave.runtime.await_result import AwaitResult

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from numpy.typing import NDArray

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.move.operations import MoveOperation
    from strideweave.dtype import DType
    from strideweave.layout import Layout
    from strideweave.operations.definition import Operation, OperationCapability
    from strideweave.operations.operand import Operand

__all__ = ["Evictable", "EvictableStatistics"]

_logger = logging.getLogger("strideweave")


@dataclass(frozen=True, slots=True)
class EvictableStatistics(CarrierStatistics):
    """What an Evictable is and has under way.

    Attributes:
        is_evicted: whether the values are in the secondary tier.
        evictions: completed evictions.
        promotions: completed promotions.
    """

    is_evicted: bool
    evictions: int
    promotions: int


@dataclass(frozen=True, slots=True, eq=False)
class _Transition:
    """One transition under way, told from others by its identity."""

    kind: str


@final
class Evictable(DependentCarrier):
    """Two tiers that hold one set of values: the primary computes, the secondary keeps what was evicted.

    Fresh hierarchies are promoted. While promoted, reads, writes, scatter and operations act through the
    primary tier; while evicted they raise ``EvictedError``. Neither transition changes values, version, size or
    dtype. Both tiers are owned: retained aliases may read them and nothing else.

    Spec: *Evictable construction validates a complete two-tier hierarchy* and the rest of
    ``carrier-composition``.

    Args:
        primary: a live, unowned carrier of at least one slot; its values are the hierarchy's, and whether it
            is publicly mutable decides whether the hierarchy is.
        secondary: another live, unowned, mutable carrier of the same dtype; it may be empty.

    Raises:
        TypeError: an argument is no Carrier, or the dtypes differ.
        ValueError: both are one object, or the primary is empty.
        RuntimeError: a tier is released, owned or, for the secondary, immutable.
        NotImplementedError: no move is registered between their classes in one of the directions.
    """

    _slots_do_io: ClassVar[bool] = True

    def __init__(self, primary: Carrier, secondary: Carrier) -> None:
        primary, secondary = check_distinct(primary, secondary)
        if primary.size() == 0 and not primary.is_released():
            raise ValueError(
                "the primary tier is empty; its values are the hierarchy's, so it needs at least one"
            )
        check_free(primary, secondary)
        self._compose(primary, secondary)

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Evictable is final; compose it instead of subclassing it")

    def _compose(
        self,
        primary: Carrier,
        secondary: Carrier,
        capabilities: tuple[OperationCapability, ...] | None = None,
    ) -> None:
        if not secondary.is_mutable():
            raise ImmutableError(
                "the secondary tier must be mutable, or it could not receive what is evicted"
            )
        if primary.dtype() is not secondary.dtype():
            raise TypeError(
                f"the primary tier holds {primary.dtype().name} and the secondary {secondary.dtype().name}; "
                "both tiers must have one dtype"
            )
        dispatch_move(type(primary), type(secondary))
        dispatch_move(type(secondary), type(primary))
        super().__init__(primary.size(), dtype=primary.dtype(), mutable=primary.is_mutable())
        self._primary, self._secondary = primary, secondary
        self._evicted = False
        self._transition: _Transition | None = None
        self._evictions = self._promotions = 0
        with self._owning(primary, secondary):
            self._capabilities = primary.operation_capabilities() if capabilities is None else capabilities

    def _around(self, primary: Carrier) -> Self:
        """A hierarchy of this kind around a fresh primary tier, which may be empty: an operation's result."""
        hierarchy = type(self).__new__(type(self))
        same = type(primary) is type(self._primary)
        secondary = self._secondary._empty_like(primary.dtype())
        hierarchy._compose(primary, secondary, self._capabilities if same else None)
        return hierarchy

    # Tiers and state

    @property
    def primary(self) -> Carrier:
        """The current primary tier; while evicted it is released, and a promotion replaces it."""
        return self._primary

    @property
    def secondary(self) -> Carrier:
        """The current secondary tier; a promotion releases it, and the next eviction replaces it."""
        return self._secondary

    def is_evicted(self) -> bool:
        """Whether the values are in the secondary tier."""
        return self._evicted

    def statistics(self) -> EvictableStatistics:
        """A frozen record of size, version, ownership, residency and unfinished requests."""
        return EvictableStatistics(
            **self._statistics_fields(),
            is_evicted=self._evicted,
            evictions=self._evictions,
            promotions=self._promotions,
        )

    # Transitions

    def evict_async(self) -> AwaitResult[None]:
        """Start moving all values to the secondary tier.

        A live secondary tier of at least the hierarchy's size receives them; otherwise a fresh one of its
        class does and replaces it. The primary tier is released. After a failure everything is as it was, and
        the call may be repeated.

        Spec: *Eviction moves complete storage into the secondary tier*; *Residency transitions are
        failure-atomic*.

        Returns:
            A handle; done at once when the values are there already.

        Raises:
            ReleasedError: the hierarchy was released.
            OwnershipError: a composite or an unfinished request owns the hierarchy.
            PendingWorkError: another transition, or a write, is unfinished.
            NotImplementedError: no move is registered any more.
        """
        return self._start("evict", evicted=True)

    def promote_async(self) -> AwaitResult[None]:
        """Start moving all values to fresh primary storage.

        The secondary tier is released. After a failure everything is as it was, and the call may be repeated.

        Spec: *Promotion restores fresh primary-class storage*; *Residency transitions are failure-atomic*.

        Returns:
            A handle; done at once when the values are there already.

        Raises:
            ReleasedError: the hierarchy was released.
            OwnershipError: a composite or an unfinished request owns the hierarchy.
            PendingWorkError: another transition is unfinished.
            NotImplementedError: no move is registered any more.
        """
        return self._start("promote", evicted=False)

    def evict(self) -> None:
        """``evict_async().wait()``: blocks the calling thread."""
        self.evict_async().wait()

    def promote(self) -> None:
        """``promote_async().wait()``: blocks the calling thread."""
        self.promote_async().wait()

    def _start(self, kind: str, *, evicted: bool) -> AwaitResult[None]:
        transition = _Transition(kind)

        def check() -> None:
            self._require_live()
            self._require_unowned()
            self._require_no_transition()
            if self._evicted is not evicted:
                self._require_no_writes()
                self._find_move()

        def enter() -> None:
            check()
            self._transition = transition

        def end() -> None:
            if self._transition is transition:
                self._transition = None

        with self._lock:
            check()
            if self._evicted is evicted:
                return AwaitResult[None].completed(None)
        handle: AwaitResult[None] = AwaitResult()
        return self._scope.start(handle, self._move, evicted, enter=enter, cleanup=end)

    def _find_move(self) -> tuple[Carrier, Carrier, type[MoveOperation]]:
        """The tier that holds the values, the other one, and how values get there."""
        tiers = (self._secondary, self._primary) if self._evicted else (self._primary, self._secondary)
        return *tiers, dispatch_move(*map(type, tiers))

    async def _move(self, evicted: bool) -> None:
        """Fill the other tier, or fresh storage of its class, and commit, or leave all as it was."""
        if self._evicted is evicted:  # by a transition of another thread that was a moment quicker
            return
        source, other, operation = self._find_move()
        usable = not other.is_released() and other.size() >= self._size
        destination = other if usable else other.allocate_like(self._size, mutable=True, empty=True)
        committed = False
        try:
            if destination is not other:
                self._own(destination)
            try:
                await run_transfers(operation, [Transfer(source, 0, destination, 0, self._size)])
            finally:  # a failure may have changed values too, and a graph of a retained alias must notice
                destination._advance_version(self._token)
            ended = self._commit(source, other, destination)
            committed = True
        finally:
            if not committed and destination is not other:
                free_storages(self._retire(destination))
        try:
            free_storages(ended)
        except Exception:  # any: the transition is over, whatever became of the old storage
            _logger.exception("the storage that an Evictable left could not be freed")

    def _commit(self, source: Carrier, other: Carrier, destination: Carrier) -> list[Carrier]:
        """Change the state and end the carriers that are left behind, or raise and change nothing."""
        with self._lock:
            ended = self._retire(source, *([other] if destination is not other else []))
            self._evicted = not self._evicted
            if self._evicted:
                self._secondary = destination
                self._evictions += 1
            else:
                self._primary = destination
                self._promotions += 1
        return ended

    # The common surface, through the primary tier

    def new_like(self, values: Iterable[Any], *, mutable: bool = True, dtype: DType | None = None) -> Self:
        """Make a fresh promoted hierarchy of the same tier kinds that holds ``values``.

        Its secondary tier is empty until the first eviction.

        Spec: *Evictable factories preserve the hierarchy pattern*.

        Raises:
            TypeError: a tier does not store the dtype, or a value does not fit.
            ValueError: there are no values.
        """
        self._check_dtype(dtype)
        primary = self._primary.new_like(values, mutable=mutable, dtype=dtype)
        return type(self)(primary, self._secondary._empty_like(primary.dtype()))

    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> Self:
        """Make a fresh promoted hierarchy of the same tier kinds with ``size`` slots, at least one.

        Spec: *Evictable factories preserve the hierarchy pattern*.

        Raises:
            TypeError: ``size`` is not an integer, or a tier does not store the dtype.
            ValueError: ``size`` is below one.
        """
        self._check_dtype(dtype)
        primary = self._primary.allocate_like(size, mutable=mutable, dtype=dtype, empty=empty)
        return type(self)(primary, self._secondary._empty_like(primary.dtype()))

    def supports_storage_dtype(self, dtype: DType) -> bool:
        """Whether both tiers can hold ``dtype``."""
        return self._primary.supports_storage_dtype(dtype) and self._secondary.supports_storage_dtype(dtype)

    def dispatch_op(self, name: str) -> Operation:
        """Give the operation of the primary tier's class, for tensors over hierarchies of this kind.

        Spec: *Promoted state is required for public data access and execution*; *Evictable results retain
        composition ownership*.

        Raises:
            ReleasedError: the hierarchy was released.
            EvictedError: it is evicted.
            NotImplementedError: the primary tier's class does not run that operation.
        """
        self._require_promoted()
        return EvictableOperation(self._primary.dispatch_op(name), type(self))

    def operation_capabilities(self, name: str | None = None) -> tuple[OperationCapability, ...]:
        """List what the primary tier ran when the hierarchy was made; answers while evicted and after release.

        Raises:
            TypeError: ``name`` is neither a string nor None.
        """
        if name is not None:
            check_operation_name(name)
        return tuple(entry for entry in self._capabilities if name in (None, entry.operation))

    def scatter(
        self, to_scatter: Operand, scatter_onto: Operand, mapping: Layout, mapping_offset: int = 0
    ) -> None:
        """Write a tensor's values to the slots that a Layout names, through the primary tier, as one write.

        Both tensors lie on Evictables; see ``CPU.scatter`` for where the values land.

        Spec: *Promoted state is required for public data access and execution*; *Transitions preserve logical
        version identity*.

        Raises:
            ReleasedError, OwnershipError, ImmutableError, TypeError, ValueError: as for ``CPU.scatter``.
            EvictedError: this hierarchy or the source's is evicted.
            PendingWorkError: a transition is unfinished.
            NotImplementedError: the primary tier's class does not scatter.
        """
        run_scatter(self, to_scatter, scatter_onto, mapping, mapping_offset, store=self._store_layout)

    def __dlpack__(self, **_: object) -> NoReturn:
        """Refuse: a consumer would hold on to memory that an eviction takes away.

        Raises:
            BufferError: always.
        """
        raise BufferError("an Evictable exposes no DLPack buffer; move its tensor to a CPU carrier first")

    def __dlpack_device__(self) -> NoReturn:
        """Refuse, as ``__dlpack__`` does.

        Raises:
            BufferError: always.
        """
        self.__dlpack__()

    # Internal

    def _bearer(self) -> Carrier:
        return self._promoted_primary()._bearer()

    def _promoted_primary(self) -> Carrier:
        """The primary tier, which holds the values; EvictedError while it does not."""
        self._require_promoted()
        return self._primary

    def _wrap(self, primary: Carrier) -> Self:
        """A hierarchy of this kind that owns a fresh result; the very same one where the result is a view."""
        if primary is self._primary:
            return self
        return self._around(primary)

    def _adopt_like(self, values: NDArray[Any], dtype: DType) -> Self:
        return self._around(self._primary._adopt_like(values, dtype))

    def _allocate_result(self, size: int) -> Self:
        return self._around(self._primary._allocate_result(size))

    def _empty_like(self, dtype: DType) -> Self:
        return self._around(self._primary._empty_like(dtype))

    def _check_dtype(self, dtype: DType | None) -> None:
        if dtype is not None and not self.supports_storage_dtype(dtype):
            raise TypeError(
                f"{dtype.name} is not stored by both {type(self._primary).__name__} and "
                f"{type(self._secondary).__name__}"
            )

    def _require_promoted(self) -> None:
        self._require_live()
        if self._evicted:
            raise EvictedError("the values of this Evictable are evicted; call promote() first")

    def _require_mutable(self) -> None:
        super()._require_mutable()
        self._require_promoted()
        self._require_no_transition()

    def _require_no_transition(self) -> None:
        if self._transition is not None:
            raise PendingWorkError(
                f"this Evictable has an unfinished {self._transition.kind}; wait for its handle", pending=1
            )

    def _require_no_writes(self) -> None:
        # Whoever claims or releases must not meet a transition either.
        super()._require_no_writes()
        self._require_no_transition()

    def _load_slot(self, i: int) -> bool | int | float:
        while True:
            primary = self._promoted_primary()
            try:
                return primary.get_value(i)
            except ReleasedError:
                if primary is self._primary and not self._evicted:
                    raise  # else another thread evicted meanwhile: look where the values are now

    def _store_slot(self, i: int, value: NDArray[Any]) -> None:
        self._promoted_primary()._set_as(self._token, i, value[()])

    def _store_layout(self, source: Operand, layout: Layout, first: int) -> None:
        primary, inner = self._promoted_primary(), on_primary(source)
        if type(inner.carrier) is not type(primary):
            raise TypeError(
                f"scatter onto an Evictable over {type(primary).__name__} takes a tensor over the same, found one "
                f"over {type(inner.carrier).__name__}"
            )
        primary._scatter_as(self._token, inner, layout, first)

    def _scatter_as(self, owner: object, source: Operand, layout: Layout, first: int) -> None:
        with self._writing(partial(self._require_live_and_owner, owner)):
            self._store_layout(source, layout, first)

    def _advance_version(self, owner: object) -> None:
        super()._advance_version(owner)
        if (
            not self._evicted
        ):  # the primary tier was written to, which a graph of a retained alias must notice
            self._primary._advance_version(self._token)

    def _bytes(self) -> NDArray[Any]:
        return self._promoted_primary()._bytes()

    def _array(self, layout: Layout, offset: int, writable: bool) -> NDArray[Any] | None:
        primary = self._promoted_primary()
        # What is written through a view after an eviction would be lost.
        return None if writable else primary._array(layout, offset, writable)

    def _read_slots(self, start: int, slots: int) -> NDArray[Any]:
        return self._promoted_primary()._read_slots(start, slots)

    def _gather_array(self, tensor: Operand) -> NDArray[Any]:
        return self._promoted_primary()._gather_array(tensor)


for _plain in (Generic, CPU, Metal, FileBacked, FileParts, BlockDeviceCarrier):
    register_move_operation(Evictable, _plain, MoveThroughTiers)
    register_move_operation(_plain, Evictable, MoveThroughTiers)
register_move_operation(Evictable, Evictable, MoveThroughTiers)
