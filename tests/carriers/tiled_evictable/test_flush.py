"""Dirty tiles written to the secondary tier where they are, and what is made to survive a loss of power."""

import errno
import os

import numpy as np
import pytest

from strideweave import (
    CPU,
    LRU,
    BlockDevice,
    Evictable,
    FileBacked,
    Generic,
    ReleasedError,
    Streaming,
    TileConflictError,
    TiledEvictable,
    TileSet,
    row_major,
)
from strideweave.io import files
from strideweave.io.files import OpenFile
from strideweave.tensor import Tensor
from tiled_tensors import experts

KINDS = [(CPU, FileBacked), (CPU, CPU), (CPU, Generic), (Generic, FileBacked), (Generic, CPU)]
FULL = OSError(errno.ENOSPC, "No space left on device")


def stored(model, *numbers):
    """What the secondary tier itself has of tiles."""
    slots = [model.carrier.secondary[number * 24 + slot] for number in numbers for slot in range(24)]
    return np.array(slots, np.float32).reshape(-1, 4, 6)


def persists(model):
    return model.carrier.secondary.statistics().file.persists


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(("primary", "secondary"), KINDS)
def test_dirty_tiles_stay_primary_and_become_clean(make_model, primary, secondary, durable):
    model = make_model(primary=primary, secondary=secondary)
    model.carrier.promote(experts(1, 2, 6))
    model.carrier[6 * 24 + 3] = model.values[6, 0, 3] = -5.0
    model.carrier[1 * 24] = model.values[1, 0, 0] = 0.25
    version = model.carrier.version
    assert model.carrier.flush(durable=durable) is None
    assert (model.primary(), model.dirty()) == ([1, 2, 6], [])
    assert model.carrier.version == version
    assert np.array_equal(stored(model, 1, 2, 6), model.values[[1, 2, 6]])
    assert model.carrier.statistics().bytes_written == 2 * model.carrier.statistics().tile_bytes
    assert model.at_rest()
    model.carrier.evict(experts(1, 2, 6))
    assert model.carrier.statistics().bytes_written == 2 * model.carrier.statistics().tile_bytes
    assert np.array_equal(model.tensor.numpy(), model.values)


@pytest.mark.anyio
async def test_both_forms_agree(make_model):
    model = make_model("primary")
    assert await model.carrier.flush_async() is None
    assert model.dirty() == []
    assert await model.carrier.flush_async(durable=True) is None
    assert persists(model) == 1
    assert await model.carrier.evict_async(experts(0), durable=True) is None
    assert persists(model) == 2
    model.check(*range(8))


def test_without_dirty_tiles_there_is_nothing_to_do_but_to_be_durable(make_model):
    model = make_model("primary")
    model.carrier.evict(experts(*range(4)))
    assert persists(model) == 0
    model.carrier.flush()
    before = model.carrier.statistics()
    assert model.carrier.flush_async().done
    assert model.carrier.statistics() == before
    model.carrier.flush(durable=True)
    model.carrier.evict(experts(0), durable=True)  # it has left before
    assert persists(model) == 2


@pytest.mark.parametrize("method", ["flush", "evict"])
def test_a_tier_without_storage_is_durable_at_once(make_model, method):
    model = make_model("neither")
    if method == "flush":
        model.carrier.flush(durable=True)
    else:
        model.carrier.evict(TileSet(), durable=True)
    assert model.at_rest()
    assert model.carrier.secondary.path is None


