"""Bad input of every kind, listed: each gives one exact error, nothing is left behind, and nothing is ever executed."""

# ruff: noqa: E501  one case a line, so that the table can be read as one
from __future__ import annotations

import json
import os
import pickle
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest

from strideweave import DType, FormatError, open_tiled
from strideweave.formats.zarr_shards import crc32c

EIGHT = {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


class Case(NamedTuple):
    """Bad input and what comes of it.

    Attributes:
        name: what is bad about it.
        make: makes it with ``Files``, and gives the path that is opened.
        error: the exact class.
        message: words of the message.
        tensor: the tensor that the error names; ``"path"`` for the path itself.
        offset: the offset that it names.
        options: of ``open_tiled``.
        culprit: the end of the path that the error names, where it is not the one opened.
    """

    name: str
    make: Any
    error: type[Exception]
    message: str
    tensor: str | None = None
    offset: int | None = None
    options: dict[str, Any] = {}
    culprit: str = ""


def tensor_file(field=None, *, data=bytes(8), length=None, header=None, name="m.safetensors"):
    """A safetensors file whose one tensor says something else about itself."""

    def make(files):
        described = header if header is not None else {"t": EIGHT["t"] | (field or {})}
        return files.raw_safetensors(name, described, data, length=length)

    return make


def plain_file(name, content):
    def make(files):
        path = files.folder / name
        path.write_bytes(content)
        return path

    return make


def npy_file(header, data=bytes(8), *, version=b"\x01\x00", length=None):
    text = header if isinstance(header, bytes) else repr(header).encode("latin-1")
    width = "<H" if version == b"\x01\x00" else "<I"
    content = (
        b"\x93NUMPY" + version + struct.pack(width, len(text) if length is None else length) + text + data
    )
    return plain_file("a.npy", content)


def described(**fields):
    return {"descr": "<f4", "fortran_order": False, "shape": (2,)} | fields


def pair(first, second):
    header = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in (("a", first), ("b", second))
    }
    return tensor_file(header=header)


