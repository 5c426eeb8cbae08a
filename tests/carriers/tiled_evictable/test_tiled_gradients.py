"""Spec: *Projection is an autograd-visible gather*; *Scatter participates in autograd*."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strideweave import (
    CPU,
    LRU,
    FileBacked,
    Generic,
    Streaming,
    Tensor,
    TiledEvictable,
    TileSelection,
    TileSet,
    asarray,
    gather,
    matmul,
    no_grad,
    reduce_sum,
    relu,
    tanh,
    tiled,
)
from strideweave.carriers.tiled_evictable import tile_values
from strideweave.carriers.tiled_evictable.gradient import gradient_like
from strideweave.dtype import DType
from strideweave.errors import InvalidTileError, StaleGraphError, TileConflictError
from strideweave.layout import Layout, row_major

EXPERTS, ROWS, COLUMNS = 8, 4, 6  # of the model
FLOATS = [dtype for dtype in vars(DType).values() if isinstance(dtype, DType) and dtype.is_differentiable]


def experts(count: int = EXPERTS, *, dtype: DType = DType.Float32, seed: int = 0, **options) -> Tensor:
    values = np.random.default_rng(seed).standard_normal((count, ROWS, COLUMNS))
    return tiled(values.astype(dtype.numpy), (1, ROWS, COLUMNS), **options)


def project(tensor: Tensor, *chosen: int, **options) -> Tensor:
    carrier = tensor.carrier
    return carrier.project(tensor, carrier.select({0: chosen}), **options).wait()


def chosen(*tiles: int) -> TileSet:
    return TileSet([(tile, 0, 0) for tile in tiles])


def weights(*shape: int, seed: int = 1, dtype: DType = DType.Float32) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(dtype.numpy)
    return asarray(values, dtype=dtype).detach()


def dense_copy(tensor: Tensor) -> Tensor:
    return asarray(tensor.numpy(copy=True), dtype=tensor.dtype)


class TestTheNode:
    def test_there_is_exactly_one_and_it_leads_to_the_source(self, make_model) -> None:
        model = make_model()
        compact = model.project(7, 2, 5).wait()
        node = compact.grad_fn
        assert node is not None
        assert node.name == "project"
        assert len(node.inputs) == 1
        assert node.inputs[0] is model.tensor
        assert compact.requires_grad
        assert model.tensor.grad_fn is None

    def test_only_where_a_gradient_is_wanted(self, make_model) -> None:
        """Grad mode and ``requires_grad`` count as they were at the call."""
        model = make_model()
        with no_grad():
            pending = model.project(7)
        assert pending.wait().grad_fn is None
        assert not pending.wait().requires_grad
        plain = model.tensor.detach()
        assert model.carrier.project(plain, model.select(7)).wait().grad_fn is None
        pending = model.project(7)
        with no_grad():
            assert pending.wait().grad_fn is not None

    def test_a_handle_is_no_operand(self, make_model) -> None:
        pending = make_model().project(7)
        with pytest.raises(TypeError, match="AwaitProjection"):
            reduce_sum(pending)
        pending.wait()

    def test_an_integer_tensor_has_none(self) -> None:
        values = tiled(np.arange(24).reshape(4, 6), (1, 6))
        assert values.carrier.project(values, values.carrier.select({0: [1]})).wait().grad_fn is None

    def test_it_does_not_keep_the_compact_tensor(self, make_model) -> None:
        model = make_model()
        compact = model.project(7).wait()
        node, gone = compact.grad_fn, weakref.ref(compact.carrier)
        del compact
        assert gone() is None
        assert node.inputs[0] is model.tensor


class TestSavedVersions:
    def test_a_write_makes_the_graph_stale(self, make_model) -> None:
        model = make_model()
        total = reduce_sum(model.project(3, 1).wait())
        model.carrier[0] = 5.0  # of a tile that was not selected: the version is the carrier's
        with pytest.raises(StaleGraphError, match="project"):
            total.backward()
        assert model.tensor.grad is None

    def test_the_version_is_that_of_the_call(self, make_model, control_moves) -> None:
        model = make_model()
        model.carrier.promote(chosen(0))
        moves = control_moves(FileBacked, CPU)
        moves.gate.clear()
        pending = model.project(3)
        model.carrier[0] = 5.0
        moves.open()
        with pytest.raises(StaleGraphError):
            reduce_sum(pending.wait()).backward()

    def test_moving_tiles_does_not(self, make_model) -> None:
        """*Prefetch without changing autograd*."""
        model = make_model()
        total = reduce_sum(model.project(3, 1).wait())
        model.carrier.promote(model.select(4, 5))
        model.carrier.evict(model.select(3))
        total.backward()
        assert model.tensor.grad.carrier.dirty_tiles == chosen(1, 3)

    def test_releasing_the_source_does(self, make_model) -> None:
        model = make_model(keep=False)
        total = reduce_sum(model.project(3, 1).wait())
        model.carrier.release()
        with pytest.raises(StaleGraphError, match="released"):
            total.backward()

    def test_assigning_does(self, make_model) -> None:
        model = make_model()
        total = reduce_sum(model.project(3).wait())
        model.carrier.assign(weights(1, ROWS, COLUMNS), model.tensor, model.select(2)).wait()
        with pytest.raises(StaleGraphError):
            total.backward()


class TestGradientsOfProjections:
    def test_through_an_operation(self, make_model) -> None:
        """*Backpropagate through project then operation*."""
        model = make_model()
        compact = model.project(7, 2, 5).wait()
        x = weights(3, 3, ROWS)
        reduce_sum(x @ compact).backward()
        gradient = model.tensor.grad
        wanted = np.zeros_like(model.values)
        wanted[[7, 2, 5]] = x.numpy().sum(1)[:, :, None]
        assert np.allclose(gradient.numpy(), wanted, rtol=1e-6)

    def test_the_gradient_is_of_the_source_s_kind(self, make_model) -> None:
        """Full-shaped, on a fresh and distinct carrier; untouched tiles are implicit zeros."""
        model = make_model(policy=LRU(max_tiles=2))
        reduce_sum(model.project(7, 2).wait()).backward()
        gradient = model.tensor.grad
        carrier = gradient.carrier
        assert type(carrier) is TiledEvictable
        assert carrier is not model.carrier
        assert (gradient.shape, gradient.layout, gradient.offset, gradient.dtype) == (
            model.tensor.shape,
            model.tensor.layout,
            model.tensor.offset,
            model.tensor.dtype,
        )
        assert (carrier.grid_shape, carrier.tile_shape) == (
            model.carrier.grid_shape,
            model.carrier.tile_shape,
        )
        assert (type(carrier.primary), type(carrier.secondary)) == (CPU, FileBacked)
        assert carrier.residency_policy is None
        assert not gradient.requires_grad
        assert gradient.grad_fn is None
        assert len(carrier.valid_tiles) == EXPERTS
        assert carrier.dirty_tiles == carrier.primary_tiles == chosen(2, 7)
        assert carrier.tile_state((0, 0, 0)).location == "implicit"
        assert carrier.statistics().resident_bytes == 2 * carrier.statistics().tile_bytes

    def test_overlapping_projections_sum(self, make_model) -> None:
        """*Accumulate overlapping projections*."""
        model = make_model()
        first, second = model.project(7, 2, 5).wait(), model.project(5, 0, 7).wait()
        x, y = weights(3, ROWS, COLUMNS), weights(3, ROWS, COLUMNS, seed=2)
        (reduce_sum(first * x) + reduce_sum(second * y)).backward()
        wanted = np.zeros_like(model.values)
        wanted[[7, 2, 5]] += x.numpy()
        wanted[[5, 0, 7]] += y.numpy()
        gradient = model.tensor.grad
        assert np.array_equal(gradient.numpy(), wanted)
        assert gradient.carrier.dirty_tiles == chosen(0, 2, 5, 7)
        assert gradient.carrier.tile_state((1, 0, 0)).location == "implicit"

    def test_passes_accumulate(self, make_model) -> None:
        model = make_model()
        for _ in range(3):
            reduce_sum(model.project(3, 1).wait()).backward()
        reduce_sum(model.project(6).wait() * 4.0).backward()
        wanted = np.zeros_like(model.values)
        wanted[[3, 1]], wanted[6] = 3, 4
        assert np.array_equal(model.tensor.grad.numpy(), wanted)
        assert model.tensor.grad.carrier.dirty_tiles == chosen(1, 3, 6)

    def test_an_earlier_gradient_does_not_change(self, make_model) -> None:
        model = make_model()
        reduce_sum(model.project(3).wait()).backward()
        earlier = model.tensor.grad
        before = earlier.numpy(copy=True)
        reduce_sum(model.project(3).wait()).backward()
        assert model.tensor.grad is not earlier
        assert np.array_equal(earlier.numpy(), before)

    def test_a_graph_may_be_walked_again_where_it_is_kept(self, make_model) -> None:
        model = make_model()
        total = reduce_sum(model.project(3, 1).wait())
        total.backward(retain_graph=True)
        total.backward()
        assert set(model.tensor.grad.numpy()[[3, 1]].ravel()) == {2.0}
        with pytest.raises(RuntimeError, match="used up"):
            total.backward()

    def test_the_same_projection_may_be_used_twice(self, make_model) -> None:
        model = make_model()
        compact = model.project(3, 1).wait()
        reduce_sum(compact * compact).backward()
        assert np.array_equal(model.tensor.grad.numpy()[[3, 1]], 2 * model.values[[3, 1]])

    def test_one_cotangent_for_two_projections(self, make_model) -> None:
        model = make_model()
        first, second = model.project(3, 1).wait(), model.project(1, 4).wait()
        reduce_sum(first + second).backward()
        assert model.tensor.grad.numpy()[:, 0, 0].tolist() == [0, 2, 0, 1, 1, 0, 0, 0]

    def test_nothing_of_the_source_moves(self, make_model) -> None:
        """Its values are not read, so no tile is promoted and no policy asked."""
        asked = []

        class Policy(LRU):
            def plan(self, required, purpose):
                asked.append(purpose)
                return super().plan(required, purpose)

        model = make_model(policy=Policy(max_tiles=4))
        total = reduce_sum(model.project(3, 1).wait())
        model.carrier.evict(model.select(3, 1))
        before, moved = model.snapshot(), model.carrier.statistics().bytes_read
        total.backward()
        assert model.snapshot() == before
        assert model.carrier.statistics().bytes_read == moved
        assert asked == ["projection"]

    def test_an_unreachable_branch_costs_nothing(self, make_model) -> None:
        """*Skip an unreachable branch*."""
        model, other = make_model(), make_model()
        unused = tanh(other.project(2).wait())
        total = reduce_sum(model.project(2).wait()) + reduce_sum(unused.detach())
        total.backward()
        assert other.tensor.grad is None

    def test_a_destination_has_the_gradient_too(self, make_model) -> None:
        model = make_model()
        destination = CPU(0)
        compact = model.project(3, 1, destination=destination).wait()
        assert compact.carrier is destination
        reduce_sum(compact * compact).backward()
        assert np.array_equal(model.tensor.grad.numpy()[[3, 1]], 2 * model.values[[3, 1]])

    def test_a_destination_that_is_used_again_makes_what_read_it_stale(self, make_model) -> None:
        model = make_model()
        destination = CPU(0)
        compact = model.project(3, destination=destination).wait()
        total = reduce_sum(compact * compact)
        model.project(4, destination=destination).wait()
        with pytest.raises(StaleGraphError):
            total.backward()

    def test_a_gradient_can_be_projected_and_read(self, make_model) -> None:
        model = make_model()
        reduce_sum(model.project(3, 1).wait() * 2.0).backward()
        gradient = model.tensor.grad
        compact = gradient.carrier.project(gradient, model.select(1, 0)).wait()
        assert not compact.requires_grad
        assert compact.numpy()[:, 0, 0].tolist() == [2, 0]
        assert gradient.numpy().sum() == 2 * 2 * ROWS * COLUMNS
        assert gradient[3, 0, 0] == 2
        assert gradient[5, 0, 0] == 0
        gradient.carrier.evict(gradient.carrier.primary_tiles)
        assert gradient.numpy().sum() == 2 * 2 * ROWS * COLUMNS

    def test_spilled_gradients_add_up(self, make_model) -> None:
        model = make_model()
        reduce_sum(model.project(3, 1).wait()).backward()
        gradient = model.tensor.grad
        gradient.carrier.evict(gradient.carrier.primary_tiles)
        reduce_sum(model.project(1, 0).wait()).backward()
        assert model.tensor.grad.numpy()[:, 0, 0].tolist() == [1, 2, 0, 1, 0, 0, 0, 0]
        assert gradient.carrier.primary_tiles == TileSet()

    def test_a_gradient_may_be_cleared_and_assigned(self, make_model) -> None:
        model = make_model()
        reduce_sum(model.project(3).wait()).backward()
        gradient = model.tensor.grad
        model.tensor.grad = None
        model.tensor.grad = gradient
        reduce_sum(model.project(3).wait()).backward()
        assert model.tensor.grad[3, 0, 0] == 2

    @pytest.mark.parametrize("start", ["primary", "secondary"])
    @pytest.mark.parametrize("kind", [CPU, Generic])
    def test_every_pair_of_tiers(self, make_model, start: str, kind: type) -> None:
        for secondary in (CPU, FileBacked, Generic):
            model = make_model(start, primary=kind, secondary=secondary)
            compact = model.project(6, 0).wait()
            (reduce_sum(compact * compact) * 0.5).backward()
            gradient = model.tensor.grad
            assert (type(gradient.carrier.primary), type(gradient.carrier.secondary)) == (kind, secondary)
            assert np.array_equal(gradient.numpy()[[6, 0]], model.values[[6, 0]])

    @pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
    def test_every_dtype_sums_as_dense_gradients_do(self, dtype: DType) -> None:
        source = experts(4, dtype=dtype)
        reference = dense_copy(source)
        cotangents = [weights(2, ROWS, COLUMNS, seed=seed, dtype=dtype) for seed in (1, 2, 3)]
        for cotangent, pair in zip(cotangents, ([3, 1], [1, 0], [1, 3]), strict=True):
            project(source, *pair).backward(cotangent)
            gather(reference, asarray(np.array(pair))).backward(cotangent)
        found, wanted = source.grad.numpy(), reference.grad.numpy()
        assert found.dtype == wanted.dtype
        assert np.array_equal(found.astype(np.float64), wanted.astype(np.float64))

    def test_a_read_only_source(self) -> None:
        values = np.ones((4, 6), np.float32)
        values.flags.writeable = False
        for tiers in ((CPU.from_numpy(values), FileBacked()), (CPU(0), CPU.from_numpy(values))):
            carrier = TiledEvictable(*tiers, (4, 1), (1, 6))
            source = Tensor(carrier, 0, row_major(4, 6))
            reduce_sum(carrier.project(source, carrier.select({0: [2]})).wait()).backward()
            assert source.grad.numpy().sum() == 6
            assert source.grad.carrier.is_mutable()

    def test_orders_inside_a_tile(self) -> None:
        """*Accept a within-tile permutation*: backward preserves the values that the Layout defines."""
        carrier = TiledEvictable(
            CPU.from_numpy(np.arange(24, dtype=np.float32)), FileBacked(), (2, 3), (2, 2)
        )
        for offset, strides in {0: (1, 2), 1: (-1, 2), 3: (-2, -1)}.items():
            layout = Layout(((2, 2), (2, 3)), ((strides[0], 4), (strides[1], 8)))
            source = Tensor(carrier, offset, layout)
            selection = TileSelection([[1], [2, 0]])
            compact = carrier.project(source, selection).wait()
            x = weights(2, 4)
            reduce_sum(compact * compact * x).backward()
            wanted = np.zeros((4, 6), np.float32)
            full = source.numpy()
            part = 2 * full[2:4][:, [4, 5, 0, 1]] * x.numpy()
            wanted[2:4, 4:6], wanted[2:4, :2] = part[:, :2], part[:, 2:]
            assert np.allclose(source.grad.numpy(), wanted)
            assert source.grad.layout == layout

    def test_many_threads_share_one_leaf(self) -> None:
        source = experts()

        def work(expert: int) -> None:
            for _ in range(4):
                reduce_sum(project(source, expert, 0)).backward()

        threads = [threading.Thread(target=work, args=(expert,)) for expert in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert source.grad.numpy()[:, 0, 0].tolist() == [16, 4, 4, 4, 4, 0, 0, 0]

    def test_a_failure_leaves_gradients_and_graph_alone(self, make_model, monkeypatch) -> None:
        model = make_model()
        reduce_sum(model.project(3).wait()).backward()
        before = model.tensor.grad
        total = reduce_sum(model.project(3, 1).wait())

        def fail(*_: object) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(tile_values, "_run", fail)
        with pytest.raises(MemoryError, match="no room"):
            total.backward()
        monkeypatch.undo()
        assert model.tensor.grad is before
        assert before[3, 0, 0] == 1
        total.backward()
        assert model.tensor.grad[3, 0, 0] == 2

    def test_no_dense_gradient_ever_exists(self) -> None:
        """64 MiB of tiles, two of which get a gradient."""
        import tracemalloc  # noqa: PLC0415

        carrier = TiledEvictable(CPU(0), FileBacked(), (4096, 1), (1, 4096))
        source = gradient_like(Tensor(carrier, 0, row_major(4096, 4096)))
        leaf = Tensor(source.carrier, 0, source.layout)
        tracemalloc.start()
        for _ in range(2):
            reduce_sum(leaf.carrier.project(leaf, carrier.select({0: [5, 4000]})).wait()).backward()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        found = leaf.grad.carrier.statistics()
        assert found.peak_resident_bytes == 2 * found.tile_bytes
        assert peak < 8 << 20


class TestGivenGradients:
    """What may be given as a gradient of a tiled tensor, or assigned as one."""

    def test_one_of_another_geometry_is_refused(self) -> None:
        leaf, other = experts(), tiled(np.zeros((EXPERTS, ROWS, COLUMNS), np.float32), (2, ROWS, COLUMNS))
        with pytest.raises(ValueError, match="grid"):
            leaf.grad = other
        with pytest.raises(ValueError, match="grid"):
            leaf.backward(other)
        with pytest.raises(TypeError, match="on CPU"):
            leaf.backward(weights(EXPERTS, ROWS, COLUMNS))
        assert leaf.grad is None

    def test_one_whose_layout_leaves_its_tiles_is_refused(self) -> None:
        leaf, other = experts(), experts(seed=1)
        spoiled = Tensor(other.carrier, 24 * 7, Layout(other.shape, (-24, 6, 1)))
        with pytest.raises(ValueError, match="tile"):
            leaf.backward(spoiled)

    def test_one_that_computes_elsewhere_is_refused(self) -> None:
        leaf = experts()
        carrier = TiledEvictable(Generic([]), FileBacked(), (EXPERTS, 1, 1), (1, ROWS, COLUMNS))
        with pytest.raises(TypeError, match="Generic"):
            leaf.backward(Tensor(carrier, 0, leaf.layout))

    def test_a_leaf_gets_a_copy_of_its_own(self) -> None:
        leaf, given_ = experts(), experts(seed=1)
        leaf.backward(given_)
        assert leaf.grad.carrier is not given_.carrier
        assert np.array_equal(leaf.grad.numpy(), given_.numpy())
        reduce_sum(project(leaf, 2)).backward()
        wanted = given_.numpy(copy=True)
        wanted[2] += 1
        assert np.array_equal(leaf.grad.numpy(), wanted)

    def test_a_single_element_supplies_its_own(self) -> None:
        leaf = tiled(np.float32([[3.0]]), (1, 1))
        leaf.backward()
        assert leaf.grad.item() == 1

    def test_one_without_values_is_noticed(self, make_model) -> None:
        """Spec: *Residency state is independent of executable selection shape*."""
        model = make_model()
        partial = model.carrier.scatter(weights(1, ROWS, COLUMNS), model.tensor, model.select(2)).wait()
        with pytest.raises(InvalidTileError):
            model.tensor.backward(partial)
        assert model.tensor.grad is None


class TestGradientsOfScatters:
    def test_replace(self, make_model) -> None:
        """*Differentiate replace scatter*: the cotangent at the saved selection; none for the template."""
        model = make_model()
        compact = Tensor(weights(3, ROWS, COLUMNS).carrier, 0, row_major(3, ROWS, COLUMNS))
        result = model.carrier.scatter(compact, model.tensor, model.select(7, 2, 5)).wait()
        node = result.grad_fn
        assert node.name == "scatter"
        assert node.inputs[0] is compact
        assert node.inputs[1] is model.tensor
        x = weights(3, ROWS, COLUMNS, seed=4)
        reduce_sum(project(result, 7, 2, 5) * x).backward()
        assert np.array_equal(compact.grad.numpy(), x.numpy())
        assert type(compact.grad.carrier) is CPU
        assert model.tensor.grad is None
        assert result.grad is None

    def test_add_goes_to_both(self, make_model) -> None:
        model = make_model()
        compact = Tensor(weights(3, ROWS, COLUMNS).carrier, 0, row_major(3, ROWS, COLUMNS))
        result = model.carrier.scatter(compact, model.tensor, model.select(7, 2, 5), "add").wait()
        x = weights(2, ROWS, COLUMNS, seed=4)
        reduce_sum(project(result, 5, 7) * x).backward()
        zero = np.zeros((ROWS, COLUMNS), np.float32)
        assert np.array_equal(compact.grad.numpy(), np.stack([x.numpy()[1], zero, x.numpy()[0]]))
        wanted = np.zeros_like(model.values)
        wanted[[5, 7]] = x.numpy()
        gradient = model.tensor.grad
        assert np.array_equal(gradient.numpy(), wanted)
        assert gradient.carrier.tile_state((0, 0, 0)).location == "implicit"

    @pytest.mark.parametrize("of", ["compact", "template"])
    def test_add_where_one_of_them_wants_none(self, make_model, of: str) -> None:
        model = make_model()
        held = weights(1, ROWS, COLUMNS)
        compact = Tensor(held.carrier, 0, held.layout, requires_grad=of == "compact")
        template = Tensor(model.carrier, 0, model.tensor.layout, requires_grad=of == "template")
        result = model.carrier.scatter(compact, template, model.select(2), "add").wait()
        reduce_sum(project(result, 2)).backward()
        assert (compact.grad is None) == (of == "template")
        assert (template.grad is None) == (of == "compact")

    def test_no_value_is_saved(self, make_model) -> None:
        """Scatter is linear: what was written since makes nothing stale."""
        model = make_model()
        compact = Tensor(weights(1, ROWS, COLUMNS).carrier, 0, row_major(1, ROWS, COLUMNS))
        result = model.carrier.scatter(compact, model.tensor, model.select(2), "add").wait()
        total = reduce_sum(project(result, 2))
        compact[0, 0, 0] = 9.0
        model.carrier[0] = 9.0
        total.backward()
        assert compact.grad.numpy().sum() == ROWS * COLUMNS

    def test_the_cotangent_stays_where_it_is(self, make_model) -> None:
        """Implicit tiles are read as zeros and promoted nowhere; nor are stored ones."""
        model = make_model()
        compact = Tensor(weights(3, ROWS, COLUMNS).carrier, 0, row_major(3, ROWS, COLUMNS))
        result = model.carrier.scatter(compact, model.tensor, model.select(1, 2, 3)).wait()
        cotangent = gradient_like(result)
        carrier = cotangent.carrier
        for expert in (2, 3):
            carrier.assign(weights(1, ROWS, COLUMNS, seed=expert), cotangent, model.select(expert)).wait()
        carrier.evict(chosen(3))
        result.backward(cotangent)
        states = [carrier.tile_state((expert, 0, 0)).location for expert in (1, 2, 3)]
        assert states == ["implicit", "primary", "secondary"]
        wanted = np.zeros((3, ROWS, COLUMNS), np.float32)
        wanted[1], wanted[2] = (weights(1, ROWS, COLUMNS, seed=expert).numpy()[0] for expert in (2, 3))
        assert np.array_equal(compact.grad.numpy(), wanted)

    def test_a_cotangent_with_a_policy_asks_it(self, make_model) -> None:
        """Spec: *Residency policy can optimize but cannot define correctness*: the purpose is ``"backward"``."""
        asked = []

        class Policy(Streaming):
            def plan(self, required, purpose):
                asked.append(purpose)
                return super().plan(required, purpose)

        model, given_ = make_model(), make_model(policy=Policy())
        compact = Tensor(weights(2, ROWS, COLUMNS).carrier, 0, row_major(2, ROWS, COLUMNS))
        model.carrier.scatter(compact, model.tensor, model.select(6, 1)).wait().backward(given_.tensor)
        assert np.array_equal(compact.grad.numpy(), given_.values[[6, 1]])
        assert asked == ["backward"]
        assert given_.at_rest()

    def test_compact_in_another_order(self, make_model) -> None:
        model = make_model()
        base = asarray(np.ascontiguousarray(weights(3, ROWS, COLUMNS).numpy().transpose(2, 1, 0)))
        result = model.carrier.scatter(base.T, model.tensor, model.select(7, 2, 5)).wait()
        x = weights(3, ROWS, COLUMNS, seed=4)
        reduce_sum(project(result, 7, 2, 5) * x).backward()
        assert np.array_equal(base.grad.numpy(), x.numpy().T)

    def test_a_repeated_element_gets_the_sum(self, make_model) -> None:
        model = make_model()
        base = asarray(np.float32([[[2.0]]]))
        wide = base.broadcast_to(3, ROWS, COLUMNS)
        result = model.carrier.scatter(wide, model.tensor, model.select(7, 2, 5)).wait()
        reduce_sum(project(result, 7, 2)).backward()
        assert base.grad.item() == 2 * ROWS * COLUMNS

    def test_a_result_as_an_inner_node(self, make_model) -> None:
        """Several paths through one result add up there, before they go on."""
        model = make_model()
        compact = Tensor(weights(2, ROWS, COLUMNS).carrier, 0, row_major(2, ROWS, COLUMNS))
        inner = model.carrier.scatter(tanh(compact), model.tensor, model.select(4, 1), "add").wait()
        outer = inner.carrier.scatter(project(inner, 1) * 3.0, inner, model.select(1), "add").wait()
        (reduce_sum(project(inner, 1, 4)) + reduce_sum(project(outer, 1))).backward()
        slope = 1 - np.tanh(compact.numpy()) ** 2
        assert np.allclose(
            compact.grad.numpy(), slope * np.array([1, 5], np.float32)[:, None, None], rtol=1e-5
        )
        assert model.tensor.grad.numpy()[:, 0, 0].tolist() == [0, 5, 0, 0, 1, 0, 0, 0]
        assert inner.grad is None

    @pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
    def test_every_dtype(self, dtype: DType) -> None:
        source = experts(4, dtype=dtype)
        held = weights(2, ROWS, COLUMNS, dtype=dtype)
        compact = Tensor(held.carrier, 0, held.layout)
        result = source.carrier.scatter(compact, source, source.carrier.select({0: [3, 0]}), "add").wait()
        cotangent = weights(2, ROWS, COLUMNS, seed=8, dtype=dtype)
        project(result, 3, 0).backward(cotangent)
        for found in (compact.grad.numpy(), source.grad.numpy()[[3, 0]]):
            assert found.tobytes() == cotangent.numpy().tobytes()

    def test_a_tile_in_transit_is_a_conflict(self, make_model, control_moves) -> None:
        model, given_ = make_model(), make_model()
        compact = Tensor(weights(1, ROWS, COLUMNS).carrier, 0, row_major(1, ROWS, COLUMNS))
        result = model.carrier.scatter(compact, model.tensor, model.select(6)).wait()
        moves = control_moves(FileBacked, CPU)
        moves.gate.clear()
        pending = given_.carrier.promote_async(chosen(6))
        with pytest.raises(TileConflictError, match="backward meets"):
            result.backward(given_.tensor)
        moves.open()
        pending.wait()
        result.backward(given_.tensor)
        assert np.array_equal(compact.grad.numpy(), given_.values[[6]])


class TestAgainstDense:
    """The same computation on dense tensors gives the same gradients."""

    @staticmethod
    def network(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        hidden = relu(matmul(x, first))
        return reduce_sum(tanh(hidden) @ second.permute(0, 2, 1))

    @pytest.mark.parametrize("limit", [None, 3])
    @settings(max_examples=25)  # each is a training step or three
    @given(data=st.data())
    def test_projections_as_gathers(self, limit: int | None, data) -> None:
        tile_bytes = ROWS * COLUMNS * 8
        options = {} if limit is None else {"memory_limit": limit * tile_bytes}
        source = experts(dtype=DType.Float64, resident=False, **options)
        reference = dense_copy(source)
        picks = st.lists(st.integers(0, EXPERTS - 1), min_size=2, max_size=2, unique=True)
        for seed in range(data.draw(st.integers(1, 3))):
            first, second = data.draw(picks), data.draw(picks)
            x = weights(2, 3, ROWS, seed=seed, dtype=DType.Float64)
            self.network(project(source, *first), project(source, *second), x).backward()
            parts = [gather(reference, asarray(np.array(pick))) for pick in (first, second)]
            self.network(*parts, x).backward()
        assert np.allclose(source.grad.numpy(), reference.grad.numpy(), rtol=1e-12, atol=1e-12)
        found = source.grad.carrier.statistics()
        if limit is not None:
            assert found.peak_resident_bytes <= limit * tile_bytes

    def test_finite_differences(self) -> None:
        source = experts(3, dtype=DType.Float64)
        held = weights(2, ROWS, COLUMNS, dtype=DType.Float64)
        x = weights(2, 3, ROWS, seed=5, dtype=DType.Float64)
        compact = Tensor(held.carrier, 0, held.layout)

        def loss() -> Tensor:
            result = source.carrier.scatter(
                tanh(compact), source, source.carrier.select({0: [2, 0]}), "add"
            ).wait()
            return self.network(project(result, 0, 2), project(source, 1, 2), x)

        loss().backward()
        step = 1e-6
        for leaf, place in [
            (source, (0, 1, 2)),
            (source, (1, 3, 5)),
            (source, (2, 0, 0)),
            (compact, (1, 2, 3)),
        ]:
            at = leaf[place]
            values = []
            for value in (at + step, at - step):
                leaf[place] = value
                with no_grad():
                    values.append(loss().item())
            leaf[place] = at
            assert leaf.grad[place] == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-7)
