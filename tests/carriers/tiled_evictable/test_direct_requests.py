"""Spec: *A direct tiled operand means the full logical Tensor*: what is refused, and what holds meanwhile."""

import threading

import numpy as np
import pytest

import strideweave as sw
from strideweave import (
    CPU,
    LRU,
    DType,
    FileBacked,
    Generic,
    InvalidTileError,
    PendingWorkError,
    ReleasedError,
    ResidencyPlan,
    Streaming,
    Tensor,
    TileConflictError,
    TiledEvictable,
    TileSet,
    row_major,
    tiled,
)
from strideweave.runtime.event_loop import current_runtime
from tiled_tensors import small_budget

NAMES = ["add", "elementwise_mul", "matmul", "mul", "reduce_sum", "relu"]


# What is refused


def test_six_operations_and_no_other():
    x = tiled(np.ones((4, 6), np.float32), (2, 3))
    carrier = x.carrier
    assert sorted({found.operation for found in carrier.operation_capabilities()}) == NAMES
    assert [found.operands for found in carrier.operation_capabilities("mul")] == [
        ("tensor", "tensor"),
        ("tensor", "scalar"),
        ("scalar", "tensor"),
    ]
    assert carrier.operation_capabilities("sub") == ()
    for name in NAMES:
        operation = carrier.dispatch_op(name)
        assert (operation.name, operation.carrier_class) == (name, TiledEvictable)
        assert operation is not carrier.dispatch_op(name)
    for refused in (
        lambda: x - 1,
        lambda: -x,
        lambda: x.T,
        lambda: x.reshape(24),
        lambda: sw.softmax(x),
        lambda: sw.sub(sw.asarray(np.ones((4, 6), np.float32)), x),
    ):
        with pytest.raises(NotImplementedError, match="TiledEvictable does not run"):
            refused()


def test_reject_a_pending_projection_operand(make_model):
    """Spec, scenario *Reject a pending projection operand*."""
    model = make_model()
    pending = model.project(1, 2)
    for refused in (
        lambda: sw.add(pending, 1.0),
        lambda: sw.add(model.tensor, pending),
        lambda: sw.matmul(pending, model.tensor),
    ):
        with pytest.raises(TypeError, match="pending result"):
            refused()
    pending.wait()
    with pytest.raises(TypeError, match="pending result"):
        model.tensor * model.carrier.promote_async(model.select(1))


def test_execute_on_an_explicitly_projected_tensor(make_model):
    """Spec, scenario *Execute on an explicitly projected Tensor*."""
    model = make_model()
    compact = model.project(6, 0, 3).wait()
    found = sw.softmax(compact * 2, axis=-1)
    assert found.shape == (3, 4, 6)
    assert np.allclose(found.numpy().sum(-1), 1)
    assert np.array_equal((compact + compact).numpy(), 2 * model.values[[6, 0, 3]])
    assert model.primary() == [0, 3, 6], "the operation touched no other tile"


def test_operands_on_other_classes_are_refused(make_model):
    model = make_model()
    values = np.ones((8, 4, 6), np.float32)
    file = FileBacked(dtype=DType.Float32).new_like(values.ravel())
    slow = FileBacked(dtype=DType.Float32).new_like(values.ravel())
    generic = Tensor(TiledEvictable(Generic([]), slow, (8, 1, 1), (1, 4, 6)), 0, row_major(8, 4, 6))
    before = model.snapshot()
    for other in (
        Tensor(file, 0, row_major(8, 4, 6)),
        Tensor(Generic(values.ravel()), 0, row_major(8, 4, 6)),
        generic,
    ):
        with pytest.raises(TypeError, match="bring all operands to one class"):
            sw.add(model.tensor, other)
        with pytest.raises(TypeError, match="bring all operands to one class"):
            sw.mul(other, model.tensor)
    assert model.snapshot() == before
    assert model.at_rest()


def test_only_the_full_tensor_is_an_operand(make_model):
    model = make_model()
    part = Tensor(model.carrier, 0, row_major(4, 4, 6))
    with pytest.raises(ValueError, match="pass the full Tensor"):
        sw.add(part, 1.0)


def test_shapes_and_options_are_checked_as_ever(make_model):
    tensor = make_model().tensor
    with pytest.raises(ValueError, match="do not broadcast"):
        tensor + sw.asarray(np.ones(5, np.float32))
    with pytest.raises(ValueError, match="inner extents"):
        tensor @ tensor
    with pytest.raises(ValueError, match="axis 3 is outside"):
        sw.reduce_sum(tensor, axis=3)


def test_released_operands_are_refused(make_model):
    model = make_model()
    dense = sw.asarray(np.ones(6, np.float32))
    dense.carrier.release()
    with pytest.raises(ReleasedError):
        sw.add(model.tensor, dense)
    model.carrier.release()
    with pytest.raises(ReleasedError):
        sw.relu(model.tensor)


def test_tiles_without_a_value_are_refused(make_model):
    model = make_model("none")
    with pytest.raises(InvalidTileError, match="operation needs 8 tiles"):
        sw.relu(model.tensor)
    assert model.at_rest()


def test_an_unfinished_residency_request_is_not_joined(make_model, control_moves):
    """Spec, scenario *Refuse hidden waiting on external transition*."""
    moves = control_moves(FileBacked, CPU)
    model = make_model()
    moves.gate.clear()
    pending = model.carrier.promote_async(model.select(3))
    with pytest.raises(TileConflictError, match="wait for"):
        sw.relu(model.tensor)
    moves.open()
    pending.wait()
    assert np.array_equal(sw.relu(model.tensor).numpy(), model.values)


