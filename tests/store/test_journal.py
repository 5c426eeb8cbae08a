"""Journals that end anywhere, or were damaged, or belong to another store."""

import shutil

import numpy as np
import pytest

from strideweave import DamagedTileError, save_tiled, tiled
from strideweave.io.files import OpenFile
from strideweave.store import journal as journal_module
from strideweave.store import read_manifest
from strideweave.store.tile_files import TileFiles

TILES, SLOTS = 6, 8
HEAD = 48


@pytest.fixture
def versions(store):
    """Tell which version every tile has; each must be whole."""

    def look(path, writable=False):
        files = TileFiles(str(path), writable=writable)
        found = []
        for tile in range(TILES):
            row = files.read_blocking(tile).view(np.float32)
            new = [version for version in (2, 3) if (row == version).all()]
            old = [1] if row[0] == row[1] - 1 else []
            found += (new or old or ["a mixture"])[:1]
        files.close()
        return found

    return look


@pytest.fixture
def unapplied(store, tmp_path, opened, write_back):
    """The store as it was, with the journal of two writes that came later: tiles 0 and 3, and tile 3 again."""
    before = tmp_path / "before"
    shutil.copytree(store, before)
    tensor = opened(store, "r+")
    for version, tile in ((2, (0, 0)), (2, (0, 1)), (3, (0, 1))):
        write_back(tensor, tile, np.full((2, 4), version))
    tensor.carrier.release()
    shutil.copy(store / "journal.bin", before / "journal.bin")
    return before


def entries(path):
    manifest = read_manifest(path)
    file = OpenFile.open(path / "journal.bin")
    return list(journal_module.scan(file, manifest.identity, manifest.tile_bytes, manifest.grid.tile_count))


def test_a_journal_has_an_entry_for_every_write(unapplied):
    found = entries(unapplied)
    assert [entry.sequence for entry in found] == [1, 2, 3]
    assert [entry.ordinals.tolist() for entry in found] == [[0], [3], [3]]
    assert found[-1].end == (unapplied / "journal.bin").stat().st_size == 3 * (HEAD + 16 + 32)


def test_a_journal_that_ends_anywhere_leaves_every_tile_old_or_new(unapplied, tmp_path, versions):
    content = (unapplied / "journal.bin").read_bytes()
    path = tmp_path / "torn"
    for length in range(len(content) + 1):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(unapplied, path)
        (path / "journal.bin").write_bytes(content[:length])
        for writable in (False, True, False):
            assert versions(path, writable=writable) == [1] * 6, "nothing was written in place"
        assert (path / "journal.bin").read_bytes() == b""


def tear(path, tile, version, length):
    """Write the first bytes of a version in place."""
    with (path / "tiles.bin").open("r+b") as file:
        file.seek(tile * 32)
        file.write(np.full(SLOTS, version, np.float32).tobytes()[:length])


def test_a_tile_torn_in_its_place_is_taken_from_the_journal(unapplied, tmp_path, versions):
    path = tmp_path / "torn"
    for length in range(33):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(unapplied, path)
        tear(path, 3, 3, length)
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        wanted = [1, 1, 1, 3 if length >= 3 else 1, 1, 1]
        assert versions(path) == wanted
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before, "reading writes nothing"
        assert versions(path, writable=True) == wanted
        assert (path / "journal.bin").read_bytes() == b""
        assert versions(path) == wanted


def test_the_last_entry_that_is_whole_counts(unapplied, tmp_path, versions):
    """A loss of power may leave a tile torn that the journal has twice, the second time in part."""
    content = (unapplied / "journal.bin").read_bytes()
    one = len(content) // 3
    path = tmp_path / "torn"
    for length in range(2 * one, len(content) + 1):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(unapplied, path)
        (path / "journal.bin").write_bytes(content[:length] + bytes(3 * one - length))
        tear(path, 3, 2, 20)
        newest = 3 if length == len(content) else 2
        assert versions(path) == [1, 1, 1, newest, 1, 1]
        assert versions(path, writable=True) == [1, 1, 1, newest, 1, 1]


def test_a_damaged_journal_makes_no_tile_older(store, opened, write_back, tmp_path, versions):
    tensor = opened(store, "r+")
    for version in (2, 3):
        write_back(tensor, (0, 0), np.full((2, 4), version))
    tensor.carrier.release()
    content = (store / "journal.bin").read_bytes()
    path = tmp_path / "damaged"
    for place in range(0, len(content), 3):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(store, path)
        damaged = bytearray(content)
        damaged[place] ^= 1
        (path / "journal.bin").write_bytes(damaged)
        assert versions(path) == [3, 1, 1, 1, 1, 1]
        assert versions(path, writable=True) == [3, 1, 1, 1, 1, 1]


def test_what_is_older_than_the_table_says_is_no_help(store, opened, write_back):
    tensor = opened(store, "r+")
    for version in (2, 3):
        write_back(tensor, (0, 0), np.full((2, 4), version))
    tensor.carrier.release()
    tear(store, 0, 7, 5)
    content = bytearray((store / "journal.bin").read_bytes())
    content[-1] ^= 1
    (store / "journal.bin").write_bytes(content)
    for writable in (False, True):
        files = TileFiles(str(store), writable=writable)
        with pytest.raises(DamagedTileError, match=r"tile \(0, 0\)"):
            files.read_blocking(0)
        files.close()


def test_a_changed_byte_of_a_journal_never_becomes_data(unapplied, tmp_path, versions):
    content = bytearray((unapplied / "journal.bin").read_bytes())
    path = tmp_path / "damaged"
    for place in range(0, len(content), 3):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(unapplied, path)
        damaged = bytearray(content)
        damaged[place] ^= 0x40
        (path / "journal.bin").write_bytes(damaged)
        tear(path, 0, 2, 9)
        try:
            first, *others = versions(path, writable=True)
        except DamagedTileError as error:
            assert error.ordinal == 0
        else:
            assert first == 2
            assert others == [1] * 5


def test_the_journal_of_another_store_is_not_replayed(unapplied, tmp_path, values, versions):
    other = tmp_path / "other"
    save_tiled(tiled(values, (2, 4)), other)
    shutil.copy(unapplied / "journal.bin", other / "journal.bin")
    tear(other, 0, 2, 9)
    for writable in (False, True):
        with pytest.raises(DamagedTileError):
            versions(other, writable=writable)


def test_the_journal_is_bounded(store, monkeypatch, opened, write_back):
    monkeypatch.setattr("strideweave.store.tile_files.JOURNAL_BYTES", 400)
    tensor = opened(store, "r+")
    for version in range(30):
        write_back(tensor, (1, 1), np.full((2, 4), version))
        assert (store / "journal.bin").stat().st_size <= 400
    found = tensor.carrier.secondary.statistics().store
    assert found.tiles_written == 30
    assert found.retirements >= 7
