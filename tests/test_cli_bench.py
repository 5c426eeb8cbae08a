"""``strideweave bench``: every way of reading gives the same bytes, and every turn is reported; no speeds here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("xxhash")

from typer.testing import CliRunner

import strideweave as sw
from strideweave.cli import app, measuring
from strideweave.cli.byte_map import ByteMap, OpenFiles, cached_share, drop_cache, read_pieces
from strideweave.formats import describe

VALUES = np.random.default_rng(0).standard_normal((12, 8, 32), dtype=np.float32)


def bench(*arguments: object):
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--turns", "2", "--size", "1MiB"])


@pytest.fixture(params=["rows", "blocks", "fortran", "store", "zarr with holes"])
def source(request, tmp_path: Path) -> list[object]:
    """Arguments that name the same array in one format or another."""
    place = tmp_path / "array"
    match request.param:
        case "rows":
            np.save(tmp_path / "array.npy", VALUES)
            return [tmp_path / "array.npy", "--tile-shape", "1,8,32"]
        case "blocks":
            np.save(tmp_path / "array.npy", VALUES)
            return [tmp_path / "array.npy", "--tile-shape", "6,2,8"]
        case "fortran":
            np.save(tmp_path / "array.npy", np.asfortranarray(VALUES))
            return [tmp_path / "array.npy", "--tile-shape", "3,4,32"]
        case "store":
            sw.save_tiled(sw.from_numpy(VALUES), place, tile_shape=(2, 8, 16))
            return [place]
        case _:
            return [zarr_with_holes(place)]


def zarr_with_holes(place: Path) -> Path:
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [12, 8, 32],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 8, 32]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 1.5,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
    }
    for chunk in range(0, 6, 2):
        (place / f"c/{chunk}/0").mkdir(parents=True)
        (place / f"c/{chunk}/0/0").write_bytes(VALUES[2 * chunk : 2 * chunk + 2].tobytes())
    (place / "zarr.json").write_text(json.dumps(metadata), "utf-8")
    return place


def test_every_case_of_every_format_is_measured(source):
    result = bench(*source, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["shape"] == [12, 8, 32]
    assert list(found["cases"]) == ["hot", "warm", "cold"]
    for name, case in found["cases"].items():
        if name == "cold" and not hasattr(os, "posix_fadvise"):
            assert case["skipped"]
            continue
        assert len(case["contenders"]) == 4
        for contender in case["contenders"].values():
            assert len(contender["seconds"]) == 2
            assert min(contender["seconds"]) > 0
            low, high = contender["quartiles"]
            assert low <= contender["median"] <= high


def test_without_a_path_a_scratch_file_is_measured_and_removed(tmp_path: Path):
    result = bench("--scratch", tmp_path)
    assert result.exit_code == 0, result.output
    assert "a scratch file: 4 tiles of 256.00 KiB" in result.stdout
    for name in ("hot", "warm", "os.preadv", "np.memmap", "rows[idx] in NumPy"):
        assert name in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_store_says_that_its_tiles_are_checked(tmp_path: Path):
    sw.save_tiled(sw.from_numpy(VALUES), tmp_path / "store", tile_shape=(1, 8, 32))
    assert "compares every tile" in bench(tmp_path / "store").stdout


def test_other_bytes_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    np.save(tmp_path / "a.npy", VALUES)

    def spoil(files, pieces, memory):
        memory[...] = 7

    monkeypatch.setattr(measuring, "map_pieces", spoil)
    result = bench(tmp_path / "a.npy", "--tile-shape", "1,8,32")
    assert result.exit_code == 2
    assert "np.memmap, opened and copied gave other bytes" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="drops pages from Linux's page cache")
def test_what_is_dropped_is_not_cached_and_looking_does_not_bring_it_back(disk_path: Path):
    np.save(disk_path / "a.npy", np.tile(VALUES, (64, 1, 1)))
    rows = ByteMap.of_array(describe(disk_path / "a.npy"), (64, 8, 32))
    pieces = rows.pieces([1, 5])
    with OpenFiles(rows.files) as files:
        read_pieces(files, pieces, np.empty(2 * rows.tile_bytes, np.uint8))
        assert cached_share(files, pieces) == 1
        drop_cache(files, pieces)
        assert cached_share(files, pieces) == cached_share(files, pieces) == 0


def test_neighbouring_runs_are_one_piece(tmp_path: Path):
    np.save(tmp_path / "a.npy", VALUES)
    rows = ByteMap.of_array(describe(tmp_path / "a.npy"), (1, 8, 32))
    assert [piece.nbytes for piece in rows.pieces([2, 3, 7])] == [2048, 1024]
    blocks = ByteMap.of_array(describe(tmp_path / "a.npy"), (1, 8, 16))
    assert len(blocks.pieces([0])) == 8
