"""The graph: one node per differentiable result, which knows how a cotangent travels back to the inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast
from weakref import ref

from strideweave.errors import StaleGraphError
from strideweave.operations.definition import RESULT, Operand, Pullback
from strideweave.operations.pullbacks import fit
from strideweave.runtime.uncopied import Uncopied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from strideweave.carriers.base import Carrier
    from strideweave.operations.definition import BoundOperation
    from strideweave.tensor import Tensor

    Share: TypeAlias = "Tensor | Contribution | None"
    """What a pullback gives for one input."""

__all__ = ["Contribution", "Node", "attach", "record"]


class Contribution(ABC):
    """A share of a gradient that is not a tensor yet: most of it is zero, and only the rest need be added.

    Several that meet at one tensor are added to a single total, so that none of them takes storage of its own.
    """

    __slots__ = ()

    @abstractmethod
    def onto(self, total: Tensor | None) -> Tensor:
        """Add this share to the gradient so far.

        Args:
            total: what has arrived before, which nobody else refers to, so that it may be changed and returned;
                None for the first arrival.

        Returns:
            The gradient with this share, of the shape, dtype and carrier class of its input.
        """


class _Saved(NamedTuple):
    """A carrier whose values backward will read, and the version they had."""

    carrier: Carrier
    version: int


class Node(Uncopied):
    """How one result came about, and the way back (contract).

    Args:
        name: the operation's name, or ``"move"``, ``"project"``, ``"scatter"``.
        inputs: the tensors the result was made from.
        pullback: takes the cotangent of the result, of its shape and dtype, and gives one cotangent per
            input, of that input's shape, dtype and carrier class, a ``Contribution`` to one, or None where there
            is none. It runs without gradients. It must not refer to the result itself, or the two would keep each
            other alive.
        saved: the tensors whose values ``pullback`` reads; or carriers, each with the version that counts where
            that was taken earlier.
    """

    __slots__ = ("_inputs", "_name", "_pullback", "_saved", "_used")

    _instead = "it leads back to the very tensors it was made from, once"

    def __init__(
        self,
        name: str,
        inputs: tuple[Tensor, ...],
        pullback: Callable[[Tensor], Sequence[Share]],
        saved: Iterable[Tensor | tuple[Carrier, int]] = (),
    ) -> None:
        self._name = name
        self._inputs = inputs
        self._pullback: Callable[[Tensor], Sequence[Share]] | None = pullback
        self._saved = tuple(
            [
                _Saved(*item) if isinstance(item, tuple) else _Saved(item.carrier, item.carrier.version)
                for item in saved
            ]
        )
        self._used: tuple[ref[Tensor], ...] = ()

    @property
    def name(self) -> str:
        """The name of the operation that made the result."""
        return self._name

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors the result was made from; once the node is used up, those that someone else still holds."""
        if self._pullback is not None:
            return self._inputs
        alive = (reference() for reference in self._used)
        return tuple(tensor for tensor in alive if tensor is not None)

    def check(self) -> None:
        """Make sure that the node can be traversed.

        Raises:
            RuntimeError: an earlier backward pass without ``retain_graph`` used it up.
            StaleGraphError: a value that backward reads was changed or released since.
        """
        if self._pullback is None:
            raise self._used_up()
        for carrier, version in self._saved:
            if carrier.is_released():
                raise StaleGraphError(
                    f"backward of {self._name!r} needs a value whose carrier was released since; release it, or "
                    "move it away, after backward"
                )
            if carrier.version != version:
                raise StaleGraphError(
                    f"backward of {self._name!r} needs a value as it was at version {version} of its carrier, "
                    f"which is at version {carrier.version} now; write after backward, or compute again"
                )

    def pull_back(self, cotangent: Tensor) -> Sequence[Share]:
        """Give the cotangent of each input, or a contribution to it.

        Raises:
            RuntimeError: an earlier backward pass used the node up.
        """
        pullback = self._pullback
        if pullback is None:  # by a pass of another thread, after this one's check
            raise self._used_up()
        return pullback(cotangent)

    def use_up(self) -> None:
        """Let go of the saved values and of the inputs, so that their memory goes though the result stays."""
        self._used = tuple(ref(tensor) for tensor in self._inputs)
        self._pullback = None
        self._inputs = ()
        self._saved = ()

    def _used_up(self) -> RuntimeError:
        return RuntimeError(
            f"the graph of {self._name!r} was used up by an earlier backward pass; to go through it again, "
            "pass retain_graph=True to every pass but the last"
        )

    def __repr__(self) -> str:
        return f"<Node {self._name!r}>"


def attach(result: Tensor, node: Node) -> Tensor:
    """Note on a fresh result, which no one else has seen yet, how it came about; gives it back."""
    result._grad_fn = node
    return result


def record(bound: BoundOperation, result: Tensor) -> Tensor:
    """Note on the result of an operation how it came about."""
    tensors = cast("tuple[Tensor, ...]", bound.tensors)
    operands, saves = bound.operands, bound.definition.saves
    if len(tensors) == len(operands):
        wanted = tuple([tensor.requires_grad for tensor in tensors])
    else:
        wanted = tuple([isinstance(operand, Operand) and operand.requires_grad for operand in operands])
    saved: list[Tensor] = []
    kept = None
    for position in {
        position for asked, read in zip(wanted, saves, strict=False) if asked for position in read
    }:
        if position == RESULT:
            kept = result.detach()
            saved.append(kept)
        elif isinstance(operand := operands[position], Operand):
            saved.append(cast("Tensor", operand))
    return attach(
        result, Node(bound.definition.name, tensors, partial(_pull_back, bound, wanted, kept), saved)
    )


def _pull_back(
    bound: BoundOperation, wanted: tuple[bool, ...], kept: Tensor | None, cotangent: Tensor
) -> list[Tensor | None]:
    """Give the share of every operand that is a tensor, fitted to it; None for those that want none."""
    vjp = bound.definition.vjp
    if vjp is None:
        raise NotImplementedError(f"{bound.definition.name} has no gradient; use it under no_grad()")
    shares = vjp(Pullback(bound.operands, kept, bound.options, wanted), cotangent)
    return [
        fit(share, cast("Tensor", operand)) if asked and share is not None else None
        for operand, share, asked in zip(bound.operands, shares, wanted, strict=True)
        if isinstance(operand, Operand)
    ]
