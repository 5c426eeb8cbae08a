"""Stores for the tests of stores."""

import numpy as np
import pytest

from strideweave import TileSet, asarray, save_tiled, tiled
from strideweave.store import open_store

ROWS, COLUMNS = 6, 8
TILE = (2, 4)
GRID = (3, 2)
TILE_BYTES = 32


@pytest.fixture
def values():
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


@pytest.fixture
def store(tmp_path, values):
    """The path of a store of six tiles."""
    path = tmp_path / "store"
    save_tiled(tiled(values, TILE), path)
    return path


@pytest.fixture
def opened():
    """Give the function that opens stores, which are closed at the end."""
    tensors = []

    def open_one(path, mode="r", **options):
        tensors.append(open_store(path, mode, **options))
        return tensors[-1]

    yield open_one
    for tensor in tensors:
        if not tensor.carrier.is_released():
            tensor.carrier.release()


@pytest.fixture
def write_back():
    """Give the function that writes new values of some tiles to the store."""

    def write(tensor, tile, values):
        carrier = tensor.carrier
        compact = asarray(np.ascontiguousarray(values, tensor.dtype.numpy), dtype=tensor.dtype)
        selection = carrier.select({axis: [index] for axis, index in enumerate(tile)})
        carrier.assign(compact, tensor, selection).wait()
        carrier.evict(TileSet([tile]))

    return write


@pytest.fixture
def tile_of():
    """Give the function that reads one tile through a projection."""

    def read(tensor, tile):
        carrier = tensor.carrier
        selection = carrier.select({axis: [index] for axis, index in enumerate(tile)})
        return carrier.project(tensor, selection).wait().numpy()

    return read
