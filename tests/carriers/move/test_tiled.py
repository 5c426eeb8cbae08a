"""Moves from and to TiledEvictable: what arrives, what is refused at once, what a failure leaves, gradients.

Spec: *Residency remains valid while tiled work needs it*; *TiledEvictable owns one flat logical storage extent*.
"""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from importlib.util import find_spec

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strideweave as sw
from processes import in_a_forked_child
from strideweave import (
    CPU,
    DType,
    Evictable,
    FileBacked,
    Generic,
    Layout,
    Metal,
    Tensor,
    TiledEvictable,
    move,
    move_async,
    no_grad,
    row_major,
)
from strideweave.carriers.extension import DefinedCarrier
from strideweave.carriers.move import Transfer, dispatch_move, registered_move_operation
from strideweave.carriers.tiled_evictable.slabs import SlabStore
from strideweave.carriers.tiled_evictable.store import SecondaryStore
from strideweave.carriers.tiled_evictable.traffic import TileTraffic
from strideweave.errors import (
    EvictedError,
    InvalidTileError,
    OwnershipError,
    PendingWorkError,
    ReleasedError,
    StaleGraphError,
    TileConflictError,
)
from strideweave.runtime.await_result import AwaitResult
from strideweave.testing import bit_patterns, failing_transfers, held_transfers, values_of

SHAPE, TILE = (6, 4), (1, 4)
SLOTS = 24
VALUES = np.arange(SLOTS, dtype=np.float32)

DENSE = {
    "Generic": lambda dtype: Generic([], dtype=dtype),
    "CPU": lambda dtype: CPU(0, dtype=dtype),
    "FileBacked": lambda dtype: FileBacked(dtype=dtype),
    "Evictable": lambda dtype: Evictable(CPU(1, dtype=dtype), FileBacked(dtype=dtype)),
}
MEMORY = [CPU, Generic]
if find_spec("mlx") is not None:  # the extra strideweave[metal]
    DENSE["Metal"] = lambda dtype: Metal(0, dtype=dtype)
    MEMORY.append(Metal)
SHIPPED = (Generic, CPU, Metal, FileBacked, Evictable, TiledEvictable)


def names(pair):
    return "-".join(kind.__name__ for kind in pair)


def empty(kind, dtype):
    if kind is Generic:
        return Generic([], dtype=dtype)
    return kind(dtype=dtype) if kind is FileBacked else kind(0, dtype=dtype)


def tiled_carrier(
    values=None, *, grid=(6, 1), tile=TILE, primary=CPU, secondary=FileBacked, dtype=DType.Float32, **options
):
    """A tiled carrier, empty or with values in its secondary tier."""
    fast, slow = empty(primary, dtype), empty(secondary, dtype)
    if values is not None:
        slow = slow.new_like(values)
    return TiledEvictable(fast, slow, grid, tile, **options)


def full(carrier, **options):
    return Tensor(carrier, 0, row_major(*SHAPE), **options)


def flat(carrier, **options):
    return Tensor(carrier, 0, row_major(carrier.size()), **options)


def mixed(**options):
    """Tiles 1 and 4 resident, 4 dirty with the value it had, the others in the secondary tier."""
    carrier = tiled_carrier(VALUES, **options)
    carrier.promote(carrier.select({0: [1, 4]}))
    carrier[16] = 16.0
    return carrier


def state(carrier):
    return (
        carrier.primary_tiles,
        carrier.secondary_tiles,
        carrier.valid_tiles,
        carrier.dirty_tiles,
        carrier.version,
        carrier.is_owned(),
        carrier.is_mutable(),
    )


def at_rest(carrier):
    found = carrier.statistics()
    return (
        found.pending_requests,
        found.pinned_tiles,
        found.in_flight_bytes,
        found.staging_bytes,
        found.waiting_requests,
    ) == (0, 0, 0, 0, 0)


@contextmanager
def failing_at(pair, number, after):
    """Make one batch of transfers between two classes fail, the ``number``-th from here on."""
    real, calls = dispatch_move(*pair), itertools.count()

    class Failing(real):
        async def transfer(self, transfers):
            doomed = next(calls) == number
            if after or not doomed:
                await super().transfer(transfers)
            if doomed:
                raise OSError("a test's own")

    with registered_move_operation(*pair, Failing, replace=True):
        yield


