"""Spec: *Residency policy can optimize but cannot define correctness*, as far as projections use it."""

import gc
import logging
import threading
import weakref

import numpy as np
import pytest

import strideweave as sw
from strideweave import (
    CPU,
    LRU,
    S3FIFO,
    FileBacked,
    KeepResident,
    ResidencyPlan,
    ResidencyPolicy,
    Streaming,
    TileConflictError,
    TiledEvictable,
    TileSet,
    Trace,
    TraceRecorder,
)
from strideweave.carriers.tiled_evictable.traffic import TileTraffic
from tiled_tensors import experts


class Scripted:
    """Answers with what the test put in, and remembers what it was asked."""

    def __init__(self, **plan):
        self.answer = ResidencyPlan(**plan)
        self.asked = []

    def plan(self, required, purpose):
        self.asked.append((required, purpose))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def scripted(make_model):
    policy = Scripted()
    return policy, make_model(policy=policy)


def test_shipped_policies_satisfy_the_protocol():
    for policy in (KeepResident(), LRU(max_tiles=1), Streaming(), Scripted()):
        assert isinstance(policy, ResidencyPolicy)


def test_asked_for_what_the_projection_requires(scripted):
    policy, model = scripted
    model.project(4, 1).wait()
    assert policy.asked == [(experts(1, 4), "projection")]


def test_explicit_requests_do_not_ask(scripted):
    policy, model = scripted
    model.carrier.promote(experts(1))
    model.carrier.evict(experts(1))
    assert policy.asked == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, TypeError),
        ([], TypeError),
        (ResidencyPlan(evict=TileSet([(9, 0, 0)])), ValueError),
        (ResidencyPlan(promote=TileSet([(0, 0)])), ValueError),
        (KeyError("mine"), KeyError),
    ],
)
def test_bad_answers_fail_before_any_work(scripted, control_moves, answer, error):
    """Spec, scenario *Reject an invalid policy result before execution*."""
    policy, model = scripted
    moves = control_moves(FileBacked, CPU)
    policy.answer = answer
    before = model.snapshot()
    destination = CPU(24)
    with pytest.raises(error):
        model.project(1, destination=destination)
    assert model.snapshot() == before
    assert moves.calls == []
    assert not destination.is_owned()
    assert model.at_rest()


def test_the_policy_is_not_asked_for_what_is_refused(scripted, control_moves):
    policy, model = scripted
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    handle = model.carrier.promote_async(experts(1))
    with pytest.raises(TileConflictError):
        model.project(1, 2)
    with pytest.raises(TypeError):
        model.project(2, destination=object())
    assert policy.asked == []
    moves.open()
    handle.wait(10)


def test_required_tiles_the_plan_does_not_mention_are_promoted_and_stay(scripted):
    _, model = scripted
    model.check(3, 5)
    assert model.primary() == [3, 5]


def test_planned_tiles_are_promoted_with_the_required_ones(scripted):
    policy, model = scripted
    policy.answer = ResidencyPlan(promote=experts(3, 6, 7))
    model.check(3)
    assert model.primary() == [3, 6, 7]


def test_a_planned_promotion_under_anothers_request_is_skipped(scripted, control_moves):
    policy, model = scripted
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    other = model.carrier.promote_async(experts(6))
    policy.answer = ResidencyPlan(promote=experts(6, 7))
    handle = model.project(3)
    moves.open()
    assert np.array_equal(handle.wait(10).numpy(), model.values[[3]])
    other.wait(10)
    assert model.primary() == [3, 6, 7]


def test_a_missing_tile_that_the_plan_evicts_streams_past_the_primary_tier(scripted):
    policy, model = scripted
    model.carrier.promote(experts(2))
    policy.answer = ResidencyPlan(evict=experts(1, 2, 5))
    model.check(5, 2, 1, 0)
    assert model.primary() == [0]
    statistics = model.carrier.statistics()
    assert statistics.peak_resident_bytes == 2 * statistics.tile_bytes
    assert statistics.peak_staging_bytes == 0  # read to where the request wants them
    assert (statistics.hits, statistics.misses, statistics.streamed) == (1, 3, 2)
    assert model.at_rest()


def test_streaming_into_a_given_destination(scripted):
    policy, model = scripted
    policy.answer = ResidencyPlan(evict=experts(1, 5))
    destination = CPU(100)
    assert np.array_equal(model.project(5, 1, destination=destination).wait().numpy(), model.values[[5, 1]])
    assert destination.version == 1


