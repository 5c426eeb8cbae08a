"""What a manifest says, and that one which says anything else is refused."""

import json

import numpy as np
import pytest

from strideweave import FormatError, open_tiled, save_tiled, tiled
from strideweave.dtype import DType
from strideweave.store import Manifest, is_store, open_store, read_manifest
from strideweave.tiles.grid import TileGrid
from strideweave.tiling import tile_major_layout


def change(path, **fields):
    manifest = path / "strideweave.json"
    found = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**found, **fields}))


def test_the_manifest_says_what_the_store_is(store):
    found = json.loads((store / "strideweave.json").read_text())
    identity, fingerprint = found.pop("identity"), found.pop("layout_fingerprint")
    assert len(identity) == len(fingerprint) == 16
    assert found == {
        "format": "strideweave tiles",
        "version": 1,
        "dtype": "Float32",
        "byte_order": "little",
        "shape": [6, 8],
        "grid_shape": [3, 2],
        "tile_shape": [2, 4],
        "tile_count": 6,
        "tile_bytes": 32,
        "layout": {"shape": [[2, 3], [4, 2]], "stride": [[4, 8], [1, 24]]},
        "checksum": "xxh3_64",
        "data": {"file": "tiles.bin", "offset": 0, "bytes": 192},
        "table": {"file": "checksums.bin", "bytes": 48},
        "journal": {"file": "journal.bin"},
        "lock": {"file": "writer.lock"},
    }
    manifest = read_manifest(store)
    assert (manifest.dtype, manifest.shape, manifest.tile_bytes) == (DType.Float32, (6, 8), 32)
    assert Manifest.decode(manifest.encode(), "x") == manifest


def test_the_same_layout_has_the_same_fingerprint(tmp_path, values):
    paths = [tmp_path / "one", tmp_path / "two", tmp_path / "other"]
    for path, tile in zip(paths, [(2, 4), (2, 4), (3, 4)], strict=True):
        save_tiled(tiled(values, tile), path)
    one, two, other = (read_manifest(path) for path in paths)
    assert one.fingerprint == two.fingerprint != other.fingerprint
    assert one.identity != two.identity


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": "zarr"}, "wanted strideweave tiles, found zarr"),
        ({"version": 2}, "wanted 1, found 2"),
        ({"version": True}, "wanted 1, found True"),
        ({"version": "1"}, "'version'"),
        ({"byte_order": "big"}, "wanted little, found big"),
        ({"dtype": "Float128"}, "found Float128"),
        ({"dtype": 7}, "wanted a string, found 7"),
        ({"dtype": "Int32"}, "'layout_fingerprint'"),
        ({"dtype": "Int64"}, "'tile_bytes'"),
        ({"checksum": "crc32c"}, "wanted xxh3_64, found crc32c"),
        ({"shape": [6, 9]}, "'shape'"),
        ({"shape": [8, 6]}, "'shape'"),
        ({"grid_shape": [3, 3]}, "'layout'"),
        ({"grid_shape": [3, 0]}, "integers of at least 1"),
        ({"grid_shape": [3, -2]}, "integers of at least 1"),
        ({"grid_shape": [3, 2.0]}, "integers of at least 1"),
        ({"grid_shape": "32"}, "a list"),
        ({"grid_shape": [1 << 61, 1 << 61]}, "at most"),
        ({"grid_shape": [1 << 28, 1]}, "at most 134217728 tiles"),
        ({"identity": "\ud800"}, r"found \ud800"),
        ({"identity": "\x1b[31m"}, r"found \x1b[31m"),
        ({"tile_shape": [2]}, "as many as grid_shape has"),
        ({"tile_shape": [4, 2]}, "'layout'"),
        ({"tile_count": 7}, "wanted 6, found 7"),
        ({"tile_bytes": 1 << 40}, "wanted 32"),
        ({"layout": None}, "'layout'"),
        ({"layout": {"shape": [6, 8], "stride": [8, 1]}}, "'layout'"),
        ({"layout": {"shape": [[2, 3], [4, 2]], "stride": [[4, 8], [1, 25]]}}, "'layout'"),
        ({"layout": {"shape": [[2, 3], [4, 2]], "stride": [[4, 8]]}}, "nested alike"),
        ({"layout": {"shape": [[2, "3"], [4, 2]], "stride": [[4, 8], [1, 24]]}}, "nested alike"),
        ({"layout_fingerprint": "0" * 16}, "'layout_fingerprint'"),
        ({"identity": "../../../etc/pass"}, "'identity'"),
        ({"data": {"file": "../elsewhere", "offset": 0, "bytes": 192}}, "'data'"),
        ({"data": {"file": "tiles.bin", "offset": 1 << 50, "bytes": 192}}, "'data'"),
        ({"table": {"file": "checksums.bin", "bytes": 8}}, "'table'"),
        ({"journal": {"file": "/dev/sda"}}, "'journal'"),
    ],
)
def test_a_manifest_that_lies_or_is_not_known_is_refused(store, fields, said):
    change(store, **fields)
    for mode in ("r", "r+"):
        with pytest.raises(FormatError) as caught:
            open_store(store, mode)
        assert caught.value.path == str(store / "strideweave.json")
        assert said in str(caught.value)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("field", ["format", "identity", "shape", "layout", "grid_shape", "dtype"])
