"""``assign``: whole tiles of a carrier get new values in place, as one public write.

Spec: *Residency state is independent of executable selection shape*; *Residency remains valid while tiled work needs
it*.
"""

from __future__ import annotations

import numpy as np
import pytest

from strideweave import (
    CPU,
    LRU,
    AwaitResult,
    Evictable,
    FileBacked,
    Generic,
    Tensor,
    TiledEvictable,
    TileSelection,
    TileSet,
    asarray,
    reduce_sum,
    tiled,
)
from strideweave.carriers.tiled_evictable import tile_values
from strideweave.errors import (
    ImmutableError,
    OwnershipError,
    PendingWorkError,
    ReleasedError,
    StaleGraphError,
    TileConflictError,
)
from strideweave.layout import Layout, row_major

ROWS, COLUMNS = 4, 6  # of a tile of the model

pytestmark = pytest.mark.anyio


def values_for(count: int, start: float = -1.0) -> np.ndarray:
    return (start - np.arange(count * ROWS * COLUMNS)).reshape(count, ROWS, COLUMNS).astype(np.float32)


def assign(model, values: np.ndarray, *experts: int) -> AwaitResult[None]:
    return model.carrier.assign(asarray(values), model.tensor, model.select(*experts))


def chosen(*experts: int) -> TileSet:
    return TileSet([(expert, 0, 0) for expert in experts])


def test_tiles_change_wherever_they_are(make_model) -> None:
    """They are primary and dirty afterwards, without having been read; the version advances once."""
    model = make_model()
    model.carrier.promote(chosen(3))
    values = values_for(3)
    handle = assign(model, values, 5, 3, 0)
    assert type(handle) is AwaitResult
    assert handle.wait() is None
    model.values[[5, 3, 0]] = values
    assert np.array_equal(model.tensor.numpy(), model.values)
    assert model.carrier.version == 1
    assert model.carrier.primary_tiles == model.carrier.dirty_tiles == chosen(0, 3, 5)
    assert model.carrier.statistics().bytes_read == model.carrier.statistics().tile_bytes * (
        1 + 5
    )  # the numpy()
    model.carrier.evict(chosen(0, 3, 5))
    model.check(5, 3, 0)
    assert model.at_rest()


def test_tiles_without_a_value_get_one(make_model) -> None:
    model = make_model(start="none")
    assign(model, values_for(2), 6, 1).wait()
    assert model.carrier.valid_tiles == chosen(1, 6)
    found = model.project(6, 1).wait()
    assert np.array_equal(found.numpy(), values_for(2))


def test_values_that_came_in_the_primary_tier_change_in_place() -> None:
    array = np.zeros((8, 6), np.float32)
    carrier = TiledEvictable(CPU.from_numpy(array), FileBacked(), (8, 1), (1, 6))
    tensor = Tensor(carrier, 0, row_major(8, 6))
    before = carrier.primary.version
    carrier.assign(asarray(np.full((2, 6), 7, np.float32)), tensor, carrier.select({0: [4, 1]})).wait()
    assert array[:, 0].tolist() == [0, 7, 0, 0, 7, 0, 0, 0]
    assert carrier.primary.version > before  # for who has saved the retained alias


def test_a_source_on_the_same_memory_is_read_before_it_is_written() -> None:
    array = np.arange(8, dtype=np.float32)
    carrier = TiledEvictable(CPU.from_numpy(array), FileBacked(), (4,), (2,))
    tensor = Tensor(carrier, 0, row_major(8))
    carrier.assign(
        Tensor(CPU.from_numpy(array), 0, row_major(8)), tensor, TileSelection([[1, 2, 3, 0]])
    ).wait()
    assert array.tolist() == [6, 7, 0, 1, 2, 3, 4, 5]


def test_orders_may_differ() -> None:
    """*Accept a within-tile permutation*."""
    carrier = TiledEvictable(CPU(0), FileBacked(), (2, 3), (2, 2))
    tensor = Tensor(carrier, 3, Layout(((2, 2), (2, 3)), ((-1, 4), (-2, 8))))
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    selection = TileSelection([[1], [2, 0]])
    carrier.assign(asarray(values.T.copy()).T, tensor, selection).wait()
    assert np.array_equal(carrier.project(tensor, selection).wait().numpy(), values)


