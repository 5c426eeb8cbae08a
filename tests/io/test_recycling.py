"""The pool of result memory: what is lent again, what is not, and what goes back to the system."""

from __future__ import annotations

import gc
import linecache
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strideweave
from processes import in_a_forked_child
from strideweave import CPU, DType
from strideweave.io import memory_limits, recycling, recycling_pool
from strideweave.io.buffers import aligned_array
from strideweave.io.recycling_pool import (
    IDLE_SECONDS,
    LENT_SECONDS,
    RecyclingPool,
    size_class,
)
from strideweave.runtime.event_loop import current_runtime, process
from strideweave.runtime.locks import holds_short_lock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from strideweave import TiledEvictable

    TraceFunction = Callable[[FrameType, str, object], object]

PAGE = mmap.PAGESIZE
MIB = 1 << 20


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lent(pool: RecyclingPool, nbytes: int) -> np.ndarray:
    """Memory of the pool, which has room for it."""
    array = pool.take(nbytes)
    assert array is not None
    return array


def address(array: np.ndarray) -> int:
    """Where an array begins."""
    return array.ctypes.data


@given(st.integers(1, 1 << 44))
def test_a_size_is_rounded_up_by_an_eighth_at_most(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size < max(nbytes * 9 / 8, nbytes + PAGE)
    assert size % PAGE == 0
    assert size_class(size) == size


def test_sizes_that_differ_little_share_their_memory() -> None:
    pool = RecyclingPool(64 * MIB)
    first = lent(pool, 5 * MIB)
    place = address(first)
    first[:] = 3
    del first
    again = lent(pool, 5 * MIB - 1000)
    assert (address(again), again.shape) == (place, (5 * MIB - 1000,))
    assert address(lent(pool, 7 * MIB)) != place
    found = pool.statistics()
    assert (found.taken, found.reused) == (3, 1)


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[5:9],
        lambda array: array.view(np.float32)[::3],
        lambda array: array.reshape(2, -1).T,
        lambda array: np.ndarray(8, np.uint8, array, 16),
        memoryview,
        lambda array: np.asarray(memoryview(array)).view(np.int64),
    ],
)
def test_memory_with_a_living_view_is_not_lent_again(view) -> None:
    pool = RecyclingPool(64 * MIB)
    array = lent(pool, MIB)
    array[:] = 7
    part = view(array)
    before = bytes(part)
    del array
    other = lent(pool, MIB)
    other[:] = 1
    assert bytes(part) == before
    assert pool.statistics().lent_bytes == 2 * MIB
    del part
    assert pool.statistics().held_bytes == MIB


class Revived:
    """Comes back to life with its array when the collector has found it."""

    kept: list[np.ndarray] = []

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.self = self

    def __del__(self) -> None:
        Revived.kept.append(self.array)


def test_memory_that_a_finalizer_revives_is_not_lent_again() -> None:
    pool = RecyclingPool(64 * MIB)
    revived = Revived(lent(pool, MIB))
    place = address(revived.array)
    del revived
    gc.collect()
    assert [address(array) for array in Revived.kept] == [place]
    other = lent(pool, MIB)
    assert address(other) != place
    assert pool.statistics().held_bytes == 0
    Revived.kept.clear()
    assert pool.statistics().held_bytes == MIB
    assert address(lent(pool, MIB)) == place


def test_what_is_lent_and_held_stays_within_the_bound_and_the_oldest_makes_room() -> None:
    clock = Clock()
    pool = RecyclingPool(8 * MIB, clock)
    arrays = [lent(pool, 2 * MIB), lent(pool, 3 * MIB)]
    assert pool.take(4 * MIB) is None
    assert [pool.has_room(size * MIB) for size in (3, 4)] == [True, False]
    while arrays:
        arrays.pop()
        pool.statistics()
        clock.now += 0.1
    assert pool.statistics().held_bytes == 5 * MIB
    kept = lent(pool, 4 * MIB)
    found = pool.statistics()
    assert (found.lent_bytes, found.held_bytes, found.returned_bytes) == (4 * MIB, 2 * MIB, 3 * MIB)
    assert pool.take(9 * MIB) is None
    assert kept.nbytes + found.held_bytes <= found.limit_bytes == 8 * MIB


