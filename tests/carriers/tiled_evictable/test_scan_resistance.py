"""`S3FIFO` on a carrier: its bound in memory, and what a scan leaves of the hot tiles."""

import numpy as np
import pytest

from strideweave import LRU, S3FIFO


@pytest.mark.parametrize("tiles", [0, 1, 3, 8])
def test_the_bound_is_never_exceeded(make_model, tiles):
    model = make_model(policy=S3FIFO(max_tiles=tiles))
    rng = np.random.default_rng(11)
    for _ in range(60):
        pick = rng.permutation(8)[: rng.integers(1, 7)].tolist()
        model.check(*pick)
        assert len(model.primary()) <= tiles
    statistics = model.carrier.statistics()
    assert statistics.peak_resident_bytes <= tiles * statistics.tile_bytes
    assert statistics.resident_tiles == statistics.policy.resident
    assert (statistics.hits, statistics.misses) == (statistics.policy.hits, statistics.policy.misses)
    assert statistics.misses * statistics.tile_bytes == statistics.bytes_read
    assert model.at_rest()


def test_a_bound_in_bytes(make_model):
    model = make_model(policy=S3FIFO(max_bytes=3 * 96 + 95))
    for expert in range(8):
        model.check(expert)
    statistics = model.carrier.statistics()
    assert model.primary() == [5, 6, 7]
    assert statistics.peak_resident_bytes == 3 * 96


def test_hot_tiles_are_not_read_again_after_a_scan(make_model):
    """Where the LRU has to read every hot tile again, this policy reads none."""
    read = {}
    for policy in (LRU(max_tiles=4), S3FIFO(max_tiles=4)):
        model = make_model(policy=policy)
        for _ in range(4):
            model.check(0, 1, 2)
        for expert in range(8):
            model.check(expert)
        before = model.carrier.statistics().misses
        model.check(0, 1, 2)
        read[type(policy)] = model.carrier.statistics().misses - before
        assert model.at_rest()
    assert read == {LRU: 3, S3FIFO: 0}
