"""Who kept a tier and computed with it learns when a tiled carrier changes its slots."""

from __future__ import annotations

import numpy as np
import pytest

from strideweave import CPU, FileBacked, Tensor, TiledEvictable, TileSet, reduce_sum, row_major
from strideweave.errors import StaleGraphError
from strideweave.testing import failing_transfers

SLOTS, TILE = 4096, 1024  # 4 KiB a tile in float32, so that a tile that leaves gives whole pages back
FIRST = TileSet([(0,)])


def graph_on(carrier):
    leaf = Tensor(carrier, 0, row_major(SLOTS))
    return leaf, reduce_sum(leaf * leaf)


def write(tiled):
    tiled[0] = 7.0


def drop(tiled):
    tiled.evict(FIRST)


def write_back(tiled):
    tiled[0] = 7.0
    tiled.evict(FIRST)


def fail_to_write_back(tiled):
    tiled[0] = 7.0
    with (
        failing_transfers(CPU, type(tiled.secondary), after=True),
        pytest.raises(OSError, match="filled the disk"),
    ):
        tiled.evict(FIRST)


@pytest.mark.parametrize(
    ("tier", "change"),
    [
        ("primary", write),
        ("primary", drop),
        ("secondary", write_back),
        ("secondary", fail_to_write_back),
    ],
)
def test_a_graph_notices_that_a_tier_changed(tier, change):
    values = CPU(0).new_like(np.ones(SLOTS, np.float32))
    leaf, total = graph_on(values)
    tiers = (values, FileBacked()) if tier == "primary" else (CPU(0), values)
    tiled = TiledEvictable(*tiers, (SLOTS // TILE,), (TILE,))
    change(tiled)
    with pytest.raises(StaleGraphError):
        total.backward()
    assert leaf.grad is None


def test_a_tier_that_is_only_read_keeps_its_version():
    values = CPU(0).new_like(np.ones(SLOTS, np.float32))
    leaf, total = graph_on(values)
    tiled = TiledEvictable(CPU(0), values, (SLOTS // TILE,), (TILE,))
    assert tiled[0] == 1.0
    tiled.promote(FIRST)
    tiled.evict(FIRST)
    total.backward()
    assert leaf.grad[0] == 2.0