@pytest.mark.parametrize("dropped_first", [True, False])
def test_a_loop_of_results_recycles_whichever_of_two_goes_first(dropped_first: bool) -> None:
    pool = RecyclingPool(limit_bytes=8 * MIB)
    tiles = pool.take(4 * MIB)
    assert tiles is not None
    pool.give_way(tiles)
    result = None
    for _ in range(6):
        if dropped_first:
            result = None
        result = pool.take(4 * MIB)  # who did not drop the last one has two for a moment
        assert result is not None
    found = pool.statistics()
    assert (found.taken, found.reused) == (7, 5 if dropped_first else 4)


def test_what_gives_way_is_recycled_as_long_as_no_result_needs_its_room() -> None:
    pool = RecyclingPool(8 * MIB)
    arrays = [lent(pool, 2 * MIB) for _ in range(4)]
    assert pool.take(3 * MIB) is None
    for array in arrays[:3]:
        pool.give_way(array)
    assert pool.take(5 * MIB) is None  # more than half of the bound
    assert pool.statistics().lent_bytes == 8 * MIB
    result = lent(pool, 3 * MIB)
    assert pool.statistics().lent_bytes == 7 * MIB  # in the room of the first two
    assert pool.take(4 * MIB) is None  # the third alone would not do
    assert not pool.has_room(2 * MIB)
    assert pool.statistics().lent_bytes == 7 * MIB
    for array in arrays:
        array[:] = 1  # whoever has it keeps it
    del array, arrays, result
    found = pool.statistics()
    assert (found.held_bytes, found.lent_bytes) == (7 * MIB, 0)
    pool.give_way(np.empty(1, np.uint8))  # not lent: nothing happens


def test_what_nobody_asks_for_goes_back_and_what_lives_long_is_forgotten() -> None:
    clock = Clock()
    pool = RecyclingPool(8 * MIB, clock)
    long, short = lent(pool, MIB), lent(pool, 2 * MIB)
    del short
    assert pool.expire()
    assert pool.statistics().held_bytes == 2 * MIB
    clock.now = IDLE_SECONDS - 0.1
    assert pool.expire()
    assert pool.statistics().held_bytes == 2 * MIB
    clock.now = IDLE_SECONDS
    assert pool.expire()
    assert (pool.statistics().held_bytes, pool.statistics().lent_bytes) == (0, MIB)
    clock.now = LENT_SECONDS
    assert not pool.expire()
    long[:] = 1
    del long
    found = pool.statistics()
    assert (found.held_bytes, found.lent_bytes, found.returned_bytes) == (0, 0, 2 * MIB)


def test_trim_gives_back_what_is_held_and_a_closed_pool_lends_nothing() -> None:
    pool = RecyclingPool(8 * MIB)
    kept = lent(pool, MIB)
    lent(pool, 2 * MIB)
    assert pool.trim() == 2 * MIB
    assert pool.trim() == 0
    pool.close()
    kept[:] = 1
    assert pool.take(MIB) is None
    del kept
    assert pool.statistics().held_bytes == 0


def test_where_the_system_refuses_memory_what_is_held_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RecyclingPool(64 * MIB)
    lent(pool, 4 * MIB)
    map_memory = recycling_pool.map_memory

    def tight(nbytes: int) -> mmap.mmap:
        if pool.statistics().held_bytes:
            raise MemoryError("no memory")
        return map_memory(nbytes)

    monkeypatch.setattr(recycling_pool, "map_memory", tight)
    assert lent(pool, 8 * MIB).nbytes == 8 * MIB

    def never(nbytes: int) -> mmap.mmap:
        raise MemoryError("no memory")

    monkeypatch.setattr(recycling_pool, "map_memory", never)
    pool.trim()
    before = pool.statistics().lent_bytes
    with pytest.raises(MemoryError):
        pool.take(16 * MIB)
    assert pool.statistics().lent_bytes == before


