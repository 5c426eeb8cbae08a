"""Spec: *Residency transitions have asynchronous and blocking forms*, whole sets at a time."""

import threading

import numpy as np
import pytest

from strideweave import (
    CPU,
    FileBacked,
    Generic,
    InvalidTileError,
    ReleasedError,
    TileConflictError,
    TiledResidencyFacet,
    TileSelection,
    TileSet,
)
from strideweave.carriers.tiled_evictable import AwaitResidency
from strideweave.runtime.event_loop import current_runtime
from tiled_tensors import experts

KINDS = [(CPU, FileBacked), (CPU, CPU), (CPU, Generic), (Generic, FileBacked), (Generic, CPU)]


@pytest.mark.parametrize(("primary", "secondary"), KINDS)
def test_round_trip_keeps_values_version_and_identity(make_model, primary, secondary):
    model = make_model(primary=primary, secondary=secondary)
    tensor, version = model.tensor, model.carrier.version
    model.carrier.promote(experts(1, 6))
    assert model.primary() == [1, 6]
    assert model.dirty() == []
    model.carrier[6 * 24] = -5.0
    model.values[6, 0, 0] = -5.0
    assert model.dirty() == [6]
    assert model.carrier.evict(experts(1, 6)) is None
    assert model.primary() == []
    assert np.array_equal(model.tensor.numpy(), model.values)
    assert model.tensor is tensor
    assert model.carrier.version == version + 1
    assert model.at_rest()


def test_promote_one_expert_changes_only_that_tile(make_model):
    """Spec, scenario *Promote one expert tile*."""
    model = make_model()
    shape, layout, carrier = model.tensor.shape, model.tensor.layout, model.tensor.carrier
    assert model.carrier.promote(experts(3)) is None
    assert model.primary() == [3]
    assert (model.tensor.shape, model.tensor.layout, model.tensor.carrier) == (shape, layout, carrier)


@pytest.mark.anyio
async def test_both_forms_agree(make_model):
    """Spec, scenario *Prefetch without changing autograd*: the Tensor stays what it was."""
    model = make_model()
    handle = model.carrier.promote_async(model.select(2, 5))
    assert isinstance(handle, AwaitResidency)
    assert await handle is None
    assert model.primary() == [2, 5]
    assert await model.carrier.evict_async(experts(5)) is None
    assert model.primary() == [2]


def test_the_facet_is_the_same_door(make_model):
    model = make_model()
    facet = model.carrier.require_facet(TiledResidencyFacet)
    facet.promote(experts(4))
    assert model.primary() == [4]
    facet.evict_async(model.select(4)).wait()
    assert model.primary() == []


def test_satisfied_requests_are_done_at_once_and_change_nothing(make_model):
    model = make_model()
    model.carrier.promote(experts(1))
    before = model.snapshot()
    assert model.carrier.promote_async(experts(1)).done
    assert model.carrier.evict_async(experts(2)).done
    assert model.carrier.promote_async(TileSet()).done
    assert model.carrier.evict_async(TileSet()).done
    assert model.snapshot() == before


def test_dirty_values_commit_to_the_secondary_tier_together(make_model):
    """Spec, scenario *Evict a selected dirty tile set*."""
    model = make_model("primary")
    assert model.dirty() == list(range(8))
    assert model.carrier.evict(model.select(0, 3, 7)) is None
    assert model.primary() == [1, 2, 4, 5, 6]
    assert model.dirty() == [1, 2, 4, 5, 6]
    statistics = model.carrier.statistics()
    assert statistics.bytes_written == 3 * statistics.tile_bytes
    model.check(*range(8))


def test_evicting_a_clean_tile_moves_nothing(make_model):
    model = make_model()
    model.carrier.promote(experts(1, 2))
    model.carrier.evict(experts(1, 2))
    assert model.carrier.statistics().bytes_written == 0


def test_an_evicted_tile_that_comes_back_is_clean(make_model):
    model = make_model("primary")
    model.carrier.evict(experts(0))
    model.carrier.promote(experts(0))
    assert 0 not in model.dirty()
    assert model.carrier.tile_state((0, 0, 0)).location == "primary"


@pytest.mark.parametrize("method", ["promote_async", "evict_async", "promote", "evict"])
@pytest.mark.parametrize(
    ("tiles", "error"),
    [
        ([(0, 0, 0)], TypeError),
        ("abc", TypeError),
        (None, TypeError),
        (TileSet([(0, 0)]), ValueError),
        (TileSet([(8, 0, 0)]), ValueError),
        (TileSelection([[0], [0]]), ValueError),
        (TileSelection([[0], [1], [0]]), ValueError),
    ],
)
def test_refused_arguments_change_nothing(make_model, method, tiles, error):
    model = make_model("primary")
    before = model.snapshot()
    with pytest.raises(error):
        getattr(model.carrier, method)(tiles)
    assert model.snapshot() == before
    assert model.at_rest()


