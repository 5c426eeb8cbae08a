"""Files as other programs write them, made byte by byte, and what a test looks at afterwards."""

from __future__ import annotations

import gc
import json
import struct
from pathlib import Path

import numpy as np
import pytest

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