def test_an_optimizer_s_step() -> None:
    """Project the weights and their gradient, write the new weights back: three experts of eight."""
    weights = tiled(np.ones((8, ROWS, COLUMNS), np.float32), (1, ROWS, COLUMNS), resident=False)
    carrier = weights.carrier
    selection = carrier.select({0: [7, 2, 5]})
    for _ in range(3):
        compact = carrier.project(weights, selection).wait()
        reduce_sum(compact * compact).backward()
        gradient = weights.grad.carrier.project(weights.grad, selection).wait()
        step = compact.detach() - gradient * 0.25
        carrier.assign(step, weights, selection).wait()
        weights.grad = None
    assert weights.numpy()[:, 0, 0].tolist() == [1, 1, 0.125, 1, 1, 0.125, 1, 0.125]


def test_it_is_no_operation(make_model) -> None:
    """Nothing is differentiated, and a graph that saved the source is stale."""
    model = make_model()
    total = reduce_sum(model.project(1).wait())
    compact = asarray(values_for(1))
    model.carrier.assign(compact, model.tensor, model.select(6)).wait()
    assert model.tensor.grad_fn is None
    with pytest.raises(StaleGraphError):
        total.backward()
    assert compact.grad is None


def test_no_policy_is_asked(make_model) -> None:
    class Policy(LRU):
        def plan(self, required, purpose):
            raise AssertionError(purpose)

    model = make_model(policy=Policy(max_tiles=1))
    assign(model, values_for(2), 6, 1).wait()
    assert model.carrier.primary_tiles == chosen(1, 6)


class TestRefusals:
    def refused(self, model, error: type, match: str, compact, tensor, selection) -> None:
        before = model.snapshot()
        with pytest.raises(error, match=match):
            model.carrier.assign(compact, tensor, selection)
        assert model.snapshot() == before
        assert model.idle()

    def test_bad_arguments(self, make_model) -> None:
        model = make_model()
        compact, selection = asarray(values_for(1)), model.select(2)
        other = make_model()
        for error, match, arguments in (
            (TypeError, "compact must be a Tensor", (values_for(1), model.tensor, selection)),
            (TypeError, "tensor must be a Tensor", (compact, None, selection)),
            (TypeError, "another TiledEvictable", (compact, other.tensor, selection)),
            (TypeError, "found TileSet", (compact, model.tensor, selection.tile_set)),
            (
                TypeError,
                "found Generic",
                (Tensor(Generic(range(24)), 0, row_major(1, 4, 6)), model.tensor, selection),
            ),
            (
                TypeError,
                "compact holds Float64, the tensor Float32",
                (asarray(np.ones((1, 4, 6))), model.tensor, selection),
            ),
            (ValueError, "compact has shape", (compact, model.tensor, model.select(2, 3))),
            (ValueError, "rank", (compact, model.tensor, TileSelection([[2]]))),
            (
                ValueError,
                "tile",
                (compact, Tensor(model.carrier, 168, Layout((8, 4, 6), (-24, 6, 1))), selection),
            ),
        ):
            self.refused(model, error, match, *arguments)

    def test_a_carrier_that_may_not_be_written(self, make_model) -> None:
        model = make_model("primary", mutable=False)
        self.refused(model, ImmutableError, "mutable", asarray(values_for(1)), model.tensor, model.select(2))
        model = make_model(keep=False)
        model.carrier.release()
        with pytest.raises(ReleasedError):
            assign(model, values_for(1), 2)

    def test_compact_in_use(self, make_model) -> None:
        model = make_model()
        compact = asarray(values_for(1))
        hierarchy = Evictable(compact.carrier, FileBacked())
        self.refused(model, OwnershipError, "owned", compact, model.tensor, model.select(2))
        hierarchy.release()
        self.refused(model, ReleasedError, "released", compact, model.tensor, model.select(2))


