"""A recorded run and its replay: the books of the replay are those of the carrier."""

import numpy as np
import pytest

from strideweave import (
    LRU,
    S3FIFO,
    KeepResident,
    ResidencyPlan,
    Streaming,
    Tensor,
    TileSet,
    Trace,
    TraceRecorder,
    asarray,
    mul,
    reduce_sum,
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


def test_every_kind_of_request_is_recorded_with_its_purpose(make_model):
    recorder = TraceRecorder(LRU(max_tiles=3))
    model = make_model(policy=recorder)
    tensor = Tensor(model.carrier, 0, model.tensor.layout)
    compact = asarray(np.ones((2, *model.values.shape[1:]), np.float32))
    model.project(1, 2).wait()
    reduce_sum(mul(tensor, tensor)).backward()
    model.carrier.scatter(compact, tensor, model.select(0, 5), "add").wait()
    model.carrier.scatter(compact, tensor, model.select(3, 4)).wait()
    model.carrier.promote(TileSet([(7, 0, 0)]))  # of which no policy is asked
    asked = [(request.purpose, len(request.tiles)) for request in recorder.trace.requests]
    assert asked[:2] == [("projection", 2), ("operation", 8)]
    assert set(asked[2:-2]) == {("backward", 8)}
    assert asked[-2:] == [("scatter", 2), ("scatter", 2)]
    assert replay(recorder.trace, LRU(max_tiles=3)).peak_resident == 3
