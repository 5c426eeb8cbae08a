"""What an operation must know of a tensor, and of the storage below it.

Operations stand below tensors and carriers; these two abstract classes are the door upwards. ``Tensor`` is
the one ``Operand`` and ``Carrier`` the one ``Storage``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from strideweave.runtime.uncopied import Uncopied

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.dtype import DType
    from strideweave.layout import Layout
    from strideweave.operations.definition import Operation

__all__ = ["Operand", "Storage"]


class Storage(Uncopied, ABC):
    """A one-dimensional sequence of slots that a tensor can stand on."""

    _instead = "it has its storage to itself: pass on the values, or the path of a file or store"

    #: Among operands on several classes, the operation is asked of the one with the highest.
    _dispatch_priority: ClassVar[int] = 0

    @abstractmethod
    def size(self) -> int:
        """Number of slots."""

    @abstractmethod
    def dtype(self) -> DType:
        """Type of every slot."""

    @property
    @abstractmethod
    def version(self) -> int:
        """How often a public write changed the values."""

    @abstractmethod
    def is_mutable(self) -> bool:
        """Whether anyone may write."""

    @abstractmethod
    def is_released(self) -> bool:
        """Whether the storage is gone."""

    @abstractmethod
    def get_value(self, i: int) -> bool | int | float:
        """Read one slot."""

    @abstractmethod
    def set_value(self, i: int, value: object) -> None:
        """Write one slot."""

    @abstractmethod
    def dispatch_op(self, name: str) -> Operation:
        """Find the implementation of an operation."""

    @abstractmethod
    def _require_live(self) -> None:
        """Raise ReleasedError when the storage is gone."""

    @abstractmethod
    def _require_mutable(self) -> None:
        """Raise ReleasedError, OwnershipError or ImmutableError when a public write is refused."""

    @abstractmethod
    def _adopt_like(self, values: NDArray[Any], dtype: DType) -> Any:
        """Make fresh storage of this kind around a fresh array that nobody else refers to."""

    @abstractmethod
    def _array(self, layout: Layout, offset: int, writable: bool) -> NDArray[Any] | None:
        """View the slots of a layout without a copy, or None where no such view exists."""

    @abstractmethod
    def _gather_array(self, tensor: Operand) -> NDArray[Any]:
        """Copy a tensor's values to a fresh array of its shape."""


class Operand(ABC):
    """A tensor as an operation sees it: a shape of plain integers, a dtype, and values on a carrier."""

    __slots__ = ()

    @property
    @abstractmethod
    def carrier(self) -> Storage:
        """The storage below."""

    @property
    @abstractmethod
    def offset(self) -> int:
        """Slot of the coordinate zero, as far as the layout starts at 0."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """How coordinates map to slots."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Extent of each mode."""

    @property
    @abstractmethod
    def dtype(self) -> DType:
        """Element type."""

    @property
    @abstractmethod
    def requires_grad(self) -> bool:
        """Whether a gradient is wanted."""

    @abstractmethod
    def numpy(self, copy: bool | None = None, *, writable: bool = False) -> NDArray[Any]:
        """The values as an array."""