def test_a_finalizer_that_interrupts_the_pool_gets_nothing_and_changes_nothing() -> None:
    """The collector may run finalizers of anybody at any statement, also inside the pool's critical sections."""
    found: list[object] = []

    class Interrupted(Clock):
        def __call__(self) -> float:
            if holds_short_lock():
                found.append((pool.take(MIB), pool.has_room(MIB), pool.trim(), pool.statistics().lent_bytes))
            return self.now

    pool = RecyclingPool(8 * MIB, Interrupted())
    first = lent(pool, MIB)
    place = address(first)
    del first
    again = lent(pool, MIB)
    assert found == [(None, False, 0, MIB)]
    assert address(again) == place
    now = pool.statistics()
    assert (now.lent_bytes, now.held_bytes, now.taken, now.reused) == (MIB, 0, 2, 1)


def test_an_interrupted_call_leaves_nothing_lent() -> None:
    """Ctrl-C may come at any statement of the thread that takes."""

    class Interrupting(Clock):
        def __call__(self) -> float:
            if self.now < 0:
                raise KeyboardInterrupt
            return self.now

    clock = Interrupting()
    pool = RecyclingPool(8 * MIB, clock)
    for _ in range(3):
        clock.now = -1.0
        with pytest.raises(KeyboardInterrupt):
            pool.take(4 * MIB)
        clock.now = 1.0
        assert pool.statistics().lent_bytes == 0
    both = lent(pool, 4 * MIB), lent(pool, 4 * MIB)
    assert pool.statistics().lent_bytes == 8 * MIB
    del both
    assert pool.statistics().held_bytes == 8 * MIB


def interrupted(statement: int, call: Callable[[], object]) -> bool:
    """Make a call and raise KeyboardInterrupt before so many of the pool's statements; whether it got that far."""
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal seen
        if frame.f_code.co_filename != recycling_pool.__file__:
            return None
        # A signal is never handled between the body of such a block and its end, where the tracer is called too.
        if event == "line" and "with short_lock" not in linecache.getline(
            recycling_pool.__file__, frame.f_lineno
        ):
            seen += 1
            if seen == statement:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("first", ["take", "statistics", "expire", "trim"])
def test_whatever_statement_is_interrupted_the_pool_counts_what_it_has(first: str) -> None:
    calls: dict[str, Callable[[RecyclingPool], object]] = {
        "take": lambda pool: pool.take(MIB),
        "statistics": RecyclingPool.statistics,
        "expire": RecyclingPool.expire,
        "trim": RecyclingPool.trim,
    }
    statement, got_there = 0, True
    while got_there:
        statement += 1
        clock = Clock()
        pool = RecyclingPool(5 * MIB, clock)
        lives = [lent(pool, MIB), lent(pool, MIB)]
        dies = [lent(pool, 2 * MIB), lent(pool, MIB)]
        del dies[0]
        pool.statistics()
        dies.clear()
        got_there = interrupted(statement, lambda pool=pool: calls[first](pool))
        assert not holds_short_lock()
        assert pool.statistics().lent_bytes in (2 * MIB, 3 * MIB)  # one more where its end was forgotten
        clock.now += LENT_SECONDS
        pool.expire()
        assert pool.statistics().lent_bytes == 0
        assert pool.statistics().held_bytes == sum(map(len, held(pool)))
        again = [lent(pool, MIB) for _ in range(5)]
        assert (pool.statistics().lent_bytes, pool.take(MIB)) == (5 * MIB, None)
        del again
        assert pool.statistics().held_bytes == sum(map(len, held(pool))) == 5 * MIB
        assert lives[0].nbytes == MIB
    assert statement > 5


def held(pool: RecyclingPool) -> list[mmap.mmap]:
    """The mappings that a pool holds."""
    return [mapping for idle in pool._held.values() for _, mapping in idle]