SAFETENSORS = [
    Case("an empty file", plain_file("m.safetensors", b""), FormatError, "ends inside its header's length", None, 0),
    Case("truncated in the length", plain_file("m.safetensors", b"\x10\0\0"), FormatError, "found 3 bytes", None, 0),
    Case("truncated in the header", tensor_file(length=5000), FormatError, "wanted 5000 bytes", None, 8),
    Case("a header of more bytes than any", tensor_file(length=2**63), FormatError, "too long", None, 0),
    Case("a header just above the limit", tensor_file(length=100_000_001), FormatError, "at most 100000000", None, 0),
    Case("truncated in the data", tensor_file(data=bytes(7)), FormatError, "outside the file", "t", 8),
    Case("bytes behind the data", tensor_file(data=bytes(9)), FormatError, "does not end with its last", None),
    Case("no brace", tensor_file(header=b"[]"), FormatError, "begin with a brace", None, 8),
    Case("an empty header", tensor_file(header=b""), FormatError, "begin with a brace", None, 8),
    Case("no JSON", tensor_file(header=b"{nonsense"), FormatError, "not valid JSON", None, 8),
    Case("no UTF-8", tensor_file(header=b'{"\xff":1}'), FormatError, "not valid JSON", None, 8),
    Case("JSON that goes on", tensor_file(header=b"{}{}"), FormatError, "not valid JSON", None, 8),
    Case("JSON with NaN", tensor_file(header=b'{"t":NaN}'), FormatError, "holds NaN", None, 8),
    Case("deep JSON", tensor_file(header=b'{"t":' + (b"[" + b" " * 20) * 200_000), FormatError,
         "nests too deeply", None, 8),
    Case("more lists than tensors can have", tensor_file(header=b'{"t":[' + b"[]," * 99 + b"[]]}"), FormatError,
         "wanted at most 23 objects and lists in 307 bytes, found 102", None, 8),
    Case("more objects than tensors can have", tensor_file(header=b'{"t":[' + b"{}," * 99 + b"{}]}"), FormatError,
         "descriptions of tensors", None, 8),
    Case("objects behind a word of quotes", tensor_file(header=b'{"\\\\\\"":[' + b"{}," * 99 + b"{}]}"), FormatError,
         "descriptions of tensors", None, 8),
    Case("a number of many digits", tensor_file(header=b'{"t":' + b"9" * 9000 + b"}"), FormatError, "not valid", None, 8),
    Case("a name twice", tensor_file(header=b'{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"t":{}}'),
         FormatError, "'t' twice", None, 8),
    Case("a field twice", tensor_file(header=b'{"t":{"dtype":"F32","dtype":"F32"}}'), FormatError, "'dtype' twice", None, 8),
    Case("a tensor that is a number", tensor_file(header={"t": 7}), FormatError, "three fields", "t", 8),
    Case("a field too many", tensor_file({"code": "x"}), FormatError, "three fields", "t", 8),
    Case("a field too few", tensor_file(header={"t": {"dtype": "F32"}}), FormatError, "three fields", "t", 8),
    Case("metadata that are numbers", tensor_file(header={"__metadata__": {"a": 1}} | EIGHT), FormatError, "metadata", None, 8),
    Case("metadata that describe a tensor", tensor_file(header={"__metadata__": EIGHT["t"]} | EIGHT), FormatError,
         "metadata", None, 8),
    Case("a description as a shape", tensor_file({"shape": EIGHT["t"]}), FormatError, "list of integers", "t", 8),
    Case("a description as offsets", tensor_file({"data_offsets": EIGHT["t"]}), FormatError, "two integers", "t", 8),
    Case("a shape of many axes", tensor_file({"shape": [1] * 65 + ["x"]}), FormatError, "at most 64 axes", "t", 8),
    Case("an unknown dtype", tensor_file({"dtype": "F7"}), FormatError, "cannot have this dtype (wanted one of BOOL", "t"),
    Case("a dtype without a name", tensor_file({"dtype": 7}), FormatError, "must be named", "t", 8),
    Case("an unsigned dtype", tensor_file({"dtype": "U32"}), FormatError, "found U32", "t"),
    Case("a negative extent", tensor_file({"shape": [-2]}), FormatError, "none negative", "t", 8),
    Case("an extent that is a bool", tensor_file({"shape": [True, 2]}), FormatError, "list of integers", "t", 8),
    Case("an extent that is a float", tensor_file({"shape": [2.0]}), FormatError, "list of integers", "t", 8),
    Case("a shape that is none", tensor_file({"shape": "2"}), FormatError, "list of integers", "t", 8),
    Case("an extent beyond 63 bits", tensor_file({"shape": [2**63]}), FormatError, "list of integers", "t", 8),
    Case("a size beyond 63 bits", tensor_file({"shape": [2**40, 2**40]}), FormatError, "2**63 elements", "t", 8),
    Case("more axes than any", tensor_file({"shape": [1] * 65}), FormatError, "64 axes", "t", 8),
    Case("no axis", tensor_file({"shape": [], "data_offsets": [0, 4]}, data=bytes(4)), FormatError, "one axis or more", "t"),
    Case("no elements", tensor_file({"shape": [0, 2], "data_offsets": [0, 0]}, data=b""), FormatError, "and elements", "t"),
    Case("a shape that the bytes do not match", tensor_file({"shape": [3]}), FormatError, "wanted 12 bytes", "t", 8),
    Case("a dtype that the bytes do not match", tensor_file({"dtype": "F64"}), FormatError, "wanted 16 bytes", "t", 8),
    Case("negative offsets", tensor_file({"data_offsets": [-8, 0]}), FormatError, "none negative", "t", 8),
    Case("offsets that run backwards", tensor_file({"data_offsets": [8, 0]}), FormatError, "outside the file", "t", 8),
    Case("offsets beyond the file", tensor_file({"data_offsets": [2**40, 2**40 + 8]}), FormatError, "outside", "t", 8),
    Case("three offsets", tensor_file({"data_offsets": [0, 4, 8]}), FormatError, "two integers", "t", 8),
    Case("offsets that are words", tensor_file({"data_offsets": ["0", "8"]}), FormatError, "two integers", "t", 8),
    Case("tensors that overlap", pair((0, 5), (4, 8)), FormatError, "overlaps the one before it", "b",
         options={"tensor": "a"}),
    Case("one tensor inside another", pair((0, 8), (2, 4)), FormatError, "overlaps", "b", options={"tensor": "a"}),
    Case("a gap between tensors", pair((0, 3), (4, 8)), FormatError, "bytes before it to no tensor", "b",
         options={"tensor": "a"}),
    Case("a gap before the first", pair((1, 4), (4, 8)), FormatError, "bytes before it to no tensor", "a",
         options={"tensor": "a"}),
    Case("no tensor of that name", tensor_file(), FormatError, "no such tensor; there are 't'", "x", options={"tensor": "x"}),
    Case("several tensors and no name", pair((0, 4), (4, 8)), ValueError, "tensor= must say which one; there are 'a', 'b'"),
    Case("another dtype than was asked for", tensor_file(), FormatError, "wanted Int8, found Float32", "t",
         options={"dtype": DType.Int8}),
    Case("another shape than was asked for", tensor_file(), FormatError, "wanted (3,), found (2,)", "t",
         options={"shape": 3}),
]  # fmt: skip


