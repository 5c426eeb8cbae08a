"""The tensor: a carrier, a first slot, and a Layout that says which slot each coordinate lies in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from strideweave.autograd.engine import run_backward
from strideweave.flags import as_flag, as_optional_flag
from strideweave.layout import Layout, row_major
from strideweave.layout.int_tuple import as_integer
from strideweave.operations import contraction, elementwise, views
from strideweave.operations.operand import Operand, Storage
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.uncopied import Uncopied

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray
    from typing_extensions import CapsuleType

    from strideweave.autograd.graph import Node
    from strideweave.carriers.base import Carrier
    from strideweave.dtype import DType
    from strideweave.operations.definition import Scalar

__all__ = ["Tensor"]

_PROCESSOR = (1, 0)  # kDLCPU, as DLPack numbers devices


class Tensor(Uncopied, Operand):
    """A view of a carrier's slots as an array: coordinate ``c`` lies in slot ``offset + layout(c)``.

    A Tensor is cheap: views share the carrier, and no value is copied when one is made. ``shape`` is a
    plain tuple of the extents of the Layout's top-level modes; ``layout.shape`` keeps the hierarchy below
    them.

    Args:
        carrier: the live carrier that holds the values.
        offset: slot of the coordinate that the Layout maps to 0.
        layout: maps coordinates to slots, relative to ``offset``.
        requires_grad: whether a gradient is wanted; None means "if the dtype is differentiable".

    Raises:
        TypeError: an argument is of a wrong type, or ``requires_grad`` was asked of a dtype without
            gradients. ValueError: the Layout reaches a slot outside the carrier. ReleasedError: the carrier
            was released.
    """

    __slots__ = ("__weakref__", "_carrier", "_grad", "_grad_fn", "_layout", "_offset", "_requires_grad")

    _instead = "detach() gives another view of its carrier, numpy(copy=True) the values"

    # NumPy's own operators give way to the reflected ones below instead of converting to an array.
    __array_priority__ = 1000

    def __init__(
        self, carrier: Carrier, offset: int, layout: Layout, *, requires_grad: bool | None = None
    ) -> None:
        if not isinstance(carrier, Storage):
            raise TypeError(f"carrier must be a Carrier, found {type(carrier).__name__}")
        if not isinstance(layout, Layout):
            raise TypeError(f"layout must be a Layout, found {type(layout).__name__}; see row_major(*shape)")
        start = as_integer(offset, "offset")
        carrier._require_live()
        _check_range(carrier, start, layout)
        self._carrier: Carrier = carrier
        self._offset = start
        self._layout = layout
        self._requires_grad = _checked_requires_grad(requires_grad, carrier.dtype())
        self._grad: Tensor | None = None
        self._grad_fn: Node | None = None

    @classmethod
    def _of(cls, carrier: Carrier, offset: int, layout: Layout, requires_grad: bool) -> Tensor:
        """Make a tensor whose arguments are known to fit, as the results of operations are."""
        tensor = cls.__new__(cls)
        tensor._carrier, tensor._offset, tensor._layout = carrier, offset, layout
        tensor._requires_grad = requires_grad
        tensor._grad = tensor._grad_fn = None
        return tensor

    # What it is

    @property
    def carrier(self) -> Carrier:
        """The carrier that holds the values."""
        return self._carrier

    @property
    def offset(self) -> int:
        """Slot of the coordinate that the Layout maps to 0."""
        return self._offset

    @property
    def layout(self) -> Layout:
        """The map from coordinates to slots, relative to ``offset``."""
        return self._layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each top-level mode."""
        return self._layout.extents

    @property
    def ndim(self) -> int:
        """Number of top-level modes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._layout.size

    @property
    def dtype(self) -> DType:
        """Type of every element."""
        return self._carrier.dtype()

    @property
    def nbytes(self) -> int:
        """Bytes that the elements stand for, ``size * dtype.itemsize``."""
        return self.size * self.dtype.itemsize

    @property
    def version(self) -> int:
        """The carrier's version: how many public writes changed it."""
        return self._carrier.version

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient is wanted for this tensor."""
        return self._requires_grad

    # Gradients

    @property
    def grad(self) -> Tensor | None:
        """The gradient that backward passes have left at this leaf so far, detached; None before the first.

        Assign None to clear it, or a Tensor of this shape, dtype and carrier class.

        Raises:
            TypeError: another value, dtype or carrier class was assigned.
            ValueError: another shape was assigned.
        """
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._grad = None if value is None else self._checked_gradient(value).detach()

    @property
    def grad_fn(self) -> Node | None:
        """How this tensor came about, for backward; None for a leaf."""
        return self._grad_fn

    def backward(self, gradient: Tensor | None = None, *, retain_graph: bool = False) -> None:
        """Send a gradient back from here and add what arrives to ``grad`` of every leaf that requires it.

        Blocks until it is done. After an error no ``grad`` has changed.

        Args:
            gradient: the gradient of this tensor; None stands for 1 where there is one element.
            retain_graph: whether the graph may be walked again; otherwise it lets go of what it saved.

        Raises:
            RuntimeError: this tensor does not require grad, or the graph was used up by an earlier pass.
            StaleGraphError: a value that the pass reads was changed or released since it was used.
            ValueError: there is no ``gradient`` and not exactly one element, or its shape is another.
            TypeError: ``gradient`` is no Tensor, or has another dtype or carrier class, or ``retain_graph`` is no
                bool.
        """
        retain_graph = as_flag(retain_graph, "retain_graph")
        if not self._requires_grad:
            raise RuntimeError("backward() needs a tensor that requires grad, and this one does not")
        if gradient is None:
            if self.size != 1:
                raise ValueError(
                    f"a tensor of shape {self.shape} needs the gradient argument; only one of one element does not"
                )
            one = self._carrier._adopt_like(np.ones(1, self.dtype.numpy), self.dtype)
            gradient = Tensor._of(one, 0, row_major(self.shape), False)
        run_backward(self, self._checked_gradient(gradient), retain_graph=retain_graph)

    def _checked_gradient(self, value: object) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"a gradient must be a Tensor, found {type(value).__name__}")
        if value.dtype is not self.dtype or type(value.carrier) is not type(self._carrier):
            raise TypeError(
                f"the gradient of {self.dtype.name} on {type(self._carrier).__name__} must be the same, found "
                f"{value.dtype.name} on {type(value.carrier).__name__}"
            )
        if value.shape != self.shape:
            raise ValueError(f"the gradient of a tensor of shape {self.shape} has shape {value.shape}")
        self._carrier._check_gradient(self, value)
        return value

    # Elements

    def __getitem__(self, index: int | tuple[Any, ...]) -> bool | int | float:
        """Read one element.

        Args:
            index: an integer is the linear coordinate with the first mode fastest; a tuple has one entry
                per mode.

        Raises:
            TypeError: the index is neither, or an entry is no integer.
            IndexError: it is outside the tensor; negative ones are.
            ReleasedError: the carrier was released.
        """
        return self._carrier.get_value(self._slot(index))

    def __setitem__(self, index: int | tuple[Any, ...], value: object) -> None:
        """Write one element, as a public mutation of the carrier; indices as for reading.

        Raises:
            TypeError, OverflowError, ValueError: the value does not fit the dtype.
            OwnershipError, ImmutableError, ReleasedError: the carrier refuses public writes.
        """
        self._carrier.set_value(self._slot(index), value)

    def item(self) -> bool | int | float:
        """Give the only element as a Python scalar.

        Raises:
            ValueError: there is not exactly one element.
        """
        if self.size != 1:
            raise ValueError(f"item() needs exactly one element, found shape {self.shape}")
        return self[0]

    def tolist(self) -> Any:
        """Give the elements as nested lists of Python scalars; a scalar for a tensor without axes."""
        return self.numpy().tolist()

    # Arrays

    def numpy(self, copy: bool | None = None, writable: bool = False) -> NDArray[Any]:
        """Give the elements as a NumPy array of ``shape``, whether or not the tensor requires a gradient.

        The array is a view of the carrier's memory where its Layout has one stride per mode and the carrier
        lives in memory. Writes through a view do not advance the version; ``carrier.increment_version()``
        does. A copy belongs to the caller: it is writable and never changes again.

        Args:
            copy: True always copies, False never, None only where no view exists.
            writable: ask for a writable view; without it a view is read-only.

        Raises:
            TypeError: ``copy`` is neither a bool nor None, or ``writable`` no bool.
            ValueError: no view exists and ``copy=False`` or a writable view was asked.
            OwnershipError, ImmutableError: a writable view was asked of a carrier that refuses public writes.
            ReleasedError: the carrier was released.
        """
        copy, writable = as_optional_flag(copy, "copy"), as_flag(writable, "writable")
        self._carrier._require_live()
        if copy:
            return self._carrier._gather_array(self)
        if writable:
            self._carrier._require_mutable()
        view = self._carrier._array(self._layout, self._offset, writable)
        if view is None or (writable and not self._layout.is_injective):
            if copy is False or writable:
                raise ValueError(self._no_view(writable))
            view = self._carrier._gather_array(self)
        return view

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Convert for ``numpy.asarray`` and its kin; without a copy the array is read-only."""
        copy = as_optional_flag(copy, "copy")
        array = self.numpy(copy)
        if dtype is None or array.dtype == np.dtype(dtype):
            return array
        if copy is False:
            raise ValueError(f"a {self.dtype.name} tensor cannot become {np.dtype(dtype)} without a copy")
        return array.astype(dtype)

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Export the elements to another library without a copy, as ``numpy.from_dlpack`` and others ask for it.

        NumPy makes the capsule. It keeps the memory alive, after ``release()`` too, save memory that a caller
        owns. A consumer may write where the carrier is publicly mutable and no two coordinates share a slot;
        otherwise the capsule is flagged read-only, which a consumer that passes no ``max_version`` of at least
        ``(1, 0)`` cannot be told. Writes of a consumer do not advance the version;
        ``carrier.increment_version()`` does. A gradient does not cross.

        Spec: *Promoted state is required for public data access and execution* (no buffer of an Evictable).

        Args:
            stream: None; memory of the processor has no streams.
            max_version: newest version of DLPack that the consumer understands; None is the time before 1.0.
            dl_device: None, or the device that ``__dlpack_device__`` gives.
            copy: True exports a copy, which works for every Layout; False and None never copy.

        Raises:
            TypeError: ``copy`` is neither a bool nor None.
            BufferError: the carrier is not plain memory, the Layout has no view with one stride per axis, NumPy
                does not export the dtype (BFloat16 and the 8-bit floats before 2.5), read-only elements were
                asked for in the old way, or another device.
            ReleasedError: the carrier was released.
        """
        copy = as_optional_flag(copy, "copy")
        if dl_device is not None and tuple(dl_device) != _PROCESSOR:
            raise BufferError(
                f"the memory is the processor's, {_PROCESSOR}; device {dl_device} was asked for"
            )
        writable = self._carrier.is_mutable() and self._layout.is_injective
        array = self._carrier._exported(self._layout, self._offset, writable)
        if array is None and copy:
            array = self._carrier._gather_array(self)
        if array is None:
            raise BufferError(self._no_view(writable=False))
        return array.__dlpack__(stream=stream, max_version=max_version, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Give the device of the export, which is the processor: ``(1, 0)``.

        Raises:
            BufferError: the carrier is not plain memory.
            ReleasedError: the carrier was released.
        """
        self._carrier._exported(row_major(0), 0, False)
        return _PROCESSOR

    # Views

    def detach(self) -> Tensor:
        """Give the same values on the same carrier, with ``requires_grad`` False."""
        self._carrier._require_live()
        return Tensor._of(self._carrier, self._offset, self._layout, False)

    def permute(self, *axes: int | tuple[int, ...]) -> Tensor:
        """Reorder the axes, given as integers or as one tuple; see ``strideweave.permute``."""
        return views.permute(self, _unpacked(axes))

    def reshape(self, *shape: int | tuple[int, ...]) -> Tensor:
        """Give the elements another shape, as integers or as one tuple; see ``strideweave.reshape``."""
        return views.reshape(self, _unpacked(shape))

    def broadcast_to(self, *shape: int | tuple[int, ...]) -> Tensor:
        """Repeat to a shape, as integers or as one tuple; see ``strideweave.broadcast_to``."""
        return views.broadcast_to(self, _unpacked(shape))

    def squeeze(self, axis: int | tuple[int, ...] | None = None) -> Tensor:
        """Drop axes of extent 1; see ``strideweave.squeeze``."""
        return views.squeeze(self, axis)

    def unsqueeze(self, axis: int) -> Tensor:
        """Insert an axis of extent 1; see ``strideweave.unsqueeze``."""
        return views.unsqueeze(self, axis)

    @property
    def T(self) -> Tensor:  # noqa: N802  (NumPy's name)
        """The axes in reverse order, as a view."""
        return views.permute(self, tuple(reversed(range(self.ndim))))

    # Operators

    def __add__(self, other: Tensor | Scalar) -> Tensor:
        return elementwise.add(self, other) if _is_operand(other) else NotImplemented

    def __radd__(self, other: Tensor | Scalar) -> Tensor:
        return elementwise.add(other, self) if _is_operand(other) else NotImplemented

    def __sub__(self, other: Tensor | Scalar) -> Tensor:
        return elementwise.sub(self, other) if _is_operand(other) else NotImplemented

    def __rsub__(self, other: Tensor | Scalar) -> Tensor:
        return elementwise.sub(other, self) if _is_operand(other) else NotImplemented

    def __mul__(self, other: Tensor | Scalar) -> Tensor:
        return elementwise.mul(self, other) if _is_operand(other) else NotImplemented

    def __rmul__(self, other: Tensor | Scalar) -> Tensor:
        return elementwise.mul(other, self) if _is_operand(other) else NotImplemented

    def __truediv__(self, other: Tensor | Scalar) -> Tensor:
        return elementwise.div(self, other) if _is_operand(other) else NotImplemented

    def __rtruediv__(self, other: Tensor | Scalar) -> Tensor:
        return elementwise.div(other, self) if _is_operand(other) else NotImplemented

    def __matmul__(self, other: Tensor) -> Tensor:
        return contraction.matmul(self, other) if _is_operand(other) else NotImplemented

    def __rmatmul__(self, other: Tensor) -> Tensor:
        return contraction.matmul(other, self) if _is_operand(other) else NotImplemented

    def __neg__(self) -> Tensor:
        return elementwise.neg(self)

    # Not a sequence: ``tensor[i]`` is a linear coordinate, so the old iteration protocol would flatten
    # silently.
    def __iter__(self) -> NoReturn:
        raise TypeError("a Tensor is not iterable; use tolist() or numpy()")

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"the truth value of a tensor of shape {self.shape} is ambiguous")
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __repr__(self) -> str:
        where = type(self._carrier).__name__ + (", released" if self._carrier.is_released() else "")
        return f"Tensor(shape={self.shape}, {self.dtype.name}, {where}, requires_grad={self._requires_grad})"

    def _slot(self, index: int | tuple[Any, ...]) -> int:
        if isinstance(index, tuple) and len(index) != self.ndim:
            raise IndexError(f"a coordinate of {self.ndim} entries is needed for {self.shape}, found {index}")
        try:
            coordinate = index if isinstance(index, tuple) else as_integer(index, "an index")
            return self._offset + self._layout(coordinate)
        except TypeError as error:
            error.add_note("an index names one element; gather() and numpy() take parts of a tensor")
            raise

    def _no_view(self, writable: bool) -> str:
        kind = "writable view" if writable else "view"
        return (
            f"a tensor of layout {self._layout} on {type(self._carrier).__name__} has no {kind} "
            "as a NumPy array; ask numpy(copy=True)"
        )


def _check_range(carrier: Storage, offset: int, layout: Layout) -> None:
    low, high, size = offset + layout.min_index, offset + layout.max_index, carrier.size()
    reached = low >= 0 and (high < size if layout.size else high <= size)
    if not reached:
        raise ValueError(
            f"offset {offset} and layout {layout} reach the slots {low} to {high}, "
            f"outside a carrier of {size} slots"
        )


def _checked_requires_grad(requires_grad: bool | None, dtype: DType) -> bool:
    asked = as_optional_flag(requires_grad, "requires_grad")
    if asked is None:
        return dtype.is_differentiable
    if asked and not dtype.is_differentiable:
        raise TypeError(f"{dtype.name} has no gradients; requires_grad=True needs a floating dtype")
    return asked


def _unpacked(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Take ``f(1, 2)`` and ``f((1, 2))`` for the same."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], tuple | list) else values


def _is_operand(other: object) -> bool:
    """Whether an operator should try; a pending result or an array is let through for the message it gets there."""
    return isinstance(other, Operand | bool | int | float | np.generic | np.ndarray | AwaitResult)
