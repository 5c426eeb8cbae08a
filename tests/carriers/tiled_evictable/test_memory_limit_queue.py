"""Requests wait for room under a memory limit, in turn, and nothing of them stays behind."""

import errno
import threading
from contextlib import suppress

import anyio
import numpy as np
import pytest

from strideweave import (
    CPU,
    LRU,
    FileBacked,
    KeepResident,
    ResidencyPlan,
    Streaming,
    TileConflictError,
    TiledEvictable,
)
from tiled_tensors import experts
from waiting import until

TILE = 4 * 6 * 4  # bytes of a tile of make_model


def statistics(model):
    return model.carrier.statistics()


# Waiting


def test_requests_wait_their_turn_and_the_caller_does_not(make_model, control_moves):
    """A small request behind a large one does not pass it, though there would be room."""
    model = make_model(memory_limit=4 * TILE)
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    first = model.project(0, 1)
    moves.wait_until_entered()
    large, small = model.project(2, 3, 4), model.project(5)
    until(lambda: statistics(model).waiting_requests == 2)
    assert (first.done, large.done, small.done) == (False, False, False)
    assert len(moves.calls) == 1
    assert statistics(model).memory_bytes == 2 * TILE
    moves.open()
    assert np.array_equal(small.wait(10).numpy(), model.values[[5]])
    assert np.array_equal(large.wait(10).numpy(), model.values[[2, 3, 4]])
    assert moves.calls == [2, 3, 1]  # as they began; two that read at once may end in any order
    assert moves.calls == [2, 3, 1]
    assert model.primary() == [2, 3, 4, 5]
    assert model.at_rest()


def test_what_is_resident_does_not_wait_behind_what_is_not(make_model, control_moves):
    model = make_model(memory_limit=2 * TILE)
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    first = model.project(0, 1)
    moves.wait_until_entered()
    waiting = model.project(2, 3)
    until(lambda: statistics(model).waiting_requests == 1)
    moves.gates[2 * 24] = threading.Event()
    moves.open()
    first.wait(10)
    until(lambda: len(moves.calls) == 2)
    assert not waiting.done
    moves.gates[2 * 24].set()
    waiting.wait(10)
    assert model.at_rest()


def test_tiles_of_a_request_that_waits_make_room_and_come_back(make_model, control_moves):
    """*A request that still waits in the queue holds no memory*."""
    model = make_model(memory_limit=3 * TILE)
    model.carrier.promote(experts(0, 1, 2))
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    first = model.project(0, 3)
    moves.wait_until_entered()
    # Whoever is next needs everything; the promotion behind it covers a resident tile and may not keep it.
    whole = model.project(4, 5, 6)
    until(lambda: statistics(model).waiting_requests == 1)
    (kept,) = set(model.primary()) - {0}
    promotion = model.carrier.promote_async(experts(kept, 7))
    until(lambda: statistics(model).waiting_requests == 2)
    with pytest.raises(TileConflictError):
        model.carrier.evict(experts(kept))
    moves.open()
    first.wait(10), whole.wait(10), promotion.wait(10)
    assert {kept, 7} < set(model.primary())
    assert model.at_rest()
    model.check(kept, 7)


def test_two_requests_that_hold_each_others_room_both_end(make_model, control_moves):
    model = make_model(memory_limit=4 * TILE)
    model.carrier.promote(experts(0, 1, 2, 3))
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    first = model.project(0, 4)
    moves.wait_until_entered()
    pair = [model.project(1, 2, 5, 6), model.project(2, 3, 6, 7)]
    until(lambda: statistics(model).waiting_requests == 2)
    moves.open()
    assert np.array_equal(first.wait(10).numpy(), model.values[[0, 4]])
    assert np.array_equal(pair[0].wait(10).numpy(), model.values[[1, 2, 5, 6]])
    assert np.array_equal(pair[1].wait(10).numpy(), model.values[[2, 3, 6, 7]])
    assert model.at_rest()