def shards(weights, **held):
    """A checkpoint with an index, true or not."""

    def make(files):
        for name, arrays in held.items():
            files.safetensors(f"{name}.safetensors", arrays)
        return files.index(weights)

    return make


def expert(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def in_shards(*arrays, names=None):
    """Experts, one to a file."""
    names = names or [f"e.{number}" for number in range(len(arrays))]
    held = {
        f"s{number}": {name: array} for number, (name, array) in enumerate(zip(names, arrays, strict=True))
    }
    return shards({name: f"s{number}.safetensors" for number, name in enumerate(names)}, **held)


def leading_out(shard):
    """An index that names a file which is there and is a true one."""

    def make(files):
        files.safetensors("outside/secret.safetensors", {"t": expert(2)})
        folder = files.folder / "checkpoint"
        folder.mkdir()
        path = folder / "model.safetensors.index.json"
        named = str(files.folder / "outside/secret.safetensors") if shard == "absolute" else shard
        path.write_text(json.dumps({"weight_map": {"t": named}}))
        return path

    return make


def in_folder(make):
    """Opens the folder of what is made."""
    return lambda files: make(files).parent


def two_files_with_one_tensor(files):
    files.safetensors("a.safetensors", {"t": expert(2)})
    return files.safetensors("b.safetensors", {"t": expert(2)}).parent


EXPERTS = {"tensor": "e.{e}"}
CHECKPOINTS = [
    Case("a shard above the checkpoint", leading_out("../outside/secret.safetensors"), FormatError, "leads out", "t"),
    Case("a shard by an absolute path", leading_out("absolute"), FormatError, "leads out", "t"),
    Case("a shard above by a detour", leading_out("a/../../outside/secret.safetensors"), FormatError, "leads out", "t"),
    Case("a shard above for another system", leading_out("..\\outside"), FormatError, "leads out", "t"),
    Case("a shard with a null byte", leading_out("m\0.safetensors"), FormatError, "leads out", "t"),
    Case("a shard without a name", leading_out(""), FormatError, "leads out", "t"),
    Case("a shard that is a number", shards({"t": 7}), FormatError, "leads out", "t"),
    Case("a shard that is the folder", leading_out("."), FormatError, "found a directory", None, culprit="checkpoint"),
    Case("a shard that is missing", shards({"t": "a.safetensors"}), FileNotFoundError, "a.safetensors", options={"tensor": "t"}),
    Case("a shard without the tensor", shards({"t": "a.safetensors"}, a={"u": expert(2)}), FormatError,
         "the index says that the tensor is in this file", "t", culprit="a.safetensors"),
    Case("an index without tensors", shards({}), FormatError, "found 0 tensors"),
    Case("an index of a list", shards([1]), FormatError, "wanted an object weight_map"),
    Case("an index without its map", plain_file("m.safetensors.index.json", b"{}"), FormatError, "weight_map"),
    Case("an index that is no JSON", plain_file("m.safetensors.index.json", b"\0"), FormatError, "not valid JSON", None, 0),
    Case("an index with a name twice", plain_file("m.safetensors.index.json", b'{"weight_map":{"a":"b","a":"c"}}'),
         FormatError, "'a' twice", None, 0),
    Case("an index of empty lists", plain_file("m.safetensors.index.json", b'{"weight_map":[' + b"[]," * 99 + b"[]]}"),
         FormatError, "the index is not made of descriptions of tensors", None, 0),
    Case("an index that is a list", plain_file("m.safetensors.index.json", b"[]"), FormatError, "not a JSON object", None, 0),
    Case("a folder without a checkpoint", in_folder(plain_file("a.txt", b"")), FormatError, "must hold one checkpoint"),
    Case("an array of zarr 2", in_folder(plain_file(".zarray", b'{"zarr_format":2}')), FormatError, "zarr_format=3"),
    Case("an array of zarr 2 by name", in_folder(plain_file(".zarray", b"{}")), FormatError, "zarr_format=3",
         options={"format": "zarr"}),
    Case("a group of zarr 2", in_folder(plain_file(".zgroup", b'{"zarr_format":2}')), FormatError, "zarr_format=3"),
    *[Case(f"a {suffix} file", plain_file(f"a{suffix}", b"PK"), ValueError, f"a {suffix} file packs its arrays; {instead}")
      for suffix, instead in ((".npz", "numpy.load"), (".pth", "save its"), (".hdf5", "give an array"))],
    Case("an empty folder", lambda files: files.folder, FormatError, "zarr 3 array; name the file or the index (wanted one "
         "*.safetensors.index.json or *.safetensors, found nothing)"),
    Case("a folder of two with one tensor", two_files_with_one_tensor, FormatError, "'t'", "t", culprit="b.safetensors"),
    Case("no tensor matches", in_shards(expert(2)), FormatError, "no tensor matches the pattern", "x.{e}",
         options={"tensor": "x.{e}"}),
    Case("a part is missing", in_shards(expert(2), expert(2), names=["e.0", "e.2"]), FormatError,
         "wanted 3 parts, found 2", "e.1", options=EXPERTS),
    Case("a part of a very long row is missing", in_shards(expert(2), names=["e.999999999"]), FormatError,
         "wanted 1000000000 parts", "e.0", options=EXPERTS),
    Case("a part of two axes is missing", in_shards(expert(2), expert(2), names=["0.1.w", "1.0.w"]), FormatError,
         "wanted 4 parts", "0.0.w", options={"tensor": "{a}.{b}.w"}),
    Case("parts of two shapes", in_shards(expert(2, 3), expert(3, 2)), FormatError, "wanted F32 (2, 3) as 'e.0'", "e.1",
         options=EXPERTS, culprit="s1.safetensors"),
    Case("parts of two dtypes", in_shards(expert(2), expert(2, dtype=np.int32)), FormatError, "found I32 (2,)", "e.1",
         options=EXPERTS, culprit="s1.safetensors"),
    Case("parts without elements", in_shards(expert(0, 2)), FormatError, "and elements", "e.0", options=EXPERTS,
         culprit="s0.safetensors"),
    Case("a placeholder twice", in_shards(expert(2)), ValueError, "a placeholder twice", options={"tensor": "{e}.{e}"}),
]  # fmt: skip


class Executed:
    """What a pickle would run."""

    def __reduce__(self):
        return os.system, ("exit 1",)


NPY = [
    Case("an empty file", plain_file("a.npy", b""), FormatError, "magic string", None, 0),
    Case("another magic", plain_file("a.npy", b"PK\3\4" + bytes(20)), FormatError, "no .npy file", None, 0),
    Case("an unknown version", npy_file(described(), version=b"\x04\x00"), FormatError, "found 4.0", None, 6),
    Case("truncated in the header", npy_file(described(), length=60_000), FormatError, "inside its header", None, 10),
    Case("a header too long", npy_file(described(), version=b"\x02\x00", length=2**31), FormatError, "too long", None, 8),
    Case("a header that calls", npy_file(b"__import__('os').abort()"), FormatError, "no Python literal", None, 8),
    Case("a header that nests deeply", npy_file(b"(" * 60_000), FormatError, "no Python literal", None, 8),
    Case("a header that is a list", npy_file([1]), FormatError, "three fields", None, 8),
    Case("a field too many", npy_file(described(more=1)), FormatError, "three fields", None, 8),
    Case("pickled objects", npy_file(described(descr="|O"), pickle.dumps(Executed())), FormatError, "never loaded", None, 8),
    Case("records", npy_file(described(descr=[("a", "<f4")])), FormatError, "no plain numbers", None, 8),
    Case("text", npy_file(described(descr="<U2")), FormatError, "cannot have this dtype", None, 8),
    Case("complex numbers", npy_file(described(descr="<c8")), FormatError, "found <c8", None, 8),
    Case("unsigned numbers", npy_file(described(descr="<u4")), FormatError, "found <u4", None, 8),
    Case("big-endian", npy_file(described(descr=">f4")), FormatError, "big-endian; convert the file first", None, 8),
    Case("bytes of no name", npy_file(described(descr="|V4")), FormatError, "pass dtype=", None, 8),
    Case("bytes of another width", npy_file(described(descr="|V4")), FormatError, "found BFloat16", None, 8,
         {"dtype": DType.BFloat16}),
    Case("a dtype that is not its own", npy_file(described()), FormatError, "wanted Int32, found Float32", "path",
         options={"dtype": DType.Int32}),
    Case("a negative extent", npy_file(described(shape=(-2,))), FormatError, "none negative", None, 10),
    Case("a shape that is a list", npy_file(described(shape=[2])), FormatError, "list of integers", None, 10),
    Case("an order that is a number", npy_file(described(fortran_order=1)), FormatError, "must be a bool", None, 10),
    Case("truncated data", npy_file(described(), bytes(7)), FormatError, "wanted 8 bytes for Float32 (2,), found 7"),
    Case("bytes behind the data", npy_file(described(), bytes(9)), FormatError, "found 9 bytes"),
    Case("a size beyond 63 bits", npy_file(described(shape=(2**40, 2**40))), FormatError, "2**63 elements", None, 10),
    Case("no axis", npy_file(described(shape=()), bytes(4)), FormatError, "one axis or more", "path"),
    Case("a tensor's name", npy_file(described()), ValueError, "leave tensor= out", options={"tensor": "t"}),
    Case("an offset", npy_file(described()), ValueError, "offset is for raw files", options={"offset": 1}),
]  # fmt: skip

FOUR = {"dtype": DType.Float32, "shape": (4,)}
RAW = [
    Case("truncated", plain_file("a.bin", bytes(15)), FormatError, "wanted 16 bytes", None, 0, FOUR),
    Case("an offset too large", plain_file("a.bin", bytes(18)), FormatError, "found 14 bytes", None, 4, {**FOUR, "offset": 4}),
    Case("an offset beyond the end", plain_file("a.bin", bytes(18)), FormatError, "found 0 bytes", None, 99,
         {**FOUR, "offset": 99}),
    Case("a negative offset", plain_file("a.bin", bytes(16)), ValueError, "not negative", options={**FOUR, "offset": -1}),
    Case("an offset that is a float", plain_file("a.bin", bytes(16)), TypeError, "offset", options={**FOUR, "offset": 1.0}),
    Case("a negative extent", plain_file("a.bin", bytes(16)), ValueError, "must not be negative",
         options={"dtype": DType.Int8, "shape": (-4, -4)}),
    Case("no elements", plain_file("a.bin", bytes(16)), FormatError, "and elements", "path",
         options={"dtype": DType.Int8, "shape": (0,)}),
    Case("no dtype", plain_file("a.bin", bytes(16)), ValueError, "one of npy, raw, safetensors, store, zarr, and",
         options={"shape": 4}),
    Case("no shape", plain_file("a.bin", bytes(16)), ValueError, "pass dtype= and shape=",
         options={"format": "raw", "dtype": DType.Int8}),
    Case("a dtype that is none", plain_file("a.bin", bytes(16)), TypeError, "must be a DType",
         options={"dtype": np.float32, "shape": 4}),
    Case("a format that is none", plain_file("a.bin", bytes(16)), ValueError, "format must be one of",
         options={"format": "hdf5"}),
    Case("a mode that is none", plain_file("a.bin", bytes(16)), ValueError, "mode must be", options={"mode": "w"}),
    Case("writing", plain_file("a.bin", bytes(16)), ValueError, "only read in place", options={**FOUR, "mode": "r+"}),
    Case("tiles that do not divide", plain_file("a.bin", bytes(16)), ValueError, "do not cut", options={**FOUR, "tile_shape": 3}),
    Case("tiles of another rank", plain_file("a.bin", bytes(16)), ValueError, "as many axes", options={**FOUR, "tile_shape": (2, 2)}),
    Case("nothing there", lambda files: files.folder / "none", FileNotFoundError, "none"),
    Case("nothing of that name", lambda files: files.folder / "none.npy", FileNotFoundError, "none.npy"),
    Case("a link to nothing", lambda files: linked(files, files.folder / "none"), FileNotFoundError, "link"),
    Case("a link to itself", lambda files: linked(files, files.folder / "link"), OSError, "link"),
    Case("a FIFO", lambda files: fifo(files, "pipe"), FormatError, "found a FIFO", options=FOUR),
    Case("a FIFO of a telling name", lambda files: fifo(files, "pipe.safetensors"), FormatError, "found a FIFO"),
    Case("a device", lambda files: "/dev/zero", FormatError, "found a character device", options=FOUR),
]  # fmt: skip


def linked(files, target):
    path = files.folder / "link"
    path.symlink_to(target)
    return path


def fifo(files, name):
    os.mkfifo(files.folder / name)
    return files.folder / name


def array_of(skip=(), **fields):
    """A zarr array of 4 by 4 Float32 in chunks of 2 by 2 that says something else about itself."""

    def make(files):
        path = files.zarr("a", np.zeros((4, 4), np.float32), (2, 2), skip=skip)
        text = json.loads((path / "zarr.json").read_text())
        (path / "zarr.json").write_text(json.dumps(text | fields))
        return path

    return make


def chunk_of(content):
    """The same with one chunk of other bytes; None puts a folder there."""

    def make(files):
        path = files.zarr("a", np.zeros((4, 4), np.float32), (2, 2), skip=((1, 0),))
        chunk = path / "c" / "1" / "0"
        chunk.parent.mkdir(exist_ok=True)
        chunk.mkdir() if content is None else chunk.write_bytes(content)
        return path

    return make


def shards_of(shape=None, **configuration):
    """A zarr array of 4 by 4 Float32 in shards of 4 by 4 with chunks of 2 by 4 that says something else of itself."""

    def make(files):
        path = files.sharded_zarr("a", np.zeros((4, 4), np.float32), (4, 4), (2, 4))
        text = json.loads((path / "zarr.json").read_text())
        text["codecs"][0]["configuration"].update(configuration)
        text["shape"] = shape or text["shape"]
        (path / "zarr.json").write_text(json.dumps(text))
        return path

    return make


def shard_with(change):
    """The same with other bytes in its one shard."""

    def make(files):
        path = shards_of()(files)
        shard = path / "c" / "0" / "0"
        shard.write_bytes(change(shard.read_bytes()))
        return path

    return make


def shard_index(*entries):
    """The same with another index, whose checksum is true."""
    index = np.array(entries, "<u8").tobytes()
    return shard_with(lambda shard: shard[:64] + index + struct.pack("<I", crc32c(index)))


def zarr_text(text):
    def make(files):
        folder = files.folder / "a"
        folder.mkdir()
        (folder / "zarr.json").write_bytes(text)
        return folder

    return make


def codecs(*names):
    return [{"name": name, "configuration": {"endian": "little"}} for name in names]


ZARR = [
    Case("no JSON", zarr_text(b"{"), FormatError, "not valid JSON", None, 0),
    Case("a group", zarr_text(b'{"zarr_format":3,"node_type":"group"}'), FormatError, "name the directory of one of its arrays"),
    Case("another version", array_of(zarr_format=2), FormatError, "zarr_format 2"),
    Case("compressed chunks", array_of(codecs=codecs("bytes", "zstd")), FormatError, "['bytes', 'zstd']"),
    Case("chunks with checksums", array_of(codecs=codecs("bytes", "crc32c")), FormatError, "without these codecs"),
    Case("shards of compressed chunks", shards_of(codecs=codecs("bytes", "zstd")), FormatError, "['bytes', 'zstd']"),
    Case("shards of shards", shards_of(codecs=codecs("sharding_indexed")), FormatError, "without these codecs"),
    Case("shards of big-endian chunks", shards_of(codecs=[{"name": "bytes", "configuration": {"endian": "big"}}]),
         FormatError, "found 'big'"),
    Case("shards without a chunk shape", array_of(codecs=codecs("sharding_indexed")), FormatError, "list of integers"),
    Case("chunks that do not divide a shard", shards_of(chunk_shape=[2, 3]), FormatError, "must divide"),
    Case("chunks of nothing in a shard", shards_of(chunk_shape=[0, 4]), FormatError, "must divide"),
    Case("an index that is compressed", shards_of(index_codecs=codecs("bytes", "gzip")), FormatError, "['bytes', 'gzip']"),
    Case("an index of nothing but a checksum", shards_of(index_codecs=codecs("crc32c")), FormatError, "without these codecs"),
    Case("an index in the middle", shards_of(index_location="middle"), FormatError, "found 'middle'"),
    Case("more chunks in shards than can be looked at", shards_of(shape=[2**20, 2**10]), FormatError, "too many chunks"),
    Case("a shard too short for its index", shard_with(lambda shard: shard[:30]), FormatError, "wanted 36 bytes, found 30",
         "path", 0, culprit="c/0/0"),
    Case("a shard whose index is damaged", shard_with(lambda shard: shard[:-8] + b"x" + shard[-7:]), FormatError,
         "damaged (wanted checksum", "path", 64, culprit="c/0/0"),
    Case("a chunk beyond its shard", shard_index((0, 32), (69, 32)), FormatError, "outside the shard", "path", 69, culprit="c/0/0"),
    Case("a chunk far beyond its shard", shard_index((0, 32), (2**64 - 2, 32)), FormatError, "outside the shard", "path",
         culprit="c/0/0"),
    Case("a chunk of another size", shard_index((0, 32), (32, 31)), FormatError, "wanted 32 bytes, found 31", "path", 32,
         culprit="c/0/0"),
    Case("chunks that overlap", shard_index((0, 32), (31, 32)), FormatError, "chunks overlap", "path", 31, culprit="c/0/0"),
    Case("transposed chunks", array_of(codecs=codecs("transpose", "bytes")), FormatError, "without these codecs"),
    Case("no codecs", array_of(codecs=[]), FormatError, "codecs must be a list"),
    Case("a codec that is a number", array_of(codecs=[7]), FormatError, "name and configuration"),
    Case("big-endian", array_of(codecs=[{"name": "bytes", "configuration": {"endian": "big"}}]), FormatError, "found 'big'"),
    Case("no byte order", array_of(codecs=["bytes"]), FormatError, "little-endian"),
    Case("an unknown dtype", array_of(data_type="uint32"), FormatError, "found 'uint32'"),
    Case("a dtype that is a list", array_of(data_type=[]), FormatError, "cannot have this dtype"),
    Case("an irregular grid", array_of(chunk_grid={"name": "rectilinear"}), FormatError, "'rectilinear'"),
    Case("a grid that is none", array_of(chunk_grid=None), FormatError, "name and configuration"),
    Case("chunks of another rank", array_of(shape=[4]), FormatError, "(4,) and (2, 2)"),
    Case("chunks of nothing", array_of(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [0, 2]}}),
         FormatError, "at least 1"),
    Case("no elements", array_of(shape=[0, 4]), FormatError, "at least 1"),
    Case("a shape that is a word", array_of(shape="4"), FormatError, "list of integers"),
    Case("more chunks than can be looked at", array_of(shape=[2**30, 2**20]), FormatError, "too many chunks"),
    Case("a size beyond 62 bits", array_of(shape=[2**31, 2**30]), FormatError, "too large"),
    Case("an unknown key encoding", array_of(chunk_key_encoding={"name": "hash"}), FormatError, "'hash'"),
    Case("keys that lead out", array_of(chunk_key_encoding={"name": "default", "configuration": {"separator": "/../"}}),
         FormatError, "separator"),
    Case("a fill value of another type", array_of(fill_value="seven"), FormatError, "found 'seven'"),
    Case("a fill value of another width", array_of(fill_value="0x00"), FormatError, "found '0x00'"),
    Case("a fill value of digits with spaces", array_of(fill_value="0x 000000"), FormatError, "0x 000000"),
    Case("no fill value", array_of(fill_value=None), FormatError, "does not fit"),
    Case("a storage transformer", array_of(storage_transformers=[{"name": "x"}]), FormatError, "not supported"),
    Case("a field that must be understood", array_of(extra={"name": "x"}), FormatError, "'extra'"),
    Case("a chunk that is too short", chunk_of(bytes(15)), FormatError, "wanted 16 bytes for Float32 (2, 2), found 15",
         "path", culprit="c/1/0"),
    Case("a chunk that is too long", chunk_of(bytes(17)), FormatError, "found 17 bytes", "path", culprit="c/1/0"),
    Case("a chunk that is empty", chunk_of(b""), FormatError, "found 0 bytes", "path", culprit="c/1/0"),
    Case("a chunk that is a folder", chunk_of(None), FormatError, "no regular file", "path", culprit="c/1/0"),
]  # fmt: skip

