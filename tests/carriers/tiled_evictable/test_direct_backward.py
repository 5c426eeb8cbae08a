"""Spec: *A direct tiled operand means the full logical Tensor*: backward as a request, and what it leaves alone."""

import threading
import weakref

import numpy as np
import pytest

import strideweave as sw
from strideweave import (
    CPU,
    LRU,
    FileBacked,
    ResidencyPlan,
    StaleGraphError,
    Tensor,
    TileConflictError,
    TileSet,
    no_grad,
    tiled,
)
from strideweave.carriers.tiled_evictable import direct_pass, targets
from tiled_tensors import assert_at_rest, residency, small_budget, whole

RNG = np.random.default_rng(12)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def make(values, tile_shape, *, resident=False, policy=None):
    return tiled(values, tile_shape, resident=resident, residency_policy=policy)


# Residency, policies and requests


def test_run_backward_without_a_policy():
    """Spec, scenario *Run backward without a policy*: saved tiles were evicted, and come back."""
    values, others = normal(8, 6), normal(6, 3)
    x, y = make(values, (2, 3), resident=True), sw.asarray(others)
    result = x @ y
    every = TileSet([(int(a), int(b)) for a, b in np.ndindex(4, 2)])
    x.carrier.evict(every)
    result.backward(sw.asarray(np.ones((8, 3), np.float32)))
    np.testing.assert_allclose(y.grad.numpy(), values.T @ np.ones((8, 3), np.float32), 1e-5, 1e-5)
    np.testing.assert_allclose(whole(x.grad), np.ones((8, 3), np.float32) @ others.T, 1e-5, 1e-5)
    assert x.carrier.secondary_tiles == every, "residency is what backward found"
    assert_at_rest(x)


class Recorder:
    """A policy that lets everything pass and notes what it was asked."""

    def __init__(self):
        self.asked = []

    def plan(self, required, purpose):
        self.asked.append((len(required.coordinates), purpose))
        return ResidencyPlan(evict=required)


def test_skip_an_unreachable_branch():
    """Spec, scenario *Skip an unreachable branch*: the policy is not asked, and nothing is promoted."""
    policy = Recorder()
    x, y = make(normal(4, 4), (2, 2), policy=policy), sw.asarray(normal(4, 4))
    chosen = sw.asarray(normal(4, 4))
    product = sw.mul(x, y)  # decides which is chosen, and so gets no gradient
    result = sw.reduce_sum(sw.select(product, chosen, 0.0))
    assert product.grad_fn is not None and product.requires_grad
    policy.asked.clear()
    before = residency(x), x.carrier.statistics()
    result.backward()
    assert chosen.grad is not None
    assert policy.asked == []
    assert x.grad is None and y.grad is None
    assert (residency(x), x.carrier.statistics()) == before


def test_the_policy_is_asked_for_what_is_read():
    policy = Recorder()
    x, y = make(normal(4, 6), (2, 3), policy=policy), sw.asarray(normal(6, 2))
    sw.reduce_sum(x @ y).backward()
    assert policy.asked == [(4, "operation"), (4, "backward")], "x's own share is made from y"
    policy.asked.clear()
    sw.reduce_sum(x).backward()
    sw.reduce_sum(sw.relu(x) + 1).backward()
    sw.reduce_sum(x * 2).backward()
    assert {purpose for _, purpose in policy.asked} == {"operation"}, (
        "no tile is read for these on the way back"
    )


def test_a_policy_decides_what_stays_after_backward():
    x, y = make(normal(8, 6), (1, 6), policy=LRU(max_tiles=3)), sw.asarray(normal(6, 2))
    sw.reduce_sum(x @ y).backward()
    statistics = x.carrier.statistics()
    assert statistics.resident_tiles == 3
    assert statistics.peak_resident_bytes <= 3 * statistics.tile_bytes
    assert_at_rest(x)


def test_an_invalid_plan_fails_backward_before_any_work():
    class Policy:
        answer = None

        def plan(self, required, purpose):
            return ResidencyPlan() if purpose == "operation" else self.answer

    x, y = make(normal(4, 4), (2, 2), policy=Policy()), sw.asarray(normal(4, 4))
    result = sw.reduce_sum(x * y)
    misses = x.carrier.statistics().misses
    with pytest.raises(TypeError, match="a policy returns a ResidencyPlan"):
        result.backward()
    assert x.grad is None and y.grad is None
    assert x.carrier.statistics().misses == misses
    assert_at_rest(x)
    Policy.answer = ResidencyPlan()
    result.backward()
    assert y.grad is not None


