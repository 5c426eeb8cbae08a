"""Extents: aligned, disjoint, lowest fit first, joined again; against a model that knows every block."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.io.extents import Extent, ExtentMap

BLOCK = 4096


def test_the_lowest_run_that_is_long_enough_is_taken_from_its_beginning():
    extents = ExtentMap(10 * BLOCK, BLOCK)
    taken = [extents.take(2 * BLOCK) for _ in range(5)]
    assert [extent.offset for extent in taken] == [0, 2 * BLOCK, 4 * BLOCK, 6 * BLOCK, 8 * BLOCK]
    extents.give(taken[1])
    extents.give(taken[3])
    assert extents.take(BLOCK) == Extent(2 * BLOCK, BLOCK)
    assert extents.take(2 * BLOCK) == Extent(6 * BLOCK, 2 * BLOCK)
    assert extents.take(1) == Extent(3 * BLOCK, BLOCK)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_what_is_given_back_joins_its_neighbours(order):
    extents = ExtentMap(3 * BLOCK, BLOCK)
    taken = [extents.take(BLOCK) for _ in range(3)]
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
    taken = [extents.take(2 * BLOCK) for _ in range(4)]
    with pytest.raises(MemoryError, match=f"{BLOCK} bytes .* largest free one has 0"):
        extents.take(1)
    extents.give(taken[0])
    extents.give(taken[2])
    before = extents.free_runs
    with pytest.raises(
        MemoryError, match=rf"{3 * BLOCK} bytes .* has {2 * BLOCK} \({4 * BLOCK} of {8 * BLOCK}"
    ):
        extents.take(2 * BLOCK + 1)
    assert extents.free_runs == before
    assert extents.live == 2


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_extent_has_at_least_one_byte(nbytes):
    with pytest.raises(ValueError, match="at least one"):
        ExtentMap(BLOCK, BLOCK).take(nbytes)


def test_what_is_not_in_use_cannot_be_given_back():
    extents = ExtentMap(8 * BLOCK, BLOCK)
    extents.take(2 * BLOCK)
    taken = extents.take(2 * BLOCK)
    extents.give(taken)
    before = extents.free_runs
    for wrong in (
        taken,
        Extent(BLOCK, 4 * BLOCK),
        Extent(8 * BLOCK, BLOCK),
        Extent(0, 3 * BLOCK),
        Extent(0, 0),
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
            extent = held.pop(number % len(held))
            extents.give(extent)
            model.give(extent.offset // BLOCK, extent.nbytes // BLOCK)
        else:
            nbytes = 1 + number % (blocks * BLOCK // 4)
            expected = model.take(-(-nbytes // BLOCK))
            if expected is None:
                with pytest.raises(MemoryError):
                    extents.take(nbytes)
            else:
                held.append(extents.take(nbytes))
                assert held[-1].offset == expected * BLOCK
                assert held[-1].nbytes % BLOCK == 0
                assert held[-1].nbytes - BLOCK < nbytes <= held[-1].nbytes
        assert extents.free_runs == [(start * BLOCK, stop * BLOCK) for start, stop in model.runs()]
        assert extents.live == len(held)
        assert extents.free_bytes == model.used.count(False) * BLOCK
        assert extents.largest_free == max((stop - start for start, stop in model.runs()), default=0) * BLOCK
    for extent in held:
        extents.give(extent)
    assert extents.free_runs == [(0, blocks * BLOCK)]


@given(st.integers(1, 20), st.lists(st.integers(0, 1 << 20), max_size=40))
def test_any_order_of_taking_and_giving_agrees_with_the_model(blocks, numbers):
    walk(blocks, len(numbers), numbers.__getitem__)


@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_random_steps_agree_with_the_model(seed):
    source = random.Random(seed)
    walk(60, 400, lambda _: source.randrange(1 << 20))