def test_a_tile_that_two_requests_need_is_reserved_once(make_model, control_moves):
    model = make_model(memory_limit=3 * TILE)
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    pair = [model.project(0, 1), model.project(1, 2)]
    until(lambda: len(moves.calls) == 2)
    assert statistics(model).waiting_requests == 0
    moves.open()
    assert np.array_equal(pair[0].wait(10).numpy(), model.values[[0, 1]])
    assert np.array_equal(pair[1].wait(10).numpy(), model.values[[1, 2]])
    assert (sorted(moves.calls), statistics(model).peak_memory_bytes) == ([1, 2], 3 * TILE)
    assert model.at_rest()


def test_an_eviction_that_fails_lets_others_look_again(make_model, control_moves):
    """Its tiles could not make room for others meanwhile, and now they can."""
    model = make_model(memory_limit=2 * TILE)
    for expert in (0, 1):
        model.carrier[expert * 24] = model.values[expert, 0, 0] = 5.0
    moves = control_moves(CPU, FileBacked)
    moves.gate.clear()
    moves.failures.append(OSError("full"))
    eviction = model.carrier.evict_async(experts(0, 1))
    moves.wait_until_entered()
    projection = model.project(2, 3)
    until(lambda: statistics(model).waiting_requests == 1)
    moves.open()
    with pytest.raises(OSError, match="full"):
        eviction.wait(10)
    assert np.array_equal(projection.wait(10).numpy(), model.values[[2, 3]])
    assert model.at_rest()
    model.check(0, 1)


def test_release_refuses_while_a_request_waits(make_model, control_moves):
    model = make_model(memory_limit=TILE)
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    first = model.project(0)
    moves.wait_until_entered()
    second = model.project(1)
    with pytest.raises(RuntimeError, match="unfinished"):
        model.carrier.release()
    moves.open()
    first.wait(10), second.wait(10)
    assert model.at_rest()


# Staging that others read


def test_staging_counts_until_the_last_reader_is_done(make_model, control_moves):
    """A request joined to read what another one streams, and is held up before it has."""
    policy = Streaming()
    model = make_model(policy=policy, memory_limit=3 * TILE)
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    streaming = model.carrier.project(model.strided(), model.select(3))
    moves.wait_until_entered()
    moves.gates[4 * 24] = threading.Event()
    promotion = TiledEvictable.project  # with a plan that keeps what it requires
    policy.plan = lambda required, purpose: ResidencyPlan(promote=required)
    both = promotion(model.carrier, model.tensor, model.select(3, 4))
    until(lambda: len(moves.calls) == 2)
    moves.open()
    streaming.wait(10)
    found = statistics(model)
    assert (found.staging_bytes, found.memory_bytes, found.pending_requests) == (TILE, 2 * TILE, 1)
    third = model.project(5, 6)  # with what is staged it does not fit
    until(lambda: statistics(model).waiting_requests == 1)
    moves.gates[4 * 24].set()
    assert np.array_equal(both.wait(10).numpy(), model.values[[3, 4]])
    assert np.array_equal(third.wait(10).numpy(), model.values[[5, 6]])
    assert (statistics(model).shared, statistics(model).peak_memory_bytes) == (1, 3 * TILE)
    assert model.at_rest()


def test_a_place_that_others_read_from_is_lent_until_they_have(make_model, control_moves):
    """Under a limit there is no room for copies, so the first request waits for the second to have read."""
    policy = Streaming()
    model = make_model(policy=policy, memory_limit=2 * TILE)
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    moves.gates[4 * 24] = threading.Event()
    first = model.project(3)
    moves.wait_until_entered()
    policy.plan = lambda required, purpose: ResidencyPlan(promote=required)
    second = model.project(3, 4)
    until(lambda: len(moves.calls) == 2)
    moves.open()
    until(lambda: statistics(model).bytes_read == TILE)
    assert not first.done
    moves.gates[4 * 24].set()
    values = first.wait(10).numpy(writable=True)
    values[...] = -1
    assert np.array_equal(second.wait(10).numpy(), model.values[[3, 4]])
    assert statistics(model).peak_staging_bytes == 0
    assert model.at_rest()


