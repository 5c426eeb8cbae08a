"""Tiles that stream past the primary tier are read to where they are wanted, where that is one run of slots."""

import threading

import numpy as np
import pytest

from strideweave import CPU, FileBacked, Streaming, Tensor, tiled
from strideweave.carriers.tiled_evictable import traffic
from strideweave.io.engine import default_engine
from strideweave.io.positioned import read_spans
from strideweave.layout import Layout


@pytest.fixture
def copies(monkeypatch) -> list[int]:
    """How many tiles were copied for other requests, each time."""
    made: list[int] = []
    copy = traffic.TileTraffic._copies

    async def watched(self, passage, rows):
        made.append(len(rows))
        return await copy(self, passage, rows)

    monkeypatch.setattr(traffic.TileTraffic, "_copies", watched)
    return made


def test_nothing_is_staged_where_tiles_stay_whole(make_model, copies):
    model = make_model(policy=Streaming())
    model.check(5, 2, 7)
    statistics = model.carrier.statistics()
    assert (statistics.streamed, statistics.bytes_read) == (3, 3 * statistics.tile_bytes)
    assert (statistics.peak_staging_bytes, statistics.promotions, copies) == (0, 0, [])
    assert statistics.peak_aside_bytes == 0  # there is no destination to be spared
    assert model.at_rest()


@pytest.mark.parametrize("cached", [True, False])
def test_a_few_tiles_in_the_page_cache_take_no_passage(make_model, monkeypatch, cached):
    """They are there when nobody else could have asked for them; what has to be waited for is announced."""
    model, passages = make_model(policy=Streaming()), []
    announce = traffic.TileTraffic._passage

    def watched(self, ordinals, *arguments):
        passages.append(ordinals.tolist())
        return announce(self, ordinals, *arguments)

    def at_once(_, spans):
        if cached:
            read_spans(spans)
        return cached

    monkeypatch.setattr(traffic.TileTraffic, "_passage", watched)
    monkeypatch.setattr(type(default_engine()), "read_at_once", at_once)
    model.check(5, 2, 7)
    assert passages == ([] if cached else [[2, 5, 7]])
    statistics = model.carrier.statistics()
    assert (statistics.streamed, statistics.misses, statistics.hits, statistics.shared) == (3, 3, 0, 0)
    assert statistics.bytes_read == 3 * statistics.tile_bytes
    assert model.at_rest()


def test_what_is_read_past_the_page_cache_is_not_looked_for_there(small_device, monkeypatch):
    values = np.arange(8 * 1024, dtype=np.float32).reshape(8, 1024)
    slow = small_device.allocate(0)
    tensor = tiled(values, (1, 1024), secondary=slow, resident=False, residency_policy=Streaming())

    def at_once(*_):
        raise AssertionError("it was looked for in the page cache")

    monkeypatch.setattr(type(default_engine()), "read_at_once", at_once)
    found = tensor.carrier.project(tensor, tensor.carrier.select({0: [5, 2]})).wait()
    assert np.array_equal(found.numpy(), values[[5, 2]])
    tensor.carrier.release()


def test_tiles_are_staged_where_their_slots_come_apart(make_model):
    model = make_model(policy=Streaming())
    experts, rows, columns = model.values.shape
    # The rows of a tile in another order than its slots, so that a tile is not one run of the result.
    flat = Tensor(model.carrier, 0, Layout((experts, (2, 2), columns), (rows * columns, (12, 6), 1)))
    found = model.carrier.project(flat, model.select(5, 2)).wait()
    order = [0, 2, 1, 3]
    assert np.array_equal(found.numpy(), model.values[[5, 2]][:, order])
    assert model.carrier.statistics().peak_staging_bytes > 0
    assert model.at_rest()


def test_a_request_that_waits_for_the_tile_gets_a_copy_that_nobody_writes_to(
    make_model, copies, control_moves
):
    """Contract section 6: *a missing tile is read once and shared*."""
    model = make_model(policy=Streaming())
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    first = model.project(3)
    moves.wait_until_entered()
    second = model.project(3)
    assert not second.done
    moves.open()
    values = first.wait().numpy(writable=True)
    values[...] = -1
    assert np.array_equal(second.wait().numpy(), model.values[[3]])
    assert (len(moves.calls), copies) == (1, [1])
    statistics = model.carrier.statistics()
    assert (statistics.streamed, statistics.shared) == (1, 1)
    assert model.at_rest()


def test_requests_that_overlap_read_each_tile_once(make_model, copies, control_moves):
    """Contract section 6, also where the tile that is shared arrives while its second reader reads another one."""
    model = make_model(policy=Streaming())
    moves = control_moves(FileBacked, CPU)
    others = moves.gates[5 * model.values[0].size] = threading.Event()
    moves.gate.clear()
    first = model.project(4, 3, 6)
    moves.wait_until_entered()
    moves.entered.clear()
    second = model.project(3, 5)
    moves.wait_until_entered()
    moves.open()
    first.wait()
    others.set()
    assert np.array_equal(second.wait().numpy(), model.values[[3, 5]])
    assert (moves.calls, copies) == ([3, 1], [1])  # only what is shared is copied
    statistics = model.carrier.statistics()
    assert (statistics.streamed, statistics.misses, statistics.shared) == (4, 4, 1)
    assert model.at_rest()


def test_a_read_that_fails_leaves_the_given_destination_as_it_was(make_model, control_moves):
    """Contract section 5: *after a failure its values are what they were*."""
    model = make_model(policy=Streaming())
    destination = CPU(0).new_like(np.full(100, 9, np.float32))
    moves = control_moves(FileBacked, CPU)
    moves.failures.append(OSError("no luck"))
    with pytest.raises(OSError, match="no luck"):
        model.project(4, 1, destination=destination).wait()
    assert set(destination.numpy().tolist()) == {9}
    assert (destination.version, destination.is_owned()) == (0, False)
    statistics = model.carrier.statistics()
    assert (statistics.aside_bytes, statistics.peak_aside_bytes) == (0, 2 * statistics.tile_bytes)
    assert model.at_rest()
    model.project(4, 1, destination=destination).wait()
    assert np.array_equal(destination.numpy()[:48], model.values[[4, 1]].ravel())


@pytest.mark.parametrize("known", ["nothing", "view", "address"])
def test_large_tiles_reach_a_given_destination_without_a_copy_unless_its_address_may_be_known(
    known, monkeypatch
):
    """Contract section 5: *after a failure its values are what they were*, so they are read aside."""
    copied: list[int] = []
    copy = traffic.TileTraffic.copy

    async def watched(self, pairs):
        copied.append(len(pairs))
        await copy(self, pairs)

    monkeypatch.setattr(traffic.TileTraffic, "copy", watched)
    values = np.arange(6 * 300_000, dtype=np.float32).reshape(6, 300_000)
    tensor = tiled(values, (1, 300_000), resident=False, residency_policy=Streaming())
    selection = tensor.carrier.select({0: [4, 1, 3]})
    destination = CPU(3 * 300_000)
    view = None if known == "nothing" else CPU(destination.size(), destination.numpy().ctypes.data).numpy()
    if known == "view":
        view = destination.numpy()
    for _ in range(3):
        found = tensor.carrier.project(tensor, selection, destination=destination).wait()
        assert found.carrier is destination
        assert np.array_equal(found.numpy(copy=True), values[[4, 1, 3]])
        assert view is None or np.array_equal(view.reshape(3, -1), values[[4, 1, 3]])
    assert copied == ([] if known == "nothing" else [1] * 3)
    assert destination.version == 3
    destination[0] = 1.0
    tensor.carrier.release()
