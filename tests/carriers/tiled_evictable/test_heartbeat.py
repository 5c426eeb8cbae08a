"""A loop that waits for a large move stays responsive: its heartbeat is not late.

A heartbeat is a task that sleeps for a millisecond and notes how much later than that it woke up. The worst
lateness of a window counts, and of five windows the median.

How it is judged. Each window with a move follows a window in which the same loop with the same heartbeat only
sleeps: the baseline, which a busy machine makes late too. What the move adds to the baseline must be at most
5 ms, median over median.

On a machine with few CPUs that difference also measures who got them. A second figure may decide instead:
the lateness less the time in which the kernel says that it kept a thread of this process waiting for a CPU
although it was ready to run (field 2 of ``schedstat``). That covers the thread of the loop, and a thread that was
put aside while it held the interpreter's lock. It is taken in both windows alike, and what the move adds must
again be at most 5 ms. A thread that keeps the interpreter to itself is running or holding a lock, not waiting for a
CPU, and is not excused: the last test here proves that it is found.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import pytest

from strideweave import CPU, FileBacked, Tensor, TiledEvictable
from strideweave.layout import row_major

pytestmark = pytest.mark.anyio

LIMIT = 5e-3
BEAT = 1e-3
BASELINE_OF_A_QUIET_MACHINE = 1e-3
WINDOWS = 5
TILES, TILE_BYTES = 1024, 1 << 20  # 1 GiB
SLOTS = TILE_BYTES // 4


@dataclass
class Lateness:
    """The worst of one window, in seconds."""

    worst: float = 0.0
    unexcused: float = 0.0  # without the time in which threads of the process waited for a CPU


class Waiting:
    """How long each thread of this process was ready to run and had no CPU; nothing where no system tells."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._files.values():
            os.close(number)

    def seconds(self) -> dict[str, float]:
        found = {}
        with suppress(FileNotFoundError):  # no such directory on this system
            for thread in os.listdir("/proc/self/task"):  # noqa: PTH208  a thousand times a second
                with suppress(OSError):  # the thread ended meanwhile
                    if thread not in self._files:
                        name = f"/proc/self/task/{thread}/schedstat"
                        self._files[thread] = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
                    found[thread] = int(os.pread(self._files[thread], 64, 0).split()[1]) * 1e-9
        return found


def excuse(before: dict[str, float], after: dict[str, float]) -> float:
    """How long the calling thread waited for a CPU, and at most one other, which may have held the lock, after it."""
    waited = {thread: after[thread] - before.get(thread, 0.0) for thread in after}
    own = waited.pop(str(threading.get_native_id()), 0.0)
    return own + max(waited.values(), default=0.0)


async def heartbeat(lateness: Lateness, stop: anyio.Event) -> None:
    clock = time.perf_counter
    with Waiting() as waiting:
        while not stop.is_set():
            before = waiting.seconds()
            due = clock() + BEAT
            await anyio.sleep(BEAT)
            late = clock() - due
            if late > lateness.unexcused:  # else it is no record whatever may be taken off
                lateness.unexcused = max(lateness.unexcused, late - excuse(before, waiting.seconds()))
            lateness.worst = max(lateness.worst, late)


async def watch(work: Callable[[], Awaitable[object]]) -> Lateness:
    """Let the heart beat while ``work`` is awaited."""
    lateness, stop = Lateness(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heartbeat, lateness, stop)
        await anyio.sleep(5 * BEAT)
        lateness.worst = lateness.unexcused = 0.0  # it beats now
        await work()
        stop.set()
    return lateness


def added(moves: list[Lateness], baseline: list[Lateness], figure: str) -> float:
    """What moves add to the baseline, median over median."""
    median = {
        name: statistics.median(getattr(lateness, figure) for lateness in windows)
        for name, windows in (("moves", moves), ("baseline", baseline))
    }
    return median["moves"] - median["baseline"]


def is_busy(baseline: list[Lateness]) -> bool:
    return statistics.median(window.worst for window in baseline) > BASELINE_OF_A_QUIET_MACHINE


