"""What an operation is: which operands it takes, and which shape and dtype its result has.

A definition knows nothing of arrays. ``bind`` turns operands and options into a ``BoundOperation`` or raises,
before anything is computed; a carrier's ``Operation`` then runs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from strideweave.dtype import DType
from strideweave.operations.operand import Operand, Storage
from strideweave.runtime.await_result import AwaitResult

if TYPE_CHECKING:
    from strideweave.tensor import Tensor

__all__ = [
    "BoundOperation",
    "Inferred",
    "Operand",
    "Operation",
    "OperationCapability",
    "OperationDefinition",
    "Pullback",
    "RESULT",
    "Scalar",
    "Signature",
    "Storage",
    "apply",
]

Scalar: TypeAlias = "bool | int | float"
"""A weak operand: it takes on the dtype of the tensor beside it."""

TENSOR, SCALAR = "tensor", "scalar"

RESULT = -1
"""Among the positions of saved operands: the result."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The shape and dtype of a tensor, which is all that a shape or dtype rule may look at."""

    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Inferred:
    """What a rule found out.

    Attributes:
        result: shape and dtype of the result.
        options: the options in normal form (axes counted from the front, defaults filled in).
        scalar_dtype: the dtype that scalar operands take on; None means the result's.
    """

    result: Signature
    options: Mapping[str, Any] = field(default_factory=dict)
    scalar_dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class OperationCapability:
    """One way to call one operation.

    Attributes:
        operation: its name.
        operands: ``"tensor"`` or ``"scalar"`` for each operand.
        result: ``"tensor"`` for fresh storage, ``"view"`` for a tensor on the operand's own storage.
    """

    operation: str
    operands: tuple[str, ...]
    result: str


@dataclass(frozen=True, slots=True)
class BoundOperation:
    """An operation with checked operands.

    Attributes:
        definition: the operation.
        operands: tensors, and Python scalars where the overload has ``"scalar"``.
        tensors: the operands that are tensors.
        options: the options in normal form.
        result: shape and dtype of the result.
        scalar_dtype: the dtype that scalar operands take on.
    """

    definition: OperationDefinition
    operands: tuple[Operand | Scalar, ...]
    tensors: tuple[Operand, ...]
    options: Mapping[str, Any]
    result: Signature
    scalar_dtype: DType


@dataclass(frozen=True, slots=True)
class Pullback:
    """What a vector-Jacobian product may look at.

    Attributes:
        operands: the operands of the forward call; those that ``saves`` names for a wanted operand have the
            values they had then, and of the others only shape and dtype are sure.
        result: the detached result, where ``saves`` names it for a wanted operand; else None.
        options: the options in normal form.
        wanted: for each operand, whether its cotangent is asked for.
    """

    operands: tuple[Any, ...]
    result: Any
    options: Mapping[str, Any]
    wanted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class OperationDefinition:
    """The meaning of one operation, apart from how it is computed.

    Attributes:
        name: the operation's name.
        overloads: the accepted combinations of operand kinds.
        infer: the shape and dtype rule. It takes a ``Signature`` for each tensor, the value for each
            scalar, and the options by keyword; it raises ValueError for shapes and TypeError for dtypes
            that do not fit.
        result: ``"tensor"`` or ``"view"``.
        vjp: the vector-Jacobian product: takes a ``Pullback`` and the result's cotangent, and gives a cotangent
            or None for each operand, computed with operations on tensors. None for an operation without one.
        saves: for each operand, the positions of the operands whose values ``vjp`` reads for its cotangent,
            ``RESULT`` for the result's; shorter where the rest reads none.
    """

    name: str
    overloads: tuple[tuple[str, ...], ...]
    infer: Callable[..., Inferred]
    result: str = TENSOR
    vjp: Callable[[Pullback, Tensor], Sequence[Tensor | None]] | None = None
    saves: tuple[tuple[int, ...], ...] = ()

    def capabilities(self) -> tuple[OperationCapability, ...]:
        """One entry per overload."""
        return tuple(OperationCapability(self.name, operands, self.result) for operands in self.overloads)

    def bind(self, *inputs: object, **options: object) -> BoundOperation:
        """Check operands and options and infer the result.

        Raises:
            TypeError: an operand is neither a Tensor nor a scalar where one is taken, the number of
                operands or an option is wrong, or the dtypes do not fit.
            ValueError: the shapes or an axis do not fit.
        """
        operands = tuple(self._operand(value, position) for position, value in enumerate(inputs))
        kinds = tuple(TENSOR if isinstance(operand, Operand) else SCALAR for operand in operands)
        if kinds not in self.overloads:
            accepted = " or ".join(f"({', '.join(overload)})" for overload in self.overloads)
            raise TypeError(f"{self.name} takes {accepted}, found ({', '.join(kinds)})")
        seen = [
            Signature(operand.shape, operand.dtype) if isinstance(operand, Operand) else operand
            for operand in operands
        ]
        inferred = self.infer(*seen, **options)
        tensors = tuple(operand for operand in operands if isinstance(operand, Operand))
        scalar_dtype = inferred.scalar_dtype or inferred.result.dtype
        return BoundOperation(self, operands, tensors, inferred.options, inferred.result, scalar_dtype)

    def _operand(self, value: object, position: int) -> Operand | Scalar:
        if isinstance(value, Operand):
            return value
        if isinstance(value, np.generic):
            value = value.item()  # NumPy scalars count as the Python scalar they stand for
        if isinstance(value, bool | int | float):
            return value
        raise TypeError(f"operand {position} of {self.name} must be a Tensor, found {_described(value)}")


class Operation(ABC):
    """One operation on one carrier class, as ``carrier.dispatch_op(name)`` gives it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The operation's name."""

    @property
    @abstractmethod
    def carrier_class(self) -> type[Storage]:
        """The exact class whose tensors it takes."""

    @abstractmethod
    def forward(self, *inputs: object, **options: object) -> Tensor:
        """Compute the operation.

        Raises:
            TypeError: an operand or option is of a wrong kind, or a tensor lies on another carrier class.
            ValueError: the shapes do not fit.
            ReleasedError: the carrier of an operand was released.
        """


def apply(name: str, *inputs: object, **options: object) -> Tensor:
    """Run an operation on the carrier of its first tensor operand, or of one whose class takes precedence.

    Raises:
        TypeError: no operand is a Tensor; otherwise as ``Operation.forward``.
        NotImplementedError: the carrier does not run that operation.
    """
    chosen: Storage | None = None
    for value in inputs:
        if isinstance(value, Operand) and (
            chosen is None or value.carrier._dispatch_priority > chosen._dispatch_priority
        ):
            chosen = value.carrier
    if chosen is not None:
        return chosen.dispatch_op(name).forward(*inputs, **options)
    pending = [value for value in inputs if isinstance(value, AwaitResult)]
    found = ", ".join(_described(value) for value in pending or inputs)
    raise TypeError(f"{name} needs a Tensor operand, found {found}")


def _described(value: object) -> str:
    if isinstance(value, AwaitResult):
        kind = type(value).__name__
        shown = kind if kind == "AwaitResult" else f"{kind} (an AwaitResult)"
        return f"{shown}, which is a pending result and no Tensor: call wait() on it first"
    return f"{type(value).__name__}; asarray(values) makes a Tensor"