def test_durable_on_every_engine(tmp_path, every_engine):
    """The tier's own file, a spill over a read-only one, a device, and a ladder of tiers."""
    values = np.arange(6 * 1024, dtype=np.float32)
    path = tmp_path / "values.bin"
    values.tofile(path)
    with BlockDevice(tmp_path / "disk.bin", size=1 << 20) as device:
        own = FileBacked.open(path, dtype=CPU(0).dtype(), mutable=True)
        kept = FileBacked.open(path, dtype=CPU(0).dtype())
        ladder = Evictable(CPU.from_numpy(values.copy()), FileBacked())  # whose values are in memory
        for tier, first in ((own, -1.0), (kept, -2.0), (device.allocate(0), -3.0), (ladder, -4.0)):
            primary = CPU(0) if tier.size() else CPU.from_numpy(values)
            carrier = TiledEvictable(primary, tier, (6, 1), (1, 1024))
            carrier.promote(rows(1, 2, 3))
            for number in (1, 2, 3):
                carrier[number * 1024] = first
            before = every_engine.statistics().persists
            carrier.evict(rows(1), durable=True)
            carrier.flush(durable=True)
            assert every_engine.statistics().persists - before == (0 if tier is ladder else 2)
            assert len(carrier.dirty_tiles) == 0
            wanted = values.reshape(6, 1024).copy()
            wanted[1:4, 0] = first
            carrier.evict(rows(*range(6)))
            assert np.array_equal(Tensor(carrier, 0, row_major(6, 1024)).numpy(), wanted)
            carrier.release()
    assert np.fromfile(path, np.float32)[1024] == -1.0
    assert every_engine.statistics().errors == 0


def rows(*numbers):
    return TileSet([(number, 0) for number in numbers])


@pytest.mark.parametrize(
    "values", [1024, 1000, 1536]
)  # a tile is pages, parts of pages, and a page and a half
def test_pages_past_the_cache_and_through_it_agree(tmp_path, every_engine, values):
    """Durable writes of whole pages go past the cache that everything else goes through."""
    path, wanted = tmp_path / "values.bin", np.zeros((32, values), np.float32)
    wanted.tofile(path)
    slow = FileBacked.open(path, dtype=CPU(0).dtype(), mutable=True)
    carrier = TiledEvictable(CPU(0), slow, (32, 1), (1, values))
    tensor = Tensor(carrier, 0, row_major(32, values))
    rng = np.random.default_rng(values)
    for turn in range(12):
        chosen = rng.permutation(32)[: rng.integers(1, 12)].tolist()
        carrier.promote(rows(*chosen))
        for number in chosen:
            wanted[number, turn] = carrier[number * values + turn] = turn + 1.0
        if turn % 3:
            carrier.evict(rows(*chosen), durable=turn % 3 == 1)
        else:
            carrier.flush(durable=True)
        assert np.array_equal(np.fromfile(path, np.float32).reshape(32, values), wanted)
        assert np.array_equal(carrier.project(tensor, carrier.select({})).wait(10).numpy(), wanted)
        carrier.evict(carrier.select({}))
    carrier.release()


def failing_persist(monkeypatch, engine):
    """Make the storage of every file refuse to be durable."""
    if engine.name == "uring":
        from_kernel = type(engine)._answer

        def answer(self, slot, places, results):
            if self._batches[slot]._opcode == 3:
                results = np.full_like(results, -errno.EIO)
            from_kernel(self, slot, places, results)

        monkeypatch.setattr(type(engine), "_answer", answer)
    else:

        def refuse(number):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(files, "synchronize", refuse)


@pytest.mark.parametrize("method", ["flush", "evict"])
def test_what_is_not_durable_stays_dirty(make_model, every_engine, monkeypatch, method):
    model = make_model("primary")
    before = model.snapshot()
    with monkeypatch.context() as patch:
        failing_persist(patch, every_engine)
        with pytest.raises(OSError, match="durable") as caught:
            if method == "flush":
                model.carrier.flush(durable=True)
            else:
                model.carrier.evict(experts(0, 1), durable=True)
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, model.carrier.secondary.path)
    assert model.snapshot() == before
    assert model.at_rest()
    assert every_engine.statistics().errors == 1
    model.carrier.evict(experts(*range(8)), durable=True)
    model.check(*range(8))


@pytest.mark.parametrize("error", [FULL, ValueError("odd"), MemoryError()])
@pytest.mark.parametrize("durable", [False, True])
def test_a_failed_flush_leaves_every_tile_as_it_was(make_model, control_moves, error, durable):
    model = make_model("primary")
    moves = control_moves(CPU, FileBacked)
    before = model.snapshot()
    moves.failures.append(error)
    with pytest.raises(type(error)) as caught:
        model.carrier.flush(durable=durable)
    assert caught.value is error
    assert model.snapshot() == before
    assert model.at_rest()
    model.carrier.flush(durable=durable)
    assert model.dirty() == []
    assert np.array_equal(stored(model, *range(8)), model.values)


