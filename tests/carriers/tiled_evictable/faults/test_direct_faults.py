"""A fault at every call of direct operations, forward and backward.

Spec: *Residency remains valid while tiled work needs it*; *A direct tiled operand means the full logical Tensor*.
"""

import numpy as np
import pytest

import strideweave as sw
from strideweave import matmul, reduce_sum, relu


def seen(find, expected):
    """What a request gives back: how to see that it is right."""

    def verify():
        assert np.allclose(find(), expected, rtol=1e-5)

    return verify


def forward(operation, expected, *, plan=None):
    """An operation on a tiled tensor of which some tiles are at hand."""

    def scenario(world):
        model = world.model([1, 4], [1], plan=plan)

        def request():
            result = operation(model.tensor)
            return seen(result.numpy, expected(model.values))

        return request

    return scenario


def with_dense(operation, expected, shape, *, plan=None):
    def scenario(world):
        model = world.model([1, 4], [1], plan=plan)
        dense, values = world.compact(*shape)

        def request():
            result = operation(model.tensor, dense)
            return seen(result.numpy, expected(model.values, values))

        return request

    return scenario


def two_carriers(world):
    model, other = world.model([1], [1]), world.model([2, 3], [3], plan={"evict": (0, 2, 5), "promote": (4,)})

    def request():
        result = model.tensor * other.tensor
        return seen(result.numpy, model.values * other.values)

    return request


FORWARD = {
    "relu": forward(relu, lambda x: np.maximum(x, 0)),
    "scale": forward(lambda x: sw.mul(2.0, x), lambda x: 2 * x),
    "reduce_sum": forward(reduce_sum, lambda x: x.sum(dtype=np.float64)),
    "add": with_dense(lambda x, y: y + x, lambda x, y: x + y, (8, 4, 6)),
    "matmul": with_dense(matmul, lambda x, y: x @ y, (6, 3)),
    "two carriers": two_carriers,
    "a plan": forward(
        relu, lambda x: np.maximum(x, 0), plan={"evict": (0, 1, 2, 3, 5, 6), "promote": (4, 7)}
    ),
}


def differentiate(world, loss, expected):
    """Go back from a loss, onto what an earlier pass may have left."""
    passes = []

    def request():
        loss.backward(retain_graph=True)
        passes.append(1)

        def verify():
            for leaf, gradient in zip(world.leaves, expected, strict=True):
                assert np.allclose(leaf.grad.numpy(), len(passes) * gradient, rtol=1e-5)

        return verify

    return request


def back_through_mul(world):
    model = world.model([1], [1], requires_grad=True)
    other = world.model([2], [2], requires_grad=True, plan={"evict": (2, 0, 5, 6)})
    return differentiate(world, reduce_sum(model.tensor * other.tensor), [other.values, model.values])


def back_through_matmul(world):
    model = world.model([1], [1], requires_grad=True)
    dense, values = world.compact(6, 3, requires_grad=True)
    by_rows = np.broadcast_to(values.sum(1), (8, 4, 6))
    by_columns = np.broadcast_to(model.values.sum((0, 1))[:, None], (6, 3))
    return differentiate(world, reduce_sum(matmul(model.tensor, dense)), [by_rows, by_columns])


def back_by_two_ways(world):
    """A direct operation and a projection meet at the leaf, whose gradient is added up tile by tile."""
    model = world.model([1], [1], requires_grad=True)
    selected = model.project(3, 1).wait()
    expected = 2 * model.values
    expected[[3, 1]] += 1
    loss = reduce_sum(model.tensor * model.tensor) + reduce_sum(selected)
    return differentiate(world, loss, [expected])


def back_onto_an_earlier_gradient(world):
    model = world.model([1], [1], requires_grad=True)
    loss = reduce_sum(relu(model.tensor))
    request = differentiate(world, loss, [(model.values > 0).astype(np.float32)])
    request()
    return request


BACKWARD = {
    "back through mul": back_through_mul,
    "back through matmul": back_through_matmul,
    "back by two ways": back_by_two_ways,
    "back onto an earlier gradient": back_onto_an_earlier_gradient,
}


@pytest.mark.parametrize("scenario", FORWARD.values(), ids=FORWARD)
def test_a_fault_at_any_call_of_a_direct_operation(fail_everywhere, scenario, case):
    """Spec: *Failure after submission SHALL publish no partial destination or result*."""
    assert fail_everywhere(scenario, *case)


@pytest.mark.parametrize("scenario", BACKWARD.values(), ids=BACKWARD)
def test_a_fault_at_any_call_of_backward(fail_everywhere, scenario, case):
    """A pass leaves every gradient as it was, and the graph can be walked again."""
    assert fail_everywhere(scenario, *case, attempts=3)
