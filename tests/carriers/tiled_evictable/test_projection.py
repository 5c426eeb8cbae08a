"""Spec: *Project eagerly returns a completion handle for a compact Tensor* and what surrounds it."""

import threading

import anyio
import numpy as np
import pytest

import strideweave
from strideweave import (
    CPU,
    AwaitProjection,
    DType,
    FileBacked,
    Generic,
    InvalidTileError,
    Layout,
    ReleasedError,
    Tensor,
    TiledEvictable,
    TileSelection,
    row_major,
)
from strideweave.autograd import no_grad
from strideweave.carriers.tiled_evictable import gathering
from strideweave.runtime import current_runtime
from tiled_tensors import experts

pytestmark = pytest.mark.anyio
KINDS = [(CPU, FileBacked), (CPU, CPU), (CPU, Generic), (Generic, FileBacked), (Generic, CPU)]


@pytest.mark.parametrize("start", ["primary", "secondary"])
@pytest.mark.parametrize(("primary", "secondary"), KINDS)
def test_selected_experts_in_router_order(make_model, start, primary, secondary):
    """Spec, scenarios *Select three experts in router order*, *Gather a permuted selection*."""
    model = make_model(start, primary=primary, secondary=secondary)
    handle = model.project(7, 2, 5)
    assert isinstance(handle, AwaitProjection)
    compact = handle.wait()
    assert compact.shape == (3, 4, 6)
    assert type(compact.carrier) is primary
    assert compact.dtype is DType.Float32
    assert np.array_equal(compact.numpy(), model.values[[7, 2, 5]])
    assert model.at_rest()


async def test_awaited_from_the_callers_loop(make_model):
    model = make_model()
    compact = await model.project(1, 0)
    assert np.array_equal(compact.numpy(), model.values[[1, 0]])


@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
def test_every_bit_of_every_dtype_survives(make_model, dtype):
    rng = np.random.default_rng(7)
    model = make_model(dtype=dtype)
    raw = rng.integers(0, 256, model.values.nbytes, np.uint8)
    if dtype is DType.Bool:
        raw &= 1
    bits = raw.view(dtype.numpy).reshape(model.values.shape)
    slow = FileBacked(dtype=dtype).new_like(bits.ravel())
    carrier = strideweave.TiledEvictable(CPU(0, dtype=dtype), slow, (8, 1, 1), (1, 4, 6))
    tensor = Tensor(carrier, 0, row_major(8, 4, 6))
    compact = carrier.project(tensor, carrier.select({0: [6, 1]})).wait()
    assert compact.numpy().tobytes() == bits[[6, 1]].tobytes()
    carrier.release()


def test_repeated_observation_gives_the_same_object(make_model):
    """Spec, scenario *Observe a completed projection repeatedly*."""
    handle = make_model().project(3)
    assert handle.wait() is handle.wait()


def test_whole_tiles_stay_contiguous(make_model):
    compact = make_model().project(4, 1).wait()
    assert compact.layout == row_major(2, 4, 6)
    assert compact.numpy().flags.c_contiguous


def test_missing_tiles_stay_primary_and_the_source_stays_what_it_was(make_model):
    """Spec, scenario *Keep the full Tensor unchanged*."""
    model = make_model()
    version, layout = model.carrier.version, model.tensor.layout
    model.project(2, 6).wait()
    assert model.primary() == [2, 6]
    assert model.dirty() == []
    assert (model.carrier.version, model.tensor.layout, model.tensor.shape) == (version, layout, (8, 4, 6))
    before = model.carrier.statistics().bytes_read
    model.check(6, 2)
    assert model.carrier.statistics().bytes_read == before


def test_returns_before_the_transfer_is_done(make_model, control_moves):
    """Spec, scenario *Overlap projection with computation*."""
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    handle = model.project(1, 3)
    assert not handle.done
    moves.wait_until_entered()
    with pytest.raises(TimeoutError):
        handle.wait(0)
    moves.open()
    assert np.array_equal(handle.wait(10).numpy(), model.values[[1, 3]])


def test_mutating_the_callers_inputs_changes_nothing(make_model, control_moves):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    chosen = [1, 3]
    selection = TileSelection([chosen, [0], [0]])
    handle = model.carrier.project(model.tensor, selection)
    chosen[:] = [0, 0]
    with pytest.raises(strideweave.TileConflictError):
        model.carrier[24] = 77.0
    moves.open()
    assert np.array_equal(handle.wait(10).numpy(), model.values[[1, 3]])
    model.carrier[24] = 77.0
    assert handle.wait().numpy()[0, 0, 0] == model.values[1, 0, 0]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_one_batch_reads_the_missing_tiles_and_nothing_else(make_model, control_moves, count):
    model = make_model()
    model.carrier.promote(experts(0))
    moves = control_moves(FileBacked, CPU)
    model.project(*range(count)).wait()
    assert moves.calls == ([count - 1] if count > 1 else [])
    assert moves.slots == (count - 1) * 24


