"""The residency table against what each commit promises."""

import numpy as np
import pytest

from strideweave.tiles.residency import Location, ResidencyTable, TileState


def tiles(*ordinals: int) -> np.ndarray:
    return np.array(ordinals, np.int64)


@pytest.mark.parametrize(
    ("start", "state"),
    [
        (Location.NONE, TileState("none", valid=False, dirty=False)),
        (Location.IMPLICIT, TileState("implicit", valid=True, dirty=False)),
        (Location.SECONDARY, TileState("secondary", valid=True, dirty=False)),
        (Location.PRIMARY, TileState("primary", valid=True, dirty=True)),
    ],
)
def test_where_tiles_start(start, state):
    table = ResidencyTable(3, start)
    assert [table.state(ordinal) for ordinal in range(3)] == [state] * 3
    assert table.resident_count == (3 if start is Location.PRIMARY else 0)


def test_promoted_from_the_secondary_tier_is_clean():
    table = ResidencyTable(4, Location.SECONDARY)
    table.commit_promotion(tiles(2, 0))
    assert table.located(Location.PRIMARY).tolist() == [0, 2]
    assert table.located(Location.SECONDARY).tolist() == [1, 3]
    assert not table.is_dirty(tiles(0, 1, 2, 3)).any()
    assert table.resident_count == 2


def test_promoted_implicit_zero_is_dirty():
    table = ResidencyTable(2, Location.IMPLICIT)
    table.commit_promotion(tiles(1))
    assert table.state(1) == TileState("primary", valid=True, dirty=True)
    assert table.state(0) == TileState("implicit", valid=True, dirty=False)


def test_promoting_a_resident_tile_again_keeps_it_dirty_and_counted_once():
    table = ResidencyTable(2, Location.PRIMARY)
    table.commit_promotion(tiles(0))
    assert table.dirty().tolist() == [0, 1]
    assert table.resident_count == 2


def test_written_cleaned_dropped():
    table = ResidencyTable(3, Location.SECONDARY)
    table.commit_promotion(tiles(0, 1))
    table.commit_write(1)
    assert table.dirty().tolist() == [1]
    table.commit_clean(tiles(1))
    assert table.dirty().tolist() == []
    table.commit_drop(tiles(0, 1))
    assert table.resident_count == 0
    assert table.valid().tolist() == [0, 1, 2]


def test_invalid_tiles_are_not_valid():
    table = ResidencyTable(2, Location.NONE)
    assert not table.is_valid(tiles(0, 1)).any()
    assert table.valid().tolist() == []


def test_filled_tiles_are_primary_and_dirty_wherever_they_were():
    table = ResidencyTable(4, Location.SECONDARY)
    table.commit_promotion(tiles(0))
    table.commit_fill(tiles(0, 2))
    assert table.dirty().tolist() == table.located(Location.PRIMARY).tolist() == [0, 2]
    assert table.resident_count == 2
    empty = ResidencyTable(2, Location.NONE)
    empty.commit_fill(tiles(1))
    assert empty.valid().tolist() == [1]


def test_a_gradient_begins_with_zeros_everywhere():
    table = ResidencyTable(3, Location.NONE)
    table.begin_implicit()
    assert table.is_implicit(tiles(0, 1, 2)).all()
    assert table.valid().tolist() == [0, 1, 2]
    assert (table.resident_count, table.dirty().tolist()) == (0, [])


def test_a_table_that_is_cleared_has_no_values():
    table = ResidencyTable(4, Location.PRIMARY)
    table.clear()
    assert (table.resident_count, len(table.valid()), len(table.dirty())) == (0, 0, 0)
    assert table.state(2).location == "none"


@pytest.mark.parametrize("count", [0, 1, 8, 9, 40])
def test_few_tiles_and_many_are_judged_alike(count):
    """A few are looked at one by one, many with one call."""
    table = ResidencyTable(64, Location.SECONDARY)
    asked = tiles(*range(63, 63 - count, -1))
    assert table.are_valid(asked)
    assert table.are_resident(asked) == (count == 0)
    assert not table.any_resident(asked)
    assert table.are_stored(asked)
    table.commit_promotion(tiles(0))
    assert not table.any_resident(asked)
    assert table.are_resident(asked) == (count == 0)
    table.commit_promotion(asked)
    assert table.are_resident(asked)
    assert table.any_resident(asked) == (count > 0)
    if count:
        assert not table.are_stored(asked)
        table.commit_clean(asked)
        table.commit_drop(asked[-1:])
        assert not table.are_resident(asked)
        assert table.any_resident(asked) == (count > 1)
        assert table.are_valid(asked)
    table.clear()
    assert table.are_valid(asked) == (count == 0)
