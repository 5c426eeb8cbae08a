"""The conflict table of the contract, entry by entry, and that leaving always frees."""

import numpy as np
import pytest

from strideweave.errors import TileConflictError
from strideweave.tiles.grid import TileGrid
from strideweave.tiles.ledger import Ledger, LedgerEntry


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(TileGrid((4, 3), (2, 2)))


def tiles(*ordinals: int) -> np.ndarray:
    return np.array(ordinals, np.int64)


def mask(*flags: bool) -> np.ndarray:
    return np.array(flags, np.bool_)


def enter_data(ledger: Ledger, kind: str, ordinals: np.ndarray) -> LedgerEntry:
    entry = LedgerEntry(kind)
    ledger.enter_data(entry, ordinals)
    return entry


def enter_residency(ledger: Ledger, kind: str, ordinals: np.ndarray, would_change: np.ndarray) -> LedgerEntry:
    entry = LedgerEntry(kind)
    ledger.enter_residency(entry, ordinals, would_change)
    return entry


def idle(ledger: Ledger) -> bool:
    held = ledger.needed.any() or ledger.changing.any() or ledger.moving.any()
    return not held and not ledger.entries


def test_data_requests_share_tiles(ledger):
    first = enter_data(ledger, "project", tiles(1, 2))
    second = enter_data(ledger, "project", tiles(2, 3))
    assert ledger.needed.tolist()[:5] == [0, 1, 2, 1, 0]
    ledger.leave(first)
    ledger.leave(second)
    assert idle(ledger)


@pytest.mark.parametrize("count", [0, 1, 8, 9])
def test_few_tiles_and_many_are_counted_alike(ledger, count):
    """A few are counted one by one, many with one call."""
    asked = tiles(*range(9, 9 - count, -1))
    entries = [enter_data(ledger, "project", asked) for _ in range(3)]
    assert ledger.needed.tolist()[10 - count : 10] == [3] * count
    assert ledger.needed.sum() == 3 * count
    assert ledger.shares_any(asked) == (count > 0)
    for entry in entries[1:]:
        ledger.leave(entry)
    assert not ledger.shares_any(asked)
    ledger.leave(entries[0])
    assert idle(ledger)


@pytest.mark.parametrize("kind", ["promote_async", "evict_async"])
def test_data_request_meets_residency_request(ledger, kind):
    entry = enter_residency(ledger, kind, tiles(5, 6), mask(True, False))
    for ordinal in (5, 6):
        with pytest.raises(TileConflictError, match=kind) as caught:
            enter_data(ledger, "project", tiles(0, ordinal))
        assert caught.value.tiles.coordinates == (ledger._grid.coordinate(ordinal),)
        assert caught.value.holder.startswith(kind)
    assert not ledger.needed.any()
    ledger.leave(entry)
    assert idle(ledger)


def test_residency_request_meets_data_request_only_where_it_would_change_a_tile(ledger):
    project = enter_data(ledger, "project", tiles(1, 2))
    with pytest.raises(TileConflictError, match="project"):
        enter_residency(ledger, "evict_async", tiles(2, 7), mask(True, True))
    assert not ledger.changing.any()
    promote = enter_residency(ledger, "promote_async", tiles(2, 7), mask(False, True))
    assert ledger.changing[[2, 7]].all()
    ledger.leave(promote)
    ledger.leave(project)
    assert idle(ledger)


@pytest.mark.parametrize("changes", [True, False])
def test_residency_requests_never_overlap(ledger, changes):
    enter_residency(ledger, "promote_async", tiles(3), mask(True))
    with pytest.raises(TileConflictError):
        enter_residency(ledger, "evict_async", tiles(3), mask(changes))
    with pytest.raises(TileConflictError):
        ledger.check_residency("promote_async", tiles(3), mask(changes))


@pytest.mark.parametrize("changes", [True, False])
def test_a_tile_being_fetched_counts_as_changing(ledger, changes):
    project = enter_data(ledger, "project", tiles(4))
    ledger.begin_move(project, tiles(4))
    with pytest.raises(TileConflictError):
        enter_residency(ledger, "promote_async", tiles(4), mask(changes))
    ledger.end_move(project, tiles(4))
    ledger.leave(project)
    assert idle(ledger)


def test_disjoint_requests_never_conflict(ledger):
    enter_data(ledger, "project", tiles(0))
    enter_residency(ledger, "evict_async", tiles(1), mask(True))
    enter_residency(ledger, "promote_async", tiles(2), mask(True))
    ledger.check_idle("a write", 3)


def test_write_meets_every_kind_of_unfinished_work(ledger):
    needed = enter_data(ledger, "project", tiles(0))
    enter_residency(ledger, "promote_async", tiles(1), mask(True))
    moving = enter_data(ledger, "project", tiles(9))
    ledger.begin_move(moving, tiles(2))
    for ordinal in (0, 1, 2):
        with pytest.raises(TileConflictError):
            ledger.check_idle("a write", ordinal)
    ledger.check_still("a read", 0)  # needed, but at rest
    for ordinal in (1, 2):
        with pytest.raises(TileConflictError):
            ledger.check_still("a read", ordinal)
    assert needed in ledger.entries


def test_leaving_twice_frees_once(ledger):
    first = enter_data(ledger, "project", tiles(1))
    second = enter_data(ledger, "project", tiles(1))
    ledger.leave(first)
    ledger.leave(first)
    assert ledger.needed[1] == 1
    ledger.leave(second)
    assert idle(ledger)


def test_dropped_needs_are_not_dropped_again_on_leaving(ledger):
    entry = enter_data(ledger, "project", tiles(1))
    other = enter_data(ledger, "project", tiles(1))
    ledger.drop_needs(entry)
    ledger.leave(entry)
    assert ledger.needed[1] == 1
    ledger.leave(other)


def test_leaving_ends_moves_that_were_left_open(ledger):
    entry = enter_data(ledger, "project", tiles(1))
    ledger.begin_move(entry, tiles(1, 6))
    ledger.leave(entry)
    assert idle(ledger)


def test_free_ends_when_every_tile_of_the_conflict_is_free(ledger):
    first = enter_residency(ledger, "promote_async", tiles(1), mask(True))
    second = enter_residency(ledger, "promote_async", tiles(2), mask(True))
    with pytest.raises(TileConflictError) as caught:
        enter_data(ledger, "project", tiles(1, 2))
    free = caught.value.free
    assert ledger.leave(first) == []
    assert not free.done
    assert ledger.leave(second) == [free]


def test_message_names_some_tiles_and_the_error_has_them_all(ledger):
    enter_residency(ledger, "evict_async", tiles(*range(12)), np.ones(12, np.bool_))
    with pytest.raises(TileConflictError, match=r"\(0, 0\), \(1, 0\).* and 8 more.*wait") as caught:
        enter_data(ledger, "project", tiles(*range(12)))
    assert len(caught.value.tiles) == 12
    assert caught.value.holder.endswith("s old")


def test_a_caller_who_tries_again_and_again_leaves_nothing_behind(ledger):
    """The handle of an error that was dropped is watched no longer; one that somebody holds is."""
    entry = enter_data(ledger, "project", tiles(1))
    with pytest.raises(TileConflictError) as kept:
        ledger.check_idle("a write", 1)
    free = kept.value.free
    for _ in range(100):
        with pytest.raises(TileConflictError):
            ledger.check_idle("a write", 1)
    assert len(ledger._watchers) <= 2
    assert ledger.leave(entry) == [free]
