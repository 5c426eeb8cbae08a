"""`S3FIFO` by hand on small cases, against the published algorithm, and against a scan."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.tiles.grid import TileGrid
from strideweave.tiles.policy import LRU, PolicyStatistics, ResidencyPlan, ResidencyPolicy
from strideweave.tiles.s3fifo import S3FIFO
from strideweave.tiles.selection import TileSet

GRID = TileGrid((400,), (4,))


def tiles(*numbers):
    """The tiles of these numbers, bound to GRID as a carrier would."""
    return TileSet._from_ordinals(GRID, numbers)


def numbers(tile_set):
    return [number for (number,) in tile_set.coordinates]


def planned(policy, *required):
    """One plan as (promote, retain, evict) lists."""
    plan = policy.plan(tiles(*required), "projection")
    return numbers(plan.promote), numbers(plan.retain), numbers(plan.evict)


@pytest.fixture
def ten():
    """A policy for ten tiles: the small queue has one of them."""
    policy = S3FIFO(max_tiles=10)
    policy.bind(GRID, 16)
    return policy


# --- by hand -------------------------------------------------------------------------------------------


def test_what_is_required_once_leaves_first(ten):
    planned(ten, *range(10))
    planned(ten, *range(9))
    planned(ten, *range(9))
    assert planned(ten, 100) == ([100], [], [9])  # 0 to 8 move on to the main queue
    for number in range(101, 200):
        assert planned(ten, number) == ([number], [], [number - 1])
    assert planned(ten, *range(9)) == ([], list(range(9)), [])


def test_what_comes_back_soon_enters_the_main_queue_at_once(ten):
    planned(ten, *range(10))
    assert planned(ten, 10) == ([10], [], [0])  # remembered
    assert planned(ten, 0) == ([0], [], [1])
    for number in range(20, 40):
        planned(ten, number)
    assert planned(ten, 0) == ([], [0], [])
    assert planned(ten, 10)[0] == [10]


def test_numbers_are_remembered_for_as_many_tiles_as_the_main_queue_has(ten):
    planned(ten, *range(10))
    planned(ten, *range(20, 29))  # the tiles 0 to 8 leave, nine of them
    planned(ten, 40)  # 9 leaves, 0 is forgotten
    planned(ten, 0)
    planned(ten, 5)
    for number in range(60, 75):
        planned(ten, number)
    assert planned(ten, 5) == ([], [5], [])
    assert planned(ten, 0)[0] == [0]


def test_a_request_larger_than_the_bound_streams_the_rest_and_flushes_nobody(ten):
    for _ in range(3):
        planned(ten, *range(9))
    planned(ten, 50)
    planned(ten, 51)  # 0 to 8 are in the main queue now
    promote, retain, evict = planned(ten, *range(400))
    assert retain == [*range(9), 51]
    assert promote == []
    assert evict == [*range(9, 51), *range(52, 400)]
    counted = ten.statistics()
    assert (counted.resident, counted.evictions, counted.streamed) == (10, 1, 390)


def test_a_large_request_without_hits_keeps_its_last_tiles():
    policy = S3FIFO(max_tiles=4)
    assert policy.plan(tiles(*range(9)), "operation") == ResidencyPlan(
        promote=tiles(5, 6, 7, 8), evict=tiles(0, 1, 2, 3, 4)
    )


def test_no_tile_leaves_that_the_same_request_needs(ten):
    planned(ten, *range(10))
    promote, retain, evict = planned(ten, 0, 1, 2, 3, 4, 11, 12, 13, 14, 15)
    assert (promote, retain, evict) == ([11, 12, 13, 14, 15], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9])


def test_what_streams_past_a_full_tier_is_remembered_too(ten):
    planned(ten, *range(10))
    assert planned(ten, *range(10), 50) == ([], list(range(10)), [50])
    planned(ten, 50)
    for number in range(100, 130):
        planned(ten, number)
    assert planned(ten, 50) == ([], [50], [])


def test_the_order_of_those_passed_over_stays():
    policy = S3FIFO(max_tiles=3)
    planned(policy, 0, 1, 2)
    assert planned(policy, 0, 1, 3) == ([3], [0, 1], [2])
    assert planned(policy, 4) == ([4], [], [0])
    assert planned(policy, 5) == ([5], [], [1])


@pytest.mark.parametrize(
    "policy",
    [S3FIFO(max_tiles=0), S3FIFO(max_bytes=0), S3FIFO(max_bytes=15)],
    ids=["no-tiles", "no-bytes", "too-few"],
)
def test_without_room_for_a_tile_everything_streams(policy):
    policy.bind(GRID, 16)
    for _ in range(4):
        assert planned(policy, 0, 1) == ([], [], [0, 1])
    assert policy.statistics() == PolicyStatistics(
        planned=4, hits=0, misses=8, evictions=0, streamed=8, resident=0, capacity=0, tile_bytes=16
    )


def test_one_tile_is_room_enough():
    policy = S3FIFO(max_tiles=1)
    policy.bind(GRID, 16)
    assert planned(policy, 3) == ([3], [], [])
    for _ in range(5):
        assert planned(policy, 3) == ([], [3], [])
    assert planned(policy, 4) == ([4], [], [3])


def test_bytes_become_whole_tiles():
    policy = S3FIFO(max_bytes=47)
    assert policy.statistics().capacity is None
    with pytest.raises(RuntimeError, match=r"S3FIFO\(max_bytes=47\) does not know the bytes of a tile"):
        policy.plan(tiles(0), "projection")
    policy.bind(GRID, 16)
    assert policy.statistics().capacity == 2
    assert planned(policy, 0, 1, 2) == ([1, 2], [], [0])


def test_a_new_carrier_finds_nothing_of_the_old_one(ten):
    planned(ten, *range(12))  # the tiles 0 and 1 are remembered
    ten.bind(GRID, 16)
    assert ten.statistics().resident == 0
    assert planned(ten, *range(10)) == (list(range(10)), [], [])
    assert planned(ten, 20) == ([20], [], [0])
    with pytest.raises(ValueError, match="make one policy for each carrier"):
        ten.bind(GRID, 32)


@pytest.mark.parametrize(
    ("bounds", "error", "said"),
    [
        ({}, ValueError, "S3FIFO takes exactly one of max_tiles and max_bytes"),
        ({"max_tiles": 1, "max_bytes": 1}, ValueError, "exactly one of max_tiles and max_bytes"),
        ({"max_tiles": -1}, ValueError, "max_tiles must not be negative, got -1"),
        ({"max_bytes": 1.5}, TypeError, "max_bytes must be an integer, got 1.5"),
    ],
)
def test_other_bounds_are_refused(bounds, error, said):
    with pytest.raises(error, match=said):
        S3FIFO(**bounds)


def test_it_is_a_policy_and_says_its_bound():
    assert isinstance(S3FIFO(max_tiles=3), ResidencyPolicy)
    assert repr(S3FIFO(max_tiles=3)) == "S3FIFO(max_tiles=3)"
    assert repr(S3FIFO(max_bytes=8)) == "S3FIFO(max_bytes=8)"


def test_coordinates_serve_before_a_carrier_has_bound_its_grid():
    policy = S3FIFO(max_tiles=2)
    assert policy.plan(TileSet([(0, 1), (1, 0)]), "scatter") == ResidencyPlan(TileSet([(0, 1), (1, 0)]))
    plan = policy.plan(TileSet([(0, 1), (2, 2)]), "backward")
    assert plan == ResidencyPlan(promote=TileSet([(2, 2)]), retain=TileSet([(0, 1)]), evict=TileSet([(1, 0)]))
    assert policy.plan(TileSet(), "operation") == ResidencyPlan()


def test_the_required_set_goes_back_where_all_of_it_has_one_fate():
    """The carrier recognises it by identity and need not look at the tiles."""
    required = tiles(0, 1)
    policy = S3FIFO(max_tiles=2)
    assert policy.plan(required, "projection").promote is required
    assert policy.plan(required, "projection").retain is required
    assert S3FIFO(max_tiles=0).plan(required, "projection").evict is required


# --- a scan --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 400], ids=["tile by tile", "in pieces", "at once"])
def test_a_scan_does_not_flush_the_hot_set(piece):
    """A decoder's hot experts, then a long prefill that needs all of them once, then the hot ones again."""
    hot, hits = range(0, 400, 20), {}
    for policy in (S3FIFO(max_tiles=25), LRU(max_tiles=25)):
        policy.bind(GRID, 16)
        for _ in range(5):
            planned(policy, *hot)
        for start in range(0, 400, piece):
            planned(policy, *range(start, min(start + piece, 400)))
        before = policy.statistics().hits
        planned(policy, *hot)
        hits[type(policy)] = policy.statistics().hits - before
    assert hits[S3FIFO] == len(hot)
    # A plan at once cannot flush the LRU either: it evicts nothing that the plan needs.
    assert hits[LRU] == (len(hot) if piece == 400 else 1)


