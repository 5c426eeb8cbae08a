"""The memory that small pieces of files are read into: bounded, counted, and part of a memory limit."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from processes import in_a_forked_child
from strideweave import FileChangedError, TileSet, open_tiled
from strideweave.carriers.part_cover import FEWEST_PIECES, LOADS_AT_ONCE, STAGING_BYTES, StagingArea
from strideweave.io.engine import statistics as engine_statistics
from strideweave.runtime.await_result import AwaitResult

ROWS, COLUMNS = 2048, 8
TALL = 512
TILE = TALL * 4 * 4  # bytes of a tile of half a row's columns: pieces of 16 bytes with gaps as long


@pytest.fixture
def columns(tmp_path):
    """A file of Float32, and what opens it in eight tiles that are half as wide as its rows."""
    array = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    path = tmp_path / "values.npy"
    np.save(path, array)

    def opened(tile=(TALL, 4), **options):
        return open_tiled(path, tile, **options)

    return array, opened


def read_each(tensor, array):
    """Project every tile, all of them at once, and compare."""
    carrier = tensor.carrier
    places = [(i, j) for i in range(ROWS // TALL) for j in range(2)]
    handles = [carrier.project(tensor, carrier.select({0: [i], 1: [j]})) for i, j in places]
    for (i, j), handle in zip(places, handles, strict=True):
        assert np.array_equal(handle.wait().numpy(), array[TALL * i : TALL * (i + 1), 4 * j : 4 * (j + 1)])


def test_the_records_of_both_carriers_name_it(columns):
    _, opened = columns
    tensor = opened()
    carrier = tensor.carrier
    carrier.promote(carrier.select({0: [0], 1: [1]}))
    found, below = carrier.statistics(), carrier.secondary.statistics()
    assert TILE < found.peak_staging_bytes == below.peak_staging_bytes < 2 * TILE
    assert found.peak_memory_bytes == found.resident_bytes + found.peak_staging_bytes
    assert found.staging_bytes == below.staging_bytes == 0
    assert below.staging_limit_bytes == STAGING_BYTES
    carrier.release()


def test_rows_take_none_and_no_share_of_a_limit(columns):
    _, opened = columns
    tensor = opened((64, COLUMNS), memory_limit=4 * 64 * COLUMNS * 4)
    carrier = tensor.carrier
    carrier.promote(carrier.select({0: range(4)}))
    found, below = carrier.statistics(), carrier.secondary.statistics()
    assert found.peak_memory_bytes == found.memory_limit_bytes == found.resident_bytes
    assert below.peak_staging_bytes == below.staging_limit_bytes == 0
    carrier.release()


@pytest.mark.parametrize("limit", [TILE, TILE + 100, 2 * TILE, 3 * TILE, 8 * TILE, 16 * TILE, 999 * TILE])
def test_a_memory_limit_counts_it_whatever_the_limit(columns, limit):
    array, opened = columns
    tensor = opened(memory_limit=limit)
    carrier = tensor.carrier
    read_each(tensor, array)
    found, below = carrier.statistics(), carrier.secondary.statistics()
    assert below.staging_limit_bytes == min(limit // 16, limit - TILE)
    assert below.peak_staging_bytes <= below.staging_limit_bytes
    assert found.peak_staging_bytes >= below.peak_staging_bytes
    assert found.peak_memory_bytes <= limit
    assert carrier.memory_limit == found.memory_limit_bytes == limit
    assert found.staging_bytes == found.pending_requests == 0
    carrier.release()


def test_ranges_are_read_under_a_limit_too(columns):
    """Of the share that is set aside a load is made, and not a read for every piece."""
    _, opened = columns
    tensor = opened(memory_limit=10 * TILE)
    before = engine_statistics().spans
    tensor.carrier.promote(tensor.carrier.select({}))
    assert engine_statistics().spans - before < 2 * ROWS // FEWEST_PIECES
    assert tensor.carrier.secondary.statistics().peak_staging_bytes > 0
    tensor.carrier.release()


def test_what_could_never_fit_beside_it_is_refused_by_name(columns):
    _, opened = columns
    carrier = opened(memory_limit=4 * TILE).carrier
    with pytest.raises(MemoryError, match=rf"memory_limit={4 * TILE}, of which .* takes {TILE // 4};"):
        carrier.promote(carrier.select({0: range(4), 1: [0]}))
    carrier.promote(carrier.select({0: range(3), 1: [0]}))
    carrier.release()


def test_many_requests_share_one_bounded_area(columns, monkeypatch):
    """Also where the area is much less than what is asked for, and where several are refused room at once."""
    array, opened = columns
    tensor = opened()
    area = tensor.carrier.secondary._beside
    area.capacity = 4096
    read_each(tensor, array)
    tensor.carrier.evict(tensor.carrier.select({}))
    tensor.carrier.promote(tensor.carrier.select({}))
    assert np.array_equal(tensor.carrier.project(tensor, tensor.carrier.select({})).wait().numpy(), array)
    assert 0 < tensor.carrier.secondary.statistics().peak_staging_bytes <= 4096
    assert area.in_use == 0
    tensor.carrier.release()


def test_a_failed_read_gives_it_back(columns, tmp_path):
    _, opened = columns
    tensor = opened(memory_limit=16 * TILE)
    path = tmp_path / "values.npy"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(FileChangedError, match="size"):
        tensor.carrier.promote(TileSet([(0, 0)]))
    found = tensor.carrier.statistics()
    assert found.staging_bytes == found.resident_bytes == found.pending_requests == 0
    assert tensor.carrier.secondary.statistics().staging_bytes == 0
    tensor.carrier.release()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_all_of_it(columns):
    """What the parent holds at the fork is the parent's."""
    array, opened = columns
    tensor = opened()
    area: StagingArea = tensor.carrier.secondary._beside
    held, rest = threading.Event(), AwaitResult[None]()

    async def hold():
        async with area.hold(100), area.hold(100):
            held.set()
            await rest

    handle = tensor.carrier._scope.start(AwaitResult[None](), hold)
    assert held.wait(10)
    assert area.in_use == 100 * LOADS_AT_ONCE

    def reads():
        assert area.in_use == 0
        return tensor[0, 0] == array[0, 0] and np.array_equal(
            tensor.carrier.secondary._read_slots(0, 4 * TALL).reshape(TALL, 4), array[:TALL, :4]
        )

    try:
        assert in_a_forked_child(reads)
    finally:
        rest._finish()
        handle.wait()
    assert area.in_use == 0
    tensor.carrier.release()
