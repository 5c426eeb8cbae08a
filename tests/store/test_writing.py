"""A store that is open for writing, as the slow tier of a tiled Tensor."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from strideweave import (
    CPU,
    BlockDevice,
    BlockDeviceCarrier,
    Evictable,
    FileBacked,
    Generic,
    ImmutableError,
    Metal,
    Tensor,
    TiledEvictable,
    TileSet,
    asarray,
    elementwise_mul,
    move,
    reduce_sum,
    save_tiled,
    tiled,
)
from strideweave.carriers.move import dispatch_move
from strideweave.dtype import DType
from strideweave.io.engine import make_engine
from strideweave.layout import row_major
from strideweave.runtime.await_result import AwaitResult
from strideweave.store import StoreBacked, open_store, tile_files, verify_tiles
from strideweave.store.tile_files import TileFiles
from strideweave.testing import bit_patterns, values_of

ALL = TileSet([(row, column) for row in range(3) for column in range(2)])


def run(carrier, function, *args):
    """Run a coroutine function in the runtime's loop."""
    return carrier._scope.start(AwaitResult(), function, *args).wait()


def store_carrier(path, *, writable=True):
    return StoreBacked(TileFiles(str(path), writable=writable))


def test_what_is_evicted_is_seen_by_every_opener(store, values, opened, write_back, tile_of):
    early = opened(store)
    tensor = opened(store, "r+")
    write_back(tensor, (1, 0), np.full((2, 4), -1))
    values[2:4, 0:4] = -1
    assert np.array_equal(early.numpy(), values)
    assert np.array_equal(opened(store).numpy(), values)
    assert np.array_equal(tensor.numpy(), values)
    tensor.carrier.release()
    assert np.array_equal(opened(store, "r+").numpy(), values)


def test_what_is_dirty_is_seen_when_it_is_evicted_and_not_before(store, values, opened):
    tensor = opened(store, "r+")
    tensor[0, 0] = 99.0
    assert np.array_equal(opened(store).numpy(), values)
    tensor.carrier.evict(TileSet([(0, 0)]))
    assert opened(store)[0, 0] == 99.0


def test_a_tile_that_was_not_changed_is_not_written(store, opened):
    tensor = opened(store, "r+")
    tensor.carrier.promote(ALL)
    tensor.carrier.evict(ALL)
    assert tensor.carrier.secondary.statistics().store.tiles_written == 0
    assert (store / "journal.bin").stat().st_size == 0


def test_a_read_only_tensor_cannot_be_changed_and_writes_nothing(store, opened, values):
    for file in [*store.iterdir(), store]:
        file.chmod(0o555 if file.is_dir() else 0o444)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in store.iterdir()}
    tensor = opened(store)
    carrier = tensor.carrier
    with pytest.raises(ImmutableError):
        tensor[0, 0] = 1.0
    with pytest.raises(ImmutableError):
        carrier.assign(asarray(values[:2, :4]), tensor, carrier.select({0: [0], 1: [0]}))
    carrier.promote(ALL)
    carrier.evict(ALL)
    assert np.array_equal(tensor.numpy(), values)
    carrier.release()
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in store.iterdir()} == before
    store.chmod(0o755)


def test_a_training_step_changes_the_store(tmp_path, opened):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    save_tiled(tiled(values, (2, 8)), tmp_path / "weights")
    weights = opened(tmp_path / "weights", "r+", memory_limit=3 * 64)
    carrier = weights.carrier
    for expert in (1, 3, 1):
        selection = carrier.select({0: [expert]})
        rows = carrier.project(weights, selection).wait()
        reduce_sum(elementwise_mul(rows, rows)).backward()
        gradient = weights.grad.carrier.project(weights.grad, selection).wait().numpy()
        assert np.array_equal(gradient, 2 * rows.numpy())
        weights.grad = None
        step = asarray(rows.numpy() - np.float32(0.25) * gradient)
        carrier.assign(step, weights, selection).wait()
        values[2 * expert : 2 * expert + 2] *= 0.5
    carrier.evict(TileSet([(tile, 0) for tile in range(4)]))
    assert np.array_equal(opened(tmp_path / "weights").numpy(), values)
    assert carrier.statistics().peak_memory_bytes <= 3 * 64


def test_gradients_and_what_is_like_it_go_to_spill_files(store, opened):
    carrier = opened(store, "r+").carrier
    like = carrier.new_like([0.0] * 48)
    assert type(like.secondary) is FileBacked
    assert type(carrier.secondary.allocate_like(3)) is FileBacked
    assert values_of(carrier.secondary.new_like([1, 2])).tolist() == [1, 2]


