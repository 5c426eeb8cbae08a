"""Threads that project, scatter, operate and go back over one tiled tensor at once: every gradient adds up."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.to_thread
import numpy as np
import pytest

from strideweave import (
    LRU,
    S3FIFO,
    Tensor,
    TileConflictError,
    TileSet,
    from_numpy,
    matmul,
    reduce_sum,
    row_major,
)
from strideweave.carriers.tiled_evictable import direct_request
from strideweave.carriers.tiled_evictable import streaming as streaming_module
from strideweave.errors import StaleGraphError

TILE_BYTES = 96
THREADS, CALLS = 6, 20
KINDS = ("project", "project", "scatter", "scale", "square", "matmul", "promote", "evict", "write")


def leaf_of(values):
    return Tensor(from_numpy(values).carrier, 0, row_major(*values.shape), requires_grad=True)


class Worker:
    """Makes one random call after the other; what its backward passes have brought is in ``gradient``."""

    def __init__(self, model, leaf, seed, most):
        self.model, self.leaf, self.random, self.most = model, leaf, random.Random(seed), most
        self.gradient = np.zeros((8, 4, 6), np.float32)
        self.counts = dict.fromkeys(("done", "refused", "stale"), 0)

    def step(self):
        kind = self.random.choice(KINDS)
        try:
            share = getattr(self, kind)(self.random.sample(range(8), self.random.randint(1, self.most)))
        except TileConflictError:
            self.counts["refused"] += 1
        except StaleGraphError:  # somebody wrote meanwhile
            self.counts["stale"] += 1
        else:
            self.counts["done"] += 1
            if share is not None:  # at once: whoever looks meanwhile sees none of it or all
                self.gradient += share

    def one_hot(self, experts, weight=1):
        share = np.zeros((8, 4, 6), np.float32)
        share[experts] = weight
        return share

    def project(self, experts):
        compact = self.model.carrier.project(self.leaf, self.model.select(*experts)).wait(60)
        assert np.array_equal(compact.numpy(), self.model.values[experts])
        reduce_sum(compact * 3.0).backward()
        return self.one_hot(experts, 3)

    def scatter(self, experts):
        added = np.full((len(experts), 4, 6), 5, np.float32)
        compact = leaf_of(added)
        selection = self.model.select(*experts)
        result = self.model.carrier.scatter(compact, self.leaf, selection, "add").wait(60)
        seen = result.carrier.project(result, selection).wait(60)
        assert np.array_equal(seen.numpy(), self.model.values[experts] + 5)
        reduce_sum(seen).backward()
        assert (compact.grad.numpy() == 1).all()
        return self.one_hot(experts)

    def scale(self, experts):
        assert np.array_equal((self.leaf * 2.0).numpy(), self.model.values * 2)

    def square(self, experts):
        reduce_sum(self.leaf * self.leaf).backward()
        return 2 * self.model.values

    def matmul(self, experts):
        dense = leaf_of(np.ones((6, 2), np.float32))
        product = matmul(self.leaf, dense)
        assert np.array_equal(product.numpy(), self.model.values @ np.ones((6, 2), np.float32))
        reduce_sum(product).backward()
        assert np.array_equal(dense.grad.numpy()[:, 0], self.model.values.sum((0, 1)))
        return np.full((8, 4, 6), 2, np.float32)

    def promote(self, experts):
        self.model.carrier.promote_async(TileSet([(expert, 0, 0) for expert in experts])).wait(60)

    def evict(self, experts):
        self.model.carrier.evict_async(TileSet([(expert, 0, 0) for expert in experts])).wait(60)

    def write(self, experts):
        """The value that is there already, so that the others know what to see."""
        self.model.carrier[experts[0] * 24] = self.model.values[experts[0], 0, 0]


SETTINGS = {
    "free": (None, None),
    "a memory limit": (None, 7 * TILE_BYTES),
    "LRU within a memory limit": (lambda: LRU(max_tiles=2), 12 * TILE_BYTES),
    "S3FIFO": (lambda: S3FIFO(max_tiles=3), None),
}


@pytest.fixture
def make_workers(make_model, monkeypatch):
    """Workers on one tensor, whose operations take several blocks and whose streams take several waves."""
    monkeypatch.setattr(direct_request, "WINDOW_BYTES", 2 * TILE_BYTES)
    monkeypatch.setattr(streaming_module, "STAGING_BYTES", 2 * TILE_BYTES)

    def make(policy, limit):
        model = make_model(policy=policy and policy(), memory_limit=limit)
        leaf = Tensor(model.carrier, 0, row_major(8, 4, 6), requires_grad=True)
        return model, leaf, [Worker(model, leaf, seed, 3 if limit else 8) for seed in range(THREADS)]

    return make


def check(model, leaf, workers):
    assert model.at_rest()
    assert np.array_equal(model.tensor.numpy(), model.values)
    assert np.array_equal(leaf.grad.numpy(), sum(worker.gradient for worker in workers))
    found = leaf.grad.carrier.statistics()
    assert (found.pending_requests, found.staging_bytes, found.waiting_requests) == (0, 0, 0)
    if model.carrier.memory_limit is not None:
        assert found.peak_memory_bytes <= model.carrier.memory_limit
    assert sum(worker.counts["done"] for worker in workers)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_threads_that_go_back_at_once(make_workers, setting):
    """Passes of several threads meet at one leaf, whose gradient is the sum of all that succeeded."""
    model, leaf, workers = make_workers(*setting)

    def run(worker):
        for _ in range(CALLS):
            worker.step()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, workers))
    check(model, leaf, workers)
    assert sum(worker.counts["refused"] for worker in workers)


@pytest.mark.anyio
@pytest.mark.parametrize("setting", [SETTINGS["free"], SETTINGS["a memory limit"]], ids=["free", "limited"])
async def test_tasks_that_give_up_waiting_for_a_thread(make_workers, setting):
    """Whoever waits for a blocking call may be cancelled; the call ends all the same, and what it did counts."""
    model, leaf, workers = make_workers(*setting)
    given_up = 0

    async def run(worker):
        nonlocal given_up
        for _ in range(12):
            call = pool.submit(worker.step)
            with anyio.move_on_after(worker.random.choice([0, 0.001, 0.01, 5])) as scope:
                await anyio.to_thread.run_sync(call.result, abandon_on_cancel=True)
            given_up += scope.cancelled_caught
            await anyio.to_thread.run_sync(call.result)

    with ThreadPoolExecutor(THREADS) as pool:
        async with anyio.create_task_group() as group:
            for worker in workers:
                group.start_soon(run, worker)
    assert given_up
    check(model, leaf, workers)
