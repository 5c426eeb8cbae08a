"""Ten thousand overlapping calls whose awaiters are cancelled at random moments: nothing stays, every bit is right."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from strideweave import LRU, S3FIFO, KeepResident, Streaming, TileConflictError, TileSet, from_numpy

EXPERTS = 8
CALLS = 10_000
TASKS = 50
MOST_LIMITED = 3  # tiles of one call, under a limit that holds five


class Client:
    """Makes one random call after the other and checks whatever comes back against the values at the call."""

    def __init__(self, model, seed):
        self.model, self.random = model, random.Random(seed)
        self.made = self.refused = self.cancelled = self.checked = 0

    def some(self):
        limit = self.model.carrier.memory_limit
        most = EXPERTS if limit is None else MOST_LIMITED
        return self.random.sample(range(EXPERTS), self.random.randint(1, most))

    def start(self):
        """Begin one call; gives its handle and what must come of it, or None where it was refused or done."""
        self.made += 1
        model, carrier = self.model, self.model.carrier
        kind = self.random.choice(
            ["project", "project", "project", "scatter", "assign", "promote", "evict", "read", "write"]
        )
        experts = self.some()
        try:
            if kind == "project":
                return model.project(*experts), model.values[experts].copy()
            if kind in ("scatter", "assign"):
                return self.write_tiles(kind, experts[:3])
            if kind in ("promote", "evict"):
                tiles = TileSet([(expert, 0, 0) for expert in experts[:3]])
                return getattr(carrier, f"{kind}_async")(tiles), None
            slot = experts[0] * 24 + self.random.randrange(24)
            if kind == "read":
                assert carrier[slot] == model.values.flat[slot]
                self.checked += 1
            elif carrier.tile_state((experts[0], 0, 0)).location == "primary":  # else it would block the loop
                value = float(self.random.randrange(1000))
                carrier[slot] = value
                model.values.flat[slot] = value
        except TileConflictError as error:
            self.refused += 1
            assert len(error.tiles)
        return None

    def write_tiles(self, kind, experts):
        """Scatter to experts, or assign to them; who comes after an assignment is refused or finds it done."""
        model, carrier = self.model, self.model.carrier
        values = np.full((len(experts), 4, 6), self.random.randrange(1000), np.float32)
        selection = model.select(*experts)
        if kind == "scatter":
            handle = carrier.scatter(from_numpy(values), model.tensor, selection, "add")
            return handle, (experts, values + model.values[experts])
        handle = carrier.assign(from_numpy(values), model.tensor, selection)
        model.values[experts] = values
        return handle, None

    def check(self, found, expected):
        """Compare what came of a call: a compact Tensor, or some slots of a full one."""
        if expected is None:
            return
        if isinstance(expected, tuple):
            experts, values = expected
            slots = [(row, self.random.randrange(4), self.random.randrange(6)) for row in range(len(experts))]
            assert all(found[experts[row], *rest] == values[row, *rest] for row, *rest in slots)
        else:
            assert np.array_equal(found.numpy(), expected)
        self.checked += 1

    async def run(self, calls):
        for _ in range(calls):
            started = self.start()
            if started is None:
                await anyio.lowlevel.checkpoint()
                continue
            handle, expected = started
            if self.random.random() < 0.2:  # never looked at again
                await anyio.lowlevel.checkpoint()
                continue
            patience = self.random.choice([0, 0.0001, 0.001, 5])
            with anyio.move_on_after(patience) as scope:
                self.check(await handle, expected)
            self.cancelled += scope.cancelled_caught


SETTINGS = {
    "no policy": {},
    "LRU": {"policy": lambda: LRU(max_tiles=3)},
    "Streaming": {"policy": Streaming},
    "KeepResident in a memory limit": {"policy": KeepResident, "memory_limit": 5 * 96},
    "S3FIFO in a memory limit": {"policy": lambda: S3FIFO(max_tiles=2), "memory_limit": 5 * 96},
}


def made(make_model, policy=None, memory_limit=None):
    return make_model(policy=policy and policy(), memory_limit=memory_limit)


@pytest.mark.anyio
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
async def test_ten_thousand_calls_with_cancelled_awaiters(make_model, setting):
    """Cancelling who waits never cancels the request: all of them end, and no other sees a wrong value."""
    model = made(make_model, **setting)
    clients = [Client(model, seed) for seed in range(TASKS)]
    async with anyio.create_task_group() as group:
        for client in clients:
            group.start_soon(client.run, CALLS // TASKS // len(SETTINGS))
    await settle(model)
    assert sum(client.made for client in clients) == CALLS // len(SETTINGS)
    for name in ("refused", "cancelled", "checked"):
        assert sum(getattr(client, name) for client in clients), f"no call was {name}"
    assert np.array_equal(model.tensor.numpy(), model.values)


async def settle(model):
    """Wait until the requests that nobody waits for have ended, which only they decide."""
    with anyio.fail_after(60):
        while model.carrier.statistics().pending_requests:  # noqa: ASYNC110 - their handles are gone
            await anyio.sleep(0.001)
    assert model.at_rest()


@pytest.mark.parametrize("memory_limit", [None, 5 * 96])
def test_threads_that_call_at_once(make_model, memory_limit):
    """From any thread: a conflict raises on the thread that caused it, and values are those of the call."""
    model = make_model(policy=LRU(max_tiles=2), memory_limit=memory_limit)
    guard = threading.Lock()  # a call and the copy of the values it must give are one step

    def client(seed):
        caller = Client(model, seed)
        for _ in range(500):
            with guard:
                started = caller.start()
            if started is None:
                continue
            handle, expected = started
            caller.check(handle.wait(30), expected)
        return caller

    with ThreadPoolExecutor(6) as pool:
        callers = list(pool.map(client, range(6)))
    assert sum(caller.checked for caller in callers) > 500
    assert sum(caller.refused for caller in callers)
    assert model.at_rest()
    assert np.array_equal(model.tensor.numpy(), model.values)
