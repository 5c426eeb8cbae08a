"""Backward: walk the graph against its direction, add up what meets, leave gradients at the leaves."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from strideweave.autograd.graph import Contribution
from strideweave.autograd.mode import no_grad
from strideweave.runtime.locks import short_lock

if TYPE_CHECKING:
    from strideweave.autograd.graph import Node
    from strideweave.tensor import Tensor

    Arrivals: TypeAlias = list[tuple[Tensor, Tensor]]
    """Leaves, each with the gradient that arrived there."""

__all__ = ["run_backward"]


def run_backward(root: Tensor, cotangent: Tensor, *, retain_graph: bool) -> None:
    """Send a cotangent from a result back to every leaf it was made from.

    The whole graph is checked before anything is computed, and leaves receive their gradients at the end, all
    of them at once, so that a failure leaves every ``grad`` and the graph as they were.

    Args:
        root: the result; it requires grad.
        cotangent: its gradient, of its shape, dtype and carrier class.
        retain_graph: whether the graph may be walked again.

    Raises:
        RuntimeError: a part of the graph was used up by an earlier pass.
        StaleGraphError: a saved value was changed or released since.
    """
    # In a context of its own, which nothing can leave switched: not even Ctrl-C at the end of a block.
    order = copy_context().run(_run, root, cotangent)
    if not retain_graph:
        for node in order:
            node.use_up()


def _run(root: Tensor, cotangent: Tensor) -> list[Node]:
    """Do the pass, without a graph of its own; gives the nodes, inputs before results."""
    # The slope of a root at 0 is infinite; that is a value and no reason for a warning from deep inside.
    with no_grad(), np.errstate(all="ignore"):
        order = _results_last(root)
        for node in order:
            node.check()
        _deposit(_owned(_walk(order, root, cotangent), cotangent))
    return order


def _results_last(root: Tensor) -> list[Node]:
    """Every node below ``root``, inputs before the results made from them; without recursion."""
    first = root.grad_fn
    if first is None:
        return []
    order: list[Node] = []
    seen = {first}
    stack = [(first, iter(first.inputs))]
    while stack:
        node, inputs = stack[-1]
        for tensor in inputs:
            below = tensor.grad_fn
            if below is not None and below not in seen:
                seen.add(below)
                stack.append((below, iter(below.inputs)))
                break
        else:
            order.append(node)
            stack.pop()
    return order


class _Arriving:
    """The gradient of one tensor while shares arrive."""

    __slots__ = ("_is_own", "total")

    def __init__(self, first: Tensor | Contribution) -> None:
        self._is_own = isinstance(first, Contribution)  # else somebody may refer to it, so it must not change
        self.total = first.onto(None) if isinstance(first, Contribution) else first

    def add(self, share: Tensor | Contribution) -> None:
        """Add what has arrived by another way."""
        if isinstance(share, Contribution):
            own = self.total if self._is_own else self.total.carrier._copy_gradient(self.total)
            self.total = share.onto(own)
        else:
            self.total = _sum(self.total, share)
        self._is_own = True


def _walk(order: list[Node], root: Tensor, cotangent: Tensor) -> Arrivals:
    """Call the pullback of every node that something arrives at, results before inputs."""
    leaves: dict[int, tuple[Tensor, _Arriving]] = {}
    arrived: dict[Node, _Arriving] = {}

    def arrive(tensor: Tensor, share: Tensor | Contribution) -> None:
        below = tensor.grad_fn
        if below is not None:
            if below in arrived:
                arrived[below].add(share)
            else:
                arrived[below] = _Arriving(share)
        elif id(tensor) in leaves:
            leaves[id(tensor)][1].add(share)
        else:
            leaves[id(tensor)] = (tensor, _Arriving(share))

    arrive(root, cotangent)
    for node in reversed(order):
        incoming = arrived.pop(node, None)
        if incoming is None:  # no path from the root brought anything here
            continue
        for tensor, share in zip(node.inputs, node.pull_back(incoming.total), strict=True):
            if share is not None and tensor.requires_grad:
                arrive(tensor, share)
    return [(leaf, arriving.total) for leaf, arriving in leaves.values()]


def _sum(earlier: Tensor, share: Tensor) -> Tensor:
    return earlier.carrier._sum_gradients(earlier, share)


def _owned(arrivals: Arrivals, cotangent: Tensor) -> Arrivals:
    """Give each gradient storage that nobody else refers to, and that it fills.

    One that is shared, with the caller's argument or with another leaf, would change with what it shares; one
    that repeats slots, as the gradient of a sum does, could not be written to.
    """
    taken = {cotangent.carrier}
    owned = []
    for leaf, arrival in arrivals:
        gradient, carrier, layout = arrival, arrival.carrier, arrival.layout
        if carrier in taken or layout.size != carrier.size() or not layout.is_injective:
            gradient = carrier._copy_gradient(arrival)
        taken.add(gradient.carrier)
        owned.append((leaf, gradient))
    return owned


def _deposit(arrivals: Arrivals) -> None:
    """Add to every ``grad`` or, after an error, to none; passes of other threads are never overwritten."""
    totals: list[tuple[Tensor | None, Tensor] | None] = [None] * len(arrivals)
    while True:
        for place, (leaf, gradient) in enumerate(arrivals):
            earlier, known = leaf.grad, totals[place]
            if known is None or known[0] is not earlier:
                totals[place] = (earlier, gradient if earlier is None else _sum(earlier, gradient))
        ready = [(leaf, *total) for (leaf, _), total in zip(arrivals, totals, strict=True) if total]
        with short_lock:
            if all(leaf.grad is earlier for leaf, earlier, _ in ready):
                for leaf, _, total in ready:
                    leaf._grad = total
                return