def test_a_failure_passes_its_turn_on(make_model, control_moves):
    model = make_model(memory_limit=TILE)
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    moves.failures.append(OSError("broken"))
    handles = [model.project(expert) for expert in range(4)]
    until(lambda: statistics(model).waiting_requests == 3)
    moves.open()
    with pytest.raises(OSError, match="broken"):
        handles[0].wait(10)
    for expert in (1, 2, 3):
        assert np.array_equal(handles[expert].wait(10).numpy(), model.values[[expert]])
    assert model.at_rest()


# Everything at once


def exercise(model, seed: int, count: int, tight: int, started: list):
    """Start random requests; adds the handles with what they must be, or None for a residency request, to a list."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        chosen = rng.permutation(8)[: rng.integers(1, tight + 1)].tolist()
        try:
            match rng.integers(6):
                case 0:
                    started.append((model.carrier.promote_async(experts(*chosen)), None))
                case 1:
                    started.append((model.carrier.evict_async(experts(*chosen)), None))
                case 2:
                    found = model.carrier.project(model.strided(), model.select(*chosen))
                    started.append((found, model.values[chosen][:, [0, 2, 1, 3]]))
                case 3:
                    slot = int(rng.integers(192))
                    model.carrier[slot] = float(model.values.reshape(-1)[slot])  # dirty, and the same
                case _:
                    started.append((model.project(*chosen), model.values[chosen]))
        except TileConflictError:
            continue
    return started


POLICIES = {
    "none": None,
    "lru": lambda: LRU(max_tiles=2),
    "streaming": Streaming,
    "keep": KeepResident,
}


@pytest.mark.parametrize("limit", [3, 4, 6])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_threads_under_a_tight_limit(make_model, policy, limit):
    model = make_model(policy=policy() if policy else None, memory_limit=limit * TILE)
    failures = []

    def work(seed):
        try:
            for turn in range(6):
                for handle, expected in exercise(model, 100 * seed + turn, 12, limit - 1, []):
                    found = handle.wait(20)
                    assert expected is None or np.array_equal(found.numpy(), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert model.at_rest()
    assert np.array_equal(model.tensor.numpy(), model.values)
    assert model.at_rest()


@pytest.mark.anyio
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
async def test_tasks_under_a_tight_limit(make_model, policy):
    """Awaiters are cancelled at random; the requests go on."""
    model = make_model(policy=policy() if policy else None, memory_limit=3 * TILE)

    async def work(seed):
        for turn in range(4):
            # Writes wait for their tile: in a worker thread, not in this loop.
            started = await anyio.to_thread.run_sync(exercise, model, 100 * seed + turn, 15, 2, [])
            for index, (handle, expected) in enumerate(started):
                with anyio.CancelScope() as scope:
                    if (index + seed) % 5 == 0:
                        scope.cancel()
                    found = await handle
                    assert expected is None or np.array_equal(found.numpy(), expected)
            for handle, _ in started:
                await handle

    async with anyio.create_task_group() as group:
        for seed in range(4):
            group.start_soon(work, seed)
    assert model.at_rest()
    assert np.array_equal(model.tensor.numpy(), model.values)


@pytest.mark.parametrize("seed", range(4))
def test_failures_under_a_tight_limit(make_model, control_moves, seed):
    """Whatever fails, whoever waits gets a turn and nothing stays reserved."""
    model = make_model(memory_limit=3 * TILE)
    rng = np.random.default_rng(seed)
    inward, outward = control_moves(FileBacked, CPU), control_moves(CPU, FileBacked)
    for moves in (inward, outward):
        moves.fail_when = lambda transfers: rng.random() < 0.2
        moves.failures = [OSError(errno.EIO, "broken") for _ in range(1000)]
    ended = 0
    for turn in range(15):
        started = []
        with suppress(OSError):  # of a write whose tile could not be fetched; what began before it goes on
            exercise(model, 1000 * seed + turn, 12, 3, started)
        for handle, expected in started:
            try:
                found = handle.wait(20)
            except OSError:
                continue
            assert expected is None or np.array_equal(found.numpy(), expected)
            ended += 1
    for moves in (inward, outward):
        moves.fail_when = lambda transfers: False
    assert ended > 20
    assert model.at_rest()
    assert np.array_equal(model.tensor.numpy(), model.values)