def test_readers_share_the_tiles_and_what_would_change_them_conflicts(make_model, control_moves):
    model = make_model()
    model.carrier.promote(experts(1, 2))
    model.carrier[24] = model.values[1, 0, 0] = 7.0
    moves = control_moves(CPU, FileBacked)
    moves.gate.clear()
    flush = model.carrier.flush_async()
    moves.wait_until_entered()
    model.check(1, 2)
    assert model.carrier[24] == 7.0
    second = model.carrier.flush_async()
    before = model.snapshot()
    compact = Tensor(CPU(24), 0, row_major(1, 4, 6))
    for attempt in (
        lambda: model.carrier.evict_async(experts(1)),
        lambda: model.carrier.set_value(24, 1.0),
        lambda: model.carrier.assign(compact, model.tensor, model.select(1)),
    ):
        with pytest.raises(TileConflictError, match="flush_async") as caught:
            attempt()
        assert caught.value.tiles == experts(1)
    with pytest.raises(RuntimeError, match="unfinished"):
        model.carrier.release()
    assert model.snapshot() == before
    model.carrier.evict(experts(2))  # clean, and no business of the flush
    model.carrier[2 * 24] = model.values[2, 0, 0] = 9.0
    moves.open()
    flush.wait(10)
    second.wait(10)
    caught.value.free.wait(10)
    assert model.dirty() == [2]  # it was not dirty when either flush began
    assert model.idle()
    model.carrier[24] = model.values[1, 0, 0] = 8.0
    assert np.array_equal(model.tensor.numpy(), model.values)


def test_tiles_under_a_residency_request_are_not_flushed(make_model, control_moves):
    model = make_model("primary")
    moves = control_moves(CPU, FileBacked)
    moves.gate.clear()
    eviction = model.carrier.evict_async(experts(3))
    moves.wait_until_entered()
    with pytest.raises(TileConflictError, match="evict_async") as caught:
        model.carrier.flush_async()
    assert caught.value.tiles == experts(3)
    moves.open()
    eviction.wait(10)
    model.carrier.flush()
    assert model.dirty() == []


@pytest.mark.parametrize("policy", [Streaming, lambda: LRU(max_tiles=1)])
def test_a_planned_eviction_waits_for_the_flush(make_model, control_moves, policy):
    model = make_model(policy=policy())
    model.carrier.promote(experts(1))
    model.carrier[24] = model.values[1, 0, 0] = 7.0
    moves = control_moves(CPU, FileBacked)
    moves.gate.clear()
    flush = model.carrier.flush_async(durable=True)
    moves.wait_until_entered()
    model.check(1)
    model.check(2)
    assert 1 in model.primary()
    moves.open()
    flush.wait(10)
    assert model.at_rest()
    assert 1 not in model.primary()
    model.check(1, 2)


def test_a_flush_holds_its_tiles_where_a_memory_limit_wants_the_room(make_model, control_moves):
    model = make_model(memory_limit=2 * 96)
    model.carrier.promote(experts(1))
    model.carrier[24] = model.values[1, 0, 0] = 7.0
    moves = control_moves(CPU, FileBacked)
    moves.gate.clear()
    flush = model.carrier.flush_async()
    moves.wait_until_entered()
    model.check(6)  # beside it there is room for one
    waiting = model.project(4, 5)
    assert 1 in model.primary()
    assert not waiting.done
    moves.open()
    flush.wait(10)
    assert np.array_equal(waiting.wait(10).numpy(), model.values[[4, 5]])
    model.check(1)
    assert model.at_rest()


def test_released_carriers_refuse(make_model):
    model = make_model()
    model.carrier.release()
    for durable in (False, True):
        with pytest.raises(ReleasedError):
            model.carrier.flush_async(durable=durable)


def test_a_file_that_is_closed_cannot_be_durable(tmp_path):
    file = OpenFile.create(tmp_path / "a.bin")
    file.persist()
    assert file.statistics().persists == 1
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.persist()