def test_a_write_makes_the_graph_stale():
    x, y = make(normal(4, 4), (2, 2)), sw.asarray(normal(4, 4))
    product, total = sw.reduce_sum(x * y), sw.reduce_sum(x + y)
    x.carrier[0] = 1.0
    with pytest.raises(StaleGraphError):
        product.backward()
    assert x.grad is None and y.grad is None
    total.backward()
    assert np.array_equal(whole(x.grad), np.ones((4, 4))), "a sum reads nothing on its way back"
    changed = sw.reduce_sum(x * y)
    y[0, 0] = 2.0
    with pytest.raises(StaleGraphError):
        changed.backward()


def test_a_released_operand_whose_values_are_not_read_is_missed_by_nobody():
    x, y = make(normal(4, 4), (2, 2)), sw.asarray(normal(4, 4))
    total, product = sw.reduce_sum(x + y), sw.reduce_sum(x * y)
    x.carrier.release()
    with pytest.raises(StaleGraphError):
        product.backward()
    total.backward()
    assert np.array_equal(whole(x.grad), np.ones((4, 4)))


def test_backward_meets_an_unfinished_residency_request(control_moves):
    moves = control_moves(FileBacked, CPU)
    x, y = make(normal(4, 4), (2, 2)), sw.asarray(normal(4, 4))
    result = sw.reduce_sum(x * y)
    moves.gate.clear()
    pending = x.carrier.promote_async(TileSet([(1, 1)]))
    with pytest.raises(TileConflictError, match="backward"):
        result.backward()
    assert y.grad is None and x.grad is None
    moves.open()
    pending.wait()
    result.backward()


def test_backward_holds_the_tiles_it_reads(control_moves):
    """Spec: *Residency remains valid while tiled work needs it*."""
    moves = control_moves(FileBacked, CPU)
    values, others = normal(4, 4), normal(4, 4)
    x, y = make(values, (2, 2)), sw.asarray(others)
    result = sw.reduce_sum(x * y)
    moves.gate.clear()
    moves.entered.clear()
    thread = threading.Thread(target=result.backward)
    thread.start()
    moves.wait_until_entered()
    with pytest.raises(TileConflictError, match="backward"):
        x.carrier.promote(TileSet([(0, 0)]))
    with pytest.raises(TileConflictError):
        x.carrier[0] = 5.0
    moves.open()
    thread.join(10)
    assert np.array_equal(y.grad.numpy(), values)
    assert np.array_equal(whole(x.grad), others)
    assert_at_rest(x)


def test_a_failed_read_leaves_no_gradient_and_a_graph_that_works(control_moves, monkeypatch):
    small_budget(monkeypatch, 16)
    moves = control_moves(FileBacked, CPU)
    values = normal(4, 4)
    x, y = make(values, (2, 2)), sw.asarray(normal(4, 4))
    result = sw.reduce_sum(x * y)
    before = residency(x)
    moves.failures.append(OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        result.backward()
    assert x.grad is None and y.grad is None
    assert residency(x) == before
    assert_at_rest(x)
    result.backward()
    assert np.array_equal(y.grad.numpy(), values)


def test_without_gradients_there_is_no_node():
    x = make(normal(4, 4), (2, 2))
    with no_grad():
        assert (x * 2).grad_fn is None
    assert not (x * 2).detach().requires_grad
    frozen = Tensor(x.carrier, 0, x.layout, requires_grad=False)
    assert not sw.relu(frozen).requires_grad
    y = sw.asarray(normal(4, 4))
    sw.reduce_sum(frozen * y).backward()
    assert y.grad is not None and frozen.grad is None


def test_no_dense_share_of_a_tiled_operand_exists(monkeypatch):
    """The largest array that a pass hands on is a window, however large the tensor is."""
    small_budget(monkeypatch, 4096)
    sizes = []
    real = targets.TiledTarget.take

    def take(self, region, part):
        sizes.append(part.nbytes)
        real(self, region, part)

    monkeypatch.setattr(targets.TiledTarget, "take", take)
    for module in (targets, direct_pass):
        monkeypatch.setattr(module, "adopted", watched(targets.adopted, sizes))
    x, y = make(normal(256, 64), (8, 64)), sw.asarray(normal(64, 2))
    sw.reduce_sum(x @ y).backward()
    assert len(sizes) >= 16
    assert max(sizes) <= 4096
    assert x.carrier.statistics().peak_staging_bytes <= 3 * 4096 + 8 * 64 * 4


def watched(adopted, sizes):
    def call(prototype, values, dtype):
        sizes.append(values.nbytes)
        return adopted(prototype, values, dtype)

    return call


def test_a_dropped_result_takes_its_graph_with_it(no_collector):
    x = make(normal(4, 4), (2, 2))
    result = sw.mul(x, sw.relu(x))
    node, carrier = weakref.ref(result), weakref.ref(result.carrier)
    del result
    assert node() is None and carrier() is None