def test_a_field_that_nests_without_end_is_refused_shortly(store, field):
    manifest = store / "strideweave.json"
    found = json.loads(manifest.read_text())
    found[field] = {"shape": "deep", "stride": "deep"} if field == "layout" else "deep"
    text = json.dumps(found)
    # Up to where the parser itself gives up; from some depth on only what follows it does.
    for depth in (100, 300, 500, *range(700, 1000, 3)):
        manifest.write_text(text.replace('"deep"', "[" * depth + "]" * depth))
        with pytest.raises(FormatError) as caught:
            read_manifest(store)
        assert len(str(caught.value)) < 2000


def test_a_manifest_of_very_many_axes_is_refused_shortly(store):
    ones = [1] * 100_000
    change(store, grid_shape=ones, tile_shape=ones)
    with pytest.raises(FormatError) as caught:
        read_manifest(store)
    assert len(str(caught.value)) < 3000


def test_a_table_that_lacks_nearly_everything_takes_no_memory(store):
    grid = TileGrid((1 << 24, 1), (2, 4))
    lying = Manifest(DType.Float32, grid, tile_major_layout(grid), "0" * 16)
    (store / "strideweave.json").write_bytes(lying.encode())
    for mode in ("r", "r+"):
        with pytest.raises(FormatError, match="much shorter than the manifest says") as caught:
            open_store(store, mode)
        assert caught.value.path == str(store / "checksums.bin")


@pytest.mark.parametrize("name", sorted(["format", "version", "dtype", "shape", "layout", "data", "lock"]))
def test_a_field_that_is_missing_is_named(store, name):
    manifest = store / "strideweave.json"
    found = json.loads(manifest.read_text())
    del found[name]
    manifest.write_text(json.dumps(found))
    with pytest.raises(FormatError, match=f"'{name}'.*found none"):
        open_store(store)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"version": 1, "version": 1}',
        b"{",
        b"[]",
        b"7",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b" " * (1 << 21),
    ],
)
def test_what_is_no_manifest_is_refused(store, content):
    (store / "strideweave.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"strideweave\.json"):
        open_store(store)


def test_every_changed_byte_of_a_manifest_is_noticed_or_changes_nothing(store):
    manifest = store / "strideweave.json"
    content, wanted = manifest.read_bytes(), read_manifest(store)
    refused = 0
    for place in range(len(content)):
        for bit in (0, 5):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            try:
                found = Manifest.decode(bytes(damaged), "damaged")
            except FormatError:
                refused += 1
            else:  # white space, or the name of the store for its journal, which is checked there
                assert (found.dtype, found.grid, found.layout) == (wanted.dtype, wanted.grid, wanted.layout)
    assert refused > len(content)


def test_what_is_no_store_is_none(store, tmp_path):
    assert is_store(store)
    assert is_store(str(store))
    assert not is_store(tmp_path)
    assert not is_store(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="nothing"):
        open_store(tmp_path / "nothing")
    with pytest.raises(TypeError, match="PathLike"):
        open_store(3)
    with pytest.raises(TypeError, match="bytes"):
        open_store(b"store")
    with pytest.raises(ValueError, match="mode must be"):
        open_store(store, "w")


@pytest.mark.parametrize(
    "name", ["strideweave.json", "tiles.bin", "checksums.bin", "journal.bin", "writer.lock"]
)
def test_a_link_in_the_place_of_a_file_is_not_written_through(store, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    (store / name).rename(elsewhere)
    before = elsewhere.read_bytes()
    (store / name).symlink_to(elsewhere)
    with pytest.raises(FormatError, match="symbolic link") as caught:
        open_store(store, "r+")
    assert (caught.value.path, caught.value.found) == (str(store / name), str(elsewhere))
    assert elsewhere.read_bytes() == before


def test_a_link_in_the_place_of_the_manifest_is_not_read_through(store, tmp_path, values):
    """Neither where it leads to a manifest nor where it leads to nothing; and what has one is not replaced."""
    manifest = store / "strideweave.json"
    elsewhere = manifest.rename(tmp_path / "elsewhere")
    manifest.symlink_to(elsewhere)
    for look in (open_store, read_manifest, open_tiled):
        with pytest.raises(FormatError, match="symbolic link"):
            look(store)
    with pytest.raises(FormatError, match="only a store can be replaced"):
        save_tiled(tiled(values, (2, 4)), store, overwrite=True)
    assert manifest.is_symlink()
    elsewhere.unlink()
    with pytest.raises(FormatError, match="symbolic link"):
        open_store(store)


def test_a_link_to_the_directory_is_followed(store, tmp_path, values):
    (tmp_path / "link").symlink_to(store)
    assert np.array_equal(open_store(tmp_path / "link").numpy(), values)


@pytest.mark.parametrize("name", ["tiles.bin", "checksums.bin"])
def test_a_missing_or_wrong_kind_of_file_is_named(store, name):
    (store / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        open_store(store)
    (store / name).mkdir()
    with pytest.raises(ValueError, match=f"{name}.*directory"):
        open_store(store)


@pytest.mark.parametrize("name", ["tiles.bin", "checksums.bin"])
def test_a_file_that_is_too_long_is_refused(store, name):
    with (store / name).open("ab") as file:
        file.write(b"more")
    with pytest.raises(FormatError, match=f"{name}.*longer"):
        open_store(store)


def test_a_store_without_a_journal_opens(store, values):
    (store / "journal.bin").unlink()
    assert np.array_equal(open_store(store).numpy(), values)
    assert not (store / "journal.bin").exists()
    open_store(store, "r+").carrier.release()
    assert (store / "journal.bin").exists()
