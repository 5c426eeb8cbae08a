"""A recorded run and its replay: the books of the replay are those of the carrier."""

import numpy as np
import pytest

from strideweave import LRU, S3FIFO, KeepResident, Streaming, Trace, TraceRecorder, replay


@pytest.mark.parametrize(
    "make",
    [lambda: LRU(max_tiles=3), lambda: S3FIFO(max_bytes=400), KeepResident, Streaming, lambda: None],
    ids=["lru", "s3fifo", "keep", "streaming", "none"],
)
def test_a_replay_tells_what_the_carrier_did(make_model, tmp_path, make):
    path = tmp_path / "run.trace"
    with TraceRecorder(make(), path) as recorder:
        model = make_model(policy=recorder)
        rng = np.random.default_rng(3)
        for _ in range(80):
            model.check(*rng.permutation(8)[: rng.integers(1, 6)].tolist())
    statistics = model.carrier.statistics()
    report = replay(Trace.load(path), make())
    assert report.requests == 80
    assert (report.hits, report.misses) == (statistics.hits, statistics.misses)
    assert (report.streamed, report.evictions) == (statistics.streamed, statistics.evictions)
    assert report.bytes_read == statistics.bytes_read
    assert report.peak_resident * statistics.tile_bytes == statistics.peak_resident_bytes
    assert report.resident == statistics.resident_tiles
    assert report.hits + report.misses == report.required
    assert model.at_rest()


def test_the_carrier_shows_the_statistics_of_the_policy_inside(make_model):
    model = make_model(policy=TraceRecorder(LRU(max_tiles=2)))
    model.check(0, 1)
    assert model.carrier.statistics().policy.capacity == 2
    assert make_model(policy=TraceRecorder()).carrier.statistics().policy is None