@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
def test_every_dtype_is_written_back_bit_by_bit(tmp_path, opened, write_back, dtype):
    values = bit_patterns(dtype, 64).reshape(8, 8)
    save_tiled(tiled(np.zeros((8, 8), dtype.numpy), (4, 8)), tmp_path / "store")
    tensor = opened(tmp_path / "store", "r+")
    for row in range(2):
        write_back(tensor, (row, 0), values[4 * row : 4 * row + 4])
    found = opened(tmp_path / "store").numpy()
    assert np.array_equal(found.view(np.uint8), values.view(np.uint8))


def test_single_slots_and_parts_of_tiles(store, values):
    carrier = store_carrier(store)
    slots = values.reshape(3, 2, 2, 4).transpose(2, 0, 1, 3).reshape(-1).copy()
    assert [carrier[i] for i in range(48)] == slots.tolist()
    carrier[13] = -5.0
    slots[13] = -5
    assert carrier.version == 1
    for start, stop in ((0, 8), (3, 5), (7, 9), (0, 48), (5, 43), (8, 24), (16, 27), (20, 20)):
        assert carrier._read_slots(start, stop - start).tolist() == slots[start:stop].tolist()
        slots[start:stop] += 100
        run(carrier, carrier._write_span, start, slots[start:stop].copy().view(np.uint8))
        assert values_of(carrier).tolist() == slots.tolist()
    carrier.release()
    assert store_errors(store) == []


def store_errors(path):
    """The damaged tiles of a store."""
    return [error for step in verify_tiles(path) for error in step.damaged]


@pytest.mark.parametrize("kind", ["CPU", "Generic", "Metal", "FileBacked", "BlockDevice", "Evictable"])
def test_moves_to_and_from_every_carrier(store, values, tmp_path, kind):
    if kind == "Metal":
        pytest.importorskip("mlx")
    device = BlockDevice(tmp_path / "disk", size=1 << 20) if kind == "BlockDevice" else None

    def empty():
        if device is not None:
            return device.allocate(0)
        if kind == "Evictable":
            return Evictable(CPU(48), FileBacked())
        return (
            {"CPU": CPU, "Metal": Metal}[kind](0)
            if kind in {"CPU", "Metal"}
            else (Generic([]) if kind == "Generic" else FileBacked())
        )

    def fill(target, numbers):
        if target.size() == 0 and target._can_allocate():
            target._allocate_in_place(48)
        if target.size() == 0:
            target = target.new_like([0.0] * 48)
        for i, number in enumerate(numbers):
            target[i] = number
        return target

    for tiled_side in (False, True):
        source = store_carrier(store, writable=False)
        slots = [source[i] for i in range(48)]
        tensor = Tensor(source, 0, row_major(48)) if not tiled_side else open_store(store)
        target = empty() if kind != "Generic" else Generic([0.0] * 48)
        moved = move(tensor, target)
        assert [moved.carrier[i] for i in range(48)] == slots
        assert tensor.carrier.is_released()
        source.release()
        moved.carrier.release()
        filled = fill(empty(), [number + 1 for number in slots])
        goal = store_carrier(store) if not tiled_side else open_store(store, "r+").carrier
        moved = move(Tensor(filled, 0, row_major(48)), goal)
        if tiled_side:
            goal.evict(ALL)
        assert filled.is_released()
        assert [moved.carrier[i] for i in range(48)] == [number + 1 for number in slots]
        goal.release()
    assert store_errors(store) == []
    if device is not None:
        device.close()


def test_a_store_moves_to_another(store, tmp_path, values):
    shutil.copytree(store, tmp_path / "other")
    source, goal = store_carrier(store, writable=False), store_carrier(tmp_path / "other")
    run(goal, goal._write_span, 0, np.zeros(192, np.uint8))
    slots = values_of(source).tolist()
    move(Tensor(source, 0, row_major(48)), goal)
    assert values_of(goal).tolist() == slots
    goal.release()


def test_every_pair_is_registered():
    for other in (
        CPU,
        Generic,
        Metal,
        FileBacked,
        BlockDeviceCarrier,
        Evictable,
        TiledEvictable,
        StoreBacked,
    ):
        dispatch_move(StoreBacked, other)
        dispatch_move(other, StoreBacked)


def test_the_class_is_final():
    with pytest.raises(TypeError, match="final"):

        class Mine(StoreBacked):
            pass


def test_the_wave_of_a_large_write_is_bounded(tmp_path, monkeypatch, opened):
    monkeypatch.setattr("strideweave.store.tile_files.WAVE_BYTES", 100)
    monkeypatch.setattr("strideweave.store.tile_files.JOURNAL_BYTES", 1000)
    save_tiled(tiled(np.zeros((16, 8), np.float32), (1, 8)), tmp_path / "store")
    tensor = opened(tmp_path / "store", "r+")
    carrier = tensor.carrier
    new = np.arange(128, dtype=np.float32).reshape(16, 8)
    carrier.assign(asarray(new), tensor, carrier.select({})).wait()
    carrier.evict(TileSet([(tile, 0) for tile in range(16)]))
    assert np.array_equal(opened(tmp_path / "store").numpy(), new)
    found = carrier.secondary.statistics().store
    assert found.tiles_written == 16
    assert found.retirements >= 1


