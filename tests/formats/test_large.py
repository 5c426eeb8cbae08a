"""Files of any size and number: what is read is what was asked for, with few descriptors open."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from strideweave import DType, open_tiled
from strideweave.io.engine import statistics

GIBIBYTE = 1 << 30
MANY = 3000


def sparse_checkpoint(files, *, experts, out, inner):
    """A BFloat16 checkpoint whose data are a hole but for one expert."""
    header, nbytes = {}, out * inner * 2
    for number in range(experts):
        place = [number * nbytes, (number + 1) * nbytes]
        header[f"experts.{number}.w1"] = {"dtype": "BF16", "shape": [out, inner], "data_offsets": place}
    path = files.raw_safetensors("big.safetensors", header)
    data = path.stat().st_size
    os.truncate(path, data + experts * nbytes)
    return path, data, nbytes


def test_a_checkpoint_of_ten_gibibytes_is_read_tile_by_tile(files):
    path, data, nbytes = sparse_checkpoint(files, experts=320, out=4096, inner=4096)
    if path.stat().st_size - data != 10 * GIBIBYTE:
        pytest.fail("the file has another size")
    marked = np.arange(4096 * 4096, dtype=np.uint16)
    with path.open("r+b") as file:
        file.seek(data + 200 * nbytes)
        file.write(marked.tobytes())
    engine_before, blocks = statistics().bytes_read, path.stat().st_blocks
    tensor = open_tiled(path, tensor="experts.{e}.w1")
    assert (tensor.shape, tensor.dtype) == ((320, 4096, 4096), DType.BFloat16)
    assert tensor.nbytes == 10 * GIBIBYTE
    assert statistics().bytes_read == engine_before  # of the tensors not a byte
    found = tensor.carrier.project(tensor, tensor.carrier.select({0: [200]})).wait(60).numpy()
    assert found.tobytes() == marked.tobytes()
    read = tensor.carrier.secondary.statistics()
    assert (read.bytes_read, read.pieces_read) == (nbytes, 1)
    assert statistics().bytes_read == engine_before + nbytes
    assert path.stat().st_blocks == blocks
    tensor.carrier.release()


@pytest.mark.parametrize("tile_shape", [None, (64, 4096), (256, 256), (1, 1024)])
def test_a_tile_of_a_large_array_reads_its_bytes_only(files, tile_shape):
    path = files.folder / "raw"
    path.touch()
    os.truncate(path, 10 * GIBIBYTE)
    tensor = open_tiled(path, tile_shape, dtype=DType.BFloat16, shape=(1310720, 4096))
    tile_bytes = tensor.carrier.statistics().tile_bytes
    last = tensor.carrier.grid_shape[0] - 1
    tensor.carrier.project(tensor, tensor.carrier.select({0: [last], 1: [0]})).wait(60)
    assert tensor.carrier.secondary.statistics().bytes_read == tile_bytes
    tensor.carrier.release()


PROGRAM = """
import json, os, resource, sys
import numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from strideweave import open_tiled
from strideweave.io.file_pool import FilePool
from strideweave.runtime.event_loop import current_runtime
folder, count = sys.argv[1], int(sys.argv[2])
tensor = open_tiled(folder, tensor="e.{e}")
carrier = tensor.carrier
assert tensor.shape == (count, 2, 2), tensor.shape
most = 0
def look():
    global most
    most = max(most, len(os.listdir("/proc/self/fd")))
handles = [carrier.project(tensor, carrier.select({0: range(start, count, 7)})) for start in range(7)]
for start, handle in enumerate(handles):
    look()
    found = handle.wait(120).numpy()
    assert found[:, 1, 1].tolist() == list(range(start, count, 7)), start
    look()
assert carrier[4 * 17] == 17
pool = current_runtime().service(FilePool).statistics()
assert pool.in_use == 0 and pool.open <= pool.capacity == 16, pool
assert pool.opened >= count
carrier.release()
look()
pool = current_runtime().service(FilePool).statistics()
assert pool.open == 0, pool
print(most)
"""


def test_thousands_of_shards_under_a_small_limit_of_descriptors(files):
    weights = {}
    for number in range(MANY):
        name = f"model-{number:05}.safetensors"
        files.safetensors(name, {f"e.{number}": np.full((2, 2), number, np.int32)})
        weights[f"e.{number}"] = name
    index = files.index(weights)
    assert json.loads(index.read_text())["weight_map"]["e.17"] == "model-00017.safetensors"
    program = [sys.executable, "-W", "error", "-c", PROGRAM, str(files.folder), str(MANY)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) <= 64