async def test_overlapping_projections_share_one_read(make_model, control_moves):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    picks = [(0, 1), (1, 2), (2, 1, 0), (3,), (1, 3)]
    handles = [model.project(*pick) for pick in picks]
    for _ in range(
        2
    ):  # the loop begins them a few at a time, each with the turn after; all are to meet the gate
        passed = threading.Event()
        current_runtime().post(passed.set)
        assert passed.wait(10)
    moves.open()
    for pick, handle in zip(picks, handles, strict=True):
        assert np.array_equal((await handle).numpy(), model.values[list(pick)])
    statistics = model.carrier.statistics()
    assert statistics.bytes_read == 4 * statistics.tile_bytes
    assert (statistics.misses, statistics.hits, statistics.shared) == (4, 0, 6)
    assert model.at_rest()


async def test_sixty_four_concurrent_projections_read_each_missing_tile_once(make_model):
    model = make_model()
    rng = np.random.default_rng(3)
    picks = [rng.permutation(7)[: rng.integers(1, 5)].tolist() for _ in range(64)]
    distinct = {expert for pick in picks for expert in pick}

    async def ask(pick):
        assert np.array_equal((await model.project(*pick)).numpy(), model.values[pick])

    async with anyio.create_task_group() as group:
        for pick in picks:
            group.start_soon(ask, pick)
    statistics = model.carrier.statistics()
    assert statistics.bytes_read == len(distinct) * statistics.tile_bytes
    assert model.carrier.secondary.statistics().file.bytes_read == statistics.bytes_read
    assert model.at_rest()


async def test_a_cancelled_awaiter_leaves_the_projection_running(make_model, control_moves):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    handle = model.project(2)
    with anyio.move_on_after(0):
        await handle
    assert not handle.done
    moves.open()
    assert np.array_equal((await handle).numpy(), model.values[[2]])
    assert model.at_rest()


@pytest.mark.parametrize("grad", [True, False])
def test_requires_grad_is_decided_at_the_call(make_model, control_moves, grad):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    if grad:
        handle = model.project(1)
    else:
        with no_grad():
            handle = model.project(1)
    moves.open()
    assert handle.wait(10).requires_grad is grad


# Destinations


@pytest.mark.parametrize("slots", [48, 100])
def test_a_destination_is_written_from_slot_zero(make_model, slots):
    model = make_model()
    destination = CPU(slots)
    compact = model.project(3, 0, destination=destination).wait()
    assert compact.carrier is destination
    assert np.array_equal(compact.numpy(), model.values[[3, 0]])
    assert destination.version == 1
    assert not destination.is_owned()
    assert not destination.numpy()[48:].any()
    destination[0] = 1.0


def test_an_empty_destination_is_allocated(make_model):
    model = make_model()
    destination = CPU(0)
    compact = model.project(3, 0, destination=destination).wait()
    assert destination.size() == 48
    assert np.array_equal(compact.numpy(), model.values[[3, 0]])


def test_a_destination_belongs_to_the_request_until_it_ends(make_model, control_moves):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    destination = CPU(48)
    handle = model.project(1, 2, destination=destination)
    for forbidden in (
        lambda: destination.set_value(0, 1.0),
        destination.release,
        destination.increment_version,
        lambda: model.project(4, destination=destination),
    ):
        with pytest.raises(strideweave.OwnershipError):
            forbidden()
    assert destination[0] == 0.0
    assert destination.version == 0
    moves.open()
    handle.wait(10)
    assert destination.version == 1
    destination.release()


def test_after_a_failure_the_destination_is_what_it_was(make_model, control_moves):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    for destination in (CPU(0).new_like(range(48)), CPU(0)):
        size, values = destination.size(), destination.numpy().copy()
        before = model.snapshot()
        moves.failures.append(OSError(5, "broken"))
        with pytest.raises(OSError, match="broken"):
            model.project(1, 2, destination=destination).wait()
        assert (destination.size(), destination.version, destination.is_owned()) == (size, 0, False)
        assert np.array_equal(destination.numpy(), values)
        assert model.snapshot() == before
        assert model.at_rest()
    model.check(1, 2)


def _released():
    carrier = CPU(48)
    carrier.release()
    return carrier


def _owned():
    carrier = CPU(48)
    carrier._claim(object())
    return carrier