class TestConflicts:
    """A write conflicts with whatever needs, moves or covers one of its tiles."""

    @pytest.mark.parametrize("work", ["project", "scatter", "promote", "evict"])
    def test_unfinished_work_on_one_of_its_tiles(self, make_model, control_moves, work: str) -> None:
        """*Eviction races with execution*, and so do writes."""
        model = make_model()
        moves = control_moves(FileBacked, CPU)
        if work == "evict":
            moves = control_moves(CPU, FileBacked)
            assign(model, model.values[[3, 1]], 3, 1).wait()  # dirty, so that there is something to write
        moves.gate.clear()
        pending = {
            "project": lambda: model.project(3, 1),
            "scatter": lambda: model.carrier.scatter(
                asarray(values_for(2)), model.tensor, model.select(3, 1), "add"
            ),
            "promote": lambda: model.carrier.promote_async(chosen(3, 1)),
            "evict": lambda: model.carrier.evict_async(chosen(3, 1)),
        }[work]()
        with pytest.raises(TileConflictError, match="assign meets an unfinished request") as caught:
            assign(model, values_for(3), 0, 1, 2)
        assert caught.value.tiles == chosen(1)
        assign(model, values_for(2), 0, 2).wait()
        moves.open()
        pending.wait()
        caught.value.free.wait()
        assign(model, values_for(3), 0, 1, 2).wait()
        model.values[[0, 1, 2]] = values_for(3)
        model.check(0, 1, 2, 3)

    def test_while_it_runs(self, make_model, monkeypatch) -> None:
        """The tiles, compact and the carrier belong to it; other tiles do not."""
        import threading  # noqa: PLC0415

        model = make_model()
        model.carrier.promote(chosen(3, 5))
        real, begun, gate = tile_values.apply, threading.Event(), threading.Event()

        async def slow(*args):
            import anyio.to_thread  # noqa: PLC0415

            begun.set()
            await anyio.to_thread.run_sync(gate.wait)
            await real(*args)

        from strideweave.carriers.tiled_evictable import filling  # noqa: PLC0415

        monkeypatch.setattr(filling, "apply", slow)
        compact = asarray(values_for(2))
        handle = model.carrier.assign(compact, model.tensor, model.select(3, 1))
        assert begun.wait(10)
        for attempt in (
            lambda: model.project(3),
            lambda: model.carrier.evict(chosen(3)),
            lambda: model.carrier.set_value(3 * 24, 1.0),
            lambda: model.carrier.get_value(3 * 24),
            lambda: assign(model, values_for(1), 1),
        ):
            with pytest.raises(TileConflictError):
                attempt()
        with pytest.raises(PendingWorkError):
            model.carrier.release()
        with pytest.raises(PendingWorkError):
            model.carrier._claim(object())
        with pytest.raises(OwnershipError):
            compact.carrier.set_value(0, 1.0)
        model.check(5)
        assert model.carrier.version == 0
        gate.set()
        handle.wait()
        assert model.carrier.version == 1
        assert compact.carrier.is_mutable()
        assert model.at_rest()

    async def test_a_cancelled_awaiter_leaves_it_alone(self, make_model) -> None:
        import anyio  # noqa: PLC0415

        model = make_model()
        with anyio.CancelScope() as scope:
            scope.cancel()
            handle = assign(model, values_for(1), 3)
            await handle
        await handle
        model.values[[3]] = values_for(1)
        model.check(3)


class TestFailures:
    def test_nothing_changes(self, make_model, monkeypatch) -> None:
        model = make_model()
        model.carrier.promote(chosen(3))
        before = model.snapshot()
        compact = asarray(values_for(2))

        def fail(*_: object) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(tile_values, "_run", fail)
        with pytest.raises(MemoryError, match="no room"):
            model.carrier.assign(compact, model.tensor, model.select(3, 1)).wait()
        monkeypatch.undo()
        assert model.snapshot() == before
        assert compact.carrier.is_mutable()
        model.check(3, 1)
        assert model.at_rest()

    def test_places_that_cannot_be_had(self, make_model, monkeypatch) -> None:
        model = make_model()
        model.carrier.promote(chosen(3))
        before = model.snapshot()

        def fail(*_: object) -> None:
            raise MemoryError("no slab")

        monkeypatch.setattr(type(model.carrier._traffic.primary), "make_room", fail)
        with pytest.raises(MemoryError, match="no slab"):
            assign(model, values_for(2), 3, 1).wait()
        monkeypatch.undo()
        assert model.snapshot() == before
        model.check(3, 1)


