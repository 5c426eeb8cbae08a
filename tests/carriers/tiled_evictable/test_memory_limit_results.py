"""Results and gradients have the memory limit of what they come from, and spill what does not fit."""

import errno

import numpy as np
import pytest

from strideweave import CPU, FileBacked, Streaming, Tensor, TileConflictError, asarray, from_numpy
from strideweave.testing import failing_transfers

TILE = 4 * 6 * 4  # bytes of a tile of make_model


def compact(values) -> object:
    return from_numpy(np.ascontiguousarray(values, np.float32))


def learnable(model) -> Tensor:
    return Tensor(model.carrier, 0, model.tensor.layout, requires_grad=True)


def read(tensor) -> np.ndarray:
    """A full tiled Tensor as an array, a tile at a time."""
    carrier = tensor.carrier
    parts = [carrier.project(tensor, carrier.select({0: [k]})).wait(10) for k in range(carrier.grid_shape[0])]
    return np.concatenate([part.numpy() for part in parts])


def stays_within(carrier, limit: int) -> None:
    found = carrier.statistics()
    assert carrier.memory_limit == limit
    assert 0 < found.peak_memory_bytes <= limit
    assert (
        found.pending_requests == found.waiting_requests == found.staging_bytes == found.in_flight_bytes == 0
    )
    assert carrier._traffic.budget.promised == (0, 0, 0)


@pytest.mark.parametrize("tiles", [1, 2, 5, 8])
def test_a_scatter_result_that_does_not_fit_spills(make_model, tiles):
    model = make_model(memory_limit=tiles * TILE)
    values = -model.values
    result = model.carrier.scatter(compact(values), model.tensor, model.select(*range(8))).wait(10)
    carrier = result.carrier
    assert len(carrier.primary_tiles) == tiles
    assert len(carrier.valid_tiles) == 8
    assert (carrier.version, model.carrier.version) == (1, 0)
    assert np.array_equal(read(result), values)
    stays_within(carrier, tiles * TILE)
    assert model.at_rest()
    carrier.release()


@pytest.mark.parametrize("tiles", [1, 3, 8])
def test_adding_to_a_template_stays_within_both_limits(make_model, tiles):
    model = make_model(policy=Streaming(), memory_limit=tiles * TILE)
    order = [5, 0, 7, 2, 1, 3, 6, 4]
    result = model.carrier.scatter(
        compact(np.ones((8, 4, 6))), model.tensor, model.select(*order), "add"
    ).wait(10)
    assert np.array_equal(read(result), model.values + 1)
    stays_within(result.carrier, tiles * TILE)
    assert model.carrier.statistics().peak_memory_bytes <= tiles * TILE
    assert model.at_rest()
    result.carrier.release()


def test_adding_to_more_of_a_template_than_fits_is_refused_where_it_is_asked(make_model):
    model = make_model(memory_limit=3 * TILE)
    before, values = model.snapshot(), compact(np.ones((4, 4, 6)))
    with pytest.raises(MemoryError, match="scatter needs 384 bytes"):
        model.carrier.scatter(values, model.tensor, model.select(0, 1, 2, 3), "add")
    assert not values.carrier.is_owned()
    assert model.snapshot() == before
    assert model.at_rest()


@pytest.mark.parametrize("tiles", [1, 2, 3, 8])
def test_a_gradient_that_does_not_fit_spills(make_model, tiles):
    """Projections of one tile each, so that the limit holds them, and a gradient of all."""
    model = make_model(memory_limit=tiles * TILE)
    model.tensor = learnable(model)
    for turn in range(2):
        for expert in (3, 1, 4, 0, 6, 2, 7, 5):
            part = model.project(expert).wait(10)
            (part * asarray(np.full((1, 4, 6), expert + turn, np.float32))).backward(
                asarray(np.ones((1, 4, 6), np.float32))
            )
    gradient = model.tensor.grad
    assert len(gradient.carrier.valid_tiles) == 8
    expected = np.repeat((2 * np.arange(8) + 1), 24).reshape(8, 4, 6)
    assert np.array_equal(read(gradient), expected)
    stays_within(gradient.carrier, tiles * TILE)
    assert model.at_rest()


