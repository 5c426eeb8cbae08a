"""The tiled encoder against the dense one: the same vectors whatever fits in memory, with fewer bytes read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strideweave import LRU, Trace, replay
from strideweave.demo.batches import Batch
from strideweave.demo.config import EncoderConfig, weight_shapes
from strideweave.demo.dense import DenseEncoder
from strideweave.demo.experts import BLOCKS, SHARED, ExpertRouter
from strideweave.demo.tile_file import TILE_ROWS, TileFile, write_tile_file
from strideweave.demo.tiled import TiledEncoder

pytestmark = pytest.mark.anyio
CONFIG = EncoderConfig(
    layers=2, hidden=32, heads=4, intermediate=256, vocabulary=1001, positions=40, max_tokens=40
)
TILE_BYTES = TILE_ROWS * CONFIG.hidden * 4


class RandomWeights:
    """A small encoder of random numbers, in memory."""

    description = "random"
    vocabulary = Path("none")

    def __init__(self, config: EncoderConfig = CONFIG) -> None:
        rng = np.random.default_rng(5)
        self.config = config
        self._arrays = {
            name: rng.standard_normal(shape).astype(np.float32) * np.float32(0.2)
            for name, shape in weight_shapes(config).items()
        }

    @property
    def names(self):
        return tuple(self._arrays)

    @property
    def total_bytes(self):
        return sum(array.nbytes for array in self._arrays.values())

    def shape(self, name):
        return self._arrays[name].shape

    def read(self, name):
        return self._arrays[name].copy()

    def read_rows(self, name, start, stop):
        return self._arrays[name][start:stop].copy()

    def checksums(self):
        return ()

    def close(self):
        pass


def random_batches(count=3, size=5):
    rng = np.random.default_rng(9)
    batches = []
    for number in range(count):
        lengths = rng.integers(3, 20, size)
        mask = np.arange(lengths.max()) < lengths[:, None]
        ids = np.where(mask, rng.integers(1, CONFIG.vocabulary, mask.shape), 0)
        batches.append(Batch(ids, mask, lengths, np.arange(number * size, (number + 1) * size)))
    return batches


def random_router():
    rng = np.random.default_rng(2)
    permutations = np.stack([rng.permutation(CONFIG.intermediate) for _ in range(CONFIG.layers)])
    routers = rng.standard_normal((CONFIG.layers, CONFIG.hidden + 1, BLOCKS - SHARED)).astype(np.float32)
    means = rng.standard_normal((CONFIG.layers, BLOCKS, CONFIG.hidden)).astype(np.float32)
    return ExpertRouter(permutations, routers, means)


@pytest.fixture
def weights():
    return RandomWeights()


def test_the_file_is_the_row_major_matrix_of_all_rows(weights, tmp_path):
    tile_file = write_tile_file(weights, tmp_path / "tiles")
    rows = np.fromfile(tile_file.path, np.float32).reshape(-1, CONFIG.hidden)
    assert len(rows) == tile_file.rows
    words = weights.read("embeddings.word_embeddings.weight")
    assert np.array_equal(rows[: len(words)], words)
    assert not rows[len(words) : tile_file.words.count].any()
    query = tile_file.attention(1).first
    assert np.array_equal(
        rows[query : query + CONFIG.hidden], weights.read("encoder.layer.1.attention.self.query.weight")
    )
    down = tile_file.down(0)
    assert np.array_equal(
        rows[down.first : down.first + down.count], weights.read("encoder.layer.0.output.dense.weight").T
    )
    assert down.part(3, CONFIG.block).tiles == range(down.first // 16 + 3, down.first // 16 + 4)


def test_expert_blocks_are_runs_of_rows(weights, tmp_path):
    router = random_router()
    tile_file = write_tile_file(weights, tmp_path / "tiles", router)
    rows = np.fromfile(tile_file.path, np.float32).reshape(-1, CONFIG.hidden)
    up = tile_file.up(1).part(5, CONFIG.block)
    units = router.permutation(1)[5 * CONFIG.block : 6 * CONFIG.block]
    assert np.array_equal(
        rows[up.first : up.first + up.count], weights.read("encoder.layer.1.intermediate.dense.weight")[units]
    )


def test_sizes_that_are_no_whole_tiles_are_refused(tmp_path):
    config = EncoderConfig(
        layers=1, hidden=20, heads=4, intermediate=256, vocabulary=50, positions=40, max_tokens=40
    )
    with pytest.raises(ValueError, match="tiles"):
        write_tile_file(RandomWeights(config), tmp_path / "tiles")
    assert not (tmp_path / "tiles").exists()


@pytest.mark.parametrize("experts", [None, 5, 9, 16])
@pytest.mark.parametrize("tiles", [1, 40, 10_000])
async def test_same_vectors_as_the_dense_model_at_any_budget(weights, tmp_path, tiles, experts):
    router = None if experts is None else random_router()
    tile_file = write_tile_file(weights, tmp_path / "tiles", router)
    encoder = TiledEncoder(weights, tile_file, tiles * TILE_BYTES, router=router, experts=experts)
    batches = random_batches()
    shares: list[float] = []
    vectors = await encoder.encode(batches, shares.append)
    dense = DenseEncoder(weights)
    expected = dense.encode(batches, experts=experts, router=router, routes=encoder.routes or None)
    assert np.abs(vectors - expected).max() <= 1e-5
    found = encoder.statistics()
    assert found.peak_resident_bytes <= tiles * TILE_BYTES
    assert found.bytes_read == found.misses * TILE_BYTES
    if tiles == 10_000:
        assert found.bytes_read <= tile_file.nbytes
        assert found.evictions == 0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert found.pending_requests == found.pinned_tiles == found.staging_bytes == 0
    encoder.release()


async def test_all_sixteen_blocks_are_the_dense_layer(weights, tmp_path):
    router = random_router()
    tile_file = write_tile_file(weights, tmp_path / "tiles", router)
    encoder = TiledEncoder(weights, tile_file, 1 << 20, router=router, experts=16)
    batches = random_batches()
    assert np.abs(await encoder.encode(batches) - DenseEncoder(weights).encode(batches)).max() <= 1e-5
    encoder.release()


async def test_fewer_experts_read_fewer_tiles(weights, tmp_path):
    router = random_router()
    tile_file = write_tile_file(weights, tmp_path / "tiles", router)
    read = {}
    for experts in (5, 16):
        encoder = TiledEncoder(weights, tile_file, 10_000 * TILE_BYTES, router=router, experts=experts)
        await encoder.encode(random_batches(count=1, size=1))
        read[experts] = encoder.statistics().bytes_read
        encoder.release()
    skipped = CONFIG.layers * 2 * 11 * CONFIG.block * CONFIG.hidden * 4
    assert read[16] - read[5] == skipped


async def test_the_clock_is_kept(weights, tmp_path):
    tile_file = write_tile_file(weights, tmp_path / "tiles")
    encoder = TiledEncoder(weights, tile_file, 40 * TILE_BYTES)
    await encoder.encode(random_batches())
    times = encoder.times
    assert 0 <= times.both <= min(times.fetching, times.computing)
    assert times.fetching + times.computing - times.both <= times.total
    assert [sample.seconds for sample in times.samples] == sorted(sample.seconds for sample in times.samples)
    assert times.samples[-1].bytes_read == encoder.statistics().bytes_read
    encoder.release()


async def test_the_trace_of_a_run_replays_to_its_statistics(weights, tmp_path):
    tile_file = write_tile_file(weights, tmp_path / "tiles")
    encoder = TiledEncoder(weights, tile_file, 40 * TILE_BYTES, trace=tmp_path / "run.trace")
    await encoder.encode(random_batches())
    encoder.save_trace()
    found = encoder.statistics()
    report = replay(Trace.load(tmp_path / "run.trace"), LRU(max_tiles=40))
    assert (report.hits, report.misses, report.evictions) == (found.hits, found.misses, found.evictions)
    assert report.bytes_read == found.bytes_read
    assert report.peak_resident * TILE_BYTES == found.peak_resident_bytes
    encoder.release()


async def test_without_a_place_for_it_no_trace_is_written(weights, tmp_path):
    tile_file = write_tile_file(weights, tmp_path / "tiles")
    encoder = TiledEncoder(weights, tile_file, 40 * TILE_BYTES)
    encoder.save_trace()
    assert list(tmp_path.iterdir()) == [tile_file.path]
    encoder.release()
    with pytest.raises(FileNotFoundError, match="folder"):
        TiledEncoder(weights, tile_file, 1 << 20, trace=tmp_path / "missing" / "run.trace")


def test_experts_need_a_router(weights, tmp_path):
    with pytest.raises(ValueError, match="router"):
        TiledEncoder(weights, TileFile(tmp_path / "none", CONFIG), 1 << 20, experts=8)


def test_a_missing_tile_file_is_an_error(weights, tmp_path):
    with pytest.raises(FileNotFoundError):
        TiledEncoder(weights, TileFile(tmp_path / "none", CONFIG), 1 << 20)