def test_writes_that_come_together_wait_for_each_other(store, opened, values):
    tensor = opened(store, "r+")
    carrier = tensor.carrier
    carrier.promote(ALL)
    for coordinate in ALL.coordinates:
        tensor[2 * coordinate[0], 4 * coordinate[1]] = -1.0
        values[2 * coordinate[0], 4 * coordinate[1]] = -1
    handles = [carrier.evict_async(TileSet([coordinate])) for coordinate in ALL.coordinates]
    for handle in handles:
        handle.wait()
    assert np.array_equal(opened(store).numpy(), values)
    assert carrier.secondary.statistics().store.tiles_written == 6


@pytest.fixture
def calls(monkeypatch):
    """What is made durable and cut short, in order."""
    done = []
    for name in ("fdatasync", "fsync", "ftruncate"):
        plain = getattr(os, name)

        def call(number, *rest, name=name, plain=plain):
            done.append((name, Path(f"/proc/self/fd/{number}").readlink().name))
            plain(number, *rest)

        monkeypatch.setattr(os, name, call)
    engine = make_engine("threads")
    monkeypatch.setattr(tile_files, "default_engine", lambda: engine)
    yield done
    engine.close()


def test_what_was_durable_is_not_torn_by_a_write_that_is_not(store, opened, write_back, calls):
    tensor = opened(store, "r+")
    calls.clear()
    for count, tile in enumerate([(0, 0), (0, 0), (1, 1)], 1):
        write_back(tensor, tile, np.full((2, 4), count))
        assert calls == count * [("fdatasync", "journal.bin")]


DURABLE = [("fdatasync", "tiles.bin"), ("fdatasync", "checksums.bin"), ("ftruncate", "journal.bin")]


def test_a_durable_flush_empties_the_journal_last(store, opened, calls, values):
    tensor = opened(store, "r+")
    calls.clear()
    tensor[0, 0] = 5.0
    tensor.carrier.flush()
    assert calls == [("fdatasync", "journal.bin")]
    assert opened(store)[0, 0] == 5.0
    assert len(tensor.carrier.primary_tiles) == 1
    calls.clear()
    tensor.carrier.flush(durable=True)
    assert calls[:3] == DURABLE
    assert [name for _, name in calls[3:]] == ["strideweave.json", "store", store.parent.name]
    assert (store / "journal.bin").stat().st_size == 0
    calls.clear()
    tensor[0, 0] = 6.0
    tensor.carrier.flush(durable=True)
    assert calls == [("fdatasync", "journal.bin"), *DURABLE], "the names are durable already"
    assert tensor.carrier.secondary.statistics().store.journal_bytes == 0
    assert opened(store)[0, 0] == 6.0


def test_an_eviction_can_be_durable(store, opened, calls):
    tensor = opened(store, "r+")
    calls.clear()
    tensor[0, 0] = 5.0
    tensor.carrier.evict(TileSet([(0, 0)]), durable=True)
    assert calls[1:4] == DURABLE
    assert len(tensor.carrier.primary_tiles) == 0


@pytest.mark.parametrize("method", ["flush", "evict"])
def test_what_was_opened_for_reading_has_nothing_to_make_durable(store, opened, values, calls, method):
    tensor = opened(store)
    carrier = tensor.carrier
    everything = carrier.select({})
    carrier.promote(everything)
    calls.clear()
    carrier.flush(durable=True) if method == "flush" else carrier.evict(everything, durable=True)
    assert not calls
    assert np.array_equal(tensor.numpy(), values)
    assert len(carrier.primary_tiles) == (6 if method == "flush" else 0)


def test_a_flush_that_cannot_be_durable_fails_and_leaves_the_tile_dirty(store, opened, monkeypatch):
    tensor = opened(store, "r+")
    tensor[0, 0] = 5.0

    def fail(number):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        engine = make_engine("threads")
        patch.setattr(tile_files, "default_engine", lambda: engine)
        patch.setattr(os, "fdatasync", fail)
        for durable in (False, True):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                tensor.carrier.flush(durable=durable)
            assert len(tensor.carrier.dirty_tiles) == 1
            assert opened(store)[0, 0] == 0.0
        engine.close()
    tensor.carrier.flush(durable=True)
    assert opened(store)[0, 0] == 5.0


def test_an_open_tensor_without_a_store_has_no_business_with_durability(store, opened):
    tensor = opened(store)
    tensor.carrier.flush()
    assert len(tensor.carrier.dirty_tiles) == 0