CASES = [
    pytest.param(case, id=f"{kind}: {case.name}")
    for kind, cases in (
        ("safetensors", SAFETENSORS),
        ("checkpoint", CHECKPOINTS),
        ("npy", NPY),
        ("raw", RAW),
        ("zarr", ZARR),
    )
    for case in cases
]


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_exact_error(files, case):
    path = case.make(files)
    before = sorted(files.folder.rglob("*"))
    with pytest.raises(case.error) as caught:
        open_tiled(path, **case.options)
    error = caught.value
    assert type(error) is case.error or case.error is OSError
    assert case.message in str(error)
    if isinstance(error, FormatError):
        assert error.path.endswith(case.culprit or str(path if "zarr" not in str(error.path) else error.path))
        assert repr(error.path) in str(error)
        assert error.tensor == (str(path) if case.tensor == "path" else case.tensor)
        assert case.offset in (None, error.offset)
    del caught, error
    assert sorted(files.folder.rglob("*")) == before  # and the fixture looks for open files


HEXADECIMAL = b"0x" + b"f" * 6000  # more digits than Python shows of an integer


@pytest.mark.parametrize(
    "make",
    [
        npy_file(b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s,)}" % HEXADECIMAL),
        npy_file(b"{'descr': '<f4', 'fortran_order': %s, 'shape': (2,)}" % HEXADECIMAL),
        npy_file(b"{'descr': %s, 'fortran_order': False, 'shape': (2,)}" % HEXADECIMAL),
        npy_file(b"{%s: '<f4'}" % HEXADECIMAL),
        npy_file(b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s,)}" % (b"9" * 4000)),
        npy_file(b"{'descr': '%s', 'fortran_order': False, 'shape': (2,)}" % (b"x" * 6000)),
        npy_file(b"{'descr': '\\x1b[31m', 'fortran_order': False, 'shape': (2,)}"),
        tensor_file({"dtype": "\ud800", "shape": [2], "data_offsets": [0, 8]}),
        tensor_file({"dtype": "x" * 5000, "shape": [2], "data_offsets": [0, 8]}),
        tensor_file({"dtype": "\x1b[31m\n", "shape": [2], "data_offsets": [0, 8]}),
        tensor_file(header={"x" * 5000: EIGHT["t"] | {"data_offsets": [0, 9]}}),
        shards({"a": "\ud800.safetensors"}),
        shards({"a": "x" * 5000 + "/../a"}),
    ],
)
def test_an_error_is_short_and_can_be_printed_whatever_the_file_says(files, make):
    path = make(files)
    with pytest.raises(FormatError) as caught:
        open_tiled(path)
    said = str(caught.value)
    assert said.isprintable()
    said.encode()
    assert len(said) < 3000


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (npy_file(described(shape=2)), "none negative (found 2)"),
        (tensor_file(header=b'{"t":1,"t":1}'), "'t' twice (wanted distinct keys)"),
        (npy_file(described(descr="|V4")), "to say which (wanted a dtype of 4 bytes)"),
    ],
)
def test_an_error_says_nothing_of_what_is_not_known(files, make, said):
    with pytest.raises(FormatError) as caught:
        open_tiled(make(files))
    assert str(caught.value).endswith(said)