@pytest.mark.parametrize(
    ("destination", "error"),
    [
        (lambda: np.zeros(48), TypeError),
        (lambda: Generic([0.0] * 48), TypeError),
        (FileBacked, TypeError),
        (lambda: CPU(48, dtype=DType.Float64), TypeError),
        (_released, ReleasedError),
        (_owned, strideweave.OwnershipError),
        (lambda: CPU(48, mutable=False), strideweave.ImmutableError),
        (lambda: CPU(47), ValueError),
    ],
)
def test_refused_destinations_change_nothing(make_model, destination, error):
    model = make_model()
    given = destination()
    owned = isinstance(given, strideweave.Carrier) and given.is_owned()
    before = model.snapshot()
    with pytest.raises(error):
        model.project(1, 2, destination=given)
    assert model.snapshot() == before
    assert model.at_rest()
    if isinstance(given, strideweave.Carrier):
        assert given.is_owned() is owned


@pytest.mark.parametrize("tier", ["primary", "secondary"])
@pytest.mark.parametrize("given_by", ["caller", "destination"])
def test_a_destination_in_the_memory_of_a_tier_is_refused(tier, given_by):
    own = CPU(0).new_like(np.arange(16.0, dtype=np.float32))
    memory = np.arange(16, dtype=np.float32) if given_by == "caller" else own.numpy(writable=True)
    tiers = (CPU.from_numpy(memory), CPU(0)) if tier == "primary" else (CPU(0), CPU.from_numpy(memory))
    carrier = TiledEvictable(*tiers, (4,), (4,))
    tensor = Tensor(carrier, 0, row_major(16))
    for destination in (CPU.from_numpy(memory[4:12]), *([own] if given_by == "destination" else [])):
        with pytest.raises(ValueError, match="memory of a tier"):
            carrier.project(tensor, carrier.select({0: [1, 0]}), destination)
        assert (destination.version, destination.is_owned()) == (0, False)
    assert memory.tolist() == list(range(16))
    elsewhere = CPU.from_numpy(np.zeros(8, np.float32))
    swapped = carrier.project(tensor, carrier.select({0: [1, 0]}), elsewhere).wait()
    assert swapped.tolist() == [4.0, 5.0, 6.0, 7.0, 0.0, 1.0, 2.0, 3.0]
    carrier.release()


def test_a_tier_or_a_tiled_carrier_is_no_destination(make_model):
    model, other = make_model(), make_model()
    with pytest.raises(TypeError):
        model.project(1, destination=other.carrier)
    with pytest.raises(strideweave.OwnershipError):
        model.project(1, destination=model.carrier.primary)


# What is refused


@pytest.mark.parametrize("tensor", [None, np.zeros((8, 4, 6)), "tensor"])
def test_something_else_than_a_tensor_is_a_type_error(make_model, tensor):
    model = make_model()
    with pytest.raises(TypeError, match="Tensor"):
        model.carrier.project(tensor, model.select(0))


def test_a_pending_projection_is_no_tensor(make_model):
    """Spec, scenario *Reject a pending projection operand*."""
    model = make_model()
    handle = model.project(0)
    with pytest.raises(TypeError, match="wait"):
        model.carrier.project(handle, model.select(0))
    handle.wait()


def test_a_tensor_of_another_carrier_is_a_type_error(make_model):
    model, other = make_model(), make_model()
    with pytest.raises(TypeError, match="another"):
        model.carrier.project(other.tensor, model.select(0))
    with pytest.raises(TypeError, match="another"):
        model.carrier.project(strideweave.zeros((8, 4, 6)), model.select(0))


@pytest.mark.parametrize("selection", [None, [[0], [0], [0]], experts(0), {0: [1]}])
def test_something_else_than_a_selection_is_a_type_error(make_model, selection):
    model = make_model()
    with pytest.raises(TypeError, match="TileSelection"):
        model.carrier.project(model.tensor, selection)


@pytest.mark.parametrize("axes", [[[0], [0]], [[8], [0], [0]], [[0], [1], [0]], [[0], [0], [0], [0]]])
def test_a_selection_that_does_not_fit_is_a_value_error(make_model, axes):
    model = make_model()
    before = model.snapshot()
    with pytest.raises(ValueError, match="grid"):
        model.carrier.project(model.tensor, TileSelection(axes))
    assert model.snapshot() == before


