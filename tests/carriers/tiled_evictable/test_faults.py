"""A fault at every single call that can fail, in every kind of request: nothing is lost, nothing stays behind.

Each scenario runs once to count the calls that move bytes, allocate or ask the policy, and then once for each of
them with a fault at that call.
"""

import asyncio

import numpy as np
import pytest

from strideweave import (
    CPU,
    LRU,
    FileBacked,
    Generic,
    ResidencyPlan,
    Streaming,
    Tensor,
    TileSet,
    reduce_sum,
    row_major,
)
from strideweave.carriers.move import dispatch_move, registered_move_operation
from strideweave.carriers.tiled_evictable import streaming as streaming_module
from strideweave.io.files import OpenFile
from strideweave.io.spill import SpillDirectory

ALLOCATIONS = [
    (kind, name)
    for kind in (CPU, Generic, FileBacked)
    for name in ("allocate_like", "_allocate_result", "_allocate_in_place")
] + [(SpillDirectory, "create"), (OpenFile, "truncate")]


class Faults:
    """Counts the calls that can fail, and fails one of them."""

    def __init__(self, error):
        self.error, self.calls, self.fatal = error, 0, None
        self.armed = False

    def strike(self):
        """Whether this call fails; only those are counted that happen while the request runs."""
        self.calls += self.armed
        return self.armed and self.calls - 1 == self.fatal

    def check(self):
        if self.strike():
            raise self.error()


class Planned:
    """Gives one plan, at a call that can fail."""

    def __init__(self, faults, **plan):
        self.faults, self.answer = faults, ResidencyPlan(**plan)

    def plan(self, required, purpose):
        self.faults.check()
        return self.answer


