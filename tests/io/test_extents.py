"""Extents: aligned, disjoint, lowest fit first, joined again; against a model that knows every block."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interruptions import interrupted_everywhere
from strideweave.io.extents import Extent, ExtentMap, ExtentPool, Lease

BLOCK = 4096


def take(extents, nbytes):
    lease = Lease()
    extents.take(nbytes, lease)
    return lease


def leasing(*extent):
    lease = Lease()
    lease.extent = Extent(*extent)
    return lease


def test_the_lowest_run_that_is_long_enough_is_taken_from_its_beginning():
    extents = ExtentMap(10 * BLOCK, BLOCK)
    taken = [take(extents, 2 * BLOCK) for _ in range(5)]
    assert [lease.extent.offset for lease in taken] == [0, 2 * BLOCK, 4 * BLOCK, 6 * BLOCK, 8 * BLOCK]
    extents.give(taken[1])
    extents.give(taken[3])
    assert taken[1].extent is None
    assert take(extents, BLOCK).extent == Extent(2 * BLOCK, BLOCK)
    assert take(extents, 2 * BLOCK).extent == Extent(6 * BLOCK, 2 * BLOCK)
    assert take(extents, 1).extent == Extent(3 * BLOCK, BLOCK)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_what_is_given_back_joins_its_neighbours(order):
    extents = ExtentMap(3 * BLOCK, BLOCK)
    taken = [take(extents, BLOCK) for _ in range(3)]
    for place in order:
        extents.give(taken[place])
    assert extents.free_runs == [(0, 3 * BLOCK)]
    assert (extents.live, extents.free_bytes, extents.largest_free) == (0, 3 * BLOCK, 3 * BLOCK)


def test_a_part_of_a_block_at_the_end_is_not_used():
    extents = ExtentMap(3 * BLOCK + 100, BLOCK)
    assert extents.capacity == extents.free_bytes == 3 * BLOCK
    assert ExtentMap(BLOCK - 1, BLOCK).free_runs == []


def test_without_room_the_error_names_what_was_wanted_and_what_there_is():
    extents = ExtentMap(8 * BLOCK, BLOCK)
    taken = [take(extents, 2 * BLOCK) for _ in range(4)]
    with pytest.raises(MemoryError, match=f"{BLOCK} bytes .* largest free one has 0"):
        take(extents, 1)
    extents.give(taken[0])
    extents.give(taken[2])
    before = extents.free_runs
    with pytest.raises(
        MemoryError, match=rf"{3 * BLOCK} bytes .* has {2 * BLOCK} \({4 * BLOCK} of {8 * BLOCK}"
    ):
        take(extents, 2 * BLOCK + 1)
    assert extents.free_runs == before
    assert extents.live == 2


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_extent_has_at_least_one_byte(nbytes):
    with pytest.raises(ValueError, match="at least one"):
        take(ExtentMap(BLOCK, BLOCK), nbytes)


def test_what_is_not_in_use_cannot_be_given_back():
    extents = ExtentMap(8 * BLOCK, BLOCK)
    take(extents, 2 * BLOCK)
    taken = take(extents, 2 * BLOCK)
    extent = taken.extent
    extents.give(taken)
    before = extents.free_runs
    extents.give(taken)  # which has none any more
    assert (extents.free_runs, extents.live) == (before, 1)
    for wrong in (
        leasing(*extent),
        leasing(BLOCK, 4 * BLOCK),
        leasing(8 * BLOCK, BLOCK),
        leasing(0, 3 * BLOCK),
        leasing(0, 0),
    ):
        with pytest.raises(ValueError, match="not in use"):
            extents.give(wrong)
        assert extents.free_runs == before


class Model:
    """One mark per block, and a search from the first block on."""

    def __init__(self, blocks):
        self.used = [False] * blocks

    def take(self, count):
        for start in range(len(self.used) - count + 1):
            if not any(self.used[start : start + count]):
                self.used[start : start + count] = [True] * count
                return start
        return None

    def give(self, start, count):
        assert all(self.used[start : start + count])
        self.used[start : start + count] = [False] * count

    def runs(self):
        edges = [place for place in range(len(self.used) + 1) if self.at(place) != self.at(place - 1)]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def at(self, place):
        return 0 <= place < len(self.used) and not self.used[place]


def walk(blocks, steps, choose):
    """Take and give as ``choose`` says, and compare with the model after every step."""
    extents, model, held = ExtentMap(blocks * BLOCK, BLOCK), Model(blocks), []
    for step in range(steps):
        number = choose(step)
        if number % 3 and held:
            lease = held.pop(number % len(held))
            extent = lease.extent
            extents.give(lease)
            model.give(extent.offset // BLOCK, extent.nbytes // BLOCK)
        else:
            nbytes = 1 + number % (blocks * BLOCK // 4)
            expected = model.take(-(-nbytes // BLOCK))
            if expected is None:
                with pytest.raises(MemoryError):
                    take(extents, nbytes)
            else:
                held.append(take(extents, nbytes))
                offset, taken = held[-1].extent
                assert offset == expected * BLOCK
                assert taken % BLOCK == 0
                assert taken - BLOCK < nbytes <= taken
        assert extents.free_runs == [(start * BLOCK, stop * BLOCK) for start, stop in model.runs()]
        assert extents.live == len(held)
        assert extents.free_bytes == model.used.count(False) * BLOCK
        assert extents.largest_free == max((stop - start for start, stop in model.runs()), default=0) * BLOCK
    for lease in held:
        extents.give(lease)
    assert extents.free_runs == [(0, blocks * BLOCK)]


@given(st.integers(1, 20), st.lists(st.integers(0, 1 << 20), max_size=40))
def test_any_order_of_taking_and_giving_agrees_with_the_model(blocks, numbers):
    walk(blocks, len(numbers), numbers.__getitem__)


@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_random_steps_agree_with_the_model(seed):
    source = random.Random(seed)
    walk(60, 400, lambda _: source.randrange(1 << 20))


def test_one_lease_has_one_extent():
    extents = ExtentMap(8 * BLOCK, BLOCK)
    lease = take(extents, BLOCK)
    with pytest.raises(ValueError, match="has one extent"):
        extents.take(BLOCK, lease)
    assert (extents.live, lease.extent) == (1, Extent(0, BLOCK))


@pytest.mark.parametrize("freed", [(), (0,), (2,), (0, 2), (0, 1)], ids=str)
def test_whatever_interrupts_taking_and_giving_no_extent_belongs_to_nobody(no_collector, freed):
    state = []

    def begin():
        pool = ExtentPool(4 * BLOCK, BLOCK)
        leases = [Lease() for _ in range(4)]
        with pool.settled() as extents:
            for lease in leases[:3]:
                extents.take(BLOCK, lease)
        for place in freed:
            pool.give(leases[place])
        state[:] = [pool, leases]

        def change():
            pool.give(leases[1])
            with pool.settled() as extents:
                extents.take(2 * BLOCK if freed else BLOCK, leases[3])

        return change

    for place in interrupted_everywhere(begin):
        pool, leases = state
        with pool.settled() as extents:  # which takes back what is on its way
            owned = sorted(lease.extent for lease in leases if lease.extent is not None)
            assert extents.live == len(owned), place
            everything = sorted(
                [*extents.free_runs, *((offset, offset + nbytes) for offset, nbytes in owned)]
            )
            assert [start for start, _ in everything] == [0, *(stop for _, stop in everything[:-1])], place
            assert everything[-1][1] == 4 * BLOCK, place
        for lease in leases:
            pool.give(lease)
        with pool.settled() as extents:
            assert (extents.live, extents.free_runs) == (0, [(0, 4 * BLOCK)]), place
