"""Projections of a few resident tiles take the short way; whoever looks sees what the long one would have left."""

import numpy as np
import pytest

from strideweave import CPU, LRU, KeepResident, Streaming
from strideweave.carriers.tiled_evictable import gathering
from strideweave.carriers.tiled_evictable.traffic import TileTraffic
from strideweave.tiles.ledger import LedgerEntry

pytestmark = pytest.mark.anyio


@pytest.fixture
def long_ways(monkeypatch) -> list[object]:
    """The requests that took the long way."""
    took: list[object] = []
    bring = TileTraffic.bring

    async def watched(self, entry, plan, changes):
        took.append(entry)
        await bring(self, entry, plan, changes)

    monkeypatch.setattr(TileTraffic, "bring", watched)
    return took


def only_one_in_the_loop(model, monkeypatch):
    """From now on workers copy two tiles."""
    for name in ("INLINE_BYTES", "_LOOP_BYTES"):
        monkeypatch.setattr(gathering, name, model.carrier._traffic.tile_bytes)


@pytest.mark.parametrize("policy", [None, KeepResident(), LRU(max_tiles=8)], ids=["none", "keep", "lru"])
async def test_resident_tiles_are_gathered_the_short_way(make_model, long_ways, policy):
    """Spec: Gather preserves public TileSelection ordering."""
    model = make_model(policy=policy)
    model.check(5, 2)
    assert len(long_ways) == 1  # to fetch
    for experts in ((5, 2), (2, 5), (2,)):
        found = await model.project(*experts)
        assert np.array_equal(found.numpy(), model.values[list(experts)])
    assert len(long_ways) == 1
    assert model.carrier.statistics().hits == 5
    assert model.at_rest()


@pytest.mark.parametrize("slots", [0, 48, 100])
def test_a_destination_is_filled_and_advances_once(make_model, long_ways, slots):
    model = make_model("primary")
    destination = CPU(slots)
    found = model.project(6, 1, destination=destination).wait()
    assert found.carrier is destination
    assert np.array_equal(found.numpy(), model.values[[6, 1]])
    assert destination.version == 1
    assert not destination.is_owned()
    assert not long_ways


def test_one_missing_tile_takes_the_long_way(make_model, long_ways):
    model = make_model()
    model.check(0)
    model.check(0, 1)
    assert len(long_ways) == 2
    assert model.carrier.statistics().misses == 2


def test_tiles_that_do_not_stay_take_the_long_way(make_model, long_ways):
    """Contract section 5: *Planned evictions run before the handle is done*."""
    model = make_model("primary", policy=Streaming())
    model.check(3)
    assert len(long_ways) == 1
    assert 3 not in model.primary()


def test_more_than_the_loop_copies_goes_to_workers_the_short_way_too(make_model, long_ways, monkeypatch):
    model = make_model("primary")
    batches = []
    run_jobs = gathering.run_jobs

    async def watched(jobs):
        batches.append(len(jobs))
        await run_jobs(jobs)

    monkeypatch.setattr(gathering, "run_jobs", watched)
    only_one_in_the_loop(model, monkeypatch)
    model.check(1)
    assert not batches
    model.check(1, 2)
    assert batches == [1]
    assert not long_ways
    assert model.carrier.statistics().hits == 3
    assert model.at_rest()


def test_under_a_memory_limit_more_than_the_loop_copies_takes_the_long_way(
    make_model, long_ways, monkeypatch
):
    """A tile could be driven out while workers copy it, if the request had not had its turn."""
    model = make_model(memory_limit=1 << 20)
    model.check(1, 2)
    assert len(long_ways) == 1
    only_one_in_the_loop(model, monkeypatch)
    model.check(1)
    assert len(long_ways) == 1
    model.check(1, 2)
    assert len(long_ways) == 2


async def test_an_eviction_that_is_put_off_while_workers_copy_runs_when_they_are_done(
    make_model, long_ways, monkeypatch
):
    model = make_model("primary")
    traffic = model.carrier._traffic
    run_jobs = gathering.run_jobs

    async def watched(jobs):
        traffic.counters.put_off.add(1)
        await run_jobs(jobs)

    monkeypatch.setattr(gathering, "run_jobs", watched)
    only_one_in_the_loop(model, monkeypatch)
    found = await model.project(1, 2)
    assert np.array_equal(found.numpy(), model.values[[1, 2]])
    assert not long_ways
    assert 1 not in model.primary()


def test_an_eviction_that_was_put_off_still_runs_when_the_last_request_needs_the_tile_no_longer(
    make_model, long_ways
):
    """Contract section 5: *put off until the last live work that needs the tile ends*."""
    model = make_model("primary")
    traffic = model.carrier._traffic
    entry = LedgerEntry("another")
    traffic.ledger.enter_data(entry, np.array([4]))
    traffic.counters.put_off.add(4)
    model.check(1)
    assert 4 in model.primary()
    traffic.leave(entry)
    model.check(1)
    assert 4 not in model.primary()
    assert len(long_ways) == 2


def test_an_allocation_that_fails_is_the_request_s_error_and_changes_nothing(make_model, monkeypatch):
    model = make_model("primary")
    before = model.snapshot()

    def no_memory(self, size):
        raise MemoryError("none left")

    monkeypatch.setattr(CPU, "_allocate_result", no_memory)
    with pytest.raises(MemoryError, match="none left"):
        model.project(1).wait()
    assert model.snapshot() == before
    assert model.at_rest()