@pytest.fixture
def place_faults(monkeypatch):
    def place(error, pair):
        faults = Faults(error)
        for owner, name in ALLOCATIONS:
            guard(faults, owner, name)
        contexts = []
        for source, destination in {pair, pair[::-1]}:
            real = dispatch_move(source, destination)

            class Failing(real):
                async def transfer(self, transfers):
                    faults.check()  # before it has done anything
                    if faults.strike():  # or when it has done the half
                        await super().transfer(transfers[: (len(transfers) + 1) // 2])
                        raise faults.error()
                    await super().transfer(transfers)

            contexts.append(registered_move_operation(source, destination, Failing, replace=True))
        return faults, contexts

    def guard(faults, owner, name):
        real = getattr(owner, name)

        def guarded(self, *arguments, **options):
            faults.check()
            return real(self, *arguments, **options)

        monkeypatch.setattr(owner, name, guarded)

    return place


def experts(*numbers):
    return TileSet([(number, 0, 0) for number in numbers])


def dirty(model, *numbers):
    for number in numbers:
        model.carrier[number * 24] = model.values[number, 0, 0] = -number - 1.0


def projecting(*numbers, size=None):
    """Project experts; into a destination of ``size`` slots."""

    def run(model):
        model.destination = None if size is None else model.carrier.primary.new_like([7.0] * size)
        yield
        found = model.project(*numbers, destination=model.destination).wait(10)
        assert np.array_equal(found.numpy(), model.values[list(numbers)])

    return run


def calling(method, *numbers):
    """Promote or evict experts."""

    def run(model):
        yield
        getattr(model.carrier, method)(experts(*numbers))
        there = set(model.primary())
        assert set(numbers) <= there if method == "promote" else not set(numbers) & there

    return run


def writing(number):
    def run(model):
        before = model.values[number, 0, 0]
        yield
        model.carrier[number * 24] = before + 0.5
        model.values[number, 0, 0] = before + 0.5

    return run


def compact_of(model, *numbers):
    """Values for experts, on a carrier of the compute class."""
    values = -np.arange(len(numbers) * 24.0).reshape(-1, 4, 6) - 1
    model.destination = None
    model.compact = Tensor(model.carrier.primary.new_like(values.ravel()), 0, row_major(len(numbers), 4, 6))
    return values


def scattering(*numbers, reduction):
    """Scatter to experts; what comes out is read slot by slot, which allocates nothing."""

    def run(model):
        values = compact_of(model, *numbers)
        selection = model.select(*numbers)
        yield
        result = model.carrier.scatter(model.compact, model.tensor, selection, reduction).wait(10)
        assert result.version == 1
        found = [[result[number, row, column] for row, column in np.ndindex(4, 6)] for number in numbers]
        found = np.reshape(found, values.shape)
        assert np.array_equal(found, values + model.values[list(numbers)] if reduction == "add" else values)

    return run


def assigning(*numbers):
    """Write whole experts in place."""

    def run(model):
        values = compact_of(model, *numbers)
        yield
        model.carrier.assign(model.compact, model.tensor, model.select(*numbers)).wait(10)
        model.values[list(numbers)] = values

    return run


def differentiating(model):
    """Go back through a scatter and two projections that overlap, twice."""
    compact_of(model, 3, 1)
    carrier, selection = model.carrier, model.select(3, 1)
    model.tensor.grad = model.compact.grad = None
    result = carrier.scatter(model.compact, model.tensor, selection, "add").wait(10)
    seen = result.carrier.project(result, model.select(1)).wait(10)
    beside = carrier.project(model.tensor, model.select(1, 4)).wait(10)
    loss = reduce_sum(seen) + reduce_sum(beside)
    yield
    try:
        loss.backward(retain_graph=True)
    except BaseException:
        assert model.tensor.grad is model.compact.grad is None
        raise
    first = model.tensor.grad
    try:
        loss.backward()
    except BaseException:
        assert model.tensor.grad is first
        raise
    finally:
        assert first.numpy()[:, 0, 0].tolist() == [0, 2, 0, 0, 1, 0, 0, 0]
    assert model.tensor.grad.numpy()[:, 0, 0].tolist() == [0, 4, 0, 0, 2, 0, 0, 0]
    assert model.compact.grad.numpy()[:, 0, 0].tolist() == [0, 2]


def reading(model):
    yield
    assert np.array_equal(model.tensor.numpy(), model.values)


# What is primary (dirty where said) when the request begins, the request, and the policy's plan.
SCENARIOS = {
    "project missing": ([], [], projecting(3, 1, 5), None),
    "project all sorts": ([1, 2], [2], projecting(3, 1, 2, 0), None),
    "project into an empty destination": ([1], [], projecting(3, 1), {"size": 0}),
    "project": ([1], [], projecting(3, 1, size=0), None),
    "project into a large destination": ([1], [1], projecting(3, 1, size=100), None),
    "project few resident": ([1, 2], [], projecting(2, 1), None),
    "project few resident into a destination": ([1, 2], [], projecting(2, 1, size=50), None),
    "stream": ([1], [1], projecting(4, 1, 2, 0, 7), {"evict": (0, 1, 2, 4, 7)}),
    "stream into a destination": ([1], [], projecting(4, 1, 2, 0, 7, size=120), {"evict": (0, 1, 2, 4, 7)}),
    "stream some": ([1], [1], projecting(4, 1, 2, 0, size=0), {"evict": (0, 1)}),
    "give up tiles first": ([0, 1, 2], [0, 2], projecting(3, 4), {"evict": (0, 1, 2)}),
    "give up and plan ahead": ([0, 1], [0], projecting(3), {"evict": (0, 1), "promote": (6, 7)}),
    "plan ahead": ([0], [], projecting(3, 0), {"promote": (3, 6), "retain": (0, 1)}),
    "promote": ([1], [1], calling("promote", 0, 1, 2), None),
    "evict": ([0, 1, 2], [1, 2], calling("evict", 0, 1, 2, 3), None),
    "write far": ([1], [1], writing(5), None),
    "write near": ([1], [], writing(1), None),
    "read everything": ([1], [1], reading, None),
    "scatter": ([1], [1], scattering(3, 1, 0, reduction="replace"), None),
    "scatter and plan": (
        [1, 2],
        [1],
        scattering(3, 1, reduction="replace"),
        {"promote": (3, 6), "evict": (1, 2)},
    ),
    "scatter onto values": ([1], [1], scattering(3, 1, 0, reduction="add"), None),
    "scatter onto values that stream": (
        [1, 2],
        [1],
        scattering(4, 1, 0, 7, reduction="add"),
        {"evict": (0, 1, 2, 7), "promote": (4, 6)},
    ),
    "assign": ([1, 2], [1], assigning(4, 1, 0, 2), None),
    "differentiate": ([1], [], differentiating, None),
}
PAIRS = [(CPU, FileBacked), (CPU, CPU), (Generic, FileBacked), (CPU, Generic)]
ERRORS = {
    "OSError": lambda: OSError(28, "No space left on device"),
    "MemoryError": MemoryError,
    "CancelledError": asyncio.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(kind.__name__ for kind in pair))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_fault_at_any_call(make_model, place_faults, monkeypatch, scenario, pair, error):
    monkeypatch.setattr(streaming_module, "STAGING_BYTES", 2 * 96)  # a stream takes several waves
    faults, contexts = place_faults(error, pair)
    for context in contexts:
        context.__enter__()
    try:
        count = attempt(make_model, faults, scenario, pair, None)
        for fatal in range(count):
            attempt(make_model, faults, scenario, pair, fatal)
    finally:
        for context in reversed(contexts):
            context.__exit__(None, None, None)


def attempt(make_model, faults, scenario, pair, fatal):
    """Run a scenario with a fault at one call, or none; give how many calls could have failed."""
    primary, touched, request, plan = SCENARIOS[scenario]
    plan = {name: experts(*tiles) for name, tiles in (plan or {}).items() if name != "size"}
    policy = Planned(faults, **plan) if plan else None
    model = make_model(primary=pair[0], secondary=pair[1], policy=policy)
    model.carrier.promote(experts(*primary))
    dirty(model, *touched)
    steps = request(model)
    next(steps)
    before, version = model.snapshot(), model.carrier.version
    values = model.values.copy()
    faults.calls, faults.fatal, faults.armed = 0, fatal, True
    failed = None
    try:
        next(steps, None)
    except (RuntimeError, type(faults.error())) as caught:  # a task that is cancelled reports a RuntimeError
        failed = caught
    finally:
        faults.armed = False
    if fatal is None:
        assert failed is None
    check_outcome(model, before, version, values, failed)
    if failed is not None:  # and it can be tried again
        steps = request(model)
        next(steps)
        next(steps, None)
        assert model.at_rest()
        assert np.array_equal(model.tensor.numpy(), model.values)
    return faults.calls


def check_outcome(model, before, version, values, failed):
    assert model.at_rest()
    destination = getattr(model, "destination", None)
    if destination is not None:
        assert destination.is_mutable()
    compact = getattr(model, "compact", None)
    if compact is not None:
        assert compact.carrier.is_mutable()
        assert compact.version == 0
    if failed is None:
        return
    assert np.array_equal(model.values, values)
    assert model.carrier.primary_tiles == before[0]
    assert set(model.carrier.dirty_tiles) <= set(before[2])
    assert model.carrier.version == version
    assert model.snapshot()[4:] == before[4:]
    if destination is not None:
        assert destination.version == 0
        assert all(destination[slot] == 7.0 for slot in range(destination.size()))
    assert np.array_equal(model.tensor.numpy(), values)


def test_policies_that_keep_books_go_on_after_a_fault(make_model, control_moves):
    """What they believe of residency may be wrong after a failure; values and bounds hold all the same."""
    for policy in (LRU(max_tiles=2), Streaming()):
        model = make_model(policy=policy)
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