# --- against the published algorithm -------------------------------------------------------------------


class Published:
    """Algorithm 1 of the paper, word for word, save that one eviction ends where a tile has left."""

    def __init__(self, size):
        self.size = size
        self.small, self.main, self.ghost = deque(), deque(), deque()  # the head is on the left
        self.uses = {}
        self.gone = []

    def read(self, x):
        self.gone = []
        if x in self.uses:
            self.uses[x] = min(self.uses[x] + 1, 3)
        else:
            self.insert(x)
            self.uses[x] = 0
        return self.gone

    def insert(self, x):
        while len(self.uses) >= self.size:
            self.evict()
        if x in self.ghost:
            self.ghost.remove(x)
            self.main.appendleft(x)
        else:
            self.small.appendleft(x)

    def evict(self):
        if len(self.small) >= 0.1 * self.size:
            self.evict_small()
        else:
            self.evict_main()

    def evict_small(self):
        while not self.gone and self.small:
            t = self.small.pop()
            if self.uses[t] > 1:
                self.uses[t] = 0
                self.main.appendleft(t)
                if len(self.main) > 0.9 * self.size:
                    self.evict_main()
            else:
                self.ghost.appendleft(t)
                while len(self.ghost) > 0.9 * self.size:
                    self.ghost.pop()
                self.leave(t)

    def evict_main(self):
        while not self.gone and self.main:
            t = self.main.pop()
            if self.uses[t] > 0:
                self.uses[t] -= 1
                self.main.appendleft(t)
            else:
                self.leave(t)

    def leave(self, t):
        del self.uses[t]
        self.gone.append(t)


