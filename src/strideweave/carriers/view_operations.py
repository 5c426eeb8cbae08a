"""Operations that every carrier runs, because they touch no value: another Layout over the same slots."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, cast

from strideweave.autograd.graph import record
from strideweave.autograd.mode import is_grad_enabled
from strideweave.layout import row_major
from strideweave.operations.definition import Operation
from strideweave.operations.views import viewed_layout
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from strideweave.carriers.base import Carrier
    from strideweave.operations.definition import BoundOperation, OperationDefinition

__all__ = ["CarrierOperation", "ViewOperation"]


class CarrierOperation(Operation):
    """What the operations of one carrier class have in common: checked operands, and the result's gradient.

    Args:
        definition: what the operation means.
        carrier_class: the exact class whose tensors it takes.
    """

    def __init__(self, definition: OperationDefinition, carrier_class: type[Carrier]) -> None:
        self._definition = definition
        self._carrier_class = carrier_class

    @property
    def name(self) -> str:
        """The operation's name."""
        return self._definition.name

    @property
    def carrier_class(self) -> type[Carrier]:
        """The exact class whose tensors it takes."""
        return self._carrier_class

    def forward(self, *inputs: object, **options: object) -> Tensor:
        """Compute the operation; see ``Operation.forward``."""
        bound = self._definition.bind(*inputs, **options)
        for tensor in bound.tensors:
            found = type(tensor.carrier)
            if found is not self._carrier_class:
                raise TypeError(
                    f"{self.name} runs on {self._carrier_class.__name__}, but an operand lies on "
                    f"{found.__name__}; bring all operands to one carrier class"
                )
            tensor.carrier._require_live()
        result = self._run(bound)
        return record(bound, result) if result.requires_grad else result

    @abstractmethod
    def _run(self, bound: BoundOperation) -> Tensor:
        """Compute with checked operands on live carriers of the right class."""

    @staticmethod
    def _wants_grad(bound: BoundOperation) -> bool:
        wanted = any(tensor.requires_grad for tensor in bound.tensors)
        return wanted and is_grad_enabled() and bound.result.dtype.is_differentiable


class ViewOperation(CarrierOperation):
    """An operation that reads the same slots through another Layout; ``reshape`` copies where it has to."""

    def _run(self, bound: BoundOperation) -> Tensor:
        source = cast("Tensor", bound.tensors[0])
        carrier, offset = source.carrier, source.offset
        layout = viewed_layout(self.name, source.layout, bound.options)
        if layout is None:
            values = source.numpy(copy=True)
            carrier, offset = carrier._adopt_like(values.reshape(-1), source.dtype), 0
            layout = row_major(bound.result.shape)
        return Tensor._of(carrier, offset, layout, self._wants_grad(bound))