def test_an_interrupted_watch_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, posted = RecyclingPool(8 * MIB), []

    def post(call: object) -> None:
        posted.append(call)
        if len(posted) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(process, "runtime", SimpleNamespace(find_service=lambda _: pool, post=post))
    with pytest.raises(KeyboardInterrupt):
        pool.take(MIB)
    kept = lent(pool, MIB), lent(pool, MIB)
    assert len(posted) == 2
    assert pool.statistics().lent_bytes == 2 * MIB
    del kept


def test_threads_never_get_the_same_memory() -> None:
    pool = RecyclingPool(64 * MIB)
    mixed: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            array = lent(pool, MIB)
            array[::PAGE] = mark
            if not (array[::PAGE] == mark).all():
                mixed.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = pool.statistics()
    assert mixed == []
    assert (found.taken, found.lent_bytes) == (800, 0)
    assert found.held_bytes <= 8 * MIB  # a thread lets go of its last array when it has the next one


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_keeps_what_is_in_use_and_gives_back_the_rest() -> None:
    pool = RecyclingPool(64 * MIB)
    kept = lent(pool, MIB)
    kept[:] = 5
    lent(pool, 2 * MIB)
    assert pool.statistics().held_bytes == 2 * MIB

    def gives_back() -> None:
        assert (kept == 5).all()
        assert not pool.statistics().held_bytes
        assert pool.take(MIB) is None

    assert in_a_forked_child(gives_back)
    assert pool.statistics().held_bytes == 2 * MIB