def test_a_failed_stream_leaves_the_destination_as_it_was(scripted, control_moves):
    policy, model = scripted
    moves = control_moves(FileBacked, CPU)
    policy.answer = ResidencyPlan(evict=experts(1))
    destination = CPU(0)
    moves.failures.append(OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        model.project(1, destination=destination).wait()
    assert (destination.size(), destination.is_owned(), destination.version) == (0, False, 0)
    assert model.at_rest()


def test_unneeded_tiles_leave_before_anything_is_fetched(scripted):
    policy, model = scripted
    model.carrier.promote(experts(0, 1))
    policy.answer = ResidencyPlan(evict=experts(0, 1))
    model.check(2, 3)
    statistics = model.carrier.statistics()
    assert model.primary() == [2, 3]
    assert statistics.peak_resident_bytes == 2 * statistics.tile_bytes


def test_a_planned_eviction_saves_dirty_values(scripted):
    policy, model = scripted
    model.carrier[0] = -1.0
    model.values[0, 0, 0] = -1.0
    policy.answer = ResidencyPlan(evict=experts(0))
    model.check(2)
    assert model.primary() == [2]
    assert model.carrier[0] == -1.0
    policy.answer = ResidencyPlan()
    model.check(0)


def test_a_planned_eviction_that_fails_is_counted_and_does_not_fail_the_request(
    scripted, control_moves, caplog
):
    policy, model = scripted
    model.carrier[0] = -1.0
    model.values[0, 0, 0] = -1.0
    model.carrier.promote(experts(1))
    moves = control_moves(CPU, FileBacked)
    moves.failures.append(OSError(28, "No space left on device"))
    policy.answer = ResidencyPlan(evict=experts(0, 1))
    with caplog.at_level(logging.WARNING, logger="strideweave"):
        model.check(2)
    assert "No space left" in caplog.text
    assert model.primary() == [0, 2]
    assert model.dirty() == [0]
    statistics = model.carrier.statistics()
    assert (statistics.failed_evictions, statistics.evictions) == (1, 1)
    assert model.at_rest()
    policy.answer = ResidencyPlan()
    model.check(0)


def test_an_eviction_is_put_off_until_the_last_live_work_ends(scripted, control_moves):
    policy, model = scripted
    model.carrier.promote(experts(0))
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    longer = model.project(0, 4)
    policy.answer = ResidencyPlan(evict=experts(0))
    shorter = model.project(0)
    assert np.array_equal(shorter.wait(10).numpy(), model.values[[0]])
    assert model.primary() == [0]
    assert model.carrier.statistics().put_off_evictions == 1
    policy.answer = ResidencyPlan()
    moves.open()
    assert np.array_equal(longer.wait(10).numpy(), model.values[[0, 4]])
    assert model.primary() == [4]
    assert model.at_rest()


def test_a_put_off_eviction_is_not_pending_work_and_a_later_promotion_drops_it(scripted, control_moves):
    policy, model = scripted
    model.carrier.promote(experts(0))
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    longer = model.project(0, 4)
    policy.answer = ResidencyPlan(evict=experts(0))
    model.project(0).wait(10)
    policy.answer = ResidencyPlan()
    assert model.carrier.promote_async(experts(0)).done
    moves.open()
    longer.wait(10)
    assert model.primary() == [0, 4]
    assert model.at_rest()


def test_retained_tiles_stay_until_the_request_is_terminal(scripted, control_moves):
    policy, model = scripted
    model.carrier.promote(experts(0))
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    policy.answer = ResidencyPlan(retain=experts(0, 1))
    handle = model.project(4)
    with pytest.raises(TileConflictError):
        model.carrier.evict_async(experts(0))
    assert model.carrier.evict_async(experts(1)).done
    moves.open()
    handle.wait(10)
    model.carrier.evict(experts(0))
    assert model.primary() == [4]


def test_two_plans_for_one_missing_tile_read_it_once(scripted, control_moves):
    """One request streams it past the primary tier, the other wants it to stay."""
    policy, model = scripted
    moves = control_moves(FileBacked, CPU)
    for first, second in ((experts(1), TileSet()), (TileSet(), experts(1))):
        moves.gate.clear()
        before = model.carrier.statistics().bytes_read
        policy.answer = ResidencyPlan(evict=first)
        one = model.project(1)
        policy.answer = ResidencyPlan(evict=second)
        two = model.project(1)
        moves.open()
        for handle in (one, two):
            assert np.array_equal(handle.wait(10).numpy(), model.values[[1]])
        assert model.carrier.statistics().bytes_read - before == model.carrier.statistics().tile_bytes
        assert model.at_rest()
        model.carrier.evict(model.carrier.primary_tiles)


def test_a_failed_projection_puts_residency_back(scripted, control_moves):
    policy, model = scripted
    model.carrier.promote(experts(0))
    moves = control_moves(FileBacked, CPU)
    before = model.snapshot()
    policy.answer = ResidencyPlan(evict=experts(0), promote=experts(7))
    moves.failures.append(OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        model.project(1, 2).wait()
    assert model.snapshot() == before
    assert model.at_rest()


@pytest.mark.parametrize("tiles", [0, 1, 3, 8])
def test_lru_never_exceeds_its_bound(make_model, tiles):
    model = make_model(policy=LRU(max_tiles=tiles))
    rng = np.random.default_rng(11)
    for _ in range(60):
        pick = rng.permutation(8)[: rng.integers(1, 7)].tolist()
        model.check(*pick)
        assert len(model.primary()) <= tiles
    statistics = model.carrier.statistics()
    assert statistics.peak_resident_bytes <= tiles * statistics.tile_bytes
    assert statistics.hits + statistics.misses == statistics.policy.hits + statistics.policy.misses
    assert statistics.misses * statistics.tile_bytes == statistics.bytes_read
    assert model.at_rest()


def test_lru_in_bytes_and_the_memory_of_what_it_evicts(make_model):
    model = make_model(policy=LRU(max_bytes=3 * 96 + 95))
    for expert in range(8):
        model.check(expert)
    statistics = model.carrier.statistics()
    assert model.primary() == [5, 6, 7]
    assert statistics.peak_resident_bytes == 3 * 96
    assert statistics.evictions == 5
    assert statistics.policy.evictions == 5


def test_lru_hits_are_not_read_again(make_model):
    model = make_model(policy=LRU(max_tiles=2))
    model.check(0, 1)
    model.check(0)
    model.check(2)
    assert model.primary() == [0, 2]
    model.check(0, 2)
    assert model.carrier.statistics().misses == 3


def test_streaming_keeps_nothing(make_model):
    model = make_model(policy=Streaming())
    for _ in range(2):
        model.check(0, 3, 5)
    assert model.primary() == []
    statistics = model.carrier.statistics()
    assert statistics.streamed == 6
    assert statistics.peak_resident_bytes == 0


def test_keep_resident_keeps_everything(make_model):
    model = make_model(policy=KeepResident())
    model.check(0, 3)
    model.check(3, 5)
    assert model.primary() == [0, 3, 5]
    assert model.carrier.statistics().misses == 3


def test_an_eviction_planned_while_the_tile_is_still_being_fetched_is_put_off_not_lost(
    make_model, control_moves
):
    """Spec: every evict tile is evicted after the request no longer needs it, here the earlier request."""
    model = make_model(policy=LRU(max_tiles=2))
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    first = model.project(0, 1)
    moves.wait_until_entered()
    second = model.project(2, 3)  # the policy evicts 0 and 1, which are on their way
    moves.open()
    first.wait()
    second.wait()
    assert model.primary() == [2, 3]
    assert model.at_rest()


def test_a_put_off_eviction_that_fails_is_not_put_off_any_longer(scripted, control_moves, caplog):
    policy, model = scripted
    model.carrier[0] = model.values[0, 0, 0] = -1.0
    reads, writes = control_moves(FileBacked, CPU), control_moves(CPU, FileBacked)
    reads.gate.clear()
    longer = model.project(0, 4)
    policy.answer = ResidencyPlan(evict=experts(0))
    model.project(0).wait(10)
    assert model.carrier.statistics().put_off_evictions == 1
    writes.failures.append(OSError(28, "No space left on device"))
    reads.open()
    with caplog.at_level(logging.WARNING, logger="strideweave"):
        longer.wait(10)
    assert "No space left" in caplog.text
    assert (model.primary(), model.dirty()) == ([0, 4], [0])
    assert model.carrier.statistics().failed_evictions == 1
    assert model.at_rest()


@pytest.mark.parametrize("when", ["projected before", "projected after", "promoted after"])
def test_a_failure_leaves_alone_what_others_have_come_to_want(make_model, control_moves, when):
    """Without the request that fails they would have made the tile primary themselves."""
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    other = model.project(1)  # is fetching tile 1
    moves.wait_until_entered()
    failing = model.project(0, 1)  # fetches tile 0, and waits for tile 1
    sharing = model.project(0) if when == "projected before" else None
    moves.failures += [OSError("broken"), OSError("broken too")]
    moves.fail_when = lambda transfers: transfers[0].source_start == 24
    moves.gates[24] = threading.Event()  # tile 1 waits longer
    moves.open()
    while model.primary() != [0]:
        assert not failing.done
    if when == "projected after":
        sharing = model.project(0)
    if sharing is not None:
        assert np.array_equal(sharing.wait(10).numpy(), model.values[[0]])
    else:
        assert model.carrier.promote_async(experts(0)).done
    moves.gates[24].set()
    for handle in (other, failing):
        with pytest.raises(OSError, match="broken"):
            handle.wait(10)
    assert model.primary() == [0]
    assert model.at_rest()


def test_tiles_on_their_way_back_after_a_failure_are_nobody_elses(scripted, control_moves, monkeypatch):
    policy, model = scripted
    model.carrier.promote(experts(0))
    moves = control_moves(FileBacked, CPU)
    moves.failures.append(OSError("broken"))
    policy.answer = ResidencyPlan(evict=experts(0))
    fetch, conflicts = TileTraffic.fetch, []

    async def contended(self, entry, ordinals, *changes):
        if ordinals.tolist() == [0]:  # the way back
            with pytest.raises(TileConflictError, match="project") as caught:
                model.carrier.promote_async(experts(0))
            conflicts.append(caught.value)
        await fetch(self, entry, ordinals, *changes)

    monkeypatch.setattr(TileTraffic, "fetch", contended)
    with pytest.raises(OSError, match="broken"):
        model.project(1).wait()
    assert conflicts
    assert model.primary() == [0]
    assert model.at_rest()


# One carrier at a time

SHIPPED = {
    "KeepResident": KeepResident,
    "Streaming": Streaming,
    "LRU": lambda: LRU(max_tiles=2),
    "LRU of bytes": lambda: LRU(max_bytes=256),
    "S3FIFO": lambda: S3FIFO(max_tiles=2),
    "TraceRecorder": TraceRecorder,
    "TraceRecorder of LRU": lambda: TraceRecorder(LRU(max_tiles=2)),
}


@pytest.fixture(params=list(SHIPPED))
def shipped(request):
    return SHIPPED[request.param]()


def carrier_with(policy, secondary=None):
    return TiledEvictable(CPU(0), secondary or FileBacked(), (6, 1), (1, 4), residency_policy=policy)


def test_a_policy_serves_one_carrier_until_that_is_released(shipped):
    slow = FileBacked()
    with carrier_with(shipped) as first:
        for make in (
            lambda: carrier_with(shipped, slow),
            lambda: sw.tiled(np.ones((6, 4), np.float32), (1, 4), residency_policy=shipped),
            lambda: TiledEvictable(CPU(0), slow, (2, 1), (1, 4), residency_policy=shipped),
            lambda: sw.replay(Trace((6, 1), (1, 4), 16, ()), shipped),
        ):
            with pytest.raises(ValueError, match="serves <TiledEvictable Float32, 24 slots, version 0>"):
                make()
        assert not slow.is_owned()
        assert first.residency_policy is shipped
    with carrier_with(shipped, slow) as second:
        first.release()  # once more: it has nothing to say about the policy any more
        with pytest.raises(ValueError, match="make one policy for each"):
            carrier_with(shipped)
        assert second.statistics().resident_tiles == 0


def test_a_refused_carrier_takes_nothing_from_the_one_that_is_served(shipped):
    values = np.arange(24, dtype=np.float32)
    with carrier_with(shipped, FileBacked().new_like(values)) as carrier:
        tensor = sw.Tensor(carrier, 0, sw.row_major(6, 4))
        carrier.project(tensor, carrier.select({0: [1, 3]})).wait()
        before = shipped.statistics(), carrier.primary_tiles
        with pytest.raises(ValueError, match="serves <TiledEvictable"):
            carrier_with(shipped)
        assert (shipped.statistics(), carrier.primary_tiles) == before


def test_a_policy_is_free_again_when_nobody_has_its_carrier(shipped):
    gone = weakref.ref(carrier := carrier_with(shipped))
    del carrier
    gc.collect()
    assert gone() is None
    carrier_with(shipped).release()


def test_a_policy_is_free_after_a_construction_that_failed(shipped):
    with pytest.raises(MemoryError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TileTraffic, "__init__", failing(MemoryError()))
        carrier_with(shipped)
    carrier_with(shipped).release()


def test_the_policy_of_a_recorder_serves_no_other_carrier():
    policy = LRU(max_tiles=2)
    recorder = TraceRecorder(policy)
    with carrier_with(recorder):
        for other in (policy, TraceRecorder(policy)):
            with pytest.raises(ValueError, match="make one policy for each"):
                carrier_with(other)
    with carrier_with(policy):
        with pytest.raises(ValueError, match="make one policy for each"):
            carrier_with(recorder)
        assert recorder._served is None
    carrier_with(recorder).release()


def test_a_policy_of_ones_own_serves_whom_it_likes():
    policy = Scripted()
    with carrier_with(policy) as first, carrier_with(policy) as second:
        assert first.residency_policy is second.residency_policy


def failing(error):
    def fail(*_, **__):
        raise error

    return fail