def judge(moves: list[Lateness], baseline: list[Lateness]) -> tuple[bool, str]:
    """Say whether the heartbeat kept its time, as the module's docstring explains, and what was measured."""
    over = added(moves, baseline, "worst")
    busy = is_busy(baseline)
    unexcused = added(moves, baseline, "unexcused")
    report = (
        f"over the baseline: {1e3 * over:.2f} ms, unexcused: {1e3 * unexcused:.2f} ms, busy machine: {busy}\n"
        + "\n".join(
            f"  move {1e3 * move.worst:7.2f} ({1e3 * move.unexcused:7.2f})   "
            f"baseline {1e3 * idle.worst:7.2f} ({1e3 * idle.unexcused:7.2f})"
            for move, idle in zip(moves, baseline, strict=True)
        )
    )
    return over <= LIMIT or unexcused <= LIMIT, report


class Gibibyte:
    """1 GiB of tiles on disk, and the memory that a quarter of them is projected into."""

    def __init__(self) -> None:
        self.carrier = TiledEvictable(CPU(TILES * SLOTS), FileBacked(), (TILES, 1), (1, SLOTS))
        self.tensor = Tensor(self.carrier, 0, row_major(TILES, SLOTS))
        self.destination = CPU(TILES // 4 * SLOTS)
        self.every = self.carrier.select({})
        self.quarter = self.carrier.select({0: range(TILES // 4)})
        self.rest = self.carrier.select({0: range(TILES // 4, TILES)})
        self.rounds = 0
        self.carrier.evict(self.every)

    async def move(self) -> None:
        """Bring all of it to memory, a quarter by a projection; write to every tile; evict all, dirty."""
        await self.carrier.project(self.tensor, self.quarter, self.destination)
        await self.carrier.promote_async(self.rest)
        self.rounds += 1
        for tile in range(TILES):
            self.carrier[tile * SLOTS] = tile + self.rounds
            if tile % 8 == 0:
                await anyio.lowlevel.checkpoint()
        await self.carrier.evict_async(self.every)

    def check(self) -> None:
        """What was written last is in the file, and nothing else changed."""
        assert len(self.carrier.primary_tiles) == 0
        for tile in (0, 1, TILES // 2, TILES - 1):
            found = [self.carrier[tile * SLOTS + slot] for slot in (0, 1, SLOTS - 1)]
            assert found == [tile + self.rounds, 0, 0]
        assert self.destination[SLOTS] == 1 + self.rounds - 1  # projected before the last writes


@pytest.fixture(scope="module")
def gibibyte():
    gibibyte = Gibibyte()
    yield gibibyte
    gibibyte.carrier.release()
    gibibyte.destination.release()


@pytest.mark.slow
async def test_the_heartbeat_of_the_loop_is_not_late_while_a_gibibyte_moves(gibibyte):
    """At most 5 ms over the baseline, in the median of five moves.

    Measured anew, twice at most, on a busy machine; where even an idle loop is late there and no attempt could
    excuse it, nothing was measured but the machine, and the test says so by skipping.
    """
    for _ in range(3):
        moves, baseline = [], []
        for _ in range(WINDOWS):
            baseline.append(await watch(lambda: anyio.sleep(0.6)))
            moves.append(await watch(gibibyte.move))
        gibibyte.check()
        kept_time, report = judge(moves, baseline)
        print(report)
        if kept_time or not is_busy(baseline):
            break
    if not kept_time and is_busy(baseline):
        pytest.skip(f"an idle loop is late on this machine too, so lateness cannot be judged: {report}")
    assert kept_time, report


async def test_a_thread_that_keeps_the_interpreter_is_found():
    """On a busy machine as well: the measure must be able to fail."""

    def hog() -> None:
        for _ in range(3):  # one would do: the worst of the window counts
            sum(range(6_000_000))  # one instruction of some 60 ms, in which no other thread has a turn
            time.sleep(0.02)

    moves = [await watch(lambda: anyio.to_thread.run_sync(hog)) for _ in range(WINDOWS)]
    baseline = [await watch(lambda: anyio.sleep(0.2)) for _ in range(WINDOWS)]
    kept_time, report = judge(moves, baseline)
    assert not kept_time, report