def test_inside_the_runtime_it_raises_instead_of_deadlocking(make_model):
    model = make_model()
    done, raised = threading.Event(), []

    def call():
        try:
            sw.relu(model.tensor)
        except RuntimeError as error:
            raised.append(error)
        done.set()

    current_runtime().post(call)
    assert done.wait(10)
    assert "deadlock" in str(raised[0])
    assert model.at_rest()


# While it runs


def in_thread(call):
    results = []

    def run():
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_two_carriers_are_held_until_the_operation_has_ended(make_model, control_moves):
    """Spec: *Residency remains valid while tiled work needs it*, on every carrier involved."""
    moves = control_moves(FileBacked, CPU)
    first, second = make_model(), make_model("primary")
    moves.gate.clear()
    thread, results = in_thread(lambda: sw.add(first.tensor, second.tensor))
    moves.wait_until_entered()
    for model in (first, second):
        with pytest.raises(PendingWorkError):
            model.carrier.release()
        with pytest.raises(TileConflictError, match="operation"):
            model.carrier.evict(model.select(5))
        with pytest.raises(TileConflictError):
            model.carrier[0] = 1.0
    before = first.snapshot(), second.snapshot()
    compact = second.project(2).wait()  # other data requests share the tiles
    assert np.array_equal(compact.numpy(), second.values[[2]])
    moves.open()
    thread.join(10)
    assert np.array_equal(results[0].numpy(), 2 * first.values)
    assert (first.snapshot(), second.snapshot()) == before
    assert first.at_rest() and second.at_rest()
    second.carrier.evict(second.select(5))


def test_a_conflict_on_the_second_carrier_leaves_the_first_alone(make_model, control_moves):
    moves = control_moves(FileBacked, CPU)
    first, second = make_model("primary"), make_model()
    moves.gate.clear()
    pending = second.carrier.promote_async(second.select(0))
    before = first.snapshot()
    with pytest.raises(TileConflictError):
        sw.add(first.tensor, second.tensor)
    assert first.snapshot() == before
    assert first.at_rest()
    moves.open()
    pending.wait()


@pytest.mark.parametrize("policy", [None, "lru"])
def test_a_failed_read_publishes_nothing_and_leaves_everything(
    make_model, control_moves, policy, monkeypatch
):
    small_budget(monkeypatch, 2 * 96)
    moves = control_moves(FileBacked, CPU)
    model = make_model(policy=None if policy is None else LRU(max_tiles=8))
    other = make_model("primary")
    model.carrier.promote(model.select(1))
    before = model.snapshot(), other.snapshot()
    moves.failures.append(OSError("the disk is gone"))
    moves.fail_when = lambda transfers: transfers[-1].source_start >= 5 * 24
    with pytest.raises(OSError, match="the disk is gone"):
        sw.add(model.tensor, other.tensor)
    assert (model.snapshot(), other.snapshot()) == before
    assert model.at_rest() and other.at_rest()
    assert np.array_equal(sw.add(model.tensor, other.tensor).numpy(), 2 * model.values)


def test_the_next_block_is_read_while_this_one_is_computed(make_model, control_moves, monkeypatch):
    small_budget(monkeypatch, 96)
    moves = control_moves(FileBacked, CPU)
    model = make_model()
    computing, seen = threading.Event(), []
    real = CPU.dispatch_op

    def watched(self, name):
        operation = real(self, name)
        forward = operation.forward

        def computed(*inputs, **options):
            seen.append(computing.wait(10))
            return forward(*inputs, **options)

        operation.forward = computed
        return operation

    monkeypatch.setattr(CPU, "dispatch_op", watched)
    moves.answer = lambda transfers: computing.set() if len(moves.calls) == 2 else None
    assert np.array_equal(sw.relu(model.tensor).numpy(), model.values)
    assert seen == [True] * 8, "a computation began and the next tile was never read meanwhile"


def test_policy_is_honoured(make_model):
    """Spec: *Residency policy can optimize but cannot define correctness*."""
    asked = []

    class Policy:
        def plan(self, required, purpose):
            asked.append((len(required.coordinates), purpose))
            return ResidencyPlan(
                promote=TileSet([(1, 0, 0), (2, 0, 0)]),
                evict=TileSet([(number, 0, 0) for number in (0, 3, 4, 5, 6, 7)]),
            )

    model = make_model(policy=Policy())
    model.carrier.promote(model.select(0, 5))
    assert np.array_equal(sw.relu(model.tensor).numpy(), model.values)
    assert asked == [(8, "operation")]
    assert model.primary() == [1, 2]
    assert model.at_rest()


@pytest.mark.parametrize(("policy", "left"), [(Streaming(), 0), (LRU(max_tiles=3), 3)])
def test_shipped_policies_keep_their_bound(make_model, policy, left):
    model = make_model(policy=policy)
    assert np.array_equal((model.tensor * 2).numpy(), 2 * model.values)
    assert len(model.primary()) == left
    assert model.carrier.statistics().peak_resident_bytes <= left * 96
    assert model.at_rest()


@pytest.mark.parametrize("answer", [None, ResidencyPlan(evict=TileSet([(99, 0, 0)]))])
def test_reject_an_invalid_policy_result_before_execution(make_model, answer):
    """Spec, scenario *Reject an invalid policy result before execution*."""

    class Policy:
        def plan(self, required, purpose):
            return answer

    model = make_model(policy=Policy())
    before = model.snapshot()
    with pytest.raises(TypeError if answer is None else ValueError):
        sw.relu(model.tensor)
    assert model.snapshot() == before
    assert model.carrier.statistics().misses == 0
    assert model.at_rest()