def test_the_bound_follows_the_limits_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < RecyclingPool().statistics().limit_bytes <= min(4 << 30, physical // 8)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (160 * MIB, resource.RLIM_INFINITY))
    assert RecyclingPool().statistics().limit_bytes <= 10 * MIB


GROUPS = {
    "second generation": ("0::/app.slice/app.service\n", "app.slice/memory.max"),
    "the group itself": ("0::/app.slice/app.service\n", "app.slice/app.service/memory.max"),
    "inside of a container": ("0::/\n", "memory.max"),
    "first generation": ("3:cpuset:/\n4:cpu,memory:/a:b/c\n0::/\n", "memory/a:b/memory.limit_in_bytes"),
    "a container that sees itself only": ("4:memory:/docker/0f\n", "memory/memory.limit_in_bytes"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_bound_follows_the_limit_of_any_group_that_the_process_is_in(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, place = GROUPS[name]
    (tmp_path / "groups").write_text(groups)
    limit = tmp_path / place
    limit.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(memory_limits, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory_limits, "_GROUP_LIMITS", tmp_path)
    limit.write_text("max\n")
    assert RecyclingPool().statistics().limit_bytes > 10 * MIB
    limit.write_text(f"{160 * MIB}\n")
    assert RecyclingPool().statistics().limit_bytes == 10 * MIB


def test_statistics_and_trim_of_a_process_start_nothing() -> None:
    program = (
        "import threading\n"
        "from strideweave.io import recycling\n"
        "print(recycling.statistics() == recycling.RecyclingStatistics(), recycling.trim())\n"
        "recycling.scratch_array(1 << 21)\n"
        "print(threading.active_count())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0", "1"]


def test_the_results_of_projections_are_recycled() -> None:
    tensor = strideweave.tiled(np.arange(4 * MIB, dtype=np.uint8).reshape(4, MIB), (1, MIB))
    carrier = cast("TiledEvictable", tensor.carrier)
    selection = carrier.select({0: [3, 1]})
    wanted = np.arange(4 * MIB, dtype=np.uint8).reshape(4, MIB)[[3, 1]]
    result = carrier.project(tensor, selection).wait()
    recycling.trim()
    before = recycling.statistics()
    assert before.lent_bytes >= 2 * MIB
    result.carrier.release()
    assert recycling.statistics().held_bytes == 2 * MIB
    again = carrier.project(tensor, selection).wait()
    assert np.array_equal(again.numpy(), wanted)
    after = recycling.statistics()
    assert (after.reused - before.reused, after.taken - before.taken) == (1, 1)
    carrier.release()


def test_results_are_recycled_however_many_tiles_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles, which may stay for long, take memory of the pool too, as long as it has room."""
    monkeypatch.setattr(current_runtime().service(RecyclingPool), "_limit", 8 * MIB)
    recycling.trim()
    values = np.arange(16 * MIB, dtype=np.uint8).reshape(16, MIB)
    tensor = strideweave.tiled(values, (1, MIB), resident=False)
    carrier = cast("TiledEvictable", tensor.carrier)
    carrier.promote(carrier.select({}))
    for chosen in ([3, 1], [2, 15], [7, 0]):
        reused = recycling.statistics().reused
        result = carrier.project(tensor, carrier.select({0: chosen})).wait()
        assert np.array_equal(result.numpy(), values[chosen])
        result.carrier.release()
        assert recycling.statistics().held_bytes == 2 * MIB
    assert recycling.statistics().reused == reused + 1
    carrier.release()


def test_the_runtime_gives_back_what_is_idle_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling_pool, "IDLE_SECONDS", 0.0)
    tensor = strideweave.tiled(np.zeros((4, MIB), np.uint8), (1, MIB))
    carrier = cast("TiledEvictable", tensor.carrier)
    result = carrier.project(tensor, carrier.select({0: [3, 1]})).wait()
    before = recycling.statistics().returned_bytes
    result.carrier.release()
    deadline = time.monotonic() + 60
    while recycling.statistics().returned_bytes == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recycling.statistics().returned_bytes >= before + 2 * MIB
    carrier.release()


def test_memory_that_is_exchanged_is_held_in_place_of_what_stays() -> None:
    pool = RecyclingPool(8 * MIB, Clock())
    kept, given_up = lent(pool, 2 * MIB), aligned_array(2 * MIB)
    place = address(given_up)
    pool.exchange(kept, given_up)
    assert pool.statistics().lent_bytes == 2 * MIB
    view = given_up[5:]
    del given_up
    assert pool.statistics().held_bytes == 0
    del view
    assert (pool.statistics().held_bytes, pool.statistics().lent_bytes) == (2 * MIB, 0)
    assert address(lent(pool, 2 * MIB)) == place != address(kept)
    del kept
    assert pool.statistics().held_bytes == 2 * MIB


def test_only_private_memory_comes_in_place_of_what_is_lent(tmp_path: Path) -> None:
    pool = RecyclingPool(8 * MIB, Clock())
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * MIB))
    with path.open("r+b") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    kept, before = lent(pool, 2 * MIB), pool.statistics()
    for other in (mapped, np.zeros(2 * MIB, np.uint8), aligned_array(MIB // 2)):
        pool.exchange(kept, other)
    pool.exchange(aligned_array(2 * MIB), aligned_array(2 * MIB))
    assert pool.statistics() == before
    del mapped, other
    assert pool.statistics() == before
    pool.exchange(kept, lent(pool, 2 * MIB))
    assert (pool.statistics().held_bytes, pool.statistics().lent_bytes) == (2 * MIB, 0)


def test_a_size_that_is_no_class_is_found_again() -> None:
    pool = RecyclingPool(64 * MIB, Clock())
    pool.exchange(lent(pool, 17 * MIB), aligned_array(17 * MIB))
    array = lent(pool, 17 * MIB)
    assert pool.statistics().reused == 1
    assert pool.statistics().lent_bytes in (17 * MIB, size_class(17 * MIB))
    del array
    assert pool.statistics().lent_bytes == 0


def test_a_destination_that_takes_over_leaves_its_memory_to_the_next_result() -> None:
    """Else a steady loop of projections into one destination would need new memory each time."""
    current_runtime()  # only where it is up memory is recycled
    destination = CPU(2 * MIB, dtype=DType.UInt8)
    reused = recycling.statistics().reused
    places = set()
    for value in range(6):
        result = destination._allocate_result(2 * MIB)
        result._slots[...] = value
        assert destination._take_over(result)
        assert destination.get_value(7) == value
        places.add(destination._slots.ctypes.data)
    assert len(places) <= 3
    assert recycling.statistics().reused >= reused + 4