@pytest.mark.parametrize("method", ["promote_async", "evict_async"])
def test_invalid_tiles_are_refused_before_anything_moves(make_model, method):
    model = make_model("neither")
    with pytest.raises(InvalidTileError, match="no value"):
        getattr(model.carrier, method)(experts(0, 1))
    assert model.at_rest()


@pytest.mark.parametrize("method", ["promote_async", "evict_async", "promote", "evict"])
def test_released_carriers_refuse(make_model, method):
    model = make_model()
    model.carrier.release()
    with pytest.raises(ReleasedError):
        getattr(model.carrier, method)(experts(0))


def test_overlapping_requests_conflict_at_once_and_disjoint_ones_do_not(make_model, control_moves):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    first = model.carrier.promote_async(experts(0, 1))
    moves.wait_until_entered()
    before = model.snapshot()
    for attempt in (
        lambda: model.carrier.promote_async(experts(1, 2)),
        lambda: model.carrier.evict_async(experts(1)),
        lambda: model.project(1),
        lambda: model.carrier.set_value(24, 1.0),
        lambda: model.carrier.get_value(24),
    ):
        with pytest.raises(TileConflictError, match="promote_async") as caught:
            attempt()
        assert caught.value.tiles == experts(1)
        assert not caught.value.free.done
    assert model.snapshot() == before
    other = model.carrier.promote_async(experts(4))
    assert not first.done
    moves.open()
    other.wait(10)
    first.wait(10)
    caught.value.free.wait(10)
    assert model.primary() == [0, 1, 4]
    model.carrier.evict(experts(1))


def test_release_refuses_while_a_request_is_unfinished(make_model, control_moves):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    handle = model.carrier.promote_async(experts(0))
    with pytest.raises(RuntimeError, match="unfinished"):
        model.carrier.release()
    assert not model.carrier.is_released()
    moves.open()
    handle.wait(10)
    model.carrier.release()
    assert model.carrier.primary.is_released()
    assert model.carrier.secondary.is_released()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("odd"), MemoryError()])
def test_a_failed_promotion_leaves_the_whole_set_as_it_was(make_model, control_moves, error):
    model = make_model()
    model.carrier.promote(experts(2))
    moves = control_moves(FileBacked, CPU)
    before = model.snapshot()
    moves.failures.append(error)
    handle = model.carrier.promote_async(experts(1, 2, 3))
    with pytest.raises(type(error)) as caught:
        handle.wait(10)
    assert caught.value is error
    assert model.snapshot() == before
    assert model.at_rest()
    model.carrier.promote(experts(1, 2, 3))
    model.check(1, 2, 3)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("odd"), MemoryError()])
def test_a_failed_eviction_leaves_the_whole_set_as_it_was(make_model, control_moves, error):
    model = make_model("primary")
    moves = control_moves(CPU, FileBacked)
    before = model.snapshot()
    moves.failures.append(error)
    with pytest.raises(type(error)):
        model.carrier.evict(experts(0, 5))
    assert model.snapshot() == before
    assert model.at_rest()
    model.carrier.evict(experts(0, 5))
    model.check(*range(8))


def test_a_move_that_answers_with_other_carriers_fails_the_request(make_model, control_moves):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.answer = lambda transfers: [CPU(24) for _ in transfers]
    before = model.snapshot()
    with pytest.raises(RuntimeError, match="destinations"):
        model.carrier.promote(experts(1))
    assert model.snapshot() == before
    assert model.at_rest()


def test_dropping_the_handle_lets_the_request_run_on(make_model, control_moves):
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    model.carrier.promote_async(experts(5))
    with pytest.raises(TileConflictError) as caught:
        model.project(5)
    moves.open()
    caught.value.free.wait(10)
    assert model.primary() == [5]


def test_a_tile_that_admitted_work_is_about_to_fetch_is_not_evicted_behind_its_back(make_model):
    """Contract: a tile that unfinished work is still fetching counts as changing, also before it has begun."""
    model = make_model()
    gate = threading.Event()
    current_runtime().post(gate.wait)  # the loop does nothing meanwhile
    try:
        handle = model.project(0)
        for method in (model.carrier.evict_async, model.carrier.promote_async):
            with pytest.raises(TileConflictError, match="project"):
                method(experts(0))
        assert model.carrier.evict_async(experts(1)).done
    finally:
        gate.set()
    handle.wait(10)
    assert model.primary() == [0]
    assert model.at_rest()