@pytest.mark.parametrize("tiles", [1, 2, 8])
def test_a_contribution_larger_than_the_limit_goes_in_step_by_step(make_model, tiles):
    model = make_model(policy=Streaming(), memory_limit=tiles * TILE)
    model.tensor = learnable(model)
    whole = model.project(*range(8)).wait(10)
    again = model.project(*reversed(range(8))).wait(10)
    (whole * again).backward(asarray(np.ones((8, 4, 6), np.float32)))
    gradient = model.tensor.grad
    assert np.array_equal(read(gradient), 2 * model.values[::-1])
    stays_within(gradient.carrier, tiles * TILE)
    assert model.at_rest()


def test_a_full_disk_under_a_result_leaves_the_inputs_as_they_were(make_model):
    model = make_model(memory_limit=2 * TILE)
    values, before, error = compact(-model.values), model.snapshot(), OSError(errno.ENOSPC, "full")
    for _ in range(2):
        with failing_transfers(CPU, FileBacked, error=error), pytest.raises(OSError, match="full") as caught:
            model.carrier.scatter(values, model.tensor, model.select(*range(8))).wait(10)
        assert caught.value is error
        assert not values.carrier.is_owned()
        assert model.snapshot() == before
        assert model.at_rest()
    result = model.carrier.scatter(values, model.tensor, model.select(*range(8))).wait(10)
    assert np.array_equal(read(result), -model.values)


@pytest.mark.parametrize("way", [(CPU, FileBacked), (FileBacked, CPU)], ids=["write", "read"])
def test_a_failure_under_a_gradient_leaves_the_source_at_rest(make_model, way):
    model = make_model(policy=Streaming(), memory_limit=2 * TILE)
    model.tensor = learnable(model)
    part = model.project(*range(8)).wait(10)
    pair = part * part
    ones = asarray(np.ones((8, 4, 6), np.float32))
    with failing_transfers(*way), pytest.raises(OSError, match="disk"):
        # Contributions of all tiles meet: the second one reads back what the first one spilled.
        (pair + model.project(*range(8)).wait(10)).backward(ones)
    assert model.at_rest()
    model.tensor = learnable(model)
    part = model.project(*range(8)).wait(10)
    (part * part).backward(ones)
    assert np.array_equal(read(model.tensor.grad), 2 * model.values)


def test_an_assignment_obeys_and_changes_all_or_nothing(make_model):
    model = make_model(memory_limit=3 * TILE)
    with pytest.raises(MemoryError, match="assign needs 384 bytes"):
        model.carrier.assign(compact(np.ones((4, 4, 6))), model.tensor, model.select(0, 1, 2, 3))
    model.check(0, 1, 2)
    model.carrier[0] = model.values[0, 0, 0] = 8.0
    before = model.snapshot()
    values = np.full((3, 4, 6), 7, np.float32)
    with failing_transfers(CPU, FileBacked), pytest.raises(OSError, match="disk"):
        model.carrier.assign(compact(values), model.tensor, model.select(5, 6, 7)).wait(10)
    assert model.snapshot() == before
    assert model.at_rest()
    model.carrier.assign(compact(values), model.tensor, model.select(7, 2, 5)).wait(10)
    model.values[[7, 2, 5]] = 7
    assert model.primary() == [2, 5, 7]
    for expert in range(8):
        model.check(expert)
    assert model.carrier.statistics().peak_memory_bytes == 3 * TILE
    assert model.at_rest()


def test_assignments_wait_their_turn(make_model, control_moves):
    model = make_model(memory_limit=2 * TILE)
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    first = model.project(0, 1)
    moves.wait_until_entered()
    second = model.carrier.assign(compact(np.ones((2, 4, 6))), model.tensor, model.select(2, 3))
    with pytest.raises(TileConflictError):
        model.project(2)
    assert not second.done
    moves.open()
    assert np.array_equal(first.wait(10).numpy(), model.values[[0, 1]])
    second.wait(10)
    model.values[[2, 3]] = 1
    model.check(2, 3)
    model.check(0)
    assert model.at_rest()
