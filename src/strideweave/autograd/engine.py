"""Backward: walk the graph against its direction, add up what meets, leave gradients at the leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strideweave.autograd.mode import no_grad
from strideweave.operations.definition import apply

if TYPE_CHECKING:
    from strideweave.autograd.graph import Node
    from strideweave.tensor import Tensor

__all__ = ["run_backward"]


def run_backward(root: Tensor, cotangent: Tensor, *, retain_graph: bool) -> None:
    """Send a cotangent from a result back to every leaf it was made from.

    Everything is checked before anything is computed, and leaves receive their gradients at the end, so that
    a failure leaves every ``grad`` as it was.

    Args:
        root: the result; it requires grad.
        cotangent: its gradient, of its shape, dtype and carrier class.
        retain_graph: whether the graph may be walked again.

    Raises:
        RuntimeError: a part of the graph was used up by an earlier pass.
        StaleGraphError: a saved value was changed or released since.
    """
    leaves: dict[int, tuple[Tensor, Tensor]] = {}
    with no_grad():
        if root.grad_fn is None:
            leaves[id(root)] = (root, cotangent)
        else:
            order = _results_last(root.grad_fn)
            for node in order:
                node.check()
            _walk(order, root.grad_fn, cotangent, leaves)
            if not retain_graph:
                for node in order:
                    node.use_up()
        taken = {id(cotangent.carrier)}
        for leaf, gradient in leaves.values():
            fresh = id(gradient.carrier) not in taken
            taken.add(id(gradient.carrier))
            leaf._accumulate(gradient, fresh=fresh)


def _results_last(root: Node) -> list[Node]:
    """Every node below ``root``, inputs before the results made from them; without recursion."""
    order: list[Node] = []
    seen = {root}
    stack = [(root, iter(root.inputs))]
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


def _walk(order: list[Node], root: Node, cotangent: Tensor, leaves: dict[int, tuple[Tensor, Tensor]]) -> None:
    arrived = {root: cotangent}
    for node in reversed(order):
        incoming = arrived.pop(node, None)
        if incoming is None:  # no path from the root brought anything here
            continue
        for tensor, share in zip(node.inputs, node.pull_back(incoming), strict=True):
            if share is None or not tensor.requires_grad:
                continue
            below = tensor.grad_fn
            if below is not None:
                arrived[below] = _sum(arrived.get(below), share)
            else:
                earlier = leaves.get(id(tensor))
                leaves[id(tensor)] = (tensor, _sum(earlier[1] if earlier else None, share))


def _sum(earlier: Tensor | None, share: Tensor) -> Tensor:
    return share if earlier is None else apply("add", earlier, share)
