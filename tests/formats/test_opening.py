"""Arrays opened in place hold what the libraries that wrote them say, bit for bit."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from strideweave import (
    LRU,
    DType,
    ImmutableError,
    TileSet,
    no_grad,
    open_tiled,
    reduce_sum,
    save_tiled,
)
from strideweave.formats import describe, detect_format
from strideweave.formats.description import TARGET_TILE_BYTES, default_tile_shape
from strideweave.formats.zarr_shards import crc32c

DTYPES = pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)


def same(found, expected):
    return (
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and found.tobytes() == expected.tobytes()
    )


# safetensors


@DTYPES
def test_safetensors_of_every_dtype(files, values_of, dtype):
    arrays = {f"t{number}": files.random((12, 10), dtype, number) for number in range(3)}
    path = files.safetensors("model.safetensors", arrays)
    for name, array in arrays.items():
        for tile_shape in (None, (3, 10), (4, 5), (1, 1), (12, 2)):
            tensor = open_tiled(path, tile_shape, tensor=name)
            assert (tensor.shape, tensor.dtype) == ((12, 10), dtype)
            assert same(values_of(tensor), array)


def test_what_the_safetensors_library_writes(tmp_path, values_of):
    library = pytest.importorskip("safetensors.numpy")
    arrays = {
        "weight": np.random.default_rng(1).random((64, 48), np.float32),
        "half": np.arange(60, dtype=np.float16).reshape(3, 4, 5),
        "flags": np.array([True, False, True]),
    }
    library.save_file(arrays, tmp_path / "m.safetensors", metadata={"format": "np"})
    for name, array in arrays.items():
        assert same(values_of(open_tiled(tmp_path / "m.safetensors", tensor=name)), array)


def test_a_pattern_stacks_tensors_of_one_file(files, values_of):
    arrays = {
        f"experts.{e}.w1": files.random((6, 4), DType.BFloat16, e) for e in (10, 3, 0, 1, 2, 4, 5, 6, 7, 8, 9)
    }
    path = files.safetensors("model.safetensors", arrays | {"experts.w1": files.random((2,), DType.Int8)})
    tensor = open_tiled(path, tensor="experts.{e}.w1")
    assert (tensor.shape, tensor.carrier.tile_shape) == ((11, 6, 4), (1, 6, 4))
    stack = np.stack([arrays[f"experts.{e}.w1"] for e in range(11)])
    carrier = tensor.carrier
    chosen = carrier.project(tensor, carrier.select({0: [10, 2, 7]})).wait(60)
    assert same(chosen.numpy(copy=True), stack[[10, 2, 7]])
    assert carrier.secondary.statistics().bytes_read == 3 * 6 * 4 * 2
    assert same(values_of(tensor), stack)
    for tile_shape in ((11, 6, 4), (1, 3, 4), (1, 2, 2)):
        assert same(values_of(open_tiled(path, tile_shape, tensor="experts.{e}.w1")), stack)


@pytest.mark.parametrize("where", ["index", "directory", "no index"])
def test_a_pattern_of_two_places_over_many_shards(files, values_of, where):
    arrays = {(n, e): files.random((4, 6), DType.Float32, 7 * n + e) for n in range(3) for e in range(5)}
    shards, weights = {}, {}
    for number, ((layer, expert), array) in enumerate(arrays.items()):
        name = f"layers.{layer}.experts.{expert}.w1"
        shards.setdefault(f"model-{number % 4}.safetensors", {})[name] = array
        weights[name] = f"model-{number % 4}.safetensors"
    for shard, held in shards.items():
        files.safetensors(shard, held)
    index = None if where == "no index" else files.index(weights)
    tensor = open_tiled(index if where == "index" else files.folder, tensor="layers.{l}.experts.{e}.w1")
    stack = np.stack([np.stack([arrays[n, e] for e in range(5)]) for n in range(3)])
    assert tensor.carrier.tile_shape == (1, 1, 4, 6)
    assert tensor[2, 4, 3, 5] == stack[2, 4, 3, 5]
    assert same(values_of(tensor), stack)


def test_only_shards_that_are_asked_for_are_looked_at(files, values_of):
    array = files.random((4, 4), DType.Float32)
    files.safetensors("a.safetensors", {"a": array})
    files.index({"a": "a.safetensors", "b": "missing.safetensors"})
    assert same(values_of(open_tiled(files.folder, tensor="a")), array)


def test_one_tensor_needs_no_name(files, values_of):
    array = files.random((4, 4), DType.Float32)
    assert same(values_of(open_tiled(files.safetensors("one.safetensors", {"a": array}))), array)


def test_a_name_with_braces_is_a_name(files, values_of):
    array = files.random((4, 4), DType.Float32)
    path = files.safetensors("one.safetensors", {"a{b}": array, "a0": array + 1})
    assert same(values_of(open_tiled(path, tensor="a{b}")), array)


def test_a_header_may_be_padded_and_have_metadata_and_empty_tensors(files, values_of):
    header = b'{"__metadata__":{"k":"v"},"e":{"dtype":"F32","shape":[0,2],"data_offsets":[0,0]},'
    header += b'"t":{"dtype":"I16","shape":[2,2],"data_offsets":[0,8]},'
    header += b'"z":{"dtype":"C64","shape":[1],"data_offsets":[8,16]}}     '
    path = files.raw_safetensors("m.safetensors", header, bytes(range(16)))
    found = values_of(open_tiled(path, tensor="t"))
    assert found.tobytes() == bytes(range(8))


def test_a_description_may_have_its_fields_in_any_order(files, values_of):
    for fields in itertools.permutations([("dtype", "I16"), ("shape", [2, 2]), ("data_offsets", [0, 8])]):
        path = files.raw_safetensors("m.safetensors", {"t": dict(fields)}, bytes(range(8)))
        assert values_of(open_tiled(path)).tobytes() == bytes(range(8))


@pytest.mark.parametrize(
    "word", ['[{"a": ["\\\\", "}"]}' * 30_000, "[" * 3_000_000, '\\"[' * 3000, "\\" * 4097 + "[" * 500]
)
def test_words_of_the_metadata_may_be_of_any_kind(files, values_of, word):
    names = {"dtype": word, "shape": word, "data_offsets": word, "other": word}
    description = {"dtype": "I16", "shape": [2, 2], "data_offsets": [0, 8]}
    path = files.raw_safetensors("m.safetensors", {"__metadata__": names, "t": description}, bytes(range(8)))
    assert values_of(open_tiled(path)).tobytes() == bytes(range(8))
    names.pop("other")
    path = files.raw_safetensors("m.safetensors", {"__metadata__": names, "t": description}, bytes(range(8)))
    assert values_of(open_tiled(path)).tobytes() == bytes(range(8))


# npy


@DTYPES
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_every_dtype(files, values_of, dtype, order):
    array = np.asarray(files.random((6, 8, 5), dtype), order=order)
    path = files.folder / "a.npy"
    np.save(path, array)
    for tile_shape in (None, (6, 8, 1), (2, 8, 5), (3, 4, 5), (1, 1, 5), (2, 2, 1)):
        tensor = open_tiled(path, tile_shape, dtype=dtype)
        assert same(np.ascontiguousarray(values_of(tensor)), np.ascontiguousarray(array))


def test_npy_in_column_order_is_cut_into_columns(files):
    path = files.folder / "a.npy"
    np.save(path, np.zeros((1024, 2048), np.float32, order="F"))
    found = describe(path)
    assert (found.order, found.tile_shape) == ("F", (1024, 256))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_of_every_version(files, values_of, version):
    array = np.arange(12, dtype=np.int16)
    path = files.folder / "a.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, version)
    assert same(values_of(open_tiled(path)), array)


# raw


@DTYPES
def test_raw_files_of_every_dtype(files, values_of, dtype):
    array = files.random((6, 8), dtype)
    path = files.folder / "weights.bin"
    path.write_bytes(b"head!" + array.tobytes() + b"tail")
    tensor = open_tiled(path, (2, 4), dtype=dtype, shape=(6, 8), offset=5)
    assert same(values_of(tensor), array)


def test_a_shape_may_be_one_number(files, values_of):
    path = files.folder / "weights.bin"
    path.write_bytes(np.arange(12, dtype=np.float64).tobytes())
    assert values_of(open_tiled(path, 4, dtype=DType.Float64, shape=12)).tolist() == list(range(12))


# zarr


@DTYPES
def test_zarr_of_every_dtype(files, values_of, dtype):
    array = files.random((12, 10), dtype)
    fill = False if dtype is DType.Bool else 0
    path = files.zarr("a", array, (4, 5), fill_value=fill)
    assert open_tiled(path).carrier.tile_shape == (4, 5)
    for tile_shape in (None, (12, 10), (6, 2), (3, 10), (1, 1)):
        assert same(values_of(open_tiled(path, tile_shape)), array)


@pytest.mark.parametrize("name", ["default", "v2"])
@pytest.mark.parametrize("separator", ["/", "."])
def test_zarr_chunks_are_found_by_every_key(files, values_of, name, separator):
    array = files.random((6, 4, 3), DType.Int16)
    encoding = {"name": name, "configuration": {"separator": separator}}
    assert same(values_of(open_tiled(files.zarr("a", array, (2, 4, 1), encoding=encoding))), array)


def test_zarr_chunks_may_reach_beyond_the_array(files, values_of):
    array = files.random((10, 7), DType.Int32)
    path = files.zarr("a", array, (4, 3))
    for tile_shape in (None, (5, 7), (2, 1), (10, 7)):
        assert same(values_of(open_tiled(path, tile_shape)), array)


@pytest.mark.parametrize(
    ("fill", "dtype", "expected"),
    [
        (3, DType.Int16, 3),
        (True, DType.Bool, True),
        (-1.5, DType.BFloat16, -1.5),
        ("-Infinity", DType.Float32, float("-inf")),
        ("0x7fc00000", DType.Float32, float("nan")),
        ("NaN", DType.Float64, float("nan")),
    ],
)
def test_zarr_chunks_that_are_not_there_have_the_fill_value(files, values_of, fill, dtype, expected):
    array = files.random((6, 4), dtype).copy()
    path = files.zarr("a", array, (2, 2), skip=((0, 1), (2, 0)), fill_value=fill)
    array[0:2, 2:4] = array[4:6, 0:2] = expected
    tensor = open_tiled(path, (3, 4))
    assert repr(tensor[0, 3]) == repr(dtype.to_python(array[0, 3]))
    assert np.array_equal(values_of(tensor).astype(np.float64), array.astype(np.float64), equal_nan=True)


def test_a_zarr_array_without_any_chunk(files, values_of):
    path = files.zarr("a", np.ones((2, 2)), (1, 2), skip=((0, 0), (1, 0)), fill_value=4.5)
    assert values_of(open_tiled(path)).tolist() == [[4.5, 4.5], [4.5, 4.5]]


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("has_sum", [True, False])
def test_zarr_shards_are_files_of_many_chunks(files, values_of, at_end, has_sum):
    array = files.random((12, 8), DType.BFloat16)
    path = files.sharded_zarr("a", array, (6, 4), (2, 4), at_end=at_end, has_sum=has_sum)
    assert open_tiled(path).carrier.tile_shape == (2, 4)
    for tile_shape in (None, (12, 8), (3, 4), (6, 2), (1, 1)):
        assert same(values_of(open_tiled(path, tile_shape)), array)


def test_zarr_shards_may_lack_chunks_and_reach_beyond_the_array(files, values_of):
    array = files.random((10, 7), DType.Int32)
    path = files.sharded_zarr("a", array, (4, 6), (2, 3), skip=((0, 0), (3, 2)))
    (path / "c" / "1" / "0").unlink()
    expected = array.copy()
    expected[0:2, 0:3] = expected[6:8, 6:7] = expected[4:8, 0:6] = 0
    assert same(values_of(open_tiled(path)), expected)
    assert same(values_of(open_tiled(path, (5, 7))), expected)


def test_a_tile_of_a_shard_reads_its_bytes_only(files):
    array = files.random((64, 64), DType.Float64)
    tensor = open_tiled(files.sharded_zarr("a", array, (32, 64), (8, 16)))
    carrier = tensor.carrier
    found = carrier.project(tensor, carrier.select({0: [5], 1: [2]})).wait(60).numpy(copy=True)
    assert same(found, array[40:48, 32:48])
    read = carrier.secondary.statistics()
    assert (read.bytes_read, read.pieces_read, read.files) == (8 * 16 * 8, 1, 2)
    carrier.release()


def test_the_checksum_of_an_index():
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the catalogue
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4


# What is told apart, and how


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_a_path_is_a_string_or_a_path_object(files, values_of, kind):
    path = files.safetensors("one.safetensors", {"a": np.arange(4, dtype=np.int8)})
    if kind is os.fsencode:
        with pytest.raises(TypeError):
            open_tiled(kind(path))
    else:
        assert values_of(open_tiled(kind(path))).tolist() == [0, 1, 2, 3]


def test_symbolic_links_are_followed_as_caches_make_them(files, values_of):
    array = files.random((4, 4), DType.Float32)
    blob = files.safetensors("blobs/3f2a", {"a": array})
    snapshot = files.folder / "snapshots"
    snapshot.mkdir()
    (snapshot / "model-1.safetensors").symlink_to(Path("../blobs/3f2a"))
    files.index({"a": "model-1.safetensors"}).rename(files.folder / "blobs" / "77")
    (snapshot / "model.safetensors.index.json").symlink_to(Path("../blobs/77"))
    (files.folder / "link").symlink_to(snapshot)
    for path in (blob, snapshot, files.folder / "link", snapshot / "model.safetensors.index.json"):
        assert same(values_of(open_tiled(path, tensor="a")), array)


def test_files_without_a_suffix_are_looked_into(files):
    arrays = files.safetensors("blob", {"a": np.zeros((2, 2))})
    np.save(files.folder / "b.npy", np.zeros((2, 2)))
    numbers = (files.folder / "b.npy").rename(files.folder / "b")
    assert detect_format(str(arrays)) == "safetensors"
    assert detect_format(str(numbers)) == "npy"
    assert detect_format(str(arrays), has_description=True) == "raw"
    assert detect_format(str(files.zarr("z", np.zeros((2, 2)), (2, 2)))) == "zarr"
    with pytest.raises(ValueError, match="nothing tells"):
        detect_format(str(files.index({}, "words.txt")))


def test_a_store_is_opened_by_the_same_function(files, values_of):
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    source = open_tiled(files.safetensors("a.safetensors", {"a": array}), (2, 3))
    save_tiled(source, files.folder / "store")
    source.carrier.release()
    assert same(values_of(open_tiled(files.folder / "store")), array)
    tensor = open_tiled(files.folder / "store", (2, 3), mode="r+", dtype=DType.Float32, shape=(4, 6))
    tensor[0, 0] = 5
    tensor.carrier.evict(TileSet([(0, 0)]))
    tensor.carrier.release()
    array[0, 0] = 5
    assert same(values_of(open_tiled(files.folder / "store")), array)
    with pytest.raises(ValueError, match="cut into tiles"):
        open_tiled(files.folder / "store", (4, 6))


# What the tensor is


def test_the_tensor_is_read_only(files):
    tensor = open_tiled(files.safetensors("a.safetensors", {"a": np.zeros((4, 4), np.float32)}), (2, 4))
    before = (files.folder / "a.safetensors").read_bytes()
    for resident in (False, True):
        if resident:
            tensor.carrier.promote(tensor.carrier.select({}))
        with pytest.raises(ImmutableError):
            tensor[0, 0] = 1
        with pytest.raises(ImmutableError):
            tensor.carrier[0] = 1
    tensor.carrier.release()
    assert (files.folder / "a.safetensors").read_bytes() == before


def test_it_goes_with_policies_limits_operations_and_gradients(files):
    array = np.random.default_rng(0).random((8, 4, 6)).astype(np.float32)
    path = files.safetensors("a.safetensors", {f"e.{number}": array[number] for number in range(8)})
    policy = LRU(max_tiles=2)
    tensor = open_tiled(path, tensor="e.{e}", residency_policy=policy, memory_limit=768)
    carrier = tensor.carrier
    assert (carrier.residency_policy, carrier.memory_limit) == (policy, 768)
    chosen = carrier.project(tensor, carrier.select({0: [5, 1]})).wait(60)
    reduce_sum(chosen).backward()
    assert tensor.grad.carrier.grid_shape == (8, 1, 1)
    gradient = tensor.grad.carrier.project(tensor.grad, carrier.select({0: [1, 2, 5]})).wait(60).numpy()
    assert gradient.sum(axis=(1, 2)).tolist() == [24, 0, 24]
    with no_grad():
        assert np.allclose(reduce_sum(tensor).numpy(), array.sum())
    tensor.grad.carrier.release()
    carrier.release()


@pytest.mark.parametrize(
    ("shape", "itemsize", "tile"),
    [
        ((4096, 4096), 2, (128, 4096)),
        ((50257, 768), 2, (1733, 768)),  # 29 times 1733, which is nearer to a mebibyte
        ((7, 3), 4, (7, 3)),
        ((8, 4096, 4096), 2, (1, 128, 4096)),
        ((8, 4, 4), 2, (8, 4, 4)),
        ((3, 1 << 22), 4, (1, 1 << 18)),
        ((1 << 30,), 4, (1 << 18,)),
        ((151643, 3), 8, (151643, 3)),  # a prime: one tile is nearer than single rows
    ],
)
def test_tiles_are_whole_rows_of_about_a_mebibyte(shape, itemsize, tile):
    assert default_tile_shape(shape, itemsize) == tile
    assert default_tile_shape(shape[::-1], itemsize, "F") == tile[::-1]
    assert TARGET_TILE_BYTES == 1 << 20