def follow(size, accesses):
    """Give single tiles to the policy and to the published algorithm, and compare after each."""
    policy, model = S3FIFO(max_tiles=size), Published(size)
    policy.bind(GRID, 16)
    for tile in accesses:
        hit = tile in model.uses
        gone = model.read(tile)
        assert planned(policy, tile) == ([] if hit else [tile], [tile] if hit else [], gone)
        assert policy.statistics().resident == len(model.uses) <= size


@given(st.integers(1, 24), st.lists(st.integers(0, 29), max_size=200))
def test_single_tiles_are_treated_as_published(size, accesses):
    follow(size, accesses)


@pytest.mark.parametrize("size", [1, 2, 3, 9, 10, 11, 19, 25, 40])
def test_long_runs_are_treated_as_published(size):
    """Popular tiles, sets that grow hot and cold again, and scans, so that every queue sees every case."""
    rng = np.random.default_rng(size)
    accesses = []
    for _ in range(60):
        accesses += (rng.zipf(1.3, 40) % 100).tolist()
        hot = rng.permutation(400)[: rng.integers(1, size + 3)]
        accesses += np.repeat(hot, rng.integers(1, 6)).tolist()
        accesses += rng.choice(hot, 30).tolist()
        start = rng.integers(0, 350)
        accesses += range(start, start + rng.integers(1, 50))
    follow(size, accesses)


@given(
    st.integers(0, 14),
    st.lists(st.lists(st.integers(0, 24), unique=True, max_size=18), max_size=40),
    st.booleans(),
)
def test_the_bound_holds_at_every_instant_of_every_plan(size, requests, bound):
    policy = S3FIFO(max_tiles=size)
    if bound:
        policy.bind(GRID, 16)
    resident = set()
    for required in requests:
        plan = policy.plan(TileSet([(tile,) for tile in required]), "projection")
        # The public constructor checks that no tile is in two fields.
        assert ResidencyPlan(plan.promote, plan.retain, plan.evict) == plan
        promote, retain, evict = (set(numbers(part)) for part in (plan.promote, plan.retain, plan.evict))
        needed = set(required)
        assert retain == needed & resident
        assert promote | (evict & needed) == needed - resident
        assert evict - needed <= resident
        # What the request does not need leaves first, then what stays is fetched; the rest streams past.
        resident = resident - evict | promote
        assert len(resident) <= size
        assert policy.statistics().resident == len(resident)
        if needed and not needed - resident and size:
            assert retain | promote == needed
        if len(needed) > size:
            assert len(needed & resident) >= 1 or not size
    counted = policy.statistics()
    assert counted.planned == len(requests)
    assert counted.hits + counted.misses == sum(map(len, requests))
    assert counted.misses == counted.streamed + counted.evictions + counted.resident


def test_a_plan_costs_in_proportion_to_its_tiles(monkeypatch):
    """What the request needs is passed over once in a plan, not once for each tile that is let in."""
    size = 4000
    policy = S3FIFO(max_tiles=size)
    policy.plan(TileSet([(tile,) for tile in range(size)]), "projection")
    policy.plan(TileSet([(tile,) for tile in range(size - 400, size)]), "projection")
    looked = []
    queues = policy._queues
    queues._small = counting(queues._small, looked)
    # The needed ones queue in front of the one tile that may leave, again and again.
    required = [*range(size - 1), *range(size, size + 2000)]
    policy.plan(TileSet([(tile,) for tile in required]), "projection")
    assert size <= len(looked) <= size + 2 * 2000
    assert policy.statistics().resident == size


def counting(queue, looked):
    class Counting(type(queue)):
        def popitem(self, last=True):
            looked.append(None)
            return super().popitem(last)

    return Counting(queue)
