"""Spec: *Scatter is the asynchronous projection counterpart*."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest

from strideweave import (
    CPU,
    LRU,
    AwaitMove,
    Evictable,
    FileBacked,
    Generic,
    ResidencyPlan,
    Tensor,
    TiledEvictable,
    TileSelection,
    TileSet,
    asarray,
    no_grad,
    reduce_sum,
    tiled,
    zeros,
)
from strideweave.carriers.tiled_evictable import tile_values
from strideweave.carriers.tiled_evictable.gradient import gradient_like
from strideweave.dtype import DType
from strideweave.errors import (
    InvalidTileError,
    OwnershipError,
    PendingWorkError,
    ReleasedError,
    TileConflictError,
)
from strideweave.layout import Layout, row_major

EXPERTS, ROWS, COLUMNS = 8, 4, 6  # of the model
DTYPES = [dtype for dtype in vars(DType).values() if isinstance(dtype, DType)]

pytestmark = pytest.mark.anyio


def compact_of(model, *experts: int, kind: type = CPU) -> Tensor:
    """Values that the model does not hold."""
    count = len(experts)
    values = -1 - np.arange(count * ROWS * COLUMNS).reshape(count, ROWS, COLUMNS)
    empty = Generic([]) if kind is Generic else CPU(0)
    carrier = empty.new_like(values.astype(model.values.dtype).ravel(), dtype=model.carrier.dtype())
    return Tensor(carrier, 0, row_major(count, ROWS, COLUMNS))


def scatter(model, compact: Tensor, *experts: int, reduction: str = "replace"):
    return model.carrier.scatter(compact, model.tensor, model.select(*experts), reduction)


def coordinates(*experts: int) -> TileSet:
    return TileSet([(expert, 0, 0) for expert in experts])


class TestReplace:
    def test_three_experts_become_valid_and_dirty(self, make_model) -> None:
        """*Scatter a compact result*; nothing of the template is read or moved."""
        model = make_model()
        compact, before = compact_of(model, 7, 2, 5), model.snapshot()
        handle = scatter(model, compact, 7, 2, 5)
        assert isinstance(handle, AwaitMove)
        result = handle.wait()
        assert result is handle.wait()
        carrier = result.carrier
        assert type(carrier) is TiledEvictable
        assert carrier is not model.carrier
        assert carrier.valid_tiles == carrier.dirty_tiles == carrier.primary_tiles == coordinates(2, 5, 7)
        assert carrier.tile_state((0, 0, 0)).location == "none"
        assert (result.version, compact.version) == (1, 0)
        assert model.snapshot() == before
        assert compact.carrier.is_mutable()
        assert model.at_rest()

    def test_the_result_is_of_the_template_s_kind(self, make_model) -> None:
        model = make_model(policy=LRU(max_tiles=3))
        result = scatter(model, compact_of(model, 1), 1).wait()
        carrier = result.carrier
        assert (result.shape, result.layout, result.offset) == (
            model.tensor.shape,
            model.tensor.layout,
            model.tensor.offset,
        )
        assert (carrier.grid_shape, carrier.tile_shape) == (
            model.carrier.grid_shape,
            model.carrier.tile_shape,
        )
        assert (type(carrier.primary), type(carrier.secondary)) == (CPU, FileBacked)
        assert carrier.dtype() is model.carrier.dtype()
        assert carrier.residency_policy is None
        assert carrier.is_mutable()

    @pytest.mark.parametrize("experts", [(3,), (7, 2, 5), tuple(range(8)), tuple(reversed(range(8)))])
    def test_projecting_the_result_gives_compact_back(self, make_model, experts) -> None:
        """*Project after replace scatter*."""
        model = make_model()
        compact = compact_of(model, *experts)
        result = scatter(model, compact, *experts).wait()
        found = result.carrier.project(result, model.select(*experts)).wait()
        assert np.array_equal(found.numpy(), compact.numpy())

    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
    @pytest.mark.parametrize("kind", [CPU, Generic])
    def test_every_bit_survives(self, kind: type, dtype: DType) -> None:
        """Negative zeros and NaN payloads among them."""
        size = EXPERTS * 24
        empty = Generic([], dtype=dtype) if kind is Generic else CPU(0, dtype=dtype)
        carrier = TiledEvictable(empty, FileBacked(dtype=dtype), (EXPERTS, 1), (1, 24))
        template = Tensor(carrier, 0, row_major(EXPERTS, 24))
        raw = np.random.default_rng(5).bytes(size * dtype.itemsize)
        bits = np.frombuffer(raw, f"u{dtype.itemsize}") % (
            2 if dtype is DType.Bool else 2 ** (8 * dtype.itemsize - 1)
        )
        values = bits.astype(f"u{dtype.itemsize}").view(dtype.numpy)
        held = kind.new_like(carrier.primary, values, dtype=dtype)
        selection = carrier.select({0: range(EXPERTS - 1, -1, -1)})
        result = carrier.scatter(Tensor(held, 0, row_major(EXPERTS, 24)), template, selection).wait()
        found = result.carrier.project(result, selection).wait()
        assert found.numpy(copy=True).tobytes() == held._bytes().tobytes()

    def test_orders_inside_tiles_and_of_compact_do_not_matter(self) -> None:
        """*Accept a within-tile permutation*; a transposed, a backward and a broadcast compact Tensor."""
        carrier = TiledEvictable(CPU(0), FileBacked(), (2, 3), (2, 2))
        layouts = {
            0: Layout(((2, 2), (2, 3)), ((1, 4), (2, 8))),
            1: Layout(((2, 2), (2, 3)), ((2, 4), (-1, 8))),
            3: Layout(((2, 2), (2, 3)), ((-1, 4), (-2, 8))),
        }
        selection = TileSelection([[1], [2, 0]])
        values = np.arange(8, dtype=np.float32).reshape(2, 4)
        sources = [
            (asarray(values), values),
            (asarray(values.T.copy()).T, values),
            (Tensor(CPU.from_numpy(values.copy()), 7, Layout((2, 4), (-4, -1))), values[::-1, ::-1]),
            (asarray(values[:1].copy()).broadcast_to(2, 4), np.repeat(values[:1], 2, 0)),
        ]
        for offset, layout in layouts.items():
            template = Tensor(carrier, offset, layout)
            for compact, wanted in sources:
                result = carrier.scatter(compact, template, selection).wait()
                assert (result.layout, result.offset) == (layout, offset)
                found = result.carrier.project(result, selection).wait()
                assert np.array_equal(found.numpy(), wanted)
                assert np.array_equal(
                    [[result[row, column] for column in (4, 5, 0, 1)] for row in (2, 3)], wanted
                )

    def test_a_template_needs_no_values(self, make_model) -> None:
        """Spec: *Residency state is independent of executable selection shape*."""
        model = make_model(start="none")
        compact = compact_of(model, 6, 1)
        result = scatter(model, compact, 6, 1).wait()
        assert result.carrier.valid_tiles == coordinates(1, 6)
        assert model.carrier.valid_tiles == TileSet()

    def test_what_has_no_value_cannot_be_read_or_moved(self, make_model) -> None:
        """Spec: *Residency state is independent of executable selection shape*."""
        model = make_model()
        result = scatter(model, compact_of(model, 4), 4).wait()
        carrier = result.carrier
        for attempt in (
            lambda: carrier.project(result, model.select(4, 5)),
            lambda: carrier.promote(coordinates(5)),
            lambda: carrier.evict(coordinates(4, 5)),
            lambda: result[5, 0, 0],
            result.numpy,
            lambda: carrier.scatter(compact_of(model, 5), result, model.select(5), "add"),
        ):
            with pytest.raises(InvalidTileError, match="no value yet"):
                attempt()
        carrier.evict(coordinates(4))
        assert carrier.tile_state((4, 0, 0)).location == "secondary"

    def test_the_result_outlives_its_inputs(self, make_model) -> None:
        model = make_model(keep=False)
        compact = compact_of(model, 3)
        wanted = compact.numpy(copy=True)
        result = scatter(model, compact, 3).wait()
        compact.carrier.release()
        model.carrier.release()
        assert np.array_equal(
            result.carrier.project(result, TileSelection([[3], [0], [0]])).wait().numpy(), wanted
        )


class TestAdd:
    def test_sums_with_what_the_template_holds(self, make_model) -> None:
        """Missing tiles of the template are promoted and stay; its values do not change."""
        model = make_model()
        model.carrier.promote(coordinates(5))
        compact = compact_of(model, 5, 0)
        result = scatter(model, compact, 5, 0, reduction="add").wait()
        found = result.carrier.project(result, model.select(5, 0)).wait()
        assert np.array_equal(found.numpy(), model.values[[5, 0]] + compact.numpy())
        assert result.carrier.valid_tiles == result.carrier.dirty_tiles == coordinates(0, 5)
        assert result.version == 1
        assert model.carrier.primary_tiles == coordinates(0, 5)
        assert model.carrier.dirty_tiles == TileSet()
        assert model.carrier.version == 0
        assert model.at_rest()
        model.check(5, 0)

    def test_implicit_zeros_count_as_zeros(self, make_model) -> None:
        model = make_model()
        template = gradient_like(model.tensor)
        compact = compact_of(model, 2)
        result = template.carrier.scatter(compact, template, model.select(2), "add").wait()
        found = result.carrier.project(result, model.select(2)).wait()
        assert np.array_equal(found.numpy(), compact.numpy())

    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
    def test_the_arithmetic_is_that_of_add(self, dtype: DType) -> None:
        rng = np.random.default_rng(11)
        if dtype is DType.Bool:
            x, y = (rng.integers(0, 2, (4, 16)).astype(np.bool_) for _ in range(2))
        elif dtype.is_differentiable:
            x, y = (rng.standard_normal((4, 16)).astype(dtype.numpy) for _ in range(2))
        else:
            limits = np.iinfo(dtype.numpy)
            x, y = (rng.integers(limits.min, limits.max, (4, 16), dtype.numpy) for _ in range(2))
        for kind in (CPU, Generic):
            start = kind.new_like(CPU(0, dtype=dtype) if kind is CPU else Generic([], dtype=dtype), x.ravel())
            carrier = TiledEvictable(start, FileBacked(dtype=dtype), (4, 1), (1, 16))
            template = Tensor(carrier, 0, row_major(4, 16), requires_grad=False)
            held = Tensor(
                kind.new_like(start, y.ravel(), dtype=dtype), 0, row_major(4, 16), requires_grad=False
            )
            result = carrier.scatter(held, template, carrier.select({}), "add").wait()
            wanted = asarray(x.copy(), dtype=dtype) + asarray(y.copy(), dtype=dtype)
            assert result.numpy().tobytes() == wanted.numpy().tobytes()

    def test_what_a_policy_lets_pass_streams_past_the_primary_tier(self, make_model) -> None:
        """Spec: *Residency policy can optimize but cannot define correctness*."""
        model = make_model(policy=LRU(max_tiles=2))
        experts = (6, 1, 3, 0, 4)
        compact = compact_of(model, *experts)
        result = scatter(model, compact, *experts, reduction="add").wait()
        found = result.carrier.project(result, model.select(*experts)).wait()
        assert np.array_equal(found.numpy(), model.values[list(experts)] + compact.numpy())
        assert result.version == 1
        assert len(model.primary()) == 2
        assert model.carrier.statistics().streamed == 3
        assert model.at_rest()


class TestRefusals:
    """*Reject a compact shape mismatch* and its kin: nothing changes, and both inputs stay usable."""

    def refused(self, model, error: type, match: str, compact, template, selection, *rest) -> None:
        before = model.snapshot()
        with pytest.raises(error, match=match):
            model.carrier.scatter(compact, template, selection, *rest)
        assert model.snapshot() == before
        assert model.idle()

    def test_wrong_types(self, make_model) -> None:
        model = make_model()
        compact, selection, tensor = compact_of(model, 2), model.select(2), model.tensor
        other = make_model()
        pending = model.project(2)
        pending.wait()
        elsewhere = FileBacked().new_like(compact.numpy().ravel())
        hierarchy = Evictable(CPU(24), FileBacked())
        for match, arguments in {
            "compact must be a Tensor, found ndarray": (compact.numpy(), tensor, selection),
            "compact must be a Tensor, found AwaitProjection; wait": (pending, tensor, selection),
            "template must be a Tensor, found list": (compact, [1], selection),
            "backed by another TiledEvictable": (compact, other.tensor, selection),
            "backed by another CPU": (compact, compact, selection),
            "found FileBacked": (Tensor(elsewhere, 0, row_major(1, 4, 6)), tensor, selection),
            "found Evictable": (Tensor(hierarchy, 0, row_major(1, 4, 6)), tensor, selection),
            "found TiledEvictable": (other.tensor, tensor, selection),
            "the class of the primary tier, found Generic": (
                compact_of(model, 2, kind=Generic),
                tensor,
                selection,
            ),
            "must be a TileSelection, found TileSet": (compact, tensor, selection.tile_set),
            "must be a TileSelection, found tuple": (compact, tensor, (2, 0, 0)),
            "compact holds Float64, the template Float32": (
                asarray(np.zeros((1, 4, 6)), dtype=DType.Float64),
                tensor,
                selection,
            ),
        }.items():
            self.refused(model, TypeError, match, *arguments)

    def test_wrong_values(self, make_model) -> None:
        model = make_model()
        compact, selection, tensor = compact_of(model, 2), model.select(2), model.tensor
        for match, arguments in {
            r"compact has shape \(1, 4, 6\), the 2 selected tiles make \(2, 4, 6\)": (
                compact,
                tensor,
                model.select(2, 3),
            ),
            r"compact has shape \(24,\)": (compact.detach().reshape(24), tensor, selection),
            "rank": (compact, tensor, TileSelection([[2]])),
            "tile 8 on axis 0": (compact, tensor, TileSelection([[8], [0], [0]])),
            'reduction must be "replace" or "add", found \'mean\'': (compact, tensor, selection, "mean"),
            'reduction must be "replace" or "add", found None': (compact, tensor, selection, None),
            "tile": (compact, Tensor(model.carrier, 0, row_major(4, 8, 6)), selection),
        }.items():
            self.refused(model, ValueError, match, *arguments)
        reversed_experts = Tensor(model.carrier, 24 * 7, Layout((EXPERTS, ROWS, COLUMNS), (-24, 6, 1)))
        self.refused(model, ValueError, "tile", compact, reversed_experts, selection)

    def test_what_is_released_or_in_use(self, make_model) -> None:
        model = make_model(keep=False)
        compact, selection = compact_of(model, 2), model.select(2)
        gone = compact_of(model, 2)
        gone.carrier.release()
        self.refused(model, ReleasedError, "compact's carrier was released", gone, model.tensor, selection)
        owned = compact_of(model, 2)
        hierarchy = Evictable(owned.carrier, FileBacked())
        self.refused(model, OwnershipError, "owned", owned, model.tensor, selection)
        hierarchy.release()
        model.carrier.release()
        with pytest.raises(ReleasedError):
            model.carrier.scatter(compact, model.tensor, selection)

    def test_adding_to_what_has_no_value(self, make_model) -> None:
        model = make_model(start="none")
        self.refused(
            model,
            InvalidTileError,
            "scatter needs 1 tiles",
            compact_of(model, 2),
            model.tensor,
            model.select(2),
            "add",
        )

    @pytest.mark.parametrize("reduction", ["replace", "add"])
    def test_an_unfinished_residency_request(self, make_model, control_moves, reduction: str) -> None:
        """Spec: *Residency transitions have asynchronous and blocking forms*; the policy is not even asked."""
        asked = []

        class Policy:
            def plan(self, required, purpose):
                asked.append(purpose)
                return ResidencyPlan()

        model = make_model(policy=Policy())
        moves = control_moves(FileBacked, CPU)
        moves.gate.clear()
        pending = model.carrier.promote_async(coordinates(2))
        compact = compact_of(model, 2)
        with pytest.raises(TileConflictError, match="scatter meets an unfinished request"):
            scatter(model, compact, 2, reduction=reduction)
        assert compact.carrier.is_mutable()
        assert asked == []
        scatter(model, compact, 3).wait()  # a disjoint tile
        moves.open()
        pending.wait()
        assert asked == ["scatter"]
        scatter(model, compact, 2, reduction=reduction).wait()


class TestWhileItRuns:
    def test_compact_and_the_template_s_tiles_are_held(self, make_model, control_moves) -> None:
        """Spec: *Residency remains valid while tiled work needs it*."""
        model = make_model()
        model.carrier.promote(coordinates(1))
        moves = control_moves(FileBacked, CPU)
        moves.gate.clear()
        compact = compact_of(model, 2, 1)
        handle = scatter(model, compact, 2, 1, reduction="add")
        assert not handle.done
        moves.wait_until_entered()
        for attempt in (
            lambda: compact.carrier.set_value(0, 1.0),
            compact.carrier.release,
            lambda: scatter(model, compact, 4, 5),
        ):
            with pytest.raises(OwnershipError):
                attempt()
        assert compact[0, 0, 0] == -1  # reading is allowed
        for attempt in (
            lambda: model.carrier.evict(coordinates(1)),
            lambda: model.carrier.set_value(24, 1.0),
        ):
            with pytest.raises(TileConflictError, match="scatter"):
                attempt()
        with pytest.raises(PendingWorkError):
            model.carrier.release()
        model.carrier.evict(coordinates(7))
        moves.open()
        handle.wait()
        compact.carrier.set_value(0, 1.0)
        model.carrier.evict(coordinates(1))

    def test_requests_share_one_read(self, make_model, control_moves) -> None:
        model = make_model()
        moves = control_moves(FileBacked, CPU)
        moves.gate.clear()
        handles = [scatter(model, compact_of(model, 3), 3, reduction="add") for _ in range(4)]
        projection = model.project(3)
        moves.open()
        for handle in handles:
            handle.wait()
        projection.wait()
        assert moves.slots == 24

    async def test_a_cancelled_awaiter_leaves_the_request_alone(self, make_model, control_moves) -> None:
        import anyio  # noqa: PLC0415

        model = make_model()
        moves = control_moves(FileBacked, CPU)
        moves.gate.clear()
        compact = compact_of(model, 3)
        handle = scatter(model, compact, 3, reduction="add")
        with anyio.move_on_after(0.01) as cancelled:
            await handle
        assert cancelled.cancelled_caught
        assert compact.carrier.is_owned()
        moves.open()
        result = await handle
        assert np.array_equal(
            result.carrier.project(result, model.select(3)).wait().numpy(),
            compact.numpy() + model.values[[3]],
        )
        assert not compact.carrier.is_owned()

    def test_from_many_threads(self, make_model) -> None:
        model = make_model()
        results: list[Tensor] = []

        def work() -> None:
            compact = compact_of(model, 1, 6)
            results.append(scatter(model, compact, 1, 6, reduction="add").wait())

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wanted = model.values[[1, 6]] + compact_of(model, 1, 6).numpy()
        for result in results:
            found = result.carrier.project(result, model.select(1, 6)).wait()
            assert np.array_equal(found.numpy(), wanted)
        assert len({id(result.carrier) for result in results}) == 8
        assert model.at_rest()


class TestFailures:
    """A failure publishes nothing, and both inputs are as they were, and usable."""

    def test_a_read_that_fails(self, make_model, control_moves) -> None:
        model = make_model()
        model.carrier.promote(coordinates(6))
        compact, before = compact_of(model, 2, 6), model.snapshot()
        moves = control_moves(FileBacked, CPU)
        moves.failures.append(OSError("the disk is gone"))
        handle = scatter(model, compact, 2, 6, reduction="add")
        with pytest.raises(OSError, match="the disk is gone"):
            handle.wait()
        assert model.snapshot() == before
        assert model.at_rest()
        assert compact.carrier.is_mutable()
        result = scatter(model, compact, 2, 6, reduction="add").wait()
        assert result.version == 1

    @pytest.mark.parametrize("reduction", ["replace", "add"])
    def test_a_result_that_cannot_be_filled(self, make_model, monkeypatch, reduction: str) -> None:
        model = make_model()
        compact, before = compact_of(model, 2, 6), model.snapshot()
        made = []
        fresh = TiledEvictable._fresh

        def noted(self, start):
            made.append(fresh(self, start))
            return made[-1]

        def fail(*_: object) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(TiledEvictable, "_fresh", noted)
        monkeypatch.setattr(tile_values, "_run", fail)
        with pytest.raises(MemoryError, match="no room"):
            scatter(model, compact, 2, 6, reduction=reduction).wait()
        monkeypatch.undo()
        assert [carrier.is_released() for carrier in made] == [True]
        assert model.snapshot() == before
        assert model.at_rest()
        assert compact.carrier.is_mutable()
        assert scatter(model, compact, 2, 6, reduction=reduction).wait().version == 1

    def test_a_result_that_cannot_be_made(self, make_model, monkeypatch) -> None:
        model = make_model()
        compact, before = compact_of(model, 2), model.snapshot()

        def fail(*_: object) -> None:
            raise MemoryError("no bookkeeping")

        monkeypatch.setattr(TiledEvictable, "_fresh", fail)
        with pytest.raises(MemoryError, match="no bookkeeping"):
            scatter(model, compact, 2).wait()
        assert model.snapshot() == before
        assert not compact.carrier.is_owned()


class Recording:
    """A policy that answers with what it was given, and remembers what it was asked."""

    def __init__(self, answer) -> None:
        self.answer, self.asked = answer, []

    def plan(self, required: TileSet, purpose: str):
        self.asked.append((required, purpose))
        return self.answer(required)


class TestPolicy:
    """Spec: *Residency policy can optimize but cannot define correctness*."""

    @pytest.mark.parametrize("reduction", ["replace", "add"])
    def test_the_purpose_is_scatter_and_the_selected_tiles_are_required(
        self, make_model, reduction: str
    ) -> None:
        policy = Recording(lambda required: ResidencyPlan())
        model = make_model(policy=policy)
        scatter(model, compact_of(model, 5, 1), 5, 1, reduction=reduction).wait()
        assert policy.asked == [(coordinates(1, 5), "scatter")]

    @pytest.mark.parametrize("reduction", ["replace", "add"])
    def test_its_plan_is_carried_out(self, make_model, reduction: str) -> None:
        policy = Recording(
            lambda required: ResidencyPlan(
                promote=coordinates(5, 0), retain=coordinates(6), evict=coordinates(7, 1)
            )
        )
        model = make_model(policy=policy)
        model.carrier.promote(coordinates(6, 7, 1))
        scatter(model, compact_of(model, 5, 1), 5, 1, reduction=reduction).wait()
        assert model.primary() == [0, 5, 6]
        assert model.at_rest()

    def test_a_promotion_of_what_has_no_value_is_passed_over(self, make_model) -> None:
        policy = Recording(lambda required: ResidencyPlan(promote=required))
        model = make_model(start="none", policy=policy)
        result = scatter(model, compact_of(model, 5, 1), 5, 1).wait()
        assert result.carrier.valid_tiles == coordinates(1, 5)
        assert model.carrier.valid_tiles == TileSet()

    @pytest.mark.parametrize("reduction", ["replace", "add"])
    @pytest.mark.parametrize(
        ("answer", "error"),
        [
            (lambda required: None, TypeError),
            (lambda required: required, TypeError),
            (lambda required: ResidencyPlan(promote=TileSet([(8, 0, 0)])), ValueError),
            (lambda required: 1 / 0, ZeroDivisionError),
        ],
    )
    def test_its_errors_come_before_any_work(self, make_model, reduction: str, answer, error: type) -> None:
        """*Reject an invalid policy result before execution*."""
        model = make_model(policy=Recording(answer))
        compact, before = compact_of(model, 5), model.snapshot()
        with pytest.raises(error):
            scatter(model, compact, 5, reduction=reduction)
        assert model.snapshot() == before
        assert not compact.carrier.is_owned()
        assert model.idle()


def test_gradients_are_those_of_the_call(make_model) -> None:
    """Spec: *Scatter participates in autograd*: grad mode and ``requires_grad`` count as they were then."""
    model = make_model()
    plain = Tensor(compact_of(model, 1).carrier, 0, row_major(1, ROWS, COLUMNS), requires_grad=False)
    with no_grad():
        assert scatter(model, compact_of(model, 1), 1).wait().grad_fn is None
    assert not scatter(model, plain, 1).wait().requires_grad  # nothing of the template is left
    assert scatter(model, plain, 1, reduction="add").wait().requires_grad
    node = scatter(model, compact_of(model, 1), 1).wait().grad_fn
    assert node is not None
    assert node.name == "scatter"
    assert zeros(()).grad_fn is None


class TestManySmallTiles:
    """Thousands of tiles in one request, in any order, some in place and some new."""

    def test_they_are_all_there(self) -> None:
        count = 3000
        values = np.random.default_rng(1).standard_normal((count, 2, 3), np.float32)
        source = tiled(values, (1, 2, 3), resident=False)
        carrier = source.carrier
        order = np.random.default_rng(2).permutation(count)[: count - 7]
        selection = carrier.select({0: order})
        carrier.promote(TileSet([(int(tile), 0, 0) for tile in order[::3]]))
        compact = asarray(np.random.default_rng(3).standard_normal((len(order), 3, 2), np.float32)).permute(
            0, 2, 1
        )
        added = compact.numpy()
        result = carrier.scatter(compact, source, selection, "add").wait()
        found = result.carrier.project(result, selection).wait()
        assert np.array_equal(found.numpy(), values[order] + added)
        reduce_sum(found * found).backward()
        assert np.array_equal(source.grad.numpy()[order], 2 * found.numpy())
        carrier.evict(TileSet([(int(tile), 0, 0) for tile in order[::2]]))
        carrier.assign(compact.detach(), source, selection).wait()
        values[order] = added
        assert np.array_equal(source.numpy(), values)


def test_nothing_is_left_when_they_are_dropped(make_model, no_collector) -> None:
    """Results and gradients go with the last reference to them, not with the collector."""
    model = make_model()
    compact = compact_of(model, 2, 5)
    result = scatter(model, compact, 2, 5, reduction="add").wait()
    seen = result.carrier.project(result, model.select(5)).wait()
    reduce_sum(seen * seen).backward()
    carriers = [result.carrier, model.tensor.grad.carrier, compact.carrier, seen.carrier]
    gone = [weakref.ref(carrier) for carrier in carriers]
    model.tensor.grad = None
    del carriers, compact, result, seen
    for _ in range(3):  # the loop lets go of what its last task held
        model.project(0).wait()
    assert [reference() for reference in gone] == [None] * 4
