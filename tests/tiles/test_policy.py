"""Plans and the shipped policies, by hand on small cases and against a slow model on random ones."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.tiles.grid import TileGrid
from strideweave.tiles.policy import (
    LRU,
    KeepResident,
    PolicyStatistics,
    ResidencyPlan,
    ResidencyPolicy,
    Streaming,
)
from strideweave.tiles.s3fifo import S3FIFO
from strideweave.tiles.selection import TileSelection, TileSet
from strideweave.tiles.trace_recorder import TraceRecorder

GRID = TileGrid((16,), (4,))


def tiles(*numbers):
    """The tiles of these numbers, bound to GRID as a carrier would."""
    return TileSet._from_ordinals(GRID, numbers)


def numbers(tile_set):
    return [number for (number,) in tile_set.coordinates]


def planned(policy, *required):
    """One plan as (promote, retain, evict) lists."""
    plan = policy.plan(tiles(*required), "projection")
    return numbers(plan.promote), numbers(plan.retain), numbers(plan.evict)


# --- ResidencyPlan -------------------------------------------------------------------------------------


def test_plan_fills_in_empty_sets():
    """Spec, *Residency requests use arbitrary immutable tile sets*: an omitted field is an empty TileSet."""
    for plan in (ResidencyPlan(), ResidencyPlan(None, None, None)):
        assert plan.promote == plan.retain == plan.evict == TileSet()
    plan = ResidencyPlan(retain=TileSet([(1,)]))
    assert (plan.promote, plan.retain, plan.evict) == (TileSet(), TileSet([(1,)]), TileSet())


@pytest.mark.parametrize("field", ["promote", "retain", "evict"])
@pytest.mark.parametrize("value", [[(0,)], (), TileSelection([[0]]), 0, "x"])
def test_plan_refuses_what_is_not_a_tile_set(field, value):
    with pytest.raises(TypeError, match=f"{field} must be a TileSet or None, not {type(value).__name__}"):
        ResidencyPlan(**{field: value})


@pytest.mark.parametrize(
    ("first", "second"), [("promote", "retain"), ("promote", "evict"), ("retain", "evict")]
)
@pytest.mark.parametrize("bound", [True, False])
def test_plan_refuses_a_tile_in_two_fields(first, second, bound):
    """Spec, same requirement: a tile in more than one field is a ValueError that names it."""
    one, other = TileSet([(1,), (2,)]), TileSet([(2,), (3,)])
    if bound:
        one, other = tiles(1, 2), tiles(2, 3)
    with pytest.raises(ValueError, match=rf"{first} and {second} both hold TileSet\(\(\(2,\),\)\)"):
        ResidencyPlan(**{first: one, second: other})


def test_plan_is_a_value():
    plan = ResidencyPlan(TileSet([(0,)]), TileSet([(1,)]), TileSet([(2,)]))
    twin = ResidencyPlan(tiles(0), tiles(1), tiles(2))
    assert plan == twin
    assert hash(plan) == hash(twin)
    assert plan != ResidencyPlan(TileSet([(0,)]))
    assert plan != (plan.promote, plan.retain, plan.evict)
    assert eval(repr(plan), {"ResidencyPlan": ResidencyPlan, "TileSet": TileSet}) == plan
    for other in (pickle.loads(pickle.dumps(plan)), copy.copy(plan), copy.deepcopy(plan)):
        assert other == plan
    with pytest.raises(AttributeError, match="is immutable"):
        plan.promote = TileSet()
    with pytest.raises(AttributeError, match="is immutable"):
        del plan.evict
    assert plan.promote == TileSet([(0,)])


# --- the protocol --------------------------------------------------------------------------------------


def test_protocol_is_structural():
    """Spec, *Residency policy can optimize but cannot define correctness*: runtime-checkable, one method."""

    class Own:
        def plan(self, required, purpose):
            return ResidencyPlan()

    for policy in (Own(), KeepResident(), Streaming(), LRU(max_tiles=1), LRU(max_bytes=1)):
        assert isinstance(policy, ResidencyPolicy)
    assert not isinstance(object(), ResidencyPolicy)


@pytest.mark.parametrize("policy", [KeepResident(), Streaming(), LRU(max_tiles=1)])
def test_shipped_policies_refuse_what_is_not_a_tile_set(policy):
    with pytest.raises(TypeError, match="required must be a TileSet, not list"):
        policy.plan([(0,)], "projection")
    assert policy.statistics().planned == 0


# --- KeepResident and Streaming ------------------------------------------------------------------------


def test_keep_resident_promotes_once_and_retains_from_then_on():
    policy = KeepResident()
    policy.bind(GRID, 16)
    assert planned(policy, 0, 1) == ([0, 1], [], [])
    assert planned(policy, 1, 2) == ([2], [1], [])
    assert planned(policy, 0, 2) == ([], [0, 2], [])
    assert policy.statistics() == PolicyStatistics(
        planned=3, hits=3, misses=3, evictions=0, streamed=0, resident=3, capacity=None, tile_bytes=16
    )


def test_streaming_evicts_everything_it_requires():
    policy = Streaming()
    policy.bind(GRID, 16)
    assert planned(policy, 0, 1) == ([], [], [0, 1])
    assert planned(policy, 1) == ([], [], [1])
    assert policy.statistics() == PolicyStatistics(
        planned=2, hits=0, misses=3, evictions=0, streamed=3, resident=0, capacity=0, tile_bytes=16
    )


# --- LRU -----------------------------------------------------------------------------------------------


def test_lru_evicts_the_least_recently_required():
    policy = LRU(max_tiles=3)
    policy.bind(GRID, 16)
    assert planned(policy, 0, 1, 2) == ([0, 1, 2], [], [])
    assert planned(policy, 0) == ([], [0], [])
    assert planned(policy, 5) == ([5], [], [1])
    assert planned(policy, 2, 6) == ([6], [2], [0])
    assert policy.statistics() == PolicyStatistics(
        planned=4, hits=2, misses=5, evictions=2, streamed=0, resident=3, capacity=3, tile_bytes=16
    )


def test_lru_never_evicts_what_the_same_request_hits():
    policy = LRU(max_tiles=3)
    policy.bind(GRID, 16)
    planned(policy, 0)
    planned(policy, 1)
    planned(policy, 2)
    assert planned(policy, 0, 3, 4) == ([3, 4], [0], [1, 2])


def test_lru_streams_what_exceeds_the_bound():
    """The resident tiles among the required stay, then the last of the others; the rest is evicted."""
    policy = LRU(max_tiles=3)
    policy.bind(GRID, 16)
    planned(policy, 1, 9)
    assert planned(policy, 0, 1, 2, 3, 4) == ([3, 4], [1], [0, 2, 9])
    assert policy.statistics().streamed == 2
    assert policy.statistics().evictions == 1
    assert policy.statistics().resident == 3
    assert planned(policy, 1, 3, 4) == ([], [1, 3, 4], [])


@pytest.mark.parametrize(
    "policy", [LRU(max_tiles=0), LRU(max_bytes=0), LRU(max_bytes=15)], ids=["no-tiles", "no-bytes", "too-few"]
)
def test_lru_without_room_for_a_tile_streams(policy):
    policy.bind(GRID, 16)
    assert planned(policy, 0, 1) == ([], [], [0, 1])
    assert planned(policy, 1) == ([], [], [1])
    assert policy.statistics().resident == 0
    assert policy.statistics().evictions == 0


def test_policies_hand_the_required_set_back_where_all_of_it_has_one_fate():
    """The carrier recognises it by identity and need not look at the tiles."""
    required = tiles(0, 1)
    lru = LRU(max_tiles=2)
    assert lru.plan(required, "projection").promote is required
    assert lru.plan(required, "projection").retain is required
    for streaming in (LRU(max_tiles=0), Streaming()):
        assert streaming.plan(required, "projection").evict is required


def test_lru_turns_bytes_into_whole_tiles():
    policy = LRU(max_bytes=47)
    assert policy.statistics().capacity is None
    policy.bind(GRID, 16)
    assert policy.statistics().capacity == 2
    assert planned(policy, 0, 1) == ([0, 1], [], [])
    assert planned(policy, 2) == ([2], [], [0])


def test_lru_in_bytes_needs_a_carrier_first():
    policy = LRU(max_bytes=64)
    with pytest.raises(RuntimeError, match=r"LRU\(max_bytes=64\) does not know the bytes of a tile"):
        policy.plan(tiles(0), "projection")
    assert policy.statistics().planned == 0


def test_lru_in_tiles_works_without_a_grid():
    policy = LRU(max_tiles=2)
    plan = policy.plan(TileSet([(0, 1), (1, 0)]), "projection")
    assert plan == ResidencyPlan(promote=TileSet([(0, 1), (1, 0)]))
    plan = policy.plan(TileSet([(0, 1), (2, 2)]), "backward")
    assert plan == ResidencyPlan(promote=TileSet([(2, 2)]), retain=TileSet([(0, 1)]), evict=TileSet([(1, 0)]))


def test_lru_plans_nothing_for_nothing():
    policy = LRU(max_tiles=2)
    policy.bind(GRID, 16)
    planned(policy, 0, 1)
    assert policy.plan(TileSet(), "operation") == ResidencyPlan()
    assert policy.statistics().resident == 2


@pytest.mark.parametrize(
    ("bounds", "error", "said"),
    [
        ({}, ValueError, "exactly one of max_tiles and max_bytes"),
        ({"max_tiles": 1, "max_bytes": 1}, ValueError, "exactly one of max_tiles and max_bytes"),
        ({"max_tiles": -1}, ValueError, "max_tiles must not be negative, got -1"),
        ({"max_bytes": -8}, ValueError, "max_bytes must not be negative, got -8"),
        ({"max_tiles": 1.5}, TypeError, "max_tiles must be an integer, got 1.5"),
        ({"max_bytes": True}, TypeError, "max_bytes must be an integer, got the bool True"),
        ({"max_bytes": "8 MiB"}, TypeError, "max_bytes must be an integer, got .8 MiB"),
    ],
)
def test_lru_refuses_other_bounds(bounds, error, said):
    with pytest.raises(error, match=said):
        LRU(**bounds)


def test_lru_says_its_bound():
    assert repr(LRU(max_tiles=3)) == "LRU(max_tiles=3)"
    assert repr(LRU(max_bytes=8)) == "LRU(max_bytes=8)"
    assert repr(KeepResident()) == "KeepResident()"


# --- binding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [KeepResident, Streaming, lambda: LRU(max_tiles=2), lambda: LRU(max_bytes=32)]
)
@pytest.mark.parametrize(
    ("grid", "tile_bytes"), [(GRID, 32), (TileGrid((8,), (4,)), 16)], ids=["tile-bytes", "grid"]
)
def test_policy_serves_carriers_of_one_geometry(make, grid, tile_bytes):
    policy = make()
    policy.bind(GRID, 16)
    before = planned(policy, 0, 1), policy.statistics()
    with pytest.raises(ValueError, match="make one policy for each carrier"):
        policy.bind(grid, tile_bytes)
    assert policy.statistics() == before[1]


@pytest.mark.parametrize("make", [KeepResident, lambda: LRU(max_tiles=2)])
def test_policy_forgets_the_tiles_of_an_earlier_carrier(make):
    policy = make()
    policy.bind(GRID, 16)
    planned(policy, 0, 1)
    policy.bind(TileGrid((16,), (4,)), 16)
    assert policy.statistics().resident == 0
    assert planned(policy, 1) == ([1], [], [])


def test_policy_refuses_tiles_without_bytes():
    with pytest.raises(ValueError, match="at least one byte, got tile_bytes=0"):
        LRU(max_bytes=4).bind(GRID, 0)


def test_policy_refuses_tiles_outside_the_bound_grid():
    policy = LRU(max_tiles=2)
    policy.bind(GRID, 16)
    with pytest.raises(ValueError, match="outside the grid"):
        policy.plan(TileSet([(16,)]), "projection")
    assert policy.statistics().planned == 0


# --- against a slow model ------------------------------------------------------------------------------


def model_lru(resident, required, capacity):
    """The semantics in words: (kept in order of use, promote, retain, evict)."""
    hits = [tile for tile in required if tile in resident]
    missing = [tile for tile in required if tile not in resident]
    room = capacity - len(hits)
    stays = missing[max(0, len(missing) - room) :] if room else []
    recent = [tile for tile in required if tile in hits or tile in stays]
    order = [tile for tile in resident if tile not in required] + recent
    victims = order[: max(0, len(order) - capacity)]
    evict = victims + [tile for tile in missing if tile not in stays]
    return order[len(victims) :], stays, hits, evict


@given(
    st.integers(0, 6),
    st.lists(st.lists(st.integers(0, 11), unique=True, max_size=9).map(sorted), max_size=12),
    st.booleans(),
)
def test_lru_follows_its_words(capacity, requests, bound):
    policy = LRU(max_tiles=capacity)
    if bound:
        policy.bind(GRID, 16)
    resident = []
    for required in requests:
        plan = policy.plan(TileSet([(tile,) for tile in required]), "projection")
        resident, promote, retain, evict = model_lru(resident, required, capacity)
        assert numbers(plan.promote) == promote
        assert numbers(plan.retain) == retain
        assert numbers(plan.evict) == sorted(evict)
        # The public constructor checks that no tile is in two fields.
        assert ResidencyPlan(plan.promote, plan.retain, plan.evict) == plan
        assert policy.statistics().resident == len(resident) <= capacity
    counted = policy.statistics()
    assert counted.planned == len(requests)
    assert counted.hits + counted.misses == sum(map(len, requests))
    assert counted.misses == counted.streamed + counted.evictions + counted.resident


@pytest.mark.parametrize("kind", [LRU, S3FIFO])
def test_counts_are_right_under_threads(kind):
    """Every tile that was missed was streamed, evicted since, or is resident; none is counted twice."""
    policy = kind(max_tiles=5)
    policy.bind(GRID, 16)
    requests = [tiles(start, (start + 3) % 16, (start + 7) % 16) for start in range(16)]
    go = threading.Barrier(4)

    def work():
        go.wait()
        for request in requests * 25:
            policy.plan(request, "projection")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = policy.statistics()
    assert counted.planned == 4 * 25 * 16
    assert counted.hits + counted.misses == 3 * counted.planned
    assert counted.misses == counted.streamed + counted.evictions + counted.resident
    assert counted.resident == 5


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize(
    "policy",
    [
        KeepResident(),
        Streaming(),
        LRU(max_tiles=2),
        LRU(max_bytes=64),
        S3FIFO(max_tiles=2),
        S3FIFO(max_bytes=64),
    ],
    ids=repr,
)
def test_a_copy_of_a_policy_is_a_new_one_with_the_same_bound(policy, copied):
    policy.bind(TileGrid((4,), (2,)), 8)
    policy.plan(TileSet([(0,), (1,)]), "projection")
    before = policy.statistics()
    other = copied(policy)
    assert (type(other), repr(other)) == (type(policy), repr(policy))
    assert other.statistics().planned == other.statistics().resident == 0
    other.bind(TileGrid((8,), (4,)), 16)  # of other tiles: nothing was remembered
    other.plan(TileSet([(5,)]), "projection")
    assert policy.statistics() == before


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_recorder_of_a_trace_is_not_copied(copied):
    with pytest.raises(TypeError, match="cannot be copied"):
        copied(TraceRecorder(KeepResident()))
