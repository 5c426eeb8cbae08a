"""The graph: one node per differentiable result, which knows how a cotangent travels back to the inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from strideweave.errors import StaleGraphError
from strideweave.operations.definition import RESULT, Operand, Pullback
from strideweave.operations.pullbacks import fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from strideweave.carriers.base import Carrier
    from strideweave.operations.definition import BoundOperation
    from strideweave.tensor import Tensor

__all__ = ["Node", "attach", "record"]


class _Saved(NamedTuple):
    """A carrier whose values backward will read, and the version they had."""

    carrier: Carrier
    version: int


class Node:
    """How one result came about, and the way back (contract section 7).

    Args:
        name: the operation's name, or ``"move"``, ``"project"``, ``"scatter"``.
        inputs: the tensors the result was made from.
        pullback: takes the cotangent of the result, of its shape and dtype, and gives one cotangent per
            input, or None where there is none. It runs without gradients.
        saved: the tensors whose values ``pullback`` reads.
    """

    __slots__ = ("_inputs", "_name", "_pullback", "_saved")

    def __init__(
        self,
        name: str,
        inputs: tuple[Tensor, ...],
        pullback: Callable[[Tensor], Sequence[Tensor | None]],
        saved: Iterable[Tensor] = (),
    ) -> None:
        self._name = name
        self._inputs: tuple[Tensor, ...] = inputs
        self._pullback: Callable[[Tensor], Sequence[Tensor | None]] | None = pullback
        self._saved = tuple(_Saved(tensor.carrier, tensor.carrier.version) for tensor in saved)

    @property
    def name(self) -> str:
        """The name of the operation that made the result."""
        return self._name

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors the result was made from."""
        return self._inputs

    def check(self) -> None:
        """Make sure that the node can be traversed.

        Raises:
            RuntimeError: an earlier backward pass without ``retain_graph`` used it up.
            StaleGraphError: a value that backward reads was changed or released since.
        """
        if self._pullback is None:
            raise RuntimeError(
                f"the graph of {self._name!r} was used up by an earlier backward pass; "
                "pass retain_graph=True to the earlier one to go through it again"
            )
        for carrier, version in self._saved:
            if carrier.is_released():
                raise StaleGraphError(f"{self._name!r} needs a value whose carrier was released since")
            if carrier.version != version:
                raise StaleGraphError(
                    f"{self._name!r} needs the values its inputs had at version {version} of their carrier, and "
                    f"that is at version {carrier.version} now; compute again after the write, or write later"
                )

    def pull_back(self, cotangent: Tensor) -> Sequence[Tensor | None]:
        """Give the cotangent of each input."""
        pullback = self._pullback
        if pullback is None:
            self.check()
            raise RuntimeError("unreachable")
        return pullback(cotangent)

    def use_up(self) -> None:
        """Let go of what backward needs; the inputs stay visible."""
        self._pullback = None
        self._saved = ()

    def __repr__(self) -> str:
        return f"<Node {self._name!r} of {len(self._inputs)} inputs>"


def attach(result: Tensor, node: Node) -> Tensor:
    """Note on a fresh result, which no one else has seen yet, how it came about; gives it back."""
    result._grad_fn = node
    return result


def record(bound: BoundOperation, result: Tensor) -> Tensor:
    """Note on the result of an operation how it came about."""
    definition = bound.definition
    saves = definition.saves
    operands = bound.operands
    kept = result.detach() if RESULT in saves else None
    wanted = tuple(isinstance(operand, Operand) and operand.requires_grad for operand in operands)
    pullback = Pullback(operands, kept, bound.options, wanted)

    def pull_back(cotangent: Tensor) -> list[Tensor | None]:
        if definition.vjp is None:
            raise NotImplementedError(f"{definition.name} has no gradient; use it under no_grad()")
        shares = definition.vjp(pullback, cotangent)
        return [
            fit(share, cast("Tensor", operand)) if asked and share is not None else None
            for operand, share, asked in zip(operands, shares, wanted, strict=True)
            if isinstance(operand, Operand)
        ]

    tensors = cast("tuple[Tensor, ...]", bound.tensors)
    saved = [operands[position] for position in saves if position != RESULT]
    read = [cast("Tensor", operand) for operand in saved if isinstance(operand, Operand)]
    if kept is not None:
        read.append(kept)
    return attach(result, Node(definition.name, tensors, pull_back, read))
