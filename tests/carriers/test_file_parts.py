"""Slots in parts of files: the contract, moves out of them, and what is written beside them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from strideweave import (
    CPU,
    BlockDevice,
    DType,
    FileBacked,
    FileChangedError,
    Generic,
    ImmutableError,
    ReleasedError,
    Tensor,
    TiledEvictable,
    TileSet,
    move,
    row_major,
)
from strideweave.carriers import FileParts
from strideweave.carriers.move import Transfer, dispatch_move
from strideweave.carriers.move.planning import TransferBatch, TransferBlock
from strideweave.carriers.part_reading import MOST_RUNS, PartTable, SlotSpans
from strideweave.io.engine import statistics as engine_statistics
from strideweave.io.file_pool import KnownFile
from strideweave.runtime.await_result import AwaitResult
from strideweave.testing import CarrierContract
from strideweave.tiles.grid import TileGrid
from strideweave.tiles.part_map import PartMap


def stored(folder, array, tile_shape, part_shape, *, per_file=2, gap=5):
    """Write an array in row-major parts, some to a file with gaps between them; gives the carrier over them."""
    grid = TileGrid(
        tuple(extent // tile for extent, tile in zip(array.shape, tile_shape, strict=True)), tile_shape
    )
    map_ = PartMap(grid, part_shape)
    paths, file_of, offset_of, contents = [], [], [], {}
    for number, place in enumerate(np.ndindex(*map_.parts_shape)):
        part = np.zeros(part_shape, array.dtype)
        values = array[tuple(slice(i * p, (i + 1) * p) for i, p in zip(place, part_shape, strict=True))]
        part[tuple(slice(extent) for extent in values.shape)] = values
        path = folder / f"{number // per_file}.bin"
        if path not in paths:
            paths.append(path)
        before = contents.get(path, b"")
        file_of.append(paths.index(path))
        offset_of.append(len(before) + gap)
        contents[path] = before + b"\xee" * gap + part.tobytes()
    for path, content in contents.items():
        path.write_bytes(content)
    known = tuple(KnownFile.of(str(path), path.stat()) for path in paths)
    table = PartTable(
        "some.tensor",
        map_,
        array.dtype.itemsize,
        known,
        np.array(file_of, np.int32),
        np.array(offset_of, np.int64),
    )
    return FileParts(table, dtype=DType.from_numpy(array.dtype))


def tile_major(array, tile_shape):
    """The slots of a tiled array, each tile row-major."""
    counts = [extent // tile for extent, tile in zip(array.shape, tile_shape, strict=True)]
    tiles = [
        array[
            tuple(slice(i * t, (i + 1) * t) for i, t in zip(last_first[::-1], tile_shape, strict=True))
        ].ravel()
        for last_first in np.ndindex(*counts[::-1])
    ]
    return np.concatenate(tiles)


class TestFilePartsInPlace(CarrierContract):
    """What is not mutable is files in place; what is mutable is like them."""

    owner_writes = False

    @pytest.fixture
    def make_carrier(self, tmp_path):
        def make(values, *, mutable=True):
            if mutable:
                return make(values, mutable=False).new_like(values)
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            folder.mkdir()
            return stored(folder, values, (len(values),), (max(1, len(values) // 2),))

        return make


@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
def test_every_bit_of_files_in_place_is_kept(tmp_path, dtype):
    bits = np.random.default_rng(0).integers(0, 256, 24 * 10 * dtype.itemsize, np.uint8)
    if dtype is DType.Bool:
        bits &= 1
    array = bits.view(dtype.numpy).reshape(24, 10)
    carrier = stored(tmp_path, array, (8, 5), (6, 10))
    slots = tile_major(array, (8, 5))
    assert carrier._read_slots(0, carrier.size()).tobytes() == slots.tobytes()
    assert [repr(carrier[i]) for i in (0, 41, 239)] == [repr(dtype.to_python(slots[i])) for i in (0, 41, 239)]
    carrier.release()


@pytest.mark.parametrize(
    ("tile", "part"), [((4, 6), (8, 12)), ((8, 12), (2, 12)), ((2, 3), (3, 5)), ((8, 1), (1, 12))]
)
def test_any_span_of_slots_is_read(tmp_path, tile, part):
    array = np.arange(96, dtype=np.int32).reshape(8, 12)
    carrier = stored(tmp_path, array, tile, part)
    slots = tile_major(array, tile)
    for start in range(0, 96, 5):
        for count in (1, 2, 7, 24, 96):
            if start + count <= 96:
                assert carrier._read_slots(start, count).tolist() == slots[start : start + count].tolist()
    assert carrier._read_slots(96, 0).tolist() == []
    carrier.release()


def test_more_runs_than_one_batch_has(tmp_path):
    array = np.arange(3 * MOST_RUNS + 8, dtype=np.int32).reshape(-1, 2)
    carrier = stored(tmp_path, array, (len(array), 1), (len(array), 2))
    slots = tile_major(array, (len(array), 1))
    assert np.array_equal(carrier._read_slots(0, carrier.size()), slots)
    assert np.array_equal(carrier._read_slots(3, carrier.size() - 5), slots[3:-2])
    carrier.release()


def destinations(tmp_path):
    device = BlockDevice(tmp_path / "device", size=1 << 20, direct=False)
    yield CPU(96, dtype=DType.Int32)
    yield Generic([0] * 96, dtype=DType.Int32)
    yield FileBacked(dtype=DType.Int32).allocate_like(96)
    yield device.allocate(96, dtype=DType.Int32)


def test_slots_move_to_every_kind_of_carrier(tmp_path):
    array = np.arange(96, dtype=np.int32).reshape(8, 12)
    for number, destination in enumerate(destinations(tmp_path)):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = stored(folder, array, (4, 6), (2, 12))
        moved = move(Tensor(source, 0, row_major(96), requires_grad=False), destination)
        assert moved.numpy().tolist() == tile_major(array, (4, 6)).tolist()
        assert source.is_released()
        destination.release()


def test_files_in_place_are_never_written(tmp_path):
    array = np.arange(96, dtype=np.int32).reshape(8, 12)
    carrier = stored(tmp_path, array, (4, 6), (2, 12))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    source = CPU(96, dtype=DType.Int32)
    for attempt in (
        lambda: carrier.set_value(0, 1),
        lambda: carrier._set_as(None, 0, 1),
        lambda: source._scope.start(
            AwaitResult(), dispatch_move(CPU, FileParts)().transfer, [Transfer(source, 0, carrier, 0, 96)]
        ).wait(),
    ):
        with pytest.raises(ImmutableError):
            attempt()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    carrier.release()


def test_what_is_written_above_files_goes_to_a_spill(tmp_path):
    array = np.arange(96, dtype=np.float32).reshape(8, 12)
    secondary = stored(tmp_path, array, (4, 6), (2, 12))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    like = secondary.allocate_like(4, dtype=DType.Int8)
    assert (type(like), like.dtype(), like.is_mutable()) == (FileBacked, DType.Int8, True)
    like.release()
    tiled = TiledEvictable(CPU(0), secondary, (2, 2), (4, 6))
    tiled[30] = -1  # of tile 1
    tiled.evict(TileSet([(1, 0)]))
    expected = tile_major(array, (4, 6))
    expected[30] = -1
    assert [tiled[i] for i in range(96)] == expected.tolist()
    tiled.promote(TileSet([(0, 0), (1, 0), (1, 1)]))  # from the files and the spill in one batch
    assert [tiled[i] for i in range(96)] == expected.tolist()
    tiled.release()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def opened_in(folder):
    gc.collect()
    links = list(Path("/proc/self/fd").iterdir())
    paths = [link.readlink() for link in links if link.is_symlink()]  # that of the listing is gone
    return sorted(str(path) for path in paths if path.is_relative_to(folder))


@pytest.mark.parametrize("end", ["release", "drop"])
def test_the_end_of_a_carrier_closes_its_files(tmp_path, end):
    carrier = stored(tmp_path, np.arange(96, dtype=np.float32).reshape(8, 12), (4, 6), (2, 12))
    assert opened_in(tmp_path) == []
    carrier._read_slots(0, 96)
    assert len(opened_in(tmp_path)) == 2
    if end == "release":
        carrier.release()
        with pytest.raises(ReleasedError):
            carrier[0]
    del carrier
    assert opened_in(tmp_path) == []


def test_the_record_counts_what_was_read(tmp_path):
    carrier = stored(tmp_path, np.arange(96, dtype=np.float32).reshape(8, 12), (4, 12), (8, 12))
    carrier._read_slots(48, 48)
    found = carrier.statistics()
    assert (found.bytes_read, found.pieces_read, found.files, found.name) == (192, 1, 1, "some.tensor")
    assert carrier[0] == 0
    assert carrier.statistics().bytes_read == 196
    carrier.release()


def test_a_changed_file_names_tensor_and_tile(tmp_path):
    carrier = stored(tmp_path, np.arange(96, dtype=np.float32).reshape(8, 12), (2, 12), (2, 12))
    os.truncate(tmp_path / "1.bin", 50)
    for attempt in (lambda: carrier._read_slots(48, 24), lambda: carrier.get_value(48)):
        with pytest.raises(FileChangedError) as caught:
            attempt()
        error = caught.value
        assert (error.path, error.tensor, error.tile) == (str(tmp_path / "1.bin"), "some.tensor", (2, 0))
        assert (error.offset, error.wanted, error.found) == (5, "202 bytes", "50 bytes")
    assert carrier._read_slots(0, 48).tolist() == list(range(48))  # the other file is as it was
    carrier.release()


@pytest.mark.parametrize(
    ("tile", "columns", "start", "count", "nbytes", "pieces"),
    [
        ((16, 8), 32, 0, 128, 16 * 8 * 4, 16),  # one tile of four beside each other: piece by piece
        ((16, 8), 32, 0, 64 * 32, 64 * 32 * 4, 64 * 4),  # all tiles: one range of the file
        ((16, 16), 32, 0, 256, (15 * 32 + 16) * 4, 16),  # half of each row: the rows, but for the last half
        ((16, 16), 48, 0, 256, 16 * 16 * 4, 16),  # a third of each row
        ((64, 24), 48, 24, 64, 64 * 4, 3),  # fewer pieces than are worth it
    ],
)
def test_small_pieces_that_lie_close_together_are_read_as_one(
    tmp_path, tile, columns, start, count, nbytes, pieces
):
    array = np.arange(64 * columns, dtype=np.int32).reshape(64, columns)
    carrier = stored(tmp_path, array, tile, array.shape, gap=3)
    found = carrier._read_slots(start, count)
    assert np.array_equal(found, tile_major(array, tile)[start : start + count])
    read = carrier.statistics()
    assert (read.bytes_read, read.pieces_read) == (nbytes, pieces)
    assert read.bytes_read < 2 * found.nbytes
    carrier.release()


def test_small_pieces_of_several_files_and_batches(tmp_path):
    array = np.random.default_rng(0).integers(0, 99, (4 * MOST_RUNS // 16, 64), np.int32)
    carrier = stored(tmp_path, array, (32, 4), (128, 64))
    assert np.array_equal(carrier._read_slots(0, carrier.size()), tile_major(array, (32, 4)))
    assert carrier.statistics().files > 3
    carrier.release()


def test_a_durable_flush_of_what_lies_above_files(tmp_path):
    array = np.arange(96, dtype=np.float32).reshape(8, 12)
    tiled = TiledEvictable(CPU(0), stored(tmp_path, array, (4, 6), (2, 12)), (2, 2), (4, 6))
    assert (
        tiled.flush(durable=True) is None
    )  # nothing is dirty: of read-only files nothing has to be made durable
    tiled[0] = -1
    tiled.flush(durable=True)
    assert tiled.dirty_tiles == TileSet([])
    tiled.evict(tiled.select({}))
    assert (tiled[0], tiled[1]) == (-1, 1)
    tiled.release()


def test_tiles_are_read_in_the_order_in_which_they_lie(tmp_path):
    """Tile numbers run down the columns of the grid; the bytes of tiles beside each other are adjacent."""
    array = np.arange(1024 * 64, dtype=np.int32).reshape(1024, 64)
    tiled = TiledEvictable(
        CPU(0, dtype=DType.Int32), stored(tmp_path, array, (256, 8), (1024, 64)), (4, 8), (256, 8)
    )
    assert 2 * MOST_RUNS == 4 * 8 * 256
    before = engine_statistics().spans
    tiled.promote(tiled.select({}))
    assert engine_statistics().spans - before == 2  # ranges, of the 8192 pieces
    assert tiled.secondary.statistics().bytes_read == array.nbytes
    assert [tiled[i] for i in range(0, 65536, 1023)] == tile_major(array, (256, 8))[::1023].tolist()
    tiled.release()


def test_tiles_beside_each_other_are_read_together_however_long_they_are(tmp_path):
    """Each of them alone has more pieces than are looked for at once."""
    array = np.arange(2 * MOST_RUNS * 24, dtype=np.int32).reshape(2 * MOST_RUNS, 24)
    carrier = stored(tmp_path, array, (2 * MOST_RUNS, 4), array.shape)
    tile = 2 * MOST_RUNS * 4
    starts, found = np.arange(6) * tile, np.zeros(array.size, np.int32)
    before = engine_statistics().spans
    spans = SlotSpans(starts, tile, found.view(np.uint8), starts * 4)
    carrier._scope.start(AwaitResult(), carrier._read_into, [spans]).wait(60)
    assert np.array_equal(found, tile_major(array, (2 * MOST_RUNS, 4)))
    assert engine_statistics().spans - before < 20  # ranges, of 49152 pieces
    assert carrier.statistics().bytes_read == array.nbytes
    carrier.release()


def test_a_batch_for_several_memories_is_one_batch_of_reads(tmp_path):
    array = np.arange(96, dtype=np.int32).reshape(8, 12)
    source = stored(tmp_path, array, (2, 12), (2, 12))
    memories = [CPU(24, dtype=DType.Int32) for _ in range(4)]
    blocks = [
        TransferBlock(source, np.array([24 * number]), memory, np.array([0]), 24)
        for number, memory in enumerate(memories)
    ]
    before = engine_statistics()
    operation = dispatch_move(FileParts, CPU)()
    source._scope.start(AwaitResult(), operation.transfer, TransferBatch(blocks)).wait(60)
    after = engine_statistics()
    assert (after.batches - before.batches, after.bytes_read - before.bytes_read) == (1, array.nbytes)
    assert [memory.numpy().tolist() for memory in memories] == array.reshape(4, 24).tolist()
    assert source.statistics().pieces_read == 4
    source.release()
