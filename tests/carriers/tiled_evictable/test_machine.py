"""Any sequence of requests, policies and failures against a dictionary of the values that must be there."""

from contextlib import ExitStack
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strideweave import (
    CPU,
    LRU,
    S3FIFO,
    FileBacked,
    Generic,
    KeepResident,
    ResidencyPlan,
    Streaming,
    Tensor,
    TileConflictError,
    TiledEvictable,
    TileSelection,
    TileSet,
    mul,
    reduce_sum,
    row_major,
)
from strideweave.carriers.move import dispatch_move, registered_move_operation
from strideweave.carriers.tiled_evictable import direct_request
from strideweave.carriers.tiled_evictable import streaming as streaming_module
from strideweave.operations.definition import apply
from strideweave.tiles.grid import TileGrid
from strideweave.tiling import tile_major_layout

GRID, TILE = (3, 2), (2, 3)
TILES = [(x, y) for y in range(2) for x in range(3)]
SHAPE, SLOTS, TILE_SLOTS = (6, 6), 36, 6

some_tiles = st.sets(st.sampled_from(TILES), min_size=1)
selections = st.tuples(
    st.permutations(range(3)).flatmap(lambda order: st.integers(1, 3).map(lambda count: order[:count])),
    st.permutations(range(2)).flatmap(lambda order: st.integers(1, 2).map(lambda count: order[:count])),
)


class Drawn:
    """Answers with the plan that the test has drawn, or raises it."""

    def __init__(self):
        self.answer = ResidencyPlan()

    def plan(self, required, purpose):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@st.composite
def plans(draw):
    part = {tile: draw(st.sampled_from(["promote", "retain", "evict", None])) for tile in TILES}
    return ResidencyPlan(
        **{
            name: TileSet([tile for tile, where in part.items() if where == name])
            for name in ("promote", "retain", "evict")
        }
    )


class TiledMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.failures = []  # for each transfer to come, whether it fails half-way
        self.broken = False  # whether allocations fail

    @initialize(
        primary=st.sampled_from([CPU, Generic]),
        secondary=st.sampled_from([CPU, Generic, FileBacked]),
        resident=st.booleans(),
        writable=st.booleans(),
        policy=st.sampled_from(
            [
                None,
                Drawn,
                KeepResident,
                Streaming,
                *[partial(kind, max_tiles=2) for kind in (LRU, S3FIFO)],
                partial(LRU, max_bytes=100),
            ]
        ),
        limit=st.sampled_from([None, None, 1, 2, 3, 4.5]),
    )
    def make(self, primary, secondary, resident, writable, policy, limit):
        self.memory = {slot: float(slot) for slot in range(SLOTS)}
        values = np.arange(SLOTS, dtype=np.float32)
        fast, slow = (
            Generic([]) if kind is Generic else kind() if kind is FileBacked else CPU(0)
            for kind in (primary, secondary)
        )
        self.place_failures(primary, secondary)
        self.limit = limit and int(limit * TILE_SLOTS * 4)
        if resident and limit is None:
            fast = fast.new_like(values)
        else:
            slow = slow.new_like(values, mutable=writable)
        self.policy = policy() if policy else None
        self.carrier = TiledEvictable(
            fast, slow, GRID, TILE, residency_policy=self.policy, memory_limit=self.limit
        )
        self.tensor = Tensor(self.carrier, 0, tile_major_layout(TileGrid(GRID, TILE)))
        self.version = 0

    def place_failures(self, primary, secondary):
        machine = self
        for pair in {(primary, secondary), (secondary, primary)}:
            real = dispatch_move(*pair)

            class Failing(real):
                async def transfer(self, transfers):
                    if machine.failures and machine.failures.pop(0):
                        await super().transfer(transfers[: len(transfers) // 2])
                        raise OSError(28, "No space left on device")
                    await super().transfer(transfers)

            self.stack.enter_context(registered_move_operation(*pair, Failing, replace=True))
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(streaming_module, "STAGING_BYTES", 2 * TILE_SLOTS * 4)  # several waves to a stream
        for kind in (CPU, Generic):
            for name in ("allocate_like", "_allocate_result", "_allocate_in_place"):
                self.make_scarce(patch, kind, name)

    def make_scarce(self, patch, kind, name):
        allocate = getattr(kind, name)

        def scarce(carrier, *arguments, **options):
            if self.broken:
                raise MemoryError("no memory left")
            return allocate(carrier, *arguments, **options)

        patch.setattr(kind, name, scarce)

    # What must hold

    def logical(self):
        """The values of the model in the Tensor's shape."""
        array = np.empty(SHAPE, np.float32)
        for ordinal, (x, y) in enumerate(TILES):
            slots = [self.memory[ordinal * TILE_SLOTS + within] for within in range(TILE_SLOTS)]
            array[2 * x : 2 * x + 2, 3 * y : 3 * y + 3] = np.reshape(slots, (2, 3))
        return array

    def compact(self, per_axis):
        rows = [2 * x + row for x in per_axis[0] for row in range(2)]
        columns = [3 * y + column for y in per_axis[1] for column in range(3)]
        return self.logical()[np.ix_(rows, columns)]

    def residency(self):
        return self.carrier.primary_tiles, self.carrier.dirty_tiles

    @invariant()
    def at_rest(self):
        if not hasattr(self, "carrier"):
            return
        carrier, found = self.carrier, self.carrier.statistics()
        assert found.pending_requests == found.pinned_tiles == 0
        assert found.in_flight_bytes == found.staging_bytes == found.put_off_evictions == 0
        assert found.resident_bytes == found.resident_tiles * found.tile_bytes
        assert found.recycled_bytes <= found.recycle_limit_bytes
        assert found.memory_bytes == found.resident_bytes + found.recycled_bytes
        if self.limit is not None:
            assert found.peak_memory_bytes <= self.limit
            assert (found.waiting_requests, carrier._traffic.budget.promised) == (0, (0, 0, 0))
        primary, secondary = set(carrier.primary_tiles), set(carrier.secondary_tiles)
        assert not primary & secondary
        assert primary | secondary == set(carrier.valid_tiles) == set(TILES)
        assert set(carrier.dirty_tiles) <= primary
        assert (found.resident_tiles, found.dirty_tiles) == (len(primary), len(carrier.dirty_tiles))
        assert carrier.version == self.version
        assert carrier.primary.is_owned()
        assert carrier.secondary.is_owned()
        assert not carrier.is_owned()

    # What can fail

    @rule(failures=st.lists(st.booleans(), max_size=4), broken=st.booleans())
    def begin_to_fail(self, failures, broken):
        self.failures, self.broken = failures, broken

    @precondition(lambda self: isinstance(self.policy, Drawn))
    @rule(answer=st.one_of(plans(), st.just(ZeroDivisionError("a bad policy"))))
    def change_the_policy(self, answer):
        self.policy.answer = answer

    def try_to(self, call, *, undone):
        """Give what the call returns, or None where an injected failure ended it, and everything is as it was."""
        (primary, dirty), failures = self.residency(), self.failures.count(True)
        try:
            return call()
        except (OSError, MemoryError, ZeroDivisionError) as error:
            if "memory_limit" in str(error):  # it can never fit, and nothing was begun
                assert self.residency() == (primary, dirty)
                return None
            bad_policy = isinstance(error, ZeroDivisionError)
            assert bad_policy or self.broken or failures > self.failures.count(True)
            single = not self.broken and failures == self.failures.count(True) + 1
            nothing_gave_way = self.policy is None and self.limit is None
            if undone and (nothing_gave_way or bad_policy or single):
                # Else a second failure may keep what made room for the request from coming back.
                assert self.carrier.primary_tiles == primary
                assert set(self.carrier.dirty_tiles) <= set(dirty)
            return None

    # Requests

    @rule(slot=st.integers(0, SLOTS - 1))
    def read(self, slot):
        before = self.residency()
        assert self.carrier[slot] == self.memory[slot]
        assert self.residency() == before

    @rule(slot=st.integers(0, SLOTS - 1), value=st.integers(-100, 100))
    def write(self, slot, value):
        def write():
            self.carrier[slot] = value
            return True

        if self.try_to(write, undone=True):
            self.memory[slot] = float(value)
            self.version += 1
            tile = TILES[slot // TILE_SLOTS]
            assert self.carrier.tile_state(tile).location == "primary"
            assert self.carrier.tile_state(tile).dirty

    @rule()
    def read_everything(self):
        before = self.residency()
        found = self.try_to(self.tensor.numpy, undone=True)
        assert found is None or np.array_equal(found, self.logical())
        assert self.residency() == before

    @rule(per_axis=selections, size=st.sampled_from([None, 0, SLOTS, 50]))
    def project(self, per_axis, size):
        broken, self.broken = self.broken, False
        primary = self.carrier.primary
        destination = None if size is None else primary.new_like([7.0] * size)
        self.broken = broken
        selection = TileSelection(per_axis)
        compact = self.try_to(
            lambda: self.carrier.project(self.tensor, selection, destination).wait(10), undone=True
        )
        if compact is not None:
            assert np.array_equal(compact.numpy(), self.compact(per_axis))
            if self.policy is None:
                assert set(selection.coordinates) <= set(self.carrier.primary_tiles)
        if destination is None:
            return
        assert destination.is_mutable()
        if compact is None:
            assert (destination.size(), destination.version) == (size, 0)
            assert [destination[slot] for slot in range(size)] == [7.0] * size
        else:
            assert compact.carrier is destination
            assert destination.version == 1
            rest = [destination[slot] for slot in range(compact.size, destination.size())]
            assert rest == [7.0] * len(rest)

    def compact_tensor(self, per_axis, start):
        """A compact Tensor, and its values."""
        shape = (2 * len(per_axis[0]), 3 * len(per_axis[1]))
        values = np.arange(start, start + shape[0] * shape[1], dtype=np.float32).reshape(shape)
        broken, self.broken = self.broken, False
        carrier = self.carrier.primary.new_like(values.ravel())
        self.broken = broken
        return Tensor(carrier, 0, row_major(*shape)), values

    @rule(per_axis=selections, start=st.integers(-50, 50), reduction=st.sampled_from(["replace", "add"]))
    def scatter(self, per_axis, start, reduction):
        compact, values = self.compact_tensor(per_axis, start)
        selection = TileSelection(per_axis)
        result = self.try_to(
            lambda: self.carrier.scatter(compact, self.tensor, selection, reduction).wait(10), undone=True
        )
        assert compact.carrier.is_mutable()
        assert compact.version == 0
        if result is None:
            return
        assert (result.version, result.carrier.memory_limit) == (1, self.limit)
        assert set(result.carrier.valid_tiles) == set(selection.coordinates)
        wanted = values + self.compact(per_axis) if reduction == "add" else values
        rows = [2 * x + row for x in per_axis[0] for row in range(2)]
        columns = [3 * y + column for y in per_axis[1] for column in range(3)]
        assert np.array_equal([[result[row, column] for column in columns] for row in rows], wanted)
        result.carrier.release()

    @rule(per_axis=selections, start=st.integers(-50, 50))
    def assign(self, per_axis, start):
        compact, values = self.compact_tensor(per_axis, start)
        selection = TileSelection(per_axis)
        if self.try_to(
            lambda: self.carrier.assign(compact, self.tensor, selection).wait(10) is None, undone=True
        ):
            self.version += 1
            for i, x in enumerate(per_axis[0]):
                for j, y in enumerate(per_axis[1]):
                    slots = values[2 * i : 2 * i + 2, 3 * j : 3 * j + 3].ravel()
                    first = TILES.index((x, y)) * TILE_SLOTS
                    self.memory.update(enumerate(slots.tolist(), first))
            assert set(selection.coordinates) <= set(self.carrier.dirty_tiles)
        assert compact.carrier.is_mutable()

    @rule(name=st.sampled_from(["add", "matmul", "reduce_sum"]), window=st.sampled_from([1, 40, 1 << 20]))
    def operate(self, name, window):
        """On all tiles, wherever they are; without a policy none of them goes elsewhere."""
        before, values = self.residency(), self.logical()
        tensor = Tensor(self.carrier, 0, self.tensor.layout)
        operands = [tensor] if name == "reduce_sum" else [tensor, tensor]
        wanted = {"add": 2 * values, "matmul": values @ values, "reduce_sum": values.sum()}[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct_request, "WINDOW_BYTES", window)
            result = self.try_to(lambda: apply(name, *operands), undone=True)
        assert result is None or np.array_equal(result.numpy(), wanted)
        if self.policy is None and self.limit is None:
            assert self.residency() == before

    @rule(window=st.sampled_from([1, 40, 1 << 20]))
    def go_back(self, window):
        """Through a direct operation: the whole gradient, tile by tile, or none of it."""
        before, values = self.residency(), self.logical()
        tensor = Tensor(self.carrier, 0, self.tensor.layout)

        def backward():
            reduce_sum(mul(tensor, tensor)).backward()
            return True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct_request, "WINDOW_BYTES", window)
            complete = self.try_to(backward, undone=self.policy is None)
        gradient = tensor.grad
        assert (gradient is not None) == bool(complete)
        if gradient is not None:
            assert np.array_equal([[gradient[i, j] for j in range(6)] for i in range(6)], 2 * values)
            gradient.carrier.release()
        if self.policy is None and self.limit is None:
            assert self.residency() == before

    @rule(tiles=some_tiles)
    def promote(self, tiles):
        if self.try_to(lambda: self.carrier.promote_async(TileSet(tiles)).wait(10) is None, undone=True):
            assert tiles <= set(self.carrier.primary_tiles)

    @rule(tiles=some_tiles)
    def evict(self, tiles):
        before = set(self.carrier.primary_tiles)
        if self.try_to(lambda: self.carrier.evict_async(TileSet(tiles)).wait(10) is None, undone=True):
            assert set(self.carrier.primary_tiles) == before - tiles

    @rule(
        calls=st.lists(
            st.one_of(
                st.tuples(st.just("project"), selections),
                st.tuples(st.sampled_from(["promote_async", "evict_async"]), some_tiles),
            ),
            min_size=2,
            max_size=6,
        )
    )
    def overlap(self, calls):
        """Several requests at once; some are refused, some fail, and none of the others gets a wrong value."""
        started, failures = [], any(self.failures)
        for method, argument in calls:
            try:
                if method == "project":
                    handle = self.carrier.project(self.tensor, TileSelection(argument))
                else:
                    handle = getattr(self.carrier, method)(TileSet(argument))
                started.append((method, argument, handle))
            except (TileConflictError, ZeroDivisionError):
                continue
            except MemoryError as error:
                assert "memory_limit" in str(error)
        for method, argument, handle in started:
            try:
                found = handle.wait(10)
            except (OSError, MemoryError):
                assert self.broken or failures
            else:
                if method == "project":
                    assert np.array_equal(found.numpy(), self.compact(argument))
        self.failures = []  # how many are left depends on chance

    def teardown(self):
        try:
            if hasattr(self, "carrier"):
                self.failures, self.broken = [], False
                assert np.array_equal(self.tensor.numpy(), self.logical())
                self.carrier.evict(TileSet(TILES))
                assert np.array_equal(self.tensor.numpy(), self.logical())
                self.carrier.release()
        finally:
            self.stack.close()


TestTiledMachine = TiledMachine.TestCase
TestTiledMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, report_multiple_bugs=False
)
