"""A recorded run and its replay: the books of the replay are those of the carrier."""

import numpy as np
import pytest

from strideweave import (
    LRU,
    S3FIFO,
    KeepResident,
    ResidencyPlan,
    Streaming,
    TileSet,
    Trace,
    TraceRecorder,
    asarray,
    replay,
)


class Erratic:
    """Plans whatever its dice say; two with one seed say the same."""

    def __init__(self):
        self.dice = np.random.default_rng(5)

    def plan(self, required, purpose):
        fates = self.dice.integers(0, 4, 8)
        parts = [TileSet([(tile, 0, 0) for tile in np.flatnonzero(fates == fate)]) for fate in range(3)]
        return ResidencyPlan(*parts)


@pytest.mark.parametrize(
    "make",
    [lambda: LRU(max_tiles=3), lambda: S3FIFO(max_bytes=400), KeepResident, Streaming, Erratic, lambda: None],
    ids=["lru", "s3fifo", "keep", "streaming", "erratic", "none"],
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


def test_resident_tiles_that_a_plan_evicts_are_hits_of_an_adding_scatter_too(make_model):
    model = make_model(policy=Streaming())
    model.carrier.promote(TileSet([(2, 0, 0), (5, 0, 0)]))
    compact = asarray(np.ones((2, *model.values.shape[1:]), np.float32))
    result = model.carrier.scatter(compact, model.tensor, model.select(2, 5), "add").wait()
    found = result.carrier.project(result, result.carrier.select({0: [2, 5]})).wait().numpy()
    assert np.array_equal(found, model.values[[2, 5]] + 1)
    statistics = model.carrier.statistics()
    assert (statistics.hits, statistics.misses, statistics.evictions) == (2, 0, 2)
