"""Files as other programs write them, made byte by byte, and what a test looks at afterwards."""

from __future__ import annotations

import gc
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from strideweave.formats.zarr_shards import crc32c

NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}


class Files:
    """Writes files below one folder, and reads tensors back."""

    def __init__(self, folder):
        self.folder = folder

    @staticmethod
    def random(shape, dtype, seed=0):
        """Any bits; in a Bool, 0 and 1."""
        count = int(np.prod(shape)) * dtype.itemsize
        bits = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
        if dtype.name == "Bool":
            bits &= 1
        return bits.view(dtype.numpy).reshape(shape)

    def raw_safetensors(self, name, header, data=b"", *, length=None):
        """A file of any header, true or not."""
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
        return path

    def safetensors(self, name, arrays):
        """A true file of arrays by name."""
        header, data = {}, b""
        for key, array in arrays.items():
            header[key] = {
                "dtype": NAMES[array.dtype.name],
                "shape": list(array.shape),
                "data_offsets": [len(data), len(data) + array.nbytes],
            }
            data += array.tobytes()
        return self.raw_safetensors(name, header, data)

    def index(self, weights, name="model.safetensors.index.json", **fields):
        path = self.folder / name
        path.write_text(json.dumps({"metadata": {}, "weight_map": weights, **fields}))
        return path

    def zarr(self, name, array, chunk, *, encoding=None, skip=(), **fields):
        """A zarr 3 array whose chunks are stored as they are."""
        folder = self.folder / name
        folder.mkdir()
        metadata = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(array.shape),
            "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
            "chunk_key_encoding": encoding or {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "attributes": {"made": "by hand"},
        }
        metadata.update(fields)
        (folder / "zarr.json").write_text(json.dumps(metadata))
        encoding = metadata["chunk_key_encoding"]
        separator = encoding["configuration"]["separator"]
        counts = [-(-extent // part) for extent, part in zip(array.shape, chunk, strict=True)]
        for place in np.ndindex(*counts):
            if place in skip:
                continue
            values = array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(place, chunk, strict=True))]
            padded = np.full(chunk, 77, array.dtype)
            padded[tuple(slice(extent) for extent in values.shape)] = values
            key = (["c"] if encoding["name"] == "default" else []) + [str(index) for index in place]
            path = folder / separator.join(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(padded.tobytes())
        return folder

    def sharded_zarr(self, name, array, shard, chunk, *, skip=(), at_end=True, has_sum=True, **configuration):
        """A zarr 3 array in shards; ``skip`` names chunks that are left out, by their place in the array."""
        named = [{"name": "bytes", "configuration": {"endian": "little"}}]
        codec = {
            "chunk_shape": list(chunk),
            "codecs": named,
            "index_codecs": [*named, {"name": "crc32c"}] if has_sum else named,
            "index_location": "end" if at_end else "start",
        }
        codec.update(configuration)
        folder = self.zarr(name, array, shard, codecs=[{"name": "sharding_indexed", "configuration": codec}])
        counts = [of // part for of, part in zip(shard, chunk, strict=True)]
        size = 16 * int(np.prod(counts)) + 4 * has_sum
        for path in sorted((folder / "c").rglob("*")):
            if path.is_dir():
                continue
            whole = np.frombuffer(path.read_bytes(), array.dtype).reshape(shard)
            place = [int(index) for index in path.relative_to(folder / "c").parts]
            entries, data = [], b""
            for within in np.ndindex(*counts):
                at = tuple(s * n + i for s, n, i in zip(place, counts, within, strict=True))
                if at in skip:
                    entries.append((2**64 - 1, 2**64 - 1))
                    continue
                part = whole[tuple(slice(i * c, (i + 1) * c) for i, c in zip(within, chunk, strict=True))]
                entries.append(((0 if at_end else size) + len(data), part.nbytes))
                data += part.tobytes()
            index = np.array(entries, "<u8").tobytes()
            index += struct.pack("<I", crc32c(index)) if has_sum else b""
            path.write_bytes(data + index if at_end else index + data)
        return folder

    def opened(self):
        """The files below the folder that this process has open."""
        found = self._open_now()
        if found:
            gc.collect()  # an error's traceback may still hold one
            found = self._open_now()
        return found

    def _open_now(self):
        links = list(Path("/proc/self/fd").iterdir())
        paths = [link.readlink() for link in links if link.is_symlink()]  # that of the listing is gone
        return sorted(str(path) for path in paths if path.is_relative_to(self.folder))


@pytest.fixture
def files(tmp_path):
    made = Files(tmp_path)
    yield made
    assert made.opened() == []


@pytest.fixture
def values_of():
    """Gives the values of a whole tiled tensor through its projection, and ends it."""

    def read(tensor):
        carrier = tensor.carrier
        found = carrier.project(tensor, carrier.select({})).wait(60).numpy(copy=True)
        statistics = carrier.statistics()
        assert (statistics.pending_requests, statistics.pinned_tiles, statistics.in_flight_bytes) == (0, 0, 0)
        carrier.release()
        return found

    return read