def start(work, carrier, tensor, tile):
    """Begin a request on one tile."""
    selection = carrier.select({0: [tile]})
    return carrier.project(tensor, selection) if work == "project" else carrier.promote_async(selection)


# What moves


@pytest.mark.parametrize("pair", [*itertools.product(SHIPPED, repeat=2)], ids=names)
def test_every_ordered_pair_of_shipped_carriers_is_registered(pair):
    assert dispatch_move(*pair)


@pytest.mark.parametrize("primary", MEMORY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("secondary", [CPU, Generic, FileBacked], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", DENSE)
def test_a_tiled_source_arrives_slot_by_slot(kind, primary, secondary):
    """Wherever its tiles are; the source is released, and its tiers with it."""
    source = mixed(primary=primary, secondary=secondary)
    destination = DENSE[kind](DType.Float32).allocate_like(SLOTS)
    tensor = full(source)
    moved = move(tensor, destination)
    assert moved.carrier is destination
    assert (moved.layout, moved.offset, destination.version) == (tensor.layout, 0, 1)
    assert values_of(destination).tolist() == VALUES.tolist()
    assert source.is_released()
    assert source.primary.is_released()
    assert source.secondary.is_released()
    assert (destination.is_owned(), destination.is_mutable()) == (False, True)


@pytest.mark.parametrize("kind", ["Generic", "CPU", "FileBacked"])
def test_an_empty_destination_is_allocated(kind):
    moved = move(full(mixed()), DENSE[kind](DType.Float32))
    assert values_of(moved.carrier).tolist() == VALUES.tolist()


@pytest.mark.parametrize("primary", MEMORY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("secondary", [CPU, FileBacked], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", DENSE)
def test_a_tiled_destination_has_every_tile_primary_and_dirty(kind, primary, secondary):
    source = DENSE[kind](DType.Float32).new_like(VALUES)
    destination = tiled_carrier(primary=primary, secondary=secondary)
    moved = move(full(source), destination)
    assert source.is_released()
    assert (len(destination.dirty_tiles), len(destination.primary_tiles), destination.version) == (6, 6, 1)
    assert np.array_equal(moved.numpy(), VALUES.reshape(SHAPE))
    projected = destination.project(moved, destination.select({0: [4, 1]})).wait()
    assert np.array_equal(projected.numpy(), VALUES.reshape(SHAPE)[[4, 1]])
    destination.evict(destination.primary_tiles)
    assert np.array_equal(moved.numpy(), VALUES.reshape(SHAPE))
    assert at_rest(destination)
    destination.release()


def test_values_that_were_there_are_replaced_wherever_their_tile_was():
    destination = mixed()
    moved = move(full(CPU(0).new_like(VALUES + 100)), destination)
    assert np.array_equal(moved.numpy().ravel(), VALUES + 100)
    assert len(destination.dirty_tiles) == 6
    destination.evict(destination.primary_tiles)
    assert np.array_equal(moved.numpy().ravel(), VALUES + 100)
    destination.release()


@pytest.mark.parametrize(
    ("grid", "tile"), [((6, 1), (1, 4)), ((2, 2), (3, 2)), ((1, 1), (6, 4)), ((8,), (3,)), ((3,), (8,))]
)
def test_tiled_to_tiled_keeps_slots_whatever_the_geometries(grid, tile):
    source, destination = mixed(), tiled_carrier(grid=grid, tile=tile)
    move(full(source, requires_grad=False), destination)
    assert values_of(destination).tolist() == VALUES.tolist()
    assert source.is_released()
    assert len(destination.dirty_tiles) == len(destination.valid_tiles) == int(np.prod(grid))
    destination.release()


@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
def test_every_bit_survives(dtype):
    values = bit_patterns(dtype, 256)
    there = move(
        flat(CPU(0, dtype=dtype).new_like(values)), tiled_carrier(grid=(16,), tile=(16,), dtype=dtype)
    )
    there.carrier.evict(there.carrier.select({0: range(9)}))
    across = move(there, tiled_carrier(grid=(8,), tile=(32,), secondary=CPU, dtype=dtype))
    back = move(across, FileBacked(dtype=dtype))
    assert values_of(back.carrier).tobytes() == values.tobytes()


def test_implicit_zeros_arrive_as_zeros():
    x = full(tiled_carrier(VALUES))
    picked = x.carrier.project(x, x.carrier.select({0: [2]})).wait()
    sw.reduce_sum(picked).backward()
    gradient, carrier = x.grad, x.grad.carrier
    assert carrier.tile_state((0, 0)).location == "implicit"
    expected = np.zeros(SHAPE, np.float32)
    expected[2] = 1
    assert np.array_equal(move(gradient, Generic([])).numpy(), expected)


def test_slots_beyond_the_source_stay_as_they_are():
    """A tile of which only a part arrives keeps the rest, zero if it had no value."""
    source = np.full(10, -1, np.float32)
    fresh = tiled_carrier()
    move(flat(CPU.from_numpy(source.copy())), fresh)
    assert [state.valid for state in map(fresh.tile_state, [(k, 0) for k in range(6)])] == [True] * 3 + [
        False
    ] * 3
    assert [fresh[i] for i in range(12)] == [-1.0] * 10 + [0.0] * 2
    for policy in (None, sw.KeepResident()):
        for start in ("primary", "secondary"):
            there = tiled_carrier(VALUES, residency_policy=policy)
            if start == "primary":
                there.promote(there.select({}))
            move(flat(CPU.from_numpy(source.copy())), there)
            assert values_of(there).tolist() == [-1.0] * 10 + VALUES[10:].tolist()
            assert at_rest(there)
            there.release()
    fresh.release()


def test_spans_of_slots_are_copied_by_the_operations_themselves():
    """As any move operation, they take any spans, not only whole carriers, and advance no version."""
    source, destination, tiled = CPU(0).new_like(VALUES), CPU(30), tiled_carrier(VALUES * 0)

    def run(transfers):
        operation = dispatch_move(type(transfers[0].source), type(transfers[0].destination))()
        destination._scope.start(AwaitResult(), operation.transfer, transfers).wait()

    run([Transfer(source, 3, tiled, 5, 7), Transfer(source, 20, tiled, 21, 2)])
    expected = np.zeros(SLOTS, np.float32)
    expected[5:12], expected[21:23] = VALUES[3:10], VALUES[20:22]
    assert values_of(tiled).tolist() == expected.tolist()
    run([Transfer(tiled, 6, destination, 1, 17)])
    assert values_of(destination).tolist() == [0.0, *expected[6:23].tolist(), *[0.0] * 12]
    assert (tiled.version, destination.version) == (0, 0)
    assert at_rest(tiled)
    tiled.release()
    warm = tiled_carrier()
    move(flat(CPU(0).new_like([9] * 8)), warm)
    warm.evict(warm.primary_tiles)
    run([Transfer(source, 3, warm, 21, 2)])
    assert [warm[i] for i in range(20, 24)] == [0.0, 3.0, 4.0, 0.0], (
        "a place that is used again was not cleared"
    )
    warm.release()


FORMS = (((6, 1), (1, 4)), ((2, 2), (3, 2)), ((1, 1), (6, 4)), ((8,), (3,)), ((3,), (8,)), ((24,), (1,)))
STOPS = st.one_of(
    st.sampled_from(sorted(DENSE)),
    st.tuples(
        st.sampled_from(FORMS),
        st.sampled_from((CPU, Generic)),
        st.sampled_from((CPU, FileBacked)),
        st.sampled_from(("free", "policy", "limit")),
    ),
)


def make_stop(stop):
    """A carrier that a script of moves ends or stops at."""
    if isinstance(stop, str):
        return DENSE[stop](DType.Float32).allocate_like(SLOTS)
    (grid, tile), primary, secondary, bound = stop
    options = {"policy": {"residency_policy": sw.LRU(max_tiles=2)}, "limit": {"memory_limit": 96}}.get(
        bound, {}
    )
    return tiled_carrier(grid=grid, tile=tile, primary=primary, secondary=secondary, **options)


@given(st.lists(STOPS, min_size=2, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_values_survive_any_journey(stops, data):
    """Through carriers of every kind, with writes, promotions and evictions wherever it stops."""
    expected, carrier = VALUES.copy(), CPU(0).new_like(VALUES)
    for number, stop in enumerate(stops):
        carrier = move(flat(carrier, requires_grad=False), make_stop(stop)).carrier
        slot = data.draw(st.integers(0, SLOTS - 1))
        carrier[slot] = expected[slot] = 100 + number
        if isinstance(carrier, TiledEvictable):
            tiles = data.draw(st.sets(st.integers(0, carrier.grid_shape[0] - 1)))
            chosen = carrier.select({0: tiles}) if tiles else sw.TileSet()
            if data.draw(st.booleans()):
                carrier.evict(chosen)
            elif carrier.memory_limit is None:
                carrier.promote(chosen)
            assert at_rest(carrier)
    assert np.array_equal(values_of(carrier), expected)
    carrier.release()


# Policies and limits


@pytest.mark.parametrize(
    "options",
    [{"residency_policy": sw.LRU(max_tiles=2)}, {"memory_limit": 40}, {"memory_limit": 5 * 16}],
    ids=["policy", "limit-of-two-tiles", "limit-of-five"],
)
@pytest.mark.parametrize("kind", [*DENSE, "TiledEvictable"])
def test_a_bounded_destination_takes_the_values_in_its_secondary_tier(kind, options):
    """Clean, none of them primary: what becomes primary is for the policy to say, or for who needs it."""
    source = mixed() if kind == "TiledEvictable" else DENSE[kind](DType.Float32).new_like(VALUES)
    destination = tiled_carrier(VALUES + 50, **options)
    destination.promote(destination.select({0: [3]}))
    destination[12] = 1.0
    moved = move(full(source, requires_grad=False), destination)
    assert (len(destination.primary_tiles), len(destination.secondary_tiles)) == (0, 6)
    assert len(destination.dirty_tiles) == 0
    found = destination.statistics()
    assert found.memory_limit_bytes is None or found.peak_memory_bytes <= found.memory_limit_bytes
    assert np.array_equal(moved.numpy().ravel(), VALUES)
    assert at_rest(destination)
    destination.release()


def test_a_limit_that_holds_every_tile_changes_nothing():
    destination = tiled_carrier(memory_limit=6 * 16)
    move(full(CPU(0).new_like(VALUES)), destination)
    assert len(destination.dirty_tiles) == 6
    assert destination.statistics().peak_memory_bytes <= 6 * 16
    destination.release()


def test_a_read_only_secondary_tier_stays_untouched(tmp_path):
    path = tmp_path / "values.bin"
    path.write_bytes(VALUES.tobytes())
    secondary = FileBacked.open(path, dtype=DType.Float32)
    destination = TiledEvictable(CPU(0), secondary, (6, 1), TILE, residency_policy=sw.Streaming())
    moved = move(full(CPU(0).new_like(VALUES + 7)), destination)
    assert np.array_equal(moved.numpy().ravel(), VALUES + 7)
    destination.release()
    assert path.read_bytes() == VALUES.tobytes()


@pytest.mark.parametrize("kind", ["Generic", "CPU", "FileBacked", "TiledEvictable"])
@pytest.mark.parametrize("tiles", [1, 3])
def test_a_source_stays_within_its_memory_limit(kind, tiles):
    source = tiled_carrier(VALUES, memory_limit=tiles * 16)
    for tile in range(tiles):
        source.promote(source.select({0: [tile]}))
        source[4 * tile] = float(4 * tile)
    destination = (
        tiled_carrier(grid=(3,), tile=(8,)) if kind == "TiledEvictable" else DENSE[kind](DType.Float32)
    )
    moved = move(full(source, requires_grad=False), destination)
    assert values_of(moved.carrier).tolist() == VALUES.tolist()
    assert source.statistics().peak_memory_bytes <= tiles * 16


def test_what_is_staged_is_bounded():
    """Sixteen MiB go past, eight at most are staged."""
    values = np.arange(4 << 20, dtype=np.float32)
    source = tiled_carrier(values, grid=(64,), tile=(1 << 16,))
    moved = move(flat(source, requires_grad=False), FileBacked())
    assert source.statistics().peak_staging_bytes == 8 << 20
    destination = tiled_carrier(grid=(16,), tile=(1 << 18,), residency_policy=sw.Streaming())
    again = move(moved, destination)
    assert destination.statistics().peak_staging_bytes == 8 << 20
    assert destination.statistics().peak_resident_bytes == 0
    assert np.array_equal(again.numpy(), values)
    destination.release()


# What is refused at once


def test_a_source_with_tiles_without_value_is_refused():
    source, destination = tiled_carrier(), CPU(SLOTS)
    move(flat(CPU(8)), source)
    before = state(source)
    with pytest.raises(InvalidTileError, match="move needs 4 tiles"):
        move_async(full(source), destination)
    assert state(source) == before
    assert (destination.version, destination.is_owned(), source.is_released()) == (0, False, False)
    assert at_rest(source)
    source.release()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: CPU(SLOTS, dtype=DType.Float64), TypeError),
        (lambda: CPU(SLOTS - 1), ValueError),
        (lambda: tiled_carrier(grid=(5, 1)), ValueError),
        (lambda: CPU(SLOTS, mutable=False), RuntimeError),
    ],
)
def test_a_destination_that_does_not_fit_is_refused(make, error):
    source = mixed()
    holder = make()
    before = state(source)
    with pytest.raises(error):
        move(full(source), holder)
    assert state(source) == before
    assert at_rest(source)
    source.release()


def test_released_and_evicted_ones_are_refused():
    source, evicted = mixed(), Evictable(CPU(SLOTS), FileBacked())
    evicted.evict()
    before = state(source)
    with pytest.raises(EvictedError):
        move(full(source), evicted)
    destination, tensor = tiled_carrier(), full(source)
    destination.release()
    with pytest.raises(ReleasedError):
        move(tensor, destination)
    assert state(source) == before
    source.release()
    with pytest.raises(ReleasedError):
        move(tensor, CPU(SLOTS))


@pytest.mark.parametrize("work", ["project", "promote_async"])
def test_unfinished_work_on_a_source_is_met_at_once(work):
    source = mixed()
    tensor = full(source)
    with held_transfers(FileBacked, CPU) as hold:
        handle = start(work, source, tensor, 2)
        destination = CPU(SLOTS)
        with pytest.raises(PendingWorkError):
            move_async(tensor, destination)
        assert (destination.is_owned(), source.is_owned(), source.is_released()) == (False, False, False)
        hold.open()
        handle.wait(60)
    assert np.array_equal(move(tensor, CPU(SLOTS)).numpy(), VALUES.reshape(SHAPE))


@pytest.mark.parametrize("work", ["project", "promote_async"])
def test_unfinished_work_on_a_destination_is_met_at_once(work):
    destination = mixed()
    tensor = full(destination)
    with held_transfers(FileBacked, CPU) as hold:
        handle = start(work, destination, tensor, 2)
        source = CPU(0).new_like(VALUES + 1)
        with pytest.raises(TileConflictError, match="move meets an unfinished request") as caught:
            move_async(full(source), destination)
        assert (destination.is_owned(), source.is_owned(), destination.version) == (False, False, 1)
        hold.open()
        handle.wait(60)
    caught.value.free.wait(60)
    assert np.array_equal(move(full(source), destination).numpy().ravel(), VALUES + 1)
    destination.release()


@pytest.mark.parametrize("end", ["source", "destination"])
def test_nothing_else_is_let_in_while_a_move_is_under_way(end):
    tiled = mixed()
    tensor = full(tiled)
    with held_transfers(*((CPU, Generic) if end == "source" else (Generic, CPU))) as hold:
        source, destination = (tensor, Generic([])) if end == "source" else (full(Generic(VALUES + 1)), tiled)
        handle = move_async(source, destination)
        hold.entered.wait(60)
        everything = tiled.select({})
        for refused in (
            lambda: tiled.project(tensor, everything),
            lambda: tiled.promote_async(everything),
            lambda: tiled.evict_async(everything),
        ):
            with pytest.raises(TileConflictError, match="move"):
                refused()
        for refused in (
            lambda: tiled.set_value(0, 1),
            tiled.release,
            lambda: move_async(tensor, CPU(SLOTS)),
            lambda: move_async(full(CPU(SLOTS)), tiled),
        ):
            with pytest.raises(OwnershipError):
                refused()
        hold.open()
        moved = handle.wait(60)
    assert np.array_equal(moved.numpy().ravel(), VALUES + (end == "destination"))


def test_a_tiled_carrier_is_no_tier():
    for compose in (
        lambda tiled: Evictable(CPU(SLOTS), tiled),
        lambda tiled: Evictable(tiled, CPU(0)),
        lambda tiled: TiledEvictable(CPU(0), tiled, (6, 1), TILE),
        lambda tiled: TiledEvictable(tiled, CPU(0), (6, 1), TILE),
    ):
        tiled = tiled_carrier(VALUES)
        with pytest.raises(NotImplementedError, match="no tier"):
            compose(tiled)
        assert not tiled.is_owned()
        tiled.release()


def test_a_class_that_nobody_registered_is_named():
    class Elsewhere(DefinedCarrier):
        """Never registered."""

    with pytest.raises(NotImplementedError, match="from Elsewhere to TiledEvictable"):
        dispatch_move(Elsewhere, TiledEvictable)


# Failures


@pytest.mark.parametrize(
    ("pair", "destination"),
    [
        ((FileBacked, CPU), lambda: CPU(0)),
        ((CPU, CPU), lambda: CPU(0)),
        ((CPU, Generic), lambda: Generic([])),
        ((FileBacked, CPU), FileBacked),
        ((CPU, FileBacked), FileBacked),
        ((TiledEvictable, CPU), tiled_carrier),
        ((FileBacked, CPU), lambda: tiled_carrier(grid=(3,), tile=(8,))),
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_a_failed_move_leaves_the_source_as_it_was(pair, destination, after):
    source, there = mixed(), destination()
    tensor, before = full(source), state(source)
    with failing_transfers(*pair, after=after) as faults, pytest.raises(OSError, match="filled the disk"):
        move(tensor, there)
    assert faults.failed == 1
    assert state(source) == before
    assert at_rest(source)
    assert values_of(source).tolist() == VALUES.tolist()
    assert (there.is_owned(), there.is_mutable()) == (False, True)
    if isinstance(there, TiledEvictable):
        assert at_rest(there)
        assert len(there.primary_tiles) == 0
    assert np.array_equal(move(tensor, there).numpy().ravel(), VALUES)


@pytest.mark.parametrize(
    "options",
    [{}, {"residency_policy": sw.Streaming()}, {"memory_limit": 48}],
    ids=["free", "policy", "limit"],
)
@pytest.mark.parametrize("pair", [(Generic, CPU), (CPU, FileBacked), (FileBacked, CPU)], ids=names)
@pytest.mark.parametrize("doomed", range(3))
@pytest.mark.parametrize("after", [False, True])
def test_a_failed_arrival_leaves_a_sound_destination(options, pair, doomed, after):
    """Whichever transfer of it fails: no tile loses its value, and what is clean is what the other tier has."""
    destination = tiled_carrier(VALUES + 50, **options)
    for tile in (1, 4):
        destination.promote(destination.select({0: [tile]}))
    destination[16] = 66.0
    source = Generic(VALUES)
    tensor = full(destination)
    failed = False
    with failing_at(pair, doomed, after):
        try:
            move(full(source), destination)
        except OSError:
            failed = True
    assert failed == (not source.is_released())
    assert destination.version == 2
    assert (destination.is_owned(), destination.is_mutable()) == (False, True)
    assert at_rest(destination)
    assert len(destination.valid_tiles) == 6
    found = values_of(destination)
    destination.evict(destination.primary_tiles)
    assert values_of(destination).tolist() == found.tolist(), "a clean tile was another than the stored one"
    assert set(found) <= set(VALUES) | set(VALUES + 50)
    if failed:
        move(full(source), destination)
    assert np.array_equal(tensor.numpy().ravel(), VALUES)
    destination.release()


@pytest.mark.parametrize(
    ("where", "name"),
    [(TileTraffic, "stage_slots"), (SlabStore, "make_room"), (SecondaryStore, "prepare_write")],
)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("options", [{}, {"residency_policy": sw.Streaming()}, {"memory_limit": 48}])
def test_memory_that_cannot_be_had_fails_a_move_and_nothing_else(monkeypatch, where, name, number, options):
    source, destination = mixed(), tiled_carrier(VALUES + 50, **options)
    destination.promote(destination.select({0: [1]}))
    tensor, before = full(source), state(source)
    real, calls = getattr(where, name), itertools.count()

    def refuse(self, *args, **kwargs):
        if next(calls) == number:
            raise MemoryError("a test's own")
        return real(self, *args, **kwargs)

    for there in (Generic([]), destination):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, refuse)
            try:
                move(tensor, there)
            except MemoryError:
                assert state(source) == before
                assert values_of(source).tolist() == VALUES.tolist()
            else:
                break
        assert at_rest(source)
    else:
        move(tensor, there)
    assert at_rest(destination)
    assert len(destination.valid_tiles) == 6
    assert values_of(there).tolist() == VALUES.tolist()
    destination.release()


def test_a_failed_arrival_on_empty_tiers_leaves_invalid_tiles():
    destination = tiled_carrier()
    with failing_transfers(Generic, CPU), pytest.raises(OSError, match="disk"):
        move(full(Generic(VALUES)), destination)
    assert (len(destination.valid_tiles), destination.statistics().resident_bytes) == (0, 0)
    assert at_rest(destination)
    destination.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("end", ["source", "destination"])
def test_a_forked_child_gets_both_carriers_back_from_its_parents_move(end):
    tiled = mixed(secondary=CPU)
    tensor = full(tiled, requires_grad=False)
    other = Generic(VALUES * (end == "destination"))
    source, destination = (tensor, other) if end == "source" else (full(other, requires_grad=False), tiled)

    def check():
        handle = move_async(source, destination)
        assert np.array_equal(handle.wait(10).numpy().ravel(), VALUES)

    with held_transfers(*((CPU, Generic) if end == "source" else (Generic, CPU))) as hold:
        handle = move_async(source, destination)
        hold.entered.wait(60)

        def gets_both_back():
            with pytest.raises(RuntimeError, match="fork"):
                handle.wait(10)
            assert not tiled.is_owned()
            assert not other.is_owned()
            assert at_rest(tiled)
            hold.open()
            check()

        assert in_a_forked_child(gets_both_back)
        hold.open()
        assert np.array_equal(handle.wait(60).numpy().ravel(), VALUES)


# Gradients


def squares(x):
    return sw.reduce_sum(sw.mul(x, x))


def check_tiled_gradient(x, geometry, expected):
    gradient = x.grad
    assert type(gradient.carrier) is TiledEvictable
    assert gradient.carrier is not x.carrier
    assert (gradient.layout, gradient.offset, gradient.dtype) == (x.layout, x.offset, x.dtype)
    assert (gradient.carrier.grid_shape, gradient.carrier.tile_shape) == geometry
    assert gradient.carrier.residency_policy is None
    assert np.array_equal(gradient.numpy(), expected)
    selection = gradient.carrier.select({})
    assert np.array_equal(gradient.carrier.project(gradient, selection).wait().numpy(), expected)


LAYOUTS = {
    "experts": ((6, 1), (1, 4), row_major(6, 4)),
    "cut-inside": ((2, 2), (3, 2), Layout(((3, 2), (2, 2)), ((2, 6), (1, 12)))),
    "one-tile": ((1, 1), (6, 4), row_major(6, 4)),
    "column-major": ((1, 1), (6, 4), Layout((6, 4), (1, 6))),
}


@pytest.mark.parametrize("kind", [*DENSE, "TiledEvictable"])
@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.parametrize("policy", [False, True], ids=["free", "policy"])
def test_the_gradient_comes_back_in_tiles(kind, form, policy):
    """With the source's Layout and geometry, whatever the moved tensor's gradient looked like."""
    grid, tile, layout = LAYOUTS[form]
    options = {"residency_policy": sw.LRU(max_tiles=1)} if policy else {}
    x = Tensor(tiled_carrier(VALUES, grid=grid, tile=tile, **options), 0, layout)
    values = x.numpy()
    if kind == "TiledEvictable":
        moved = move(x, tiled_carrier(grid=grid, tile=tile))
    else:
        moved = move(x, DENSE[kind](DType.Float32).allocate_like(SLOTS))
    if kind == "FileBacked":
        moved = move(moved, CPU(0))
    if kind == "TiledEvictable":
        moved = moved.carrier.project(moved, moved.carrier.select({})).wait()
    squares(moved).backward()
    check_tiled_gradient(x, (grid, tile), 2 * values)


def test_a_gradient_stays_within_the_memory_limit():
    grid, tile, layout = LAYOUTS["cut-inside"]
    x = Tensor(tiled_carrier(VALUES, grid=grid, tile=tile, memory_limit=48), 0, layout)
    values = x.numpy()
    squares(move(x, CPU(0))).backward()
    found = x.grad.carrier.statistics()
    assert found.memory_limit_bytes == 48
    assert found.peak_memory_bytes <= 48
    assert np.array_equal(x.grad.numpy(), 2 * values)


def test_a_gradient_goes_through_a_tiled_carrier():
    """Dense to tiled, projected, and back to where the values came from."""
    x = sw.asarray(VALUES.reshape(SHAPE).tolist(), dtype=DType.Float32)
    moved = move(x, tiled_carrier())
    picked = moved.carrier.project(moved, moved.carrier.select({0: [3, 1]})).wait()
    squares(picked).backward()
    expected = np.zeros(SHAPE, np.float32)
    expected[[3, 1]] = 2 * VALUES.reshape(SHAPE)[[3, 1]]
    assert type(x.grad.carrier) is CPU
    assert np.array_equal(x.grad.numpy(), expected)


@pytest.mark.parametrize("kind", DENSE)
def test_a_tiled_gradient_comes_back_to_any_dense_class(kind):
    x = full(DENSE[kind](DType.Float32).new_like(VALUES))
    moved = move(x, tiled_carrier())
    squares(moved.carrier.project(moved, moved.carrier.select({})).wait()).backward()
    assert type(x.grad.carrier).__name__ == kind
    assert np.array_equal(x.grad.numpy(), 2 * VALUES.reshape(SHAPE))


def test_there_and_back_again_with_a_layout_across_tiles():
    """No projection could take the tensor in between, but its values and gradient have their slots all the same."""
    x = sw.asarray(VALUES.reshape(SHAPE).tolist(), dtype=DType.Float32)
    there = move(x, tiled_carrier(grid=(2, 2), tile=(3, 2)))
    with pytest.raises(ValueError, match="tile"):
        there.carrier.project(there, there.carrier.select({}))
    squares(move(there, CPU(0))).backward()
    assert np.array_equal(x.grad.numpy(), 2 * VALUES.reshape(SHAPE))


def test_a_projection_made_before_a_move_is_stale_after_it():
    """Spec: *Projection is an autograd-visible gather*: the saved version is that of a carrier that has gone."""
    x = full(tiled_carrier(VALUES))
    picked = x.carrier.project(x, x.carrier.select({0: [5]})).wait()
    moved = move(x, CPU(0))
    with pytest.raises(StaleGraphError, match="move it away, after backward"):
        sw.add(squares(moved), squares(picked)).backward()
    assert x.grad is None


def test_a_tier_is_no_destination():
    source, holder = mixed(), tiled_carrier(VALUES, secondary=CPU)
    before = state(source)
    for tier in (holder.primary, holder.secondary):
        with pytest.raises(OwnershipError):
            move(full(source), tier)
    assert state(source) == before
    source.release()
    holder.release()


def test_no_grad_moves_without_a_node():
    with no_grad():
        moved = move(full(mixed()), CPU(0))
    assert (moved.requires_grad, moved.grad_fn) == (False, None)
    moved = move(full(mixed()), CPU(0))
    assert (moved.grad_fn.name, len(moved.grad_fn.inputs)) == ("move", 1)


# Async callers


@pytest.mark.anyio
async def test_a_move_is_awaited():
    moved = await move_async(full(mixed()), CPU(0))
    back = await move_async(moved, tiled_carrier())
    with anyio.fail_after(60):
        values = await back.carrier.project(back, back.carrier.select({}))
    assert np.array_equal(values.numpy().ravel(), VALUES)
    back.carrier.release()
