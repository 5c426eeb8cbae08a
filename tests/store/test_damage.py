"""Damage is said tile by tile and never returned; what is whole can be read."""

import os

import numpy as np
import pytest

from strideweave import DamagedTileError, FormatError, TileSet, matmul, move, ones
from strideweave.carriers import CPU, FileBacked
from strideweave.store import verify_tiles

ROWS, COLUMNS, TILE_BYTES = 6, 8, 32
TILES = [(row, column) for column in range(2) for row in range(3)]


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def whole(tensor, values, tile_of):
    """Which tiles can be read; each of them must be right."""
    found = []
    for row, column in TILES:
        try:
            tile = tile_of(tensor, (row, column))
        except DamagedTileError as error:
            assert error.tile == (row, column)
            assert error.ordinal == TILES.index(error.tile)
            assert error.offset == error.ordinal * TILE_BYTES
            assert error.path.endswith("tiles.bin")
            assert error.wanted in str(error)
            assert error.found in str(error)
        else:
            assert np.array_equal(tile, values[2 * row : 2 * row + 2, 4 * column : 4 * column + 4])
            found.append((row, column))
    return found


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(("name", "size", "per_tile"), [("tiles.bin", 192, 32), ("checksums.bin", 48, 8)])
def test_a_changed_byte_damages_its_tile_alone(store, values, opened, tile_of, mode, name, size, per_tile):
    assert (store / name).stat().st_size == size
    for place in range(0, size, 5):
        flip(store / name, place)
        tensor = opened(store, mode)
        assert whole(tensor, values, tile_of) == [t for n, t in enumerate(TILES) if n != place // per_tile]
        assert tensor.carrier.statistics().pending_requests == 0
        assert tensor.carrier.statistics().pinned_tiles == 0
        tensor.carrier.release()
        flip(store / name, place)


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(("name", "per_tile"), [("tiles.bin", 32), ("checksums.bin", 8)])
def test_a_file_that_is_too_short_has_the_tiles_before_its_end(
    store, values, opened, tile_of, mode, name, per_tile
):
    content = (store / name).read_bytes()
    for size in (0, 1, per_tile, 3 * per_tile + per_tile // 2, len(content) - 1):
        (store / name).write_bytes(content[:size])
        tensor = opened(store, mode)
        assert whole(tensor, values, tile_of) == TILES[: size // per_tile]
        tensor.carrier.release()


def test_a_file_that_shrinks_while_it_is_open_has_the_tiles_before_its_end(store, values, opened, tile_of):
    tensor = opened(store)
    os.truncate(store / "tiles.bin", 70)
    assert whole(tensor, values, tile_of) == TILES[:2]


def test_files_that_disappear_while_they_are_open_can_still_be_read(store, values, opened, tile_of):
    tensor = opened(store)
    for file in store.iterdir():
        file.unlink()
    store.rmdir()
    assert whole(tensor, values, tile_of) == TILES


def test_the_table_of_another_store_fits_no_tile(store, opened, tile_of, values):
    (store / "checksums.bin").write_bytes(np.arange(6, dtype="<u8").tobytes())
    assert whole(opened(store), values, tile_of) == []


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_every_way_to_read_a_damaged_tile_says_so(store, opened, mode):
    flip(store / "tiles.bin", 3 * TILE_BYTES + 7)
    tensor = opened(store, mode)
    carrier = tensor.carrier
    for read in (
        tensor.numpy,
        lambda: carrier.project(tensor, carrier.select({})).wait(),
        lambda: carrier.promote(TileSet([(0, 1)])),
        lambda: carrier[3 * 8],
        lambda: tensor[0, 4],
        lambda: matmul(tensor, ones((8, 2))),
        lambda: carrier.secondary[3 * 8],
        lambda: carrier.secondary._read_slots(20, 10),
    ):
        with pytest.raises(DamagedTileError):
            read()
    assert len(carrier.primary_tiles) == 0
    assert carrier[0] == 0.0
    assert carrier.secondary.statistics().store.tiles_damaged >= 6


def test_damage_of_several_tiles_is_one_error_with_notes(store, opened):
    for tile in (1, 4, 5):
        flip(store / "tiles.bin", tile * TILE_BYTES)
    with pytest.raises(DamagedTileError) as caught:
        opened(store).numpy()
    assert caught.value.ordinal == 1
    assert len(caught.value.__notes__) == 2
    assert "(1, 1)" in caught.value.__notes__[0]


@pytest.mark.parametrize("destination", [CPU, FileBacked])
def test_a_move_of_a_damaged_store_fails_and_leaves_it_open(store, opened, destination):
    flip(store / "tiles.bin", 100)
    tensor = opened(store)
    target = CPU(0) if destination is CPU else FileBacked()
    with pytest.raises(DamagedTileError):
        move(tensor, target)
    assert not tensor.carrier.is_released()
    assert tensor.carrier.secondary[0] == 0.0
    target.release()


def test_a_damaged_tile_can_be_given_new_values(store, values, opened, write_back, tile_of):
    flip(store / "tiles.bin", 3 * TILE_BYTES + 7)
    tensor = opened(store, "r+")
    with pytest.raises(DamagedTileError):
        tile_of(tensor, (0, 1))
    write_back(tensor, (0, 1), np.full((2, 4), 9))
    values[0:2, 4:8] = 9
    assert whole(tensor, values, tile_of) == TILES
    assert whole(opened(store), values, tile_of) == TILES


def test_a_slot_of_a_damaged_tile_cannot_be_written_alone(store, opened):
    flip(store / "tiles.bin", 7)
    carrier = opened(store, "r+").carrier
    with pytest.raises(DamagedTileError):
        carrier[0] = 1.0
    carrier[10] = 1.0
    carrier.flush()


def test_verify_reads_every_tile_and_names_the_damaged_ones(store):
    steps = list(verify_tiles(store))
    assert [(step.tiles, step.tile_count, step.nbytes, step.damaged) for step in steps] == [(6, 6, 192, ())]
    flip(store / "tiles.bin", 40)
    flip(store / "checksums.bin", 41)
    before = {file.name: file.read_bytes() for file in store.iterdir()}
    (step,) = verify_tiles(store)
    assert [error.ordinal for error in step.damaged] == [1, 5]
    assert {file.name: file.read_bytes() for file in store.iterdir()} == before
    (store / "strideweave.json").write_text("{}")
    with pytest.raises(FormatError):
        next(verify_tiles(store))


def test_verify_goes_on_step_by_step(store, monkeypatch):
    monkeypatch.setattr("strideweave.store.verifying._STEP_BYTES", 70)
    flip(store / "tiles.bin", 4 * TILE_BYTES)
    steps = list(verify_tiles(store))
    assert [step.tiles for step in steps] == [2, 4, 6]
    assert [[error.tile for error in step.damaged] for step in steps] == [[], [], [(1, 1)]]
