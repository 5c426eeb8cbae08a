"""``strideweave pack``, ``inspect`` and ``verify``: what is in files, said and copied, and what is wrong with it."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("xxhash")

from typer.testing import CliRunner

import strideweave as sw
from strideweave.cli import app
from strideweave.cli.grid_picture import grid_cells

EXPERTS = np.arange(2 * 4 * 8 * 16, dtype=np.float32).reshape(2, 4, 8, 16)
PATTERN = "layers.{l}.experts.{e}.w1"


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shard(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file without the library."""
    header, data = {}, b""
    for name, values in tensors.items():
        place = [len(data), len(data) + values.nbytes]
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": place}
        data += values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two layers of four experts in two shards, and a tensor of no pattern in each."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weight_map = {}
    for layer in range(2):
        tensors = {f"layers.{layer}.experts.{e}.w1": EXPERTS[layer, e] for e in range(4)}
        tensors[f"norm{layer}"] = np.ones(3, np.float32)
        shard(folder / f"part{layer}.safetensors", tensors)
        weight_map |= dict.fromkeys(tensors, f"part{layer}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    return folder


@pytest.fixture
def store(checkpoint: Path, tmp_path: Path) -> Path:
    result = run("pack", checkpoint, tmp_path / "store", "--tensor", PATTERN)
    assert result.exit_code == 0, result.output
    return tmp_path / "store"


def test_a_pattern_of_a_checkpoint_becomes_a_store(store: Path):
    tensor = sw.open_tiled(store)
    assert tensor.carrier.tile_shape == (1, 1, 8, 16)
    assert np.array_equal(tensor.carrier.project(tensor, tensor.carrier.select({})).wait().numpy(), EXPERTS)
    tensor.carrier.release()


@pytest.mark.parametrize("kind", ["npy", "raw", "store"])
def test_every_kind_is_packed_and_says_so_in_json(tmp_path: Path, store: Path, kind: str):
    source, options = tmp_path / f"values.{kind}", []
    if kind == "npy":
        np.save(source, EXPERTS[0])
    if kind == "raw":
        source.write_bytes(b"head" + EXPERTS[0].tobytes())
        options = ["--dtype", "float32", "--shape", "4x8x16", "--offset", 4, "--format", "raw"]
    if kind == "store":
        source = store
    cut = [] if kind == "store" else ["--tile-shape", "2,8,16"]
    result = run("pack", source, tmp_path / "out", *options, *cut, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["dtype"] == "Float32"
    assert found["tile_shape"] == ([1, 1, 8, 16] if kind == "store" else [2, 8, 16])
    assert found["bytes"] == found["tiles"] * found["tile_bytes"]
    tensor = sw.open_tiled(tmp_path / "out")
    values = tensor.carrier.project(tensor, tensor.carrier.select({})).wait().numpy()
    assert np.array_equal(values, EXPERTS if kind == "store" else EXPERTS[0])
    tensor.carrier.release()


def test_a_store_is_replaced_only_when_asked(checkpoint: Path, store: Path):
    before = (store / "strideweave.json").read_bytes()
    result = run("pack", checkpoint, store, "--tensor", PATTERN)
    assert result.exit_code == 2
    assert "--overwrite replaces a store" in result.stderr
    assert (store / "strideweave.json").read_bytes() == before
    assert run("pack", checkpoint, store, "--tensor", "norm1", "--overwrite").exit_code == 0
    assert sw.open_tiled(store).shape == (3,)


def test_a_checkpoint_is_listed_with_what_belongs_together(checkpoint: Path):
    result = run("inspect", checkpoint)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "10 tensors in 2 files" in lines[0]
    assert [line.split()[0] for line in lines[3:]] == ["layers.{i}.experts.{j}.w1", "norm0", "norm1"]
    assert "2 x 4 x (8 x 16)" in result.stdout
    found = json.loads(run("inspect", checkpoint, "--json").stdout)
    assert len(found["tensors"]) == 10
    assert found["tensors"][0]["name"] == "layers.0.experts.0.w1"
    assert [one["pattern"] for one in found["patterns"]] == ["layers.{i}.experts.{j}.w1"]
    assert found["damage"] == []


def test_what_inspect_lists_as_one_opens_as_one(checkpoint: Path):
    (one,) = json.loads(run("inspect", checkpoint, "--json").stdout)["patterns"]
    tensor = sw.open_tiled(checkpoint, tensor=one["pattern"])
    assert list(tensor.shape) == [*one["extents"], *one["shape"]]


def test_tensors_of_no_whole_pattern_are_listed_one_by_one(tmp_path: Path):
    values = np.zeros(4, np.float32)
    shard(tmp_path / "a.safetensors", {"x.0": values, "x.2": values, "y.0": values, "y.1": values[:2]})
    assert json.loads(run("inspect", tmp_path, "--json").stdout)["patterns"] == []
    assert [line.split()[0] for line in run("inspect", tmp_path).stdout.splitlines()[3:]] == [
        *("x.0", "x.2", "y.0", "y.1")
    ]


def test_an_array_in_place_says_how_it_is_cut(checkpoint: Path):
    result = run("inspect", checkpoint, "--tensor", PATTERN)
    assert result.exit_code == 0, result.output
    assert "8 of 1 x 1 x 8 x 16, 512 bytes each, in a grid of 2 x 4 x 1 x 1" in result.stdout
    assert "8 of 1 x 1 x 8 x 16 in 2 files" in result.stdout
    found = json.loads(
        run("inspect", checkpoint, "--tensor", PATTERN, "--tile-shape", "1,1,4,16", "--json").stdout
    )
    assert (found["tiles"], found["tile_bytes"], found["format"]) == (16, 256, "safetensors")


def test_a_damaged_shard_is_named_and_the_others_are_listed(checkpoint: Path):
    (checkpoint / "part1.safetensors").write_bytes((checkpoint / "part1.safetensors").read_bytes()[:-1])
    result = run("inspect", checkpoint)
    assert result.exit_code == 1
    assert "damaged: " in result.stdout
    assert "part1.safetensors" in result.stdout
    assert "layers.0.experts.{i}.w1" in result.stdout
    (checkpoint / "part1.safetensors").unlink()
    found = run("inspect", checkpoint, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["damage"][0]["message"] == "No such file or directory"


def test_a_tensor_that_is_not_in_its_shard_is_named(checkpoint: Path):
    index = checkpoint / "model.safetensors.index.json"
    fields = json.loads(index.read_text("utf-8"))
    fields["weight_map"]["more"] = "part0.safetensors"
    index.write_text(json.dumps(fields), "utf-8")
    result = run("inspect", checkpoint)
    assert result.exit_code == 1
    assert "'more'" in result.stdout


def test_a_whole_store_is_right(store: Path):
    assert "8 of 1 x 1 x 8 x 16" in run("inspect", store).stdout
    result = run("verify", store)
    assert result.exit_code == 0, result.output
    assert "all 8 tiles are right" in result.stdout
    assert result.stderr == ""
    assert json.loads(run("verify", store, "--json").stdout)["passed"] is True


def test_a_changed_bit_is_found_by_verify_and_by_it_alone(store: Path):
    data = store / "tiles.bin"
    content = bytearray(data.read_bytes())
    content[3 * 512 + 5] ^= 1
    data.write_bytes(content)
    assert run("inspect", store).exit_code == 0
    result = run("verify", store)
    assert result.exit_code == 1
    assert "1 of 8 tiles are damaged" in result.stdout
    assert "tile (1, 1, 0, 0)" in result.stdout
    (damaged,) = json.loads(run("verify", store, "--json").stdout)["damaged"]
    assert (damaged["ordinal"], damaged["tile"], damaged["offset"]) == (3, [1, 1, 0, 0], 1536)
    assert damaged["wanted"] != damaged["found"]


def test_a_store_that_is_too_short_has_lost_tiles(store: Path):
    with (store / "tiles.bin").open("r+b") as data:
        data.truncate(6 * 512 + 1)
    result = run("inspect", store)
    assert result.exit_code == 1
    assert "2 tiles lost, from number 6 on" in result.stdout
    (damage,) = json.loads(run("inspect", store, "--json").stdout)["damage"]
    assert (damage["first_tile"], damage["tiles"]) == (6, 2)
    assert "2 of 8 tiles are damaged" in run("verify", store).stdout


@pytest.mark.parametrize("file", ["tiles.bin", "checksums.bin", "journal.bin"])
def test_a_missing_file_of_a_store_is_named(store: Path, file: str):
    (store / file).unlink()
    result = run("inspect", store)
    assert result.exit_code == 1
    assert f"{file}: the file is missing" in result.stdout


def test_a_manifest_that_lies_is_an_error_in_one_line(store: Path):
    manifest = store / "strideweave.json"
    manifest.write_text(manifest.read_text("utf-8").replace('"tile_count": 8', '"tile_count": 9'), "utf-8")
    for command in ("inspect", "verify"):
        result = run(command, store)
        assert result.exit_code == 1
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert "tile_count" in line


def test_other_formats_have_nothing_to_verify(tmp_path: Path):
    np.save(tmp_path / "a.npy", EXPERTS)
    result = run("verify", tmp_path / "a.npy")
    assert result.exit_code == 2
    assert "no checksums" in result.stderr


def test_a_grid_is_drawn(checkpoint: Path, store: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "grid.svg"
    drawn = run("inspect", checkpoint, "--tensor", PATTERN, "--plot", picture)
    assert drawn.exit_code == 0
    assert drawn.stdout.endswith(f"\ndrawn in {picture}\n")
    assert "part1.safetensors" in picture.read_text("utf-8")
    (store / "tiles.bin").write_bytes(b"")
    assert run("inspect", store, "--plot", picture).exit_code == 1
    assert "lost" in picture.read_text("utf-8")
    result = run("inspect", checkpoint, "--plot", picture)
    assert result.exit_code == 2
    assert "--tensor" in result.stderr


def test_without_matplotlib_the_picture_names_its_extra(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strideweave.cli.grid_picture.find_spec", lambda name: None)
    result = run("inspect", store, "--plot", store / "grid.svg")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "strideweave inspect: --plot needs matplotlib: pip install 'strideweave[plot]'"
    ]
    assert not (store / "grid.svg").exists()


def test_a_large_grid_hides_no_lost_tile(tmp_path: Path):
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    rows, columns = 520, 300  # both more than the cells of the picture, and no multiple of them
    np.zeros((rows, columns), np.uint8).tofile(tmp_path / "a.bin")
    options = ["--dtype", "UInt8", "--shape", f"{rows},{columns}", "--tile-shape", "1,1"]
    assert run("pack", tmp_path / "a.bin", tmp_path / "store", *options).exit_code == 0
    with (tmp_path / "store" / "tiles.bin").open("r+b") as data:
        data.truncate(rows * columns - 1)
    run("inspect", tmp_path / "store", "--plot", tmp_path / "grid.svg")
    assert "lost" in (tmp_path / "grid.svg").read_text("utf-8")


@pytest.mark.parametrize("lost", [0, 1, 299, 300, 301, 78_123, 520 * 300 - 1])
def test_a_lost_tile_shows_in_the_cell_that_it_shares_and_in_no_other(lost):
    kinds = np.zeros(520 * 300, np.int64)
    kinds[lost] = -2
    cells, (high, wide) = grid_cells(kinds, 520, 300)
    assert (high, wide, cells.shape) == (3, 2, (174, 150))
    row, column = divmod(lost, 300)
    assert np.argwhere(cells == -2).tolist() == [[row // high, column // wide]]
    assert np.count_nonzero(cells) == 1
