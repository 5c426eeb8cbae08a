"""Any sequence of scatters, projections, whole writes and backward passes against arrays of what must come of it.

The values of the template, of every scatter result that is kept, and every gradient have a model in NumPy; transfers
fail on demand. In the end everything goes, and gives back memory and descriptors.
"""

import gc
import sys
import threading
import weakref
from contextlib import ExitStack

import anyio.to_thread
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from descriptors import descriptors, open_what_stays
from strideweave import (
    CPU,
    LRU,
    S3FIFO,
    FileBacked,
    KeepResident,
    PendingWorkError,
    ReleasedError,
    Streaming,
    Tensor,
    TiledEvictable,
    TileSelection,
    reduce_sum,
    row_major,
)
from strideweave.carriers.move import dispatch_move, registered_move_operation
from strideweave.carriers.tiled_evictable import streaming as streaming_module
from strideweave.errors import InvalidTileError
from strideweave.tiles.grid import TileGrid
from strideweave.tiling import tile_major_layout
from waiting import let_the_loop_turn

GRID, TILE, SHAPE, TILE_BYTES = (3, 2), (2, 3), (6, 6), 24
LAYOUT = tile_major_layout(TileGrid(GRID, TILE))
MOST_RESULTS = 3
selections = st.tuples(
    st.permutations(range(3)).flatmap(lambda order: st.integers(1, 3).map(lambda count: order[:count])),
    st.permutations(range(2)).flatmap(lambda order: st.integers(1, 2).map(lambda count: order[:count])),
)
failures = st.lists(st.booleans(), max_size=5)
policies = st.sampled_from(
    [None, KeepResident, Streaming, lambda: LRU(max_tiles=2), lambda: S3FIFO(max_tiles=2)]
)


def elements(per_axis):
    """Which elements of the full array a selection takes, in its order."""
    rows = [2 * x + row for x in per_axis[0] for row in range(2)]
    columns = [3 * y + column for y in per_axis[1] for column in range(3)]
    return np.ix_(rows, columns)


class Leaf:
    """A Tensor that takes gradients, and what these must be."""

    def __init__(self, tensor, values):
        self.tensor, self.values, self.gradient = tensor, values, None

    def add(self, share):
        if share is not None:
            self.gradient = share + (0 if self.gradient is None else self.gradient)

    def check(self):
        if self.gradient is None:
            assert self.tensor.grad is None
        else:
            assert np.array_equal(self.tensor.grad.numpy(), self.gradient)


class Result:
    """What a scatter gave: NaN where it has no value."""

    def __init__(self, tensor, values, compact, per_axis, reduction):
        self.tensor, self.values = tensor, values
        self.compact, self.per_axis, self.reduction = compact, per_axis, reduction


class GradientMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        open_what_stays()
        self.descriptors = descriptors()
        self.stack = ExitStack()
        self.failures, self.results, self.leaves, self.made = [], [], [], []
        self.gate, self.entered = threading.Event(), threading.Event()

    @initialize(
        slow=st.sampled_from([CPU, FileBacked]), policy=policies, limit=st.sampled_from([None, 6, 3, 2.5])
    )
    def make(self, slow, policy, limit):
        self.gate.set()
        for pair in {(CPU, slow), (slow, CPU)}:
            self.place_failures(pair)
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(streaming_module, "STAGING_BYTES", 2 * TILE_BYTES)
        values = np.arange(36, dtype=np.float32).reshape(SHAPE)
        self.limit = limit and int(limit * TILE_BYTES)
        storage = np.empty(36, np.float32)
        for slot, (i, j) in ((LAYOUT((i, j)), (i, j)) for i in range(6) for j in range(6)):
            storage[slot] = values[i, j]
        source = CPU(0).new_like(storage) if slow is CPU else FileBacked().new_like(storage)
        carrier = TiledEvictable(
            CPU(0), source, GRID, TILE, residency_policy=policy and policy(), memory_limit=self.limit
        )
        self.template = Leaf(Tensor(carrier, 0, LAYOUT, requires_grad=True), values)
        self.leaves.append(self.template)

    def place_failures(self, pair):
        machine, real = self, dispatch_move(*pair)

        class Failing(real):
            async def transfer(self, transfers):
                machine.entered.set()
                if machine.failures and machine.failures.pop(0):
                    await super().transfer(transfers[: len(transfers) // 2])
                    raise OSError(28, "No space left on device")
                if not machine.gate.is_set():
                    await anyio.to_thread.run_sync(machine.gate.wait)
                await super().transfer(transfers)

        self.stack.enter_context(registered_move_operation(*pair, Failing, replace=True))

    @property
    def carrier(self):
        return self.template.tensor.carrier

    def may_fail(self, call, failures):
        """What the call gives, or None where a failure that was placed, or the memory limit, ended it."""
        self.failures = [*failures]
        try:
            return call()
        except OSError:
            assert any(failures)
        except MemoryError as error:
            assert self.limit is not None
            assert "memory_limit" in str(error)
        finally:
            self.failures = []
        return None

    def compact(self, per_axis, start):
        shape = (2 * len(per_axis[0]), 3 * len(per_axis[1]))
        values = np.arange(start, start + shape[0] * shape[1], dtype=np.float32).reshape(shape)
        return Leaf(Tensor(CPU(0).new_like(values.ravel()), 0, row_major(*shape), requires_grad=True), values)

    # Requests

    @precondition(lambda self: len(self.results) < MOST_RESULTS)
    @rule(
        per_axis=selections,
        start=st.integers(-9, 9),
        reduction=st.sampled_from(["replace", "add"]),
        fail=failures,
    )
    def scatter(self, per_axis, start, reduction, fail):
        compact, selection = self.compact(per_axis, start), TileSelection(per_axis)
        tensor = self.may_fail(
            lambda: self.carrier.scatter(compact.tensor, self.template.tensor, selection, reduction).wait(10),
            fail,
        )
        assert compact.tensor.carrier.is_mutable()
        if tensor is None:
            return
        values, at = np.full(SHAPE, np.nan, np.float32), elements(per_axis)
        values[at] = compact.values + (self.template.values[at] if reduction == "add" else 0)
        assert set(tensor.carrier.valid_tiles) == set(selection.coordinates)
        self.results.append(Result(tensor, values, compact, per_axis, reduction))
        self.leaves.append(compact)
        self.made.append(weakref.ref(tensor.carrier))

    @precondition(lambda self: self.results)
    @rule(which=st.integers(0, MOST_RESULTS - 1), per_axis=selections, fail=failures)
    def project_a_result(self, which, per_axis, fail):
        result = self.results[which % len(self.results)]
        wanted = result.values[elements(per_axis)]
        project = result.tensor.carrier.project
        if np.isnan(wanted).any():
            with pytest.raises(InvalidTileError if self.limit is None else (InvalidTileError, MemoryError)):
                project(result.tensor, TileSelection(per_axis))
            return
        compact = self.may_fail(lambda: project(result.tensor, TileSelection(per_axis)).wait(10), fail)
        assert compact is None or np.array_equal(compact.numpy(), wanted)

    @precondition(lambda self: self.results)
    @rule(which=st.integers(0, MOST_RESULTS - 1))
    def drop_a_result(self, which):
        result = self.results.pop(which % len(self.results))
        result.tensor.carrier.release()
        self.leaves.remove(result.compact)

    @rule(per_axis=selections, start=st.integers(-9, 9), fail=failures)
    def assign(self, per_axis, start, fail):
        compact, at = self.compact(per_axis, start), elements(per_axis)

        def assign():
            self.carrier.assign(compact.tensor, self.template.tensor, TileSelection(per_axis)).wait(10)
            return True

        if self.may_fail(assign, fail):
            self.template.values[at] = compact.values

    @rule(per_axis=selections, evict=st.booleans(), fail=failures)
    def change_residency(self, per_axis, evict, fail):
        change = self.carrier.evict_async if evict else self.carrier.promote_async
        self.may_fail(lambda: change(TileSelection(per_axis)).wait(10), fail)

    @rule(
        seen=st.lists(st.tuples(selections, st.integers(1, 3)), min_size=1, max_size=3),
        through=st.lists(st.integers(0, MOST_RESULTS - 1), max_size=2),
        twice=st.booleans(),
        fail=failures,
    )
    def go_back(self, seen, through, twice, fail):
        """Through overlapping projections of the template, and of results back to both of their inputs."""
        shares = []

        def forward():
            shares.clear()
            loss = None
            for per_axis, weight in seen:
                compact = self.carrier.project(self.template.tensor, TileSelection(per_axis)).wait(10)
                part = reduce_sum(compact * float(weight))
                loss = part if loss is None else loss + part
                share = np.zeros(SHAPE, np.float32)
                share[elements(per_axis)] = weight
                shares.append((self.template, share))
            for which in through[: len(self.results)]:
                result = self.results[which % len(self.results)]
                carrier, selection = result.tensor.carrier, TileSelection(result.per_axis)
                loss = loss + reduce_sum(carrier.project(result.tensor, selection).wait(10))
                shares.append((result.compact, np.ones(result.compact.tensor.shape, np.float32)))
                if result.reduction == "add":
                    share = np.zeros(SHAPE, np.float32)
                    share[elements(result.per_axis)] = 1
                    shares.append((self.template, share))
            return loss

        loss = self.may_fail(forward, [])
        for _ in range(0 if loss is None else 1 + twice):
            if self.may_fail(lambda: loss.backward(retain_graph=True) is None, fail):
                for leaf, share in shares:
                    leaf.add(share)
        if self.template.tensor.grad is not None:
            self.made.append(weakref.ref(self.template.tensor.grad.carrier))

    @rule()
    def forget_gradients(self):
        for leaf in self.leaves:
            leaf.tensor.grad = leaf.gradient = None

    # What must hold

    @invariant()
    def everything_is_right(self):
        if not self.leaves:
            return
        assert np.array_equal(self.template.tensor.numpy(), self.template.values)
        for leaf in self.leaves:
            leaf.check()
        carriers = [self.carrier, *[result.tensor.carrier for result in self.results]]
        if self.template.tensor.grad is not None:
            carriers.append(self.template.tensor.grad.carrier)
        for carrier in carriers:
            found = carrier.statistics()
            assert (found.pending_requests, found.pinned_tiles, found.waiting_requests) == (0, 0, 0)
            assert (found.in_flight_bytes, found.staging_bytes, found.put_off_evictions) == (0, 0, 0)
            assert found.memory_bytes == found.resident_bytes + found.recycled_bytes
            assert carrier.memory_limit == self.limit
            assert self.limit is None or found.peak_memory_bytes <= self.limit

    def teardown(self):
        try:
            if self.leaves and sys.exc_info()[0] is None:  # else that error is the one to report
                self.release()
        finally:
            self.gate.set()
            self.stack.close()

    def release(self):
        """Refused while work is pending; then nothing remains of what was made."""
        carrier, tensor = self.carrier, self.template.tensor
        one = TileSelection([[0], [0]])
        carrier.evict(one)
        self.entered.clear()
        self.gate.clear()
        handle = carrier.project(tensor, one)
        assert self.entered.wait(10)
        with pytest.raises(PendingWorkError):
            carrier.release()
        assert not carrier.is_released()
        self.gate.set()
        assert np.array_equal(handle.wait(10).numpy(), self.template.values[:2, :3])
        carrier.release()
        with pytest.raises(ReleasedError):
            carrier.project(tensor, one)
        assert carrier.primary.is_released()
        assert carrier.secondary.is_released()
        gone = [*self.made, weakref.ref(carrier)]
        self.results, self.leaves, self.template = [], [], None
        del carrier, tensor, handle
        for turn in range(50):
            if all(ref() is None for ref in gone) and descriptors() <= self.descriptors:
                return
            let_the_loop_turn()
            if turn % 10 == 9:
                gc.collect()
        raise AssertionError([ref() for ref in gone], self.descriptors, descriptors())


TestGradientMachine = GradientMachine.TestCase
TestGradientMachine.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, report_multiple_bugs=False
)
