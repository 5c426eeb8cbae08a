"""From a Tensor to a store and back, whatever it stands on and whatever is at the place."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from strideweave import (
    CPU,
    LRU,
    FileBacked,
    FormatError,
    Generic,
    InvalidTileError,
    ReleasedError,
    Tensor,
    TiledEvictable,
    TileSet,
    asarray,
    from_numpy,
    open_tiled,
    reduce_sum,
    save_tiled,
    save_tiled_async,
    tiled,
)
from strideweave.dtype import DType
from strideweave.layout import Layout
from strideweave.store import open_store, saving, writer
from strideweave.store.tile_files import TileFiles
from strideweave.testing import bit_patterns

TILE = (2, 4)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("resident", [True, False])
def test_every_bit_of_every_dtype_comes_back(tmp_path, opened, dtype, resident):
    values = bit_patterns(dtype, 256).reshape(16, 16)
    save_tiled(tiled(values, (4, 8), resident=resident), tmp_path / "tiled")
    save_tiled(asarray(values, dtype=dtype), tmp_path / "dense", tile_shape=(4, 8))
    for name in ("tiled", "dense"):
        tensor = opened(tmp_path / name)
        assert tensor.dtype is dtype
        assert tensor.shape == (16, 16)
        assert np.array_equal(bits(tensor.numpy()), bits(values))
    one, other = ((tmp_path / name / "tiles.bin").read_bytes() for name in ("tiled", "dense"))
    assert one == other


def test_the_data_file_is_the_tiles_in_order(store, values):
    found = np.fromfile(store / "tiles.bin", "<f4").reshape(2, 3, 2, 4)  # columns of tiles, rows of tiles
    wanted = values.reshape(3, 2, 2, 4).transpose(2, 0, 1, 3)
    assert np.array_equal(found, wanted)


def test_a_mixture_of_residency_is_saved_as_it_is_and_stays(tmp_path, values, opened):
    tensor = tiled(values, TILE)
    carrier = tensor.carrier
    carrier.evict(TileSet([(0, 0), (2, 1), (1, 1)]))
    carrier.promote(TileSet([(2, 1)]))
    before = carrier.primary_tiles, carrier.secondary_tiles, carrier.dirty_tiles, carrier.version
    save_tiled(tensor, tmp_path / "store")
    assert (carrier.primary_tiles, carrier.secondary_tiles, carrier.dirty_tiles, carrier.version) == before
    assert np.array_equal(opened(tmp_path / "store").numpy(), values)
    assert carrier.statistics().pinned_tiles == carrier.statistics().pending_requests == 0


@pytest.mark.parametrize("limit", [32, 64, 192])
def test_a_memory_limit_holds_while_saving(tmp_path, values, opened, limit):
    tensor = tiled(values, TILE, resident=False, memory_limit=limit)
    save_tiled(tensor, tmp_path / "store")
    assert tensor.carrier.statistics().peak_memory_bytes <= limit
    assert np.array_equal(opened(tmp_path / "store").numpy(), values)


def test_zeros_without_storage_become_holes(tmp_path, opened):
    shape, tile = (64, 65536), (1, 65536)
    weights = tiled(np.ones(shape, np.float32), tile)
    selected = weights.carrier.project(weights, weights.carrier.select({0: [3, 5]})).wait()
    reduce_sum(selected).backward()
    gradient = weights.grad
    assert gradient.carrier.tile_state((0, 0)).location == "implicit"
    save_tiled(gradient, tmp_path / "store")
    assert gradient.carrier.tile_state((0, 0)).location == "implicit"
    data = (tmp_path / "store" / "tiles.bin").stat()
    assert data.st_size == 64 * 65536 * 4
    assert data.st_blocks * 512 <= 4 * 65536 * 4
    found = opened(tmp_path / "store").numpy()
    assert found.sum() == 2 * 65536
    assert (found[3] == 1).all()


@pytest.mark.parametrize("make", [CPU, Generic, FileBacked], ids=lambda kind: kind.__name__)
def test_a_tensor_on_any_carrier_is_cut_into_tiles(tmp_path, values, opened, make):
    carrier = CPU(0).new_like(values.reshape(-1)) if make is CPU else None
    carrier = carrier or (Generic([]) if make is Generic else make()).new_like(values.reshape(-1))
    save_tiled(Tensor(carrier, 0, Layout((6, 8), (8, 1))), tmp_path / "store", tile_shape=TILE)
    save_tiled(Tensor(carrier, 0, Layout((8, 6), (1, 8))), tmp_path / "across", tile_shape=(4, 2))
    assert np.array_equal(opened(tmp_path / "store").numpy(), values)
    assert np.array_equal(opened(tmp_path / "across").numpy(), values.T)
    assert not carrier.is_owned()
    carrier.release()


@pytest.mark.parametrize(
    ("tile_shape", "is_staged"),
    [((1, 8), False), ((3, 8), False), ((6, 8), False), ((6, 1), True), (TILE, True)],
)
@pytest.mark.parametrize("staging_bytes", [1, 70, 1 << 20])
def test_tiles_that_lie_in_one_piece_are_written_from_there(
    tmp_path, values, opened, monkeypatch, tile_shape, is_staged, staging_bytes
):
    staged = []
    monkeypatch.setattr(saving, "STAGING_BYTES", staging_bytes)
    monkeypatch.setattr(
        saving, "aligned_array", lambda nbytes: staged.append(nbytes) or np.zeros(nbytes, np.uint8)
    )
    array = values.copy()
    array.flags.writeable = False
    save_tiled(from_numpy(array), tmp_path / "store", tile_shape=tile_shape)
    assert bool(staged[0]) is is_staged
    assert np.array_equal(opened(tmp_path / "store").numpy(), values)


def test_a_layout_of_its_own_comes_back(tmp_path, opened):
    carrier = TiledEvictable(CPU(0).new_like(range(48)), FileBacked(), (3, 2), TILE)
    tensor = Tensor(carrier, 0, Layout(((2, 3), (4, 2)), ((1, 8), (2, 24))))  # column-major inside
    save_tiled(tensor, tmp_path / "store")
    found = opened(tmp_path / "store")
    assert found.layout == tensor.layout
    assert np.array_equal(found.numpy(), tensor.numpy())


def test_one_axis_and_one_tile(tmp_path, opened):
    save_tiled(asarray(np.arange(6)), tmp_path / "store", tile_shape=6)
    assert opened(tmp_path / "store").tolist() == list(range(6))


@pytest.mark.anyio
async def test_saving_can_be_awaited(tmp_path, values, opened):
    handle = save_tiled_async(tiled(values, TILE), tmp_path / "store")
    assert await handle is None
    assert await handle is None
    tensor = opened(tmp_path / "store", "r+")
    found = await tensor.carrier.project(tensor, tensor.carrier.select({0: [2]}))
    assert np.array_equal(found.numpy(), values[4:6])


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path, values):
    path = tmp_path / "store"
    tensor = tiled(values, TILE)
    empty = TiledEvictable(CPU(0), FileBacked(), (3, 2), TILE)
    partly = Tensor(empty, 0, tensor.layout)
    released = asarray(values)
    released.carrier.release()
    part = Tensor(tensor.carrier, 0, Layout((2, 4), (4, 1)))
    for error, said, call in (
        (TypeError, "takes a Tensor", lambda: save_tiled(values, path)),
        (TypeError, "PathLike", lambda: save_tiled(tensor, 3)),
        (ValueError, "give tile_shape", lambda: save_tiled(asarray(values), path)),
        (ValueError, "cut an array", lambda: save_tiled(asarray(values), path, tile_shape=(4, 4))),
        (TypeError, "integer", lambda: save_tiled(asarray(values), path, tile_shape=(2.0, 4))),
        (ValueError, r"\(2, 4\)", lambda: save_tiled(tensor, path, tile_shape=(4, 2))),
        (ValueError, None, lambda: save_tiled(part, path)),
        (InvalidTileError, "a save", lambda: save_tiled(partly, path)),
        (ReleasedError, "released", lambda: save_tiled(released, path, tile_shape=TILE)),
        (FileNotFoundError, "nowhere", lambda: save_tiled(tensor, tmp_path / "nowhere" / "store")),
        (FileExistsError, "something is there", lambda: save_tiled(tensor, "")),
    ):
        with pytest.raises(error, match=said):
            call()
        assert list(tmp_path.iterdir()) == []
    assert tensor.carrier.statistics().pinned_tiles == 0


@pytest.mark.parametrize("kind", ["file", "directory", "full directory", "store", "link"])
def test_what_is_at_the_place_is_not_replaced_unasked(tmp_path, values, store, kind):
    path = tmp_path / "place"
    if kind == "file":
        path.write_text("kept")
    elif kind == "store":
        path = store
    elif kind == "link":
        path.symlink_to(store)
    else:
        path.mkdir()
        if kind == "full directory":
            (path / "kept").write_text("kept")
    before = sorted((entry, entry.stat().st_mtime_ns) for entry in tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_tiled(tiled(values + 1, TILE), path)
    if kind != "store":
        with pytest.raises(FormatError, match="only a store can be replaced"):
            save_tiled(tiled(values + 1, TILE), path, overwrite=True)
    assert sorted((entry, entry.stat().st_mtime_ns) for entry in tmp_path.rglob("*")) == before


def test_a_store_is_replaced_and_its_readers_go_on(store, values, opened, tmp_path):
    reader = opened(store)
    save_tiled(tiled(values + 1, TILE), store, overwrite=True)
    assert np.array_equal(reader.numpy(), values)
    assert np.array_equal(opened(store).numpy(), values + 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


def test_a_store_with_other_files_in_it_is_not_replaced(store, values, opened):
    (store / "notes.txt").write_text("kept")
    with pytest.raises(FormatError, match=r"found notes\.txt"):
        save_tiled(tiled(values + 1, TILE), store, overwrite=True)
    assert (store / "notes.txt").read_text() == "kept"
    assert np.array_equal(opened(store).numpy(), values)


def test_a_store_that_is_replaced_while_it_is_opened_is_opened_anew(store, values, opened, monkeypatch):
    plain, replacements = (
        TileFiles._open_files,
        [values.astype(np.int16), values.reshape(8, 6).astype(np.int32)],
    )

    def open_files(files):
        if replacements:
            save_tiled(tiled(replacements.pop(0), (2, 2)), store, overwrite=True)
        plain(files)

    monkeypatch.setattr(TileFiles, "_open_files", open_files)
    tensor = opened(store)
    assert tensor.dtype is DType.Int32
    assert np.array_equal(tensor.numpy(), values.reshape(8, 6))


def test_a_store_is_saved_over_itself(store, values, opened):
    save_tiled(opened(store), store, overwrite=True)
    assert np.array_equal(opened(store).numpy(), values)


def test_a_store_that_is_open_for_writing_is_not_replaced(store, values, opened, tmp_path):
    opened(store, "r+")
    with pytest.raises(OSError, match="this process has this store open"):
        save_tiled(tiled(values + 1, TILE), store, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    assert np.array_equal(opened(store).numpy(), values)


@pytest.mark.parametrize("durable", [True, False])
def test_durable_is_a_promise_of_its_own(tmp_path, values, monkeypatch, opened, durable):
    synced = []
    for name in ("fdatasync", "fsync"):
        plain = getattr(os, name)

        def call(number, plain=plain):
            synced.append(Path(f"/proc/self/fd/{number}").readlink().name)
            plain(number)

        monkeypatch.setattr(os, name, call)
    save_tiled(tiled(values, TILE), tmp_path / "store", durable=durable)
    assert np.array_equal(opened(tmp_path / "store").numpy(), values)
    if durable:
        assert {"tiles.bin", "checksums.bin", "strideweave.json"} <= set(synced[:-2])
        assert synced[-2].endswith(".saving"), "the names in the directory, before it is at its place"
        assert synced[-1] == tmp_path.name, "its own name comes last"
    else:
        assert synced == []


def test_without_the_library_the_extra_is_named(tmp_path, values, monkeypatch, store):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    for call in (
        lambda: save_tiled(tiled(values, TILE), tmp_path / "other"),
        lambda: open_store(store),
    ):
        with pytest.raises(ImportError, match=r"strideweave\[store\]"):
            call()
    assert not (tmp_path / "other").exists()


def test_open_tiled_opens_a_store(store, values, tmp_path):
    tensor = open_tiled(store, residency_policy=LRU(max_tiles=2))
    assert np.array_equal(tensor.numpy(), values)
    with pytest.raises(RuntimeError, match="mutable"):
        tensor[0, 0] = 1.0
    tensor = open_tiled(str(store), mode="r+", memory_limit=64)
    tensor[0, 0] = 7.0
    tensor.carrier.evict(TileSet([(0, 0)]))
    tensor.carrier.release()
    assert open_tiled(store)[0, 0] == 7.0


def test_a_million_tiles_take_a_small_manifest(tmp_path, opened):
    count = 1 << 20
    carrier = TiledEvictable(CPU(0), FileBacked(), (count,), (4,))
    carrier._traffic.table.begin_implicit()
    save_tiled(Tensor(carrier, 0, Layout((4 * count,), (1,))), tmp_path / "store")
    assert (tmp_path / "store" / "strideweave.json").stat().st_size < 2000
    assert json.loads((tmp_path / "store" / "strideweave.json").read_text())["tile_count"] == count
    tensor = opened(tmp_path / "store")
    assert tensor[4 * count - 1] == 0.0
    assert tensor.carrier.secondary.statistics().store.tiles_read == 1


def test_what_only_looks_like_an_unfinished_store_stays(tmp_path, values):
    mine = tmp_path / ".store.backup.saving"
    foreign = tmp_path / ".store.0123456789ab.saving"
    for folder in (mine, foreign):
        folder.mkdir()
        (folder / "thesis.txt").write_text("the only copy")
    elsewhere = tmp_path / "elsewhere"
    save_tiled(tiled(values, (2, 4)), elsewhere)
    link = tmp_path / ".store.ba9876543210.saving"
    link.symlink_to(elsewhere, target_is_directory=True)
    left = tmp_path / ".store.aaaaaaaaaaaa.saving"
    left.mkdir()
    (left / "tiles.bin").write_bytes(b"half a save")
    just_made = tmp_path / ".store.bbbbbbbbbbbb.saving"  # by a process that was killed then
    just_made.mkdir()
    save_tiled(tiled(values, (2, 4)), tmp_path / "store")
    assert sorted(path.name for path in mine.iterdir()) == ["thesis.txt"]
    assert sorted(path.name for path in foreign.iterdir()) == ["thesis.txt"]
    assert link.is_symlink() and (elsewhere / "tiles.bin").is_file()
    assert not left.exists() and not just_made.exists()


@pytest.mark.parametrize("state", ["gone", "locked"])
def test_a_save_whose_directory_another_takes_for_left_behind_makes_another(
    tmp_path, values, monkeypatch, state
):
    """Between the making of the directory and its lock nobody can tell that the one who made it lives."""
    others, plain = [], writer.WriterLock

    def lock(path):
        if not others:
            others.append(plain(path))
            if state == "gone":
                shutil.rmtree(Path(path).parent)
        return plain(path)

    monkeypatch.setattr(writer, "WriterLock", lock)
    save_tiled(tiled(values, (2, 4)), tmp_path / "store")
    others[0].close()
    assert np.array_equal(open_tiled(tmp_path / "store").numpy(), values)
    save_tiled(tiled(values, (2, 4)), tmp_path / "store", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_store_of_more_tiles_than_one_can_have_is_refused(tmp_path, values, monkeypatch):
    monkeypatch.setattr(writer, "MOST_TILES", 5)
    with pytest.raises(ValueError, match="at most 5 tiles, found 6"):
        save_tiled(tiled(values, (2, 4)), tmp_path / "store")
    assert list(tmp_path.iterdir()) == []