@pytest.mark.parametrize(
    ("layout", "offset"),
    [
        (Layout((8, 4, 6), (24, 6, 0)), 0),
        (Layout((8, 4, 6), (24, 1, 1)), 0),
        (Layout((4, 4, 6), (24, 6, 1)), 0),
        (Layout((4, 4, 6), (24, 6, 1)), 96),
        (Layout((6, 4, 8), (1, 48, 6)), 0),
        (Layout((8, 4, 6), (-24, 6, 1)), 168),
    ],
)
def test_an_incompatible_layout_is_a_value_error_and_changes_nothing(make_model, layout, offset):
    """Spec: *Tensor Layout compatibility preserves exact carrier tile footprints*, the rejecting scenarios."""
    model = make_model()
    before = model.snapshot()
    with pytest.raises(ValueError):
        model.carrier.project(Tensor(model.carrier, offset, layout), model.select(0))
    assert model.snapshot() == before
    assert model.at_rest()


def test_a_permuted_order_inside_a_tile_is_compatible(make_model):
    """Spec, scenario *Accept a within-tile permutation*."""
    model = make_model()
    layout = Layout((8, 4, 6), (24, 1, 4))
    tensor = Tensor(model.carrier, 0, layout)
    compact = model.carrier.project(tensor, model.select(5, 2)).wait()
    logical = model.values.reshape(8, 6, 4).transpose(0, 2, 1)
    assert np.array_equal(compact.numpy(), logical[[5, 2]])
    assert np.array_equal(tensor.numpy(), logical)


def test_invalid_tiles_are_refused(make_model):
    model = make_model("neither")
    with pytest.raises(InvalidTileError, match="no value"):
        model.project(0)
    assert model.at_rest()


def test_a_released_carrier_refuses(make_model):
    model = make_model()
    selection = model.select(0)
    model.carrier.release()
    with pytest.raises(ReleasedError):
        model.carrier.project(model.tensor, selection)


def test_no_operation_takes_the_raw_tensor(make_model):
    model = make_model()
    for refused in (strideweave.exp, lambda tensor: tensor.T, lambda tensor: tensor.reshape(-1)):
        with pytest.raises(NotImplementedError):
            refused(model.tensor)
    assert np.allclose(strideweave.exp(model.project(0).wait()).numpy(), np.exp(model.values[[0]]))


def test_multi_axis_selections_come_first_mode_fastest():
    """Spec, scenarios *Gather a multi-axis selection*, *Include every recombined corner*."""
    values = np.arange(20 * 20, dtype=np.float32).reshape(20, 20)
    tensor = strideweave.tiled(values, (2, 2))
    carrier = tensor.carrier
    selection = TileSelection([[7, 2], [4, 9]])
    compact = carrier.project(tensor, selection).wait()
    rows = [14, 15, 4, 5]
    columns = [8, 9, 18, 19]
    assert np.array_equal(compact.numpy(), values[np.ix_(rows, columns)])
    carrier.release()


@pytest.fixture
def copied(monkeypatch) -> list[int]:
    """How many tiles the loop has copied at once."""
    turns: list[int] = []
    copy = gathering.copy_inline

    def watched(traffic, geometry, ordinals, positions, compact):
        turns.append(len(ordinals))
        copy(traffic, geometry, ordinals, positions, compact)

    monkeypatch.setattr(gathering, "copy_inline", watched)
    monkeypatch.setattr("strideweave.carriers.tiled_evictable.projection.copy_inline", watched)
    return turns


@pytest.mark.parametrize(("rows", "turns"), [(64, [64]), (256, [256]), (257, [])])
def test_the_loop_copies_a_mebibyte_of_small_tiles_at_once(rows, turns, copied):
    """More is the workers'."""
    values = np.arange(260 * 1024, dtype=np.float32).reshape(260, 1024)
    tensor = strideweave.tiled(values, (1, 1024))
    chosen = np.random.default_rng(5).permutation(260)[:rows]
    compact = tensor.carrier.project(tensor, tensor.carrier.select({0: chosen})).wait()
    assert np.array_equal(compact.numpy(), values[chosen])
    assert copied == turns
    tensor.carrier.release()


@pytest.mark.parametrize(
    ("columns", "turns"), [(64, [64]), (65, [64, 1]), (200, [64, 64, 64, 8]), (256, [64] * 4), (257, [])]
)
def test_the_loop_copies_a_quarter_of_a_mebibyte_at_once_where_values_change_their_order(
    columns, turns, copied
):
    """Others get their turn in between."""
    values = np.arange(260 * 1024, dtype=np.float32).reshape(4, 260 * 256)
    tensor = strideweave.tiled(values, (4, 256))
    chosen = np.random.default_rng(5).permutation(260)[:columns]
    compact = tensor.carrier.project(tensor, tensor.carrier.select({1: chosen})).wait()
    assert np.array_equal(compact.numpy(), values.reshape(4, 260, 256)[:, chosen].reshape(4, -1))
    assert copied == turns
    tensor.carrier.release()
