"""What every scatter checks, and how it counts as one public write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strideweave.layout import Layout
from strideweave.layout.int_tuple import as_integer
from strideweave.operations.operand import Operand
from strideweave.runtime.await_result import AwaitResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from strideweave.carriers.base import Carrier

__all__ = ["run_scatter"]


def run_scatter(
    carrier: Carrier,
    to_scatter: Operand,
    scatter_onto: Operand,
    mapping: Layout,
    mapping_offset: int,
    *,
    store: Callable[[Operand, Layout, int], None],
) -> None:
    """Check a scatter, let ``store`` write the values, and advance the version of ``carrier`` by one.

    Args:
        carrier: the receiver of the public call.
        to_scatter: the source, on the receiver's class.
        scatter_onto: the destination, on the receiver.
        mapping: where each coordinate of the source lands, relative to the destination's offset.
        mapping_offset: is added to every place.
        store: writes the source to the slots of a Layout from a first slot on. It reads the whole source
            before it writes, because the two may overlap.

    Raises:
        TypeError, ValueError, ReleasedError, OwnershipError, ImmutableError: as for ``MemoryCarrier.scatter``;
            nothing has changed.
    """
    carrier._require_mutable()
    _check_tensors(carrier, to_scatter, scatter_onto)
    first = scatter_onto.offset + as_integer(mapping_offset, "mapping_offset")
    _check_mapping(carrier, to_scatter, mapping, first)
    # As a write that waits for I/O: the copy may be long, so no lock is held while it runs.
    with carrier._writing(carrier._require_mutable):
        store(to_scatter, mapping, first)


def _check_tensors(carrier: Carrier, to_scatter: object, scatter_onto: object) -> None:
    for name, tensor in (("to_scatter", to_scatter), ("scatter_onto", scatter_onto)):
        if not isinstance(tensor, Operand):
            hint = ", a pending result: call wait() on it first" if isinstance(tensor, AwaitResult) else ""
            raise TypeError(f"scatter: {name} must be a Tensor, found {type(tensor).__name__}{hint}")
        tensor.carrier._require_live()
        if type(tensor.carrier) is not type(carrier):
            raise TypeError(
                f"scatter runs on {type(carrier).__name__}, but {name} lies on "
                f"{type(tensor.carrier).__name__}; bring all operands to one carrier class"
            )
        if tensor.dtype is not carrier.dtype():
            raise TypeError(
                f"scatter: {name} holds {tensor.dtype.name} and the carrier {carrier.dtype().name}; "
                "a scatter moves values and converts none"
            )
        if name == "scatter_onto" and tensor.carrier is not carrier:
            raise ValueError(
                "scatter: scatter_onto lies on another carrier; call scatter on scatter_onto.carrier"
            )


def _check_mapping(carrier: Carrier, to_scatter: Operand, mapping: object, first: int) -> None:
    if not isinstance(mapping, Layout):
        raise TypeError(f"scatter: mapping must be a Layout, found {type(mapping).__name__}")
    if mapping.extents != to_scatter.shape:
        raise ValueError(
            f"scatter: mapping has the extents {mapping.extents} and to_scatter the shape "
            f"{to_scatter.shape}; they must be the same"
        )
    low, high = first + mapping.min_index, first + mapping.max_index
    if mapping.size and (low < 0 or high >= carrier.size()):
        raise ValueError(
            f"scatter: mapping {mapping} from slot {first} on reaches the slots {low} to {high}, outside a "
            f"carrier of {carrier.size()} slots"
        )
    if not mapping.is_injective:
        raise ValueError(
            f"scatter: mapping {mapping} sends two coordinates to one slot, and which value stays is not "
            "defined; scatter_add adds them up"
        )