def test_names_that_an_error_lists_are_short(files):
    path = files.safetensors("m.safetensors", {n * 5000: np.zeros(2, np.float32) for n in "ab"})
    with pytest.raises(ValueError, match=r"a'\.\.\., 'bb") as caught:
        open_tiled(path)
    assert len(str(caught.value)) < 1000


def test_placeholders_side_by_side_are_refused(files):
    # Each way to cut the digits would be tried; and none of them is the right one.
    path = files.safetensors("m.safetensors", {"1" * 40 + "x": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="side by side"):
        open_tiled(path, tensor="".join([f"{{a{n}}}" for n in range(8)]) + "y")


def test_an_unknown_dtype_of_another_tensor_is_none_of_ours(files):
    header = {
        "new": {"dtype": "F6_E9", "shape": [3], "data_offsets": [0, 5]},
        "t": {"dtype": "U8", "shape": [3], "data_offsets": [5, 8]},
    }
    path = files.raw_safetensors("m.safetensors", header, b"12345abc")
    tensor = open_tiled(path, tensor="t")
    assert bytes(tensor.carrier[i] for i in range(3)) == b"abc"
    tensor.carrier.release()


def test_a_bad_argument_of_the_carrier_leaves_nothing_open(files):
    path = files.safetensors("m.safetensors", {"t": np.zeros((4, 4), np.float32)})
    with pytest.raises(ValueError, match="limit"):
        open_tiled(path, (4, 4), memory_limit=8)
    with pytest.raises(TypeError, match="plan"):
        open_tiled(path, residency_policy=object())


def test_a_file_without_permission_is_the_systems_error(files):
    path = files.safetensors("m.safetensors", {"t": np.zeros(4, np.float32)})
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything: permissions mean nothing to root")
    with pytest.raises(PermissionError) as caught:
        open_tiled(path)
    assert caught.value.filename == str(path)


def test_a_read_only_medium_is_all_that_it_takes(files, values_of):
    path = files.safetensors("m.safetensors", {"t": np.arange(4, dtype=np.float32)})
    path.chmod(0o400)
    files.folder.chmod(0o500)
    try:
        assert values_of(open_tiled(path)).tolist() == [0, 1, 2, 3]
    finally:
        files.folder.chmod(0o700)
