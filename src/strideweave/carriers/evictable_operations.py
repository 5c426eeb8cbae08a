"""Operations on tensors over an Evictable: the primary tier's own, run on the primary tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from strideweave.autograd.mode import no_grad
from strideweave.carriers.view_operations import CarrierOperation
from strideweave.operations.operand import Operand
from strideweave.operations.table import OPERATIONS
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from strideweave.carriers.evictable import Evictable
    from strideweave.operations.definition import BoundOperation, Operation

__all__ = ["EvictableOperation", "on_primary"]


class EvictableOperation(CarrierOperation):
    """Runs an operation of the primary tier's class and gives a fresh result a hierarchy of its own.

    Spec: *Evictable results retain composition ownership*.

    Args:
        inner: the operation of the primary tier's class.
        carrier_class: Evictable.
    """

    def __init__(self, inner: Operation, carrier_class: type[Evictable]) -> None:
        super().__init__(OPERATIONS[inner.name], carrier_class)
        self._inner = inner

    def _run(self, bound: BoundOperation) -> Tensor:
        hierarchies = [cast("Evictable", tensor.carrier) for tensor in bound.tensors]
        with no_grad():  # the graph is of tensors over hierarchies; CarrierOperation notes the node
            result = self._inner.forward(*map(on_primary, bound.operands), **bound.options)
        owner = next((own for own in hierarchies if own.primary is result.carrier), hierarchies[0])
        return Tensor._of(owner._wrap(result.carrier), result.offset, result.layout, self._wants_grad(bound))


def on_primary(operand: Any) -> Any:
    """The same tensor on the primary tier of its hierarchy; a scalar as it is."""
    if not isinstance(operand, Operand):
        return operand
    hierarchy = cast("Evictable", operand.carrier)
    return Tensor._of(hierarchy._promoted_primary(), operand.offset, operand.layout, False)