class TestMemoryLimit:
    """All the tiles of an assignment are in memory together, or it is refused."""

    def make(self, tiles: int) -> Tensor:
        return tiled(
            values_for(8), (1, ROWS, COLUMNS), resident=False, memory_limit=tiles * ROWS * COLUMNS * 4
        )

    def test_others_make_room(self) -> None:
        tensor = self.make(2)
        carrier = tensor.carrier
        carrier.promote(chosen(6, 7))
        carrier.assign(asarray(values_for(2, 5.0)), tensor, carrier.select({0: [3, 1]})).wait()
        assert carrier.primary_tiles == chosen(1, 3)
        wanted = values_for(8)
        wanted[[3, 1]] = values_for(2, 5.0)
        assert np.array_equal(tensor.numpy(), wanted)

    def test_what_can_never_fit_is_refused_before_any_work(self) -> None:
        tensor = self.make(2)
        compact = asarray(values_for(3))
        with pytest.raises(MemoryError):
            tensor.carrier.assign(compact, tensor, tensor.carrier.select({0: [3, 1, 2]}))
        assert compact.carrier.is_mutable()
        assert tensor.version == 0

    def test_a_failure_puts_back_what_made_room(self, monkeypatch) -> None:
        tensor = self.make(2)
        carrier = tensor.carrier
        carrier.promote(chosen(6, 7))

        def fail(*_: object) -> None:
            raise MemoryError("no luck")

        monkeypatch.setattr(tile_values, "_run", fail)
        with pytest.raises(MemoryError, match="no luck"):
            carrier.assign(asarray(values_for(2)), tensor, carrier.select({0: [3, 1]})).wait()
        monkeypatch.undo()
        assert carrier.primary_tiles == chosen(6, 7)
        assert np.array_equal(tensor.numpy(), values_for(8))

    @pytest.mark.parametrize("reduction", ["replace", "add"])
    def test_scatter_results_spill(self, reduction: str) -> None:
        """Spec: *Scatter is the asynchronous projection counterpart*: a result has its template's limit."""
        tensor = self.make(3)
        carrier = tensor.carrier
        experts = (5, 1, 7) if reduction == "add" else (5, 1, 7, 0, 2, 6, 4, 3)
        selection = carrier.select({0: experts})
        compact = asarray(values_for(len(experts), 100.0))
        result = carrier.scatter(compact, tensor, selection, reduction).wait()
        assert result.version == 1
        assert result.carrier.memory_limit == carrier.memory_limit
        wanted = values_for(len(experts), 100.0)
        if reduction == "add":
            wanted = wanted + values_for(8)[list(experts)]
        for index, expert in enumerate(experts):
            found = result.carrier.project(result, carrier.select({0: [expert]})).wait()
            assert np.array_equal(found.numpy()[0], wanted[index])
        assert result.carrier.statistics().peak_resident_bytes <= carrier.memory_limit
        with pytest.raises(MemoryError):
            carrier.scatter(asarray(values_for(4)), tensor, carrier.select({0: [0, 1, 2, 3]}), "add")

    def test_gradients_spill(self) -> None:
        """Spec: *Projection is an autograd-visible gather*: a gradient has its tensor's limit."""
        tensor = self.make(2)
        carrier = tensor.carrier
        for _ in range(2):
            for expert in range(8):
                picked = carrier.project(tensor, carrier.select({0: [expert, (expert + 1) % 8]})).wait()
                (reduce_sum(picked) * float(expert)).backward()
        wanted = [2.0 * (expert + (expert - 1) % 8) for expert in range(8)]
        assert tensor.grad.numpy()[:, 0, 0].tolist() == wanted
        statistics = tensor.grad.carrier.statistics()
        assert statistics.peak_resident_bytes <= carrier.memory_limit
        assert tensor.grad.carrier.memory_limit == carrier.memory_limit
