"""The carrier: one-dimensional storage with a lifecycle, a version, an owner and operations.

Writing a carrier of your own: subclass ``Carrier`` and give ``_load_slot``, ``_store_slot``,
``_free_storage``, ``new_like`` and ``allocate_like``. The other hooks have defaults that fit storage which is
not memory and does not compute. Where a few blocking functions are all there is to it, ``DefinedCarrier`` in
``strideweave.carriers.extension`` has the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np

from strideweave.carriers.lifecycle import CarrierStatistics
from strideweave.carriers.slots import CarrierSlots
from strideweave.carriers.view_operations import ViewOperation
from strideweave.dtype import DType, check_dtype
from strideweave.layout import row_major
from strideweave.operations.definition import apply
from strideweave.operations.table import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager
    from typing import Self

    from numpy.typing import NDArray

    from strideweave.carriers.extension.definition import CarrierDefinition
    from strideweave.layout import Layout
    from strideweave.operations.definition import Operation, OperationCapability
    from strideweave.operations.operand import Operand
    from strideweave.tensor import Tensor

__all__ = ["Carrier", "CarrierStatistics"]

F = TypeVar("F")


class Carrier(CarrierSlots):
    """Base of all carriers: a one-dimensional homogeneous sequence of slots of one dtype.

    Slot indices are integers in ``[0, size())``: anything but an integer (``bool`` included) is a
    ``TypeError``, any other integer, negative ones too, an ``IndexError``. Public writes are safe from
    several threads at once.

    Spec: *Child ownership makes retained aliases externally read-only*; *Release ends the whole hierarchy
        lifecycle*.

    Args:
        size: number of slots.
        dtype: type of every slot.
        mutable: whether public writes are allowed.

    Raises:
        TypeError: ``dtype`` is not a DType or ``size`` not an integer.
        ValueError: ``size`` is negative.
    """

    #: False withholds the layout-only operations, for a carrier whose tensors must keep their Layout.
    _gives_views: ClassVar[bool] = True

    #: What a user does whose operation this class does not run: the end of the error's message.
    _operation_hint: ClassVar[str] = "move the tensor to a carrier that computes, such as CPU"

    #: What ``strideweave.carriers.extension`` installs on an exact class; ``_installed`` reads it.
    _definition: ClassVar[CarrierDefinition | None] = None

    def supports_storage_dtype(self, dtype: DType) -> bool:
        """Whether carriers of this class can hold ``dtype``. Answers after release too.

        Raises:
            TypeError: ``dtype`` is not a DType.
        """
        check_dtype(dtype)
        installed = self._installed()
        return installed is None or installed.supports(self, dtype)

    @abstractmethod
    def new_like(self, values: Iterable[Any], *, mutable: bool = True, dtype: DType | None = None) -> Self:
        """Make a fresh carrier of this class that holds ``values``. Works after release too.

        Args:
            values: a finite iterable of numbers, one a slot.
            mutable: whether the new carrier is publicly mutable.
            dtype: its dtype; None keeps this carrier's.

        Raises:
            TypeError, OverflowError, ValueError: as ``set_value`` for a value that does not fit.
        """
        return cast("Self", self._factories().new_like(self, values, mutable, dtype))

    @abstractmethod
    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> Self:
        """Make a fresh carrier of this class with ``size`` slots. Works after release too.

        Args:
            size: number of slots.
            mutable: whether the new carrier is publicly mutable.
            dtype: its dtype; None keeps this carrier's.
            empty: True leaves the values unspecified, False makes them zero.

        Raises:
            TypeError: ``size`` is not an integer, or ``dtype`` no DType that this class stores.
            ValueError: ``size`` is negative.
        """
        return cast("Self", self._factories().allocate_like(self, size, mutable, dtype, empty))

    # Operations

    def dispatch_op(self, name: str) -> Operation:
        """Give a fresh ``Operation`` that runs the operation ``name`` on tensors of this carrier class.

        Raises:
            ReleasedError: the carrier was released.
            TypeError: ``name`` is not a string.
            NotImplementedError: this carrier class does not run that operation.
        """
        self._require_live()
        check_operation_name(name)
        definition, installed = OPERATIONS.get(name), self._installed()
        if definition is not None and installed is not None and installed.runs(self, name):
            return installed.operation(definition)
        if definition is not None and definition.result == "view" and self._gives_views:
            return ViewOperation(definition, type(self))
        raise NotImplementedError(
            f"{type(self).__name__} does not run the operation {name!r}; {self._operation_hint}"
        )

    def operation_capabilities(self, name: str | None = None) -> tuple[OperationCapability, ...]:
        """List what this carrier class runs, all of it or the entries of one operation.

        Answers after release too. The layout-only operations need no support from a carrier.

        Raises:
            TypeError: ``name`` is neither a string nor None.
        """
        if name is not None:
            check_operation_name(name)
        installed = self._installed()
        return tuple(
            capability
            for definition in OPERATIONS.values()
            if name in (None, definition.name)
            and (
                (self._gives_views and definition.result == "view")
                or (installed is not None and installed.runs(self, definition.name))
            )
            for capability in definition.capabilities()
        )

    def facet(self, facet_type: type[F]) -> F | None:
        """Give the facet of that type which this carrier carries, or None.

        Raises:
            TypeError: ``facet_type`` is not a class.
        """
        if not isinstance(facet_type, type):
            raise TypeError(f"facet_type must be a class, found {type(facet_type).__name__}")
        installed = self._installed()
        return None if installed is None else cast("F | None", installed.facet(self, facet_type))

    def require_facet(self, facet_type: type[F]) -> F:
        """Give the facet of that type.

        Raises:
            TypeError: ``facet_type`` is not a class.
            NotImplementedError: this carrier has none.
        """
        found = self.facet(facet_type)
        if found is None:
            raise NotImplementedError(f"{type(self).__name__} carries no {facet_type.__name__}")
        return found

    def scatter(
        self, to_scatter: Operand, scatter_onto: Operand, mapping: Layout, mapping_offset: int = 0
    ) -> None:
        """Write a tensor's values to the slots that a Layout names; carriers that can do it override this.

        Raises:
            NotImplementedError: this carrier class cannot.
        """
        raise NotImplementedError(f"{type(self).__name__} does not scatter; use a carrier in memory")

    def _scatter_as(self, owner: object, source: Operand, layout: Layout, first: int) -> None:
        """Write a tensor's values to checked slots, relative to ``first``, and advance the version as the owner.

        NotImplementedError where this carrier class cannot; nothing has changed.
        """
        raise NotImplementedError(f"{type(self).__name__} does not scatter; use a carrier in memory")

    # The definition of the exact class (internal)

    @classmethod
    def _installed(cls) -> CarrierDefinition | None:
        """The definition of this exact class, which no subclass inherits; most classes have none."""
        definition: CarrierDefinition | None = cls.__dict__.get("_definition")
        return definition

    def _factories(self) -> CarrierDefinition:
        """The definition that makes carriers like this one, for a class without factories of its own."""
        installed = self._installed()
        if installed is None or installed.storage is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no factories and no definition with storage"
            )
        return installed

    # Storage (internal)

    def _bearer(self) -> Carrier:
        """The carrier whose storage holds the values now: this one, or a tier of a composite."""
        return self

    def _can_allocate(self) -> bool:
        """Whether ``_allocate_in_place`` would work: live, empty, of a kind that takes storage later."""
        return False

    def _allocate_in_place(self, size: int) -> None:
        """Give a live carrier of size 0 storage for ``size`` slots, once; zero or unspecified values."""
        raise ValueError(
            f"{type(self).__name__} of {self._size} slots cannot be given storage for {size} slots"
        )

    def _empty_in_place(self) -> None:
        """Undo ``_allocate_in_place`` where nobody uses the storage yet: it can be given storage once more."""
        with self._lock:
            self._require_live()
            self._size = 0
        self._free_storage()

    def _shares_memory(self, other: Carrier) -> bool:
        """Whether what is written to one of them may be read from the other: memory that somebody gave to both."""
        del other
        return False

    def _take_over(self, other: Carrier) -> bool:
        """Make the storage of a fresh carrier of this class, dtype and size one's own, and release that carrier.

        Only where nobody can tell it from a copy: this carrier is empty and can be given storage, or has storage of
        its own whose address nobody was ever given.

        Returns:
            Whether that was done; else both are as they were, and the values are to be copied.
        """
        del other
        return False

    async def _persist(self) -> None:
        """Return once what was written to these slots would survive a loss of power, as far as the storage can.

        In the runtime's loop. Memory has nothing to do; a class that keeps its slots elsewhere overrides this.
        """
        bearer = self._bearer()
        if bearer is not self:
            await bearer._persist()

    def _outlasts_release(self) -> bool:
        """Whether others find what was written here after the release, as in a file that stays."""
        return False

    def _writing_durably(self) -> AbstractContextManager[None]:
        """What writes are made in that ``_persist`` follows; a class may send them another way."""
        bearer = self._bearer()
        return nullcontext() if bearer is self else bearer._writing_durably()

    # Others like it (internal)

    def _adopt_like(self, values: NDArray[Any], dtype: DType) -> Self:
        """Make a fresh carrier of this class around a fresh 1-D array that nobody else refers to."""
        return self.new_like(values, dtype=dtype)

    def _empty_like(self, dtype: DType) -> Self:
        """Make a fresh mutable carrier of this class without slots: a tier that waits for its values."""
        return self.allocate_like(0, mutable=True, dtype=dtype)

    def _allocate_result(self, size: int) -> Self:
        """Make a fresh mutable carrier of this class and dtype, for values that follow at once."""
        return self.allocate_like(size, mutable=True, empty=True)

    # Moves (internal)

    def _check_tier(self) -> None:
        """Refuse to become a tier of a composite; NotImplementedError in a class that cannot."""

    def _begin_move(self, other: type[Carrier], *, reads: bool) -> None:
        """A move of all slots begins, which has claimed this carrier: its source if it is read, or its destination.

        Called under the short lock; what it raises, the move raises, and nothing has changed. ``_finish_move``
        follows in any case, which must not raise or block.
        """

    async def _undo_move(self) -> None:
        """The move of all slots off this carrier failed: put back what it changed besides; it must not raise."""

    def _finish_move(self) -> None:
        """The move is over, whatever became of it; does nothing where none had begun."""

    # Gradients (internal)

    def _gradient_of_moved(self, offset: int, layout: Layout, cotangent: Tensor) -> Tensor | None:
        """Make the gradient of a tensor that was moved off this carrier, in a class whose tensors need their own.

        None leaves it to the move, which makes one that is row-major. May wait; works after release.
        """
        return None

    def _check_gradient(self, tensor: Tensor, gradient: Tensor) -> None:
        """Refuse a gradient of the right class, dtype and shape that cannot be one of a tensor on this carrier.

        ValueError in a class whose storage has a geometry of its own.
        """

    def _sum_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Add two gradients of one shape that lie on this carrier class, without changing either.

        A class that has no addition, since it only keeps values, adds in memory.
        """
        if self.operation_capabilities("add"):
            return apply("add", x, y)
        total = np.add(x.numpy(), y.numpy())
        carrier = self._adopt_like(total.reshape(-1), x.dtype)
        return type(x)._of(carrier, 0, row_major(total.shape), False)

    def _copy_gradient(self, gradient: Tensor) -> Tensor:
        """Copy a gradient that lies on this carrier to fresh storage that it fills, row-major."""
        carrier = self._adopt_like(gradient.numpy(copy=True).reshape(-1), gradient.dtype)
        return type(gradient)._of(carrier, 0, row_major(gradient.shape), False)

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self._size} slots"
        return f"<{type(self).__name__} {self._dtype.name}, {state}, version {self._version}>"


def check_operation_name(name: object) -> None:
    """Refuse what cannot be the name of an operation.

    Raises:
        TypeError: ``name`` is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"an operation is named by a string such as 'add', found {type(name).__name__}")
