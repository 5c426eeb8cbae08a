"""A fault at every call of moves from, to and between tiled carriers, and of the way back of their gradients.

Contract: until a move has succeeded nothing is published and the source is what it was; what the destination holds
after a failure is unspecified.
"""

import numpy as np
import pytest

from strideweave import CPU, FileBacked, Tensor, TiledEvictable, move, reduce_sum, row_major


def outward(make):
    """From tiles to another class."""

    def scenario(world):
        model = world.model([1, 4], [1])
        destination = make()
        world.spoilt.append(destination)

        def request():
            return moved(model.tensor, destination, model.values)

        world.checks.append(lambda: check_free(destination))
        return request

    return scenario


def inward(make, **options):
    """To tiles, some of which are primary and some dirty."""

    def scenario(world):
        model = world.model(**{"primary": [1, 4], "touched": [1], **options})
        values = -np.arange(192, dtype=np.float32).reshape(8, 4, 6)
        source = Tensor(make().new_like(values.ravel()), 0, row_major(8, 4, 6))
        world.dense.append((source, values))
        world.spoilt.append(model.carrier)

        def request():
            verify = moved(source, model.carrier, values)
            model.values[:] = values
            return verify

        world.checks.append(lambda: check_free(model.carrier))
        return request

    return scenario


def between(**options):
    def scenario(world):
        source, model = world.model([1, 4], [1]), world.model([2], [2], **options)
        source.values[0] = -5
        for slot in range(24):
            source.carrier[slot] = -5.0
        world.spoilt.append(model.carrier)

        def request():
            verify = moved(source.tensor, model.carrier, source.values)
            model.values[:] = source.values
            return verify

        world.checks.append(lambda: check_free(model.carrier))
        return request

    return scenario


def moved(tensor, destination, values):
    result = move(tensor, destination)

    def verify():
        assert np.array_equal(result.numpy(), values)
        assert tensor.carrier.is_released()
        assert not destination.is_owned()

    return verify


def check_free(carrier):
    assert not carrier.is_owned()
    if isinstance(carrier, TiledEvictable):
        assert carrier.statistics().pending_requests == 0
        assert set(carrier.dirty_tiles) <= set(carrier.primary_tiles)


def differentiating(make):
    """Go back through a move off the tiles: the gradient is tiled again."""

    def scenario(world):
        model = world.model([1], [1], requires_grad=True)
        leaf, values = model.tensor, model.values.copy()
        result = move(leaf, make())
        weights, factors = world.compact(8, 4, 6)
        back = result if isinstance(result.carrier, CPU) else move(result, CPU(0))
        loss = reduce_sum(back * weights)
        assert np.isclose(loss.numpy(), (values * factors).sum())
        passes = []

        def request():
            loss.backward(retain_graph=True)
            passes.append(1)

            def verify():
                assert isinstance(leaf.grad.carrier, TiledEvictable)
                assert np.array_equal(leaf.grad.numpy(), len(passes) * factors)

            return verify

        return request

    return scenario


PLAN = {"evict": (0, 1), "promote": (4,)}
SCENARIOS = {
    "to memory": outward(lambda: CPU(0)),
    "to a file": outward(FileBacked),
    "to more memory than needed": outward(lambda: CPU(300)),
    "from memory": inward(lambda: CPU(0)),
    "from a file": inward(FileBacked),
    "from memory past a policy": inward(lambda: CPU(0), plan=PLAN),
    "from a file to tiles that have no value": inward(FileBacked, primary=(), touched=(), start="nowhere"),
    "between tiles": between(),
    "between tiles past a policy": between(plan=PLAN),
    "back from memory": differentiating(lambda: CPU(0)),
    "back from a file": differentiating(FileBacked),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_fault_at_any_call_of_a_move(fail_everywhere, scenario, cpu_case):
    """Spec: *every affected Tensor and Carrier SHALL again be usable when the failure becomes terminal*."""
    assert fail_everywhere(scenario, *cpu_case)
