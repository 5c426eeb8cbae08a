"""A fault at every single call that can fail: nothing is lost, nothing stays behind, and it can be tried again.

A scenario runs once to count the calls that move bytes, allocate, use a worker or ask the policy, and then once for
each of them with a fault at that call.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest

from descriptors import descriptors, open_what_stays
from strideweave import CPU, FileBacked, Generic, ResidencyPlan, Tensor, TiledEvictable, row_major
from strideweave.carriers.move import dispatch_move, registered_move_operation
from strideweave.io.files import OpenFile
from strideweave.io.spill import SpillDirectory
from strideweave.runtime.workers import run_jobs
from tiled_tensors import experts
from waiting import let_the_loop_turn

TILE_BYTES = 96
ATTEMPTS = 6
ERRORS = {
    "OSError": lambda: OSError(28, "No space left on device"),
    "MemoryError": MemoryError,
    "CancelledError": asyncio.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
}
ALLOCATIONS = [
    *product(
        (CPU, Generic, FileBacked), ("allocate_like", "_allocate_result", "_allocate_in_place", "_adopt_like")
    ),
    (SpillDirectory, "create"),
    (OpenFile, "truncate"),
]
CASES = {
    **{f"CPU-FileBacked-{error}": ((CPU, FileBacked), error, None) for error in ERRORS},
    "CPU-CPU": ((CPU, CPU), "OSError", None),
    "Generic-FileBacked": ((Generic, FileBacked), "MemoryError", None),
    "within a memory limit": ((CPU, FileBacked), "OSError", "tight"),
    "CPU-CPU within a memory limit": ((CPU, CPU), "CancelledError", "tight"),
}


class Faults:
    """Counts the calls that can fail, and fails one of them."""

    def __init__(self):
        self.error, self.calls, self.fatal, self.armed = OSError, 0, None, False
        self._lock = threading.Lock()

    def strike(self):
        """Whether this call fails; only those are counted that happen while the request runs."""
        with self._lock:
            self.calls += self.armed
            return self.armed and self.calls - 1 == self.fatal

    def check(self):
        if self.strike():
            raise self.error()

    def guard(self, patch, owner, name):
        real = getattr(owner, name)

        def guarded(this, *arguments, **options):
            self.check()
            return real(this, *arguments, **options)

        patch.setattr(owner, name, guarded)

    def failing(self, real):
        """A move whose every transfer may fail, before it has done anything or when it has done the half."""
        faults = self

        class Failing(real):
            async def transfer(self, transfers):
                faults.check()
                if faults.strike():
                    await super().transfer(transfers[: (len(transfers) + 1) // 2])
                    raise faults.error()
                await super().transfer(transfers)

        return Failing

    async def start_jobs(self, jobs):
        """As the real one, or it fails before the first job."""
        self.check()
        await run_jobs(jobs)

    async def run_jobs(self, jobs):
        """As the real one; it may fail, too, after half of the jobs and in a worker."""
        self.check()
        if self.strike():

            def fail():
                raise self.error()

            jobs = [*jobs[: (len(jobs) + 1) // 2], fail]
        await run_jobs(jobs)


class Planned:
    """Gives one plan, at a call that can fail."""

    def __init__(self, faults, **plan):
        self.faults, self.answer = faults, ResidencyPlan(**plan)

    def plan(self, required, purpose):
        self.faults.check()
        return self.answer


@dataclass
class World:
    """What a scenario works with, and what has to be as it was when its request has failed."""

    make_model: Callable
    faults: Faults
    pair: tuple[type, type]
    limit: int | None
    models: list = field(default_factory=list)
    dense: list = field(default_factory=list)  # Tensors that no request may change
    leaves: list = field(default_factory=list)  # Tensors whose gradients only a whole success may change
    checks: list = field(default_factory=list)  # of what else a failure leaves as it was
    written: list = field(default_factory=list)  # carriers of whose slots one is written by itself
    spoilt: list = field(default_factory=list)  # carriers whose values a failed move leaves unspecified

    def model(
        self, primary=(), touched=(), *, start="secondary", plan=None, limited=True, requires_grad=False
    ):
        """A model with some tiles primary and some of these dirty."""
        tiles = {name: experts(*numbers) for name, numbers in (plan or {}).items()}
        model = self.make_model(
            start,
            primary=self.pair[0],
            secondary=self.pair[1],
            policy=Planned(self.faults, **tiles) if plan else None,
            memory_limit=self.limit if limited else None,
            keep=False,
        )
        model.tensor = Tensor(model.carrier, 0, row_major(8, 4, 6), requires_grad=requires_grad)
        self.models.append(model)
        if primary:
            model.carrier.promote(experts(*primary))
        for number in touched:
            model.carrier[number * 24] = model.values[number, 0, 0] = -number - 1.0
        if requires_grad:
            self.leaves.append(model.tensor)
        return model

    def compact(self, *shape, requires_grad=False):
        """A dense Tensor on the compute class, and its values."""
        values = -np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape) - 1
        like = self.pair[0](0) if self.pair[0] is CPU else Generic([])
        tensor = Tensor(like.new_like(values.ravel()), 0, row_major(*shape), requires_grad=requires_grad)
        self.dense.append((tensor, values))
        if requires_grad:
            self.leaves.append(tensor)
        return tensor, values

    def state(self):
        tiled = [
            (model.carrier, model.snapshot(), model.values.copy())
            for model in self.models
            if not model.carrier.is_released()
        ]
        grads = [leaf.grad for leaf in self.leaves]
        return tiled, [(grad, *(() if grad is None else resident_values(grad))) for grad in grads]

    def check_unchanged(self, before, *, interrupted):
        tiled, grads = before
        for carrier, snapshot, values in tiled:
            assert not carrier.is_released()
            model = next(model for model in self.models if model.carrier is carrier)
            if carrier in self.spoilt:
                continue
            primary, _, dirty, *rest = model.snapshot()
            assert primary == snapshot[0]
            assert set(dirty) <= set(snapshot[2])
            version, *others = snapshot[3:]
            # A write that was interrupted may have changed the value, for all that its caller can know.
            counts = interrupted and carrier in self.written
            assert rest in ([version, *others], [version + counts, *others])
            assert np.array_equal(model.values, values)
            assert np.array_equal(model.tensor.numpy(), values)
        for check in self.checks:
            check()
        for leaf, (grad, *known) in zip(self.leaves, grads, strict=True):
            assert leaf.grad is grad
            if grad is not None:
                primary, values = resident_values(grad)
                # What read it before the fault may have made room for that, but nothing came to it.
                assert primary == known[0] or (self.limit and set(primary) <= set(known[0]))
                assert np.array_equal(values, known[1])

    def check_at_rest(self):
        for model in self.models:
            assert model.carrier.is_released() or model.at_rest()
        for tensor, values in self.dense:
            if not tensor.carrier.is_released() and tensor.carrier not in self.spoilt:
                assert tensor.carrier.is_mutable()
                assert tensor.version == 0
                assert np.array_equal(tensor.numpy(), values)

    def check_values(self):
        for model in self.models:
            assert model.carrier.is_released() or np.array_equal(model.tensor.numpy(), model.values)


class Born:
    """The tiled carriers that were made since, and which of them still live."""

    def __init__(self, patch):
        self.found = []
        real = TiledEvictable.__init__

        def noted(this, *arguments, **options):
            self.found.append(weakref.ref(this))
            real(this, *arguments, **options)

        patch.setattr(TiledEvictable, "__init__", noted)

    def forget(self):
        self.found.clear()

    def living(self):
        return [carrier for ref in self.found if (carrier := ref()) is not None]


def resident_values(tensor):
    """Which tiles are primary, where there are tiles, and what a Tensor holds."""
    carrier = tensor.carrier
    primary = carrier.primary_tiles if isinstance(carrier, TiledEvictable) else None
    return primary, tensor.numpy(copy=True)


def settles(condition):
    """Whether a condition comes true once the loop has let go of what it held."""
    for turn in range(40):
        if condition():
            return True
        if turn % 10 == 9:
            gc.collect()
        let_the_loop_turn()
    return False


@pytest.fixture
def fail_everywhere(make_model, monkeypatch):
    """Run a scenario without a fault, and then with one at each call in turn."""
    open_what_stays()
    faults, born = Faults(), Born(monkeypatch)

    def attempt(scenario, pair, limit, fatal):
        before = descriptors()
        world = World(make_model, faults, pair, limit)
        request = scenario(world)
        state = world.state()
        born.forget()
        faults.calls, faults.fatal, faults.armed = 0, fatal, True
        verify, failed = None, False
        expected = (
            () if fatal is None else (RuntimeError, type(faults.error()))
        )  # a cancelled task: RuntimeError
        try:
            verify = request()
        except expected:
            failed = True
        finally:
            faults.armed = False
        calls = faults.calls
        if failed:
            world.check_at_rest()
            world.check_unchanged(state, interrupted=isinstance(faults.error(), KeyboardInterrupt))
            assert settles(lambda: not born.living()), "something half-made lives on"
            verify = request()
        verify()
        world.check_at_rest()
        world.check_values()
        close(world)
        del world, verify, request, state
        assert settles(lambda: descriptors() <= before), "a file was left open"
        return calls

    def close(world):
        for model in world.models:
            model.carrier.release()
        for leaf in world.leaves:
            leaf.grad = None

    def tightest(scenario, pair):
        """The smallest memory limit under which the scenario runs at all."""
        for quarters in range(4, 64, 2):
            limit = quarters * TILE_BYTES // 4
            try:
                attempt(scenario, pair, limit, None)
            except MemoryError as error:
                if "memory_limit" not in str(error):
                    raise
                continue
            return limit
        raise AssertionError("it runs under no limit")

    def run(scenario, pair, error, limit, turn, *, inline=True, attempts=ATTEMPTS):
        for name, module in [*sys.modules.items()]:
            if not name.startswith("strideweave.carriers."):
                continue
            for constant in ("STAGING_BYTES", "WINDOW_BYTES"):
                if hasattr(module, constant):
                    monkeypatch.setattr(module, constant, 2 * TILE_BYTES)  # what streams takes several waves
            if not inline and hasattr(module, "INLINE_BYTES"):
                monkeypatch.setattr(module, "INLINE_BYTES", 0)
            if getattr(module, "run_jobs", None) is run_jobs:
                # Writing in place cannot fail, so it comes last, when all that can has been done.
                in_place = name.endswith(".tile_values")
                monkeypatch.setattr(module, "run_jobs", faults.start_jobs if in_place else faults.run_jobs)
        for owner, name in ALLOCATIONS:
            faults.guard(monkeypatch, owner, name)
        let_the_loop_turn()  # it opens descriptors once
        faults.error = ERRORS[error]
        with ExitStack() as stack:
            for ends in product({*pair, CPU, FileBacked}, repeat=2):
                failing = faults.failing(dispatch_move(*ends))
                stack.enter_context(registered_move_operation(*ends, failing, replace=True))
            if limit == "tight":
                limit = tightest(scenario, pair)
            count = attempt(scenario, pair, limit, None)
            # Where there are many, each case takes its share of them, and together they take all.
            step = max(1, -(-count // attempts))
            for fatal in range(turn % step, count, step):
                attempt(scenario, pair, limit, fatal)
        return count

    return run


@pytest.fixture
def some_case():
    """One of the cases, where the others would tell nothing more."""
    return (CPU, FileBacked), "OSError", None, 0


def pytest_generate_tests(metafunc):
    cases = {name: (*case, turn) for turn, (name, case) in enumerate(CASES.items())}
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases.values(), ids=cases)
    if "cpu_case" in metafunc.fixturenames:
        cases = {name: case for name, case in cases.items() if case[0][0] is CPU and case[1] != "MemoryError"}
        metafunc.parametrize("cpu_case", cases.values(), ids=cases)
