"""A fault at every call of projections, residency requests, slot access, scatters, whole writes and their gradients.

Spec: *Residency remains valid while tiled work needs it*; *Residency transitions have asynchronous and blocking
forms*; *Scatter is the asynchronous projection counterpart*.
"""

import numpy as np
import pytest

from strideweave import CPU, LRU, S3FIFO, FileBacked, Streaming, TileSet, reduce_sum


def projecting(*numbers, size=None, primary=(1,), touched=(), plan=None):
    """Project experts; into a destination of ``size`` slots, which a failure leaves as it was."""

    def scenario(world):
        model = world.model(primary, touched, plan=plan)
        destination = None if size is None else model.carrier.primary.new_like([7.0] * size)

        def check_destination():
            assert destination.version == 0
            assert [destination[slot] for slot in range(destination.size())] == [7.0] * destination.size()
            assert destination.is_mutable()

        if size is not None:
            world.checks.append(check_destination)

        def request():
            found = model.project(*numbers, destination=destination).wait(10)

            def verify():
                assert np.array_equal(found.numpy(), model.values[list(numbers)])
                assert destination is None or destination.version == 1

            return verify

        return request

    return scenario


def calling(method, *numbers, primary=(1,), touched=()):
    """Promote or evict experts."""

    def scenario(world):
        model = world.model(primary, touched)

        def request():
            getattr(model.carrier, method)(TileSet([(number, 0, 0) for number in numbers]))

            def verify():
                there = set(model.primary())
                assert set(numbers) <= there if method == "promote" else not set(numbers) & there

            return verify

        return request

    return scenario


def flushing(*touched, durable, primary=(1, 2, 3)):
    """Write dirty experts to the slow tier, where they stay."""

    def scenario(world):
        model = world.model(primary, touched)

        def request():
            model.carrier.flush(durable=durable)

            def verify():
                assert (model.primary(), model.dirty()) == (sorted(primary), [])

            return verify

        return request

    return scenario


def writing(number):
    def scenario(world):
        model = world.model([1], [1])
        world.written.append(model.carrier)

        def request():
            model.carrier[number * 24] = 0.5

            def verify():
                model.values[number, 0, 0] = 0.5
                assert number in model.dirty()

            return verify

        return request

    return scenario


def reading(world):
    model = world.model([1], [1])

    def request():
        found = model.tensor.numpy()
        return lambda: check_equal(found, model.values)

    return request


def check_equal(found, expected):
    assert np.array_equal(found, expected)


def scattering(*numbers, reduction, primary=(1,), touched=(1,), plan=None):
    """Scatter to experts; what comes out holds these and nothing else."""

    def scenario(world):
        model = world.model(primary, touched, plan=plan)
        compact, values = world.compact(len(numbers), 4, 6)

        def request():
            result = model.carrier.scatter(compact, model.tensor, model.select(*numbers), reduction).wait(10)

            def verify():
                carrier = result.carrier
                assert result.version == 1
                assert [tile[0] for tile in carrier.valid_tiles.coordinates] == sorted(numbers)
                wanted = values + model.values[list(numbers)] if reduction == "add" else values
                check_equal(carrier.project(result, model.select(*numbers)).wait(10).numpy(), wanted)

            return verify

        return request

    return scenario


def assigning(*numbers):
    """Write whole experts in place."""

    def scenario(world):
        model = world.model([1, 2], [1])
        compact, values = world.compact(len(numbers), 4, 6)

        def request():
            model.carrier.assign(compact, model.tensor, model.select(*numbers)).wait(10)

            def verify():
                model.values[list(numbers)] = values
                assert set(numbers) <= set(model.dirty())

            return verify

        return request

    return scenario


def differentiating(reduction, plan=None):
    """Go back through a scatter and two projections that overlap, onto what an earlier pass has left."""

    def scenario(world):
        model = world.model([1], requires_grad=True, plan=plan)
        compact, _ = world.compact(2, 4, 6, requires_grad=True)
        carrier = model.carrier
        result = carrier.scatter(compact, model.tensor, model.select(3, 1), reduction).wait(10)
        seen = result.carrier.project(result, result.carrier.select({0: [1]})).wait(10)
        beside = model.project(1, 4).wait(10)
        loss = reduce_sum(seen) + reduce_sum(beside)
        passes = []
        wanted = np.array([0, 2 if reduction == "add" else 1, 0, 0, 1, 0, 0, 0])

        def request():
            loss.backward(retain_graph=True)
            passes.append(1)

            def verify():
                count = len(passes)
                assert (model.tensor.grad.numpy() == count * wanted[:, None, None]).all()
                assert compact.grad.numpy()[:, 0, 0].tolist() == [0, count]

            return verify

        request()
        return request

    return scenario


