"""What an empty request costs beside a bare task round trip, measured in turns in one process.

The *bare* round trip is the least that keeps the contract's shape, a task in a task group of the runtime
loop: the caller posts with ``call_soon_threadsafe``, the loop calls ``TaskGroup.start_soon``, and the task
wakes the caller. A waiting thread is woken by releasing its lock, an awaiting task by setting an
``anyio.Event`` through its own loop. The *request* is ``scope.start(AwaitResult(), noop)`` and then
``handle.wait()`` or ``await handle``.

The two take turns, a few hundred calls at a time, so that whatever else the machine does meets both. The
table gives the median and the quartiles of all calls, and the median and the quartiles of the ratios of
neighbouring turns. The target is a ratio of at most 1.25 with ``wait()``.

Run it: ``python benchmarks/runtime.py [--turns 40] [--calls 200] [--json]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import current_token

from strideweave.runtime import AwaitResult, TaskScope, current_runtime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TARGET = 1.25


async def noop() -> None:
    """The empty request."""


class Bare:
    """A task group in the runtime loop and nothing else."""

    def __init__(self) -> None:
        self._runtime = current_runtime()
        self._open = threading.Event()
        self._runtime.post(self._spawn)
        self._open.wait()

    def _spawn(self) -> None:
        self._runtime.root.start_soon(self._host)

    async def _host(self) -> None:
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as group:
            self._start = partial(loop.call_soon_threadsafe, group.start_soon, context=copy_context())
            self._closing = anyio.Event()
            self._open.set()
            await self._closing.wait()

    def wait(self) -> None:
        gate = threading.Lock()
        gate.acquire()
        self._start(_release, gate)
        gate.acquire()

    async def wait_async(self) -> None:
        event = anyio.Event()
        native: Any = current_token().native_token
        call_soon = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon
        self._start(_set, call_soon, event)
        await event.wait()

    def close(self) -> None:
        self._runtime.post(self._closing.set)


async def _release(gate: threading.Lock) -> None:
    gate.release()


async def _set(call_soon: Callable[[Callable[[], None]], object], event: anyio.Event) -> None:
    call_soon(event.set)


class Request:
    """An empty request of one scope."""

    def __init__(self) -> None:
        self._scope = TaskScope("benchmark")

    def wait(self) -> None:
        self._scope.start(AwaitResult(), noop).wait()

    async def wait_async(self) -> None:
        await self._scope.start(AwaitResult(), noop)

    def close(self) -> None:
        self._scope.close()


def time_calls(call: Callable[[], None], calls: int) -> list[float]:
    clock, times = time.perf_counter, []
    for _ in range(calls):
        start = clock()
        call()
        times.append(clock() - start)
    return times


async def time_awaits(call: Callable[[], Awaitable[None]], calls: int) -> list[float]:
    clock, times = time.perf_counter, []
    for _ in range(calls):
        start = clock()
        await call()
        times.append(clock() - start)
    return times


def compare_waits(turns: int, calls: int) -> dict[str, Any]:
    bare, request = Bare(), Request()
    pairs = [(time_calls(bare.wait, calls), time_calls(request.wait, calls)) for _ in range(turns + 2)]
    bare.close()
    request.close()
    return summary(pairs[2:])


async def compare_awaits(turns: int, calls: int) -> dict[str, Any]:
    bare, request = Bare(), Request()
    pairs = [
        (await time_awaits(bare.wait_async, calls), await time_awaits(request.wait_async, calls))
        for _ in range(turns + 2)
    ]
    bare.close()
    request.close()
    return summary(pairs[2:])


def summary(pairs: list[tuple[list[float], list[float]]]) -> dict[str, Any]:
    """Reduce turns of (bare, request) times to medians and quartiles, in microseconds and as ratios."""
    ratios = [statistics.median(request) / statistics.median(bare) for bare, request in pairs]
    return {
        "bare": quartiles([1e6 * t for bare, _ in pairs for t in bare]),
        "request": quartiles([1e6 * t for _, request in pairs for t in request]),
        "ratio": quartiles(ratios),
    }


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def with_uvloop(turns: int, calls: int) -> dict[str, Any] | None:
    try:
        import uvloop  # noqa: PLC0415  optional
    except ImportError:
        return None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(compare_awaits(turns, calls))


def measure(turns: int, calls: int) -> dict[str, dict[str, Any]]:
    results = {"wait()": compare_waits(turns, calls)}
    results["await, asyncio"] = anyio.run(compare_awaits, turns, calls, backend="asyncio")
    uvloop = with_uvloop(turns, calls)
    if uvloop is not None:
        results["await, uvloop"] = uvloop
    results["await, trio"] = anyio.run(compare_awaits, turns, calls, backend="trio")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = measure(options.turns, options.calls)
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        print(f"{'observer':<16}{'bare, us':>24}{'request, us':>24}{'ratio':>24}")
        for name, row in results.items():
            cells = ("{1:.1f} ({0:.1f}..{2:.1f})".format(*row[key]) for key in ("bare", "request"))
            print(f"{name:<16}" + "".join(f"{cell:>24}" for cell in cells), end="")
            print("{:>24}".format("{1:.2f} ({0:.2f}..{2:.2f})".format(*row["ratio"])))
    return 0 if results["wait()"]["ratio"][1] <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
