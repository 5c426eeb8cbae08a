"""Single slots: reads wherever the tile is, writes that make it primary and dirty, and whole-array reads."""

import numpy as np
import pytest

from strideweave import (
    CPU,
    AwaitResult,
    FileBacked,
    Generic,
    InvalidTileError,
    ReleasedError,
    TileConflictError,
)
from tiled_tensors import experts


@pytest.mark.parametrize("secondary", [FileBacked, CPU, Generic])
@pytest.mark.parametrize("start", ["primary", "secondary"])
def test_reads_take_any_valid_tile_where_it_is(make_model, start, secondary):
    model = make_model(start, secondary=secondary)
    model.carrier.evict(experts(2)) if start == "primary" else model.carrier.promote(experts(2))
    before = model.snapshot()
    assert [model.carrier[slot] for slot in range(192)] == model.values.ravel().tolist()
    assert model.snapshot() == before


def test_a_write_makes_its_tile_primary_and_dirty_and_advances_the_version_once(make_model):
    model = make_model()
    model.carrier[3 * 24 + 5] = 0.5
    assert model.primary() == model.dirty() == [3]
    assert model.carrier.version == 1
    assert model.carrier[3 * 24 + 5] == 0.5
    model.carrier[3 * 24 + 6] = 1.5
    assert model.carrier.version == 2
    assert model.carrier.statistics().misses == 0
    model.values[3, 0, 5], model.values[3, 1, 0] = 0.5, 1.5
    model.check(3)
    assert model.at_rest()


def test_tensor_indexing_reaches_the_slot_of_its_layout(make_model):
    model = make_model()
    model.tensor[2, 3, 4] = 123.0
    assert model.tensor[2, 3, 4] == 123.0
    assert model.carrier[2 * 24 + 3 * 6 + 4] == 123.0


@pytest.mark.parametrize(
    ("slot", "value", "error"),
    [
        (-1, 0.0, IndexError),
        (192, 0.0, IndexError),
        (0.0, 0.0, TypeError),
        (True, 0.0, TypeError),
        ("0", 0.0, TypeError),
        (0, "x", TypeError),
        (0, None, TypeError),
        (0, 1j, TypeError),
    ],
)
def test_refused_writes_change_nothing(make_model, slot, value, error):
    model = make_model()
    before = model.snapshot()
    with pytest.raises(error):
        model.carrier[slot] = value
    assert model.snapshot() == before


def test_invalid_tiles_are_neither_read_nor_written(make_model):
    model = make_model("neither")
    with pytest.raises(InvalidTileError):
        model.carrier[0]
    with pytest.raises(InvalidTileError):
        model.carrier[0] = 1.0
    with pytest.raises(InvalidTileError):
        model.tensor.numpy()
    assert model.carrier.version == 0
    assert model.at_rest()


def test_a_write_that_cannot_fetch_changes_nothing(make_model, control_moves):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    before = model.snapshot()
    moves.failures.append(OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        model.carrier[0] = 5.0
    assert model.snapshot() == before
    assert model.at_rest()
    assert model.carrier[0] == 0.0


def test_a_write_meets_unfinished_work(make_model, control_moves):
    model = make_model()
    model.carrier.promote(experts(0))
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    handle = model.project(0, 1)
    assert model.carrier[0] == 0.0  # needed, and at hand
    for slot in (0, 24):
        with pytest.raises(TileConflictError, match="project"):
            model.carrier[slot] = 9.0
    moves.wait_until_entered()
    with pytest.raises(TileConflictError, match="project"):
        model.carrier[24]  # in transit
    assert model.carrier.version == 0
    model.carrier.set_value(0 + 24 * 7, 0.0) if moves.open() else None
    handle.wait(10)
    model.carrier[0] = 9.0


def test_whole_array_reads_leave_residency_as_it_is(make_model):
    model = make_model()
    model.carrier.promote(experts(1))
    model.carrier[24] = -2.0
    model.values[1, 0, 0] = -2.0
    before = model.snapshot()
    assert np.array_equal(model.tensor.numpy(), model.values)
    assert np.array_equal(np.asarray(model.tensor), model.values)
    assert np.array_equal(model.carrier._read_slots(20, 10), model.values.ravel()[20:30])
    assert model.snapshot() == before
    assert model.at_rest()


@pytest.mark.parametrize(
    ("start", "slots"), [(0, 0), (0, 1), (23, 1), (23, 2), (0, 192), (191, 1), (30, 100)]
)
def test_runs_of_slots(make_model, start, slots):
    model = make_model()
    assert np.array_equal(
        model.carrier._read_slots(start, slots), model.values.ravel()[start : start + slots]
    )


def test_released_carriers_refuse_and_still_answer_what_they_may(make_model):
    model = make_model()
    model.carrier.release()
    model.carrier.release()
    for access in (
        lambda: model.carrier[0],
        lambda: model.carrier.set_value(0, 1.0),
        model.tensor.numpy,
        lambda: model.carrier.primary_tiles,
        lambda: model.carrier.tile_state((0, 0, 0)),
        lambda: model.carrier.dispatch_op("add"),
    ):
        with pytest.raises(ReleasedError):
            access()
    assert model.carrier.size() == 0
    assert model.carrier.is_released()
    assert model.carrier.dtype() is model.tensor.dtype
    fresh = model.carrier.new_like(range(192))
    assert fresh[191] == 191.0
    fresh.release()


@pytest.mark.parametrize("start", ["primary", "secondary"])
@pytest.mark.parametrize("limit", [None, 8 * 96])
def test_a_released_carrier_says_that_it_holds_nothing(make_model, start, limit):
    model = make_model(start, memory_limit=limit)
    model.check(1, 2)
    before = model.carrier.statistics()
    assert before.resident_tiles > 0 < before.memory_bytes
    model.carrier.release()
    after = model.carrier.statistics()
    assert (after.resident_tiles, after.resident_bytes, after.memory_bytes) == (0, 0, 0)
    assert (after.dirty_tiles, after.recycled_bytes, after.put_off_evictions) == (0, 0, 0)
    assert (after.peak_memory_bytes, after.misses) == (before.peak_memory_bytes, before.misses)


def test_a_write_inside_the_runtime_that_would_have_to_wait_is_refused_and_never_happens(make_model):
    model = make_model()
    model.carrier.promote(model.select(1))

    async def write(slot):
        model.carrier[slot] = -1.0

    model.carrier._scope.start(AwaitResult(), write, 24).wait(10)
    with pytest.raises(RuntimeError, match="promote the tile first"):
        model.carrier._scope.start(AwaitResult(), write, 0).wait(10)
    assert (model.carrier[24], model.carrier[0], model.carrier.version) == (-1.0, 0.0, 1)
    assert model.primary() == [1]
    assert model.at_rest()