def copying(world):
    """Copy a tiled gradient, as a pass does before it adds to one that somebody refers to."""
    model = world.model([1, 2], [1])

    def request():
        copy = model.carrier._copy_gradient(model.tensor)
        return lambda: check_equal(copy.numpy(), model.values)

    return request


STREAM = {"evict": (0, 1, 2, 4, 7)}
SCENARIOS = {
    "project missing": projecting(3, 1, 5, primary=()),
    "project all sorts": projecting(3, 1, 2, 0, primary=(1, 2), touched=(2,)),
    "project into an empty destination": projecting(3, 1, size=0),
    "project into a large destination": projecting(3, 1, size=100, touched=(1,)),
    "project few resident": projecting(2, 1, primary=(1, 2)),
    "project few resident into a destination": projecting(2, 1, size=50, primary=(1, 2)),
    "stream": projecting(4, 1, 2, 0, 7, touched=(1,), plan=STREAM),
    "stream into a destination": projecting(4, 1, 2, 0, 7, size=120, plan=STREAM),
    "stream some": projecting(4, 1, 2, 0, size=0, touched=(1,), plan={"evict": (0, 1)}),
    "give up tiles first": projecting(3, 4, primary=(0, 1, 2), touched=(0, 2), plan={"evict": (0, 1, 2)}),
    "give up and plan ahead": projecting(
        3, primary=(0, 1), touched=(0,), plan={"evict": (0, 1), "promote": (6, 7)}
    ),
    "plan ahead": projecting(3, 0, primary=(0,), plan={"promote": (3, 6), "retain": (0, 1)}),
    "promote": calling("promote", 0, 1, 2, touched=(1,)),
    "evict": calling("evict", 0, 1, 2, 3, primary=(0, 1, 2), touched=(1, 2)),
    "flush": flushing(1, 3, durable=False),
    "flush durably": flushing(1, 3, durable=True),
    "be durable": flushing(durable=True),
    "write far": writing(5),
    "write near": writing(1),
    "read everything": reading,
    "scatter": scattering(3, 1, 0, reduction="replace"),
    "scatter and plan": scattering(
        3, 1, reduction="replace", primary=(1, 2), plan={"promote": (3, 6), "evict": (1, 2)}
    ),
    "scatter onto values": scattering(3, 1, 0, reduction="add"),
    "scatter onto values that stream": scattering(
        4, 1, 0, 7, reduction="add", primary=(1, 2), plan={"evict": (0, 1, 2, 7), "promote": (4, 6)}
    ),
    "assign": assigning(4, 1, 0, 2),
    "assign where others make room": assigning(4, 0),
    "copy a gradient": copying,
    "differentiate replacing": differentiating("replace"),
    "differentiate adding": differentiating("add"),
    "differentiate with a plan": differentiating("add", {"evict": (1, 3), "promote": (6,)}),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_fault_at_any_call(fail_everywhere, scenario, case):
    """Spec: *A failed residency request SHALL retain the complete set's prior residency*."""
    fail_everywhere(scenario, *case)


@pytest.mark.parametrize(
    "name",
    ["project all sorts", "stream", "scatter onto values that stream", "assign", "differentiate adding"],
)
def test_a_fault_at_any_call_where_workers_copy(fail_everywhere, some_case, name):
    """Copies in worker threads fail as others do."""
    assert fail_everywhere(SCENARIOS[name], *some_case, inline=False)


@pytest.mark.parametrize("policy", [lambda: LRU(max_tiles=2), lambda: S3FIFO(max_tiles=2), Streaming])
def test_policies_that_keep_books_go_on_after_a_fault(make_model, control_moves, policy):
    """What they believe of residency may be wrong after a failure; values and bounds hold all the same."""
    model = make_model(policy=policy())
    reads = control_moves(FileBacked, CPU)
    rng = np.random.default_rng(3)
    for _ in range(40):
        chosen = rng.permutation(8)[: rng.integers(1, 5)].tolist()
        if rng.random() < 0.3:
            reads.failures.append(OSError("broken"))
        try:
            model.check(*chosen)
        except OSError:
            continue
        assert model.at_rest()
    reads.failures.clear()
    for number in range(8):
        model.check(number)
    assert len(model.primary()) <= 2
