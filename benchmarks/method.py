"""One contender: what it does in a turn, and the loops that time it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.task import Picks

__all__ = ["FRESH", "GIVEN", "AwaitedMethod", "Method", "OverlappingMethod", "Sample", "WrongResultError"]

FRESH, GIVEN = "fresh", "given"

Sample = dict[str, list[float]]
"""Figures of one turn, one of each kind a round: ``seconds``, and what else a case measures."""

_BEAT = 0.001  # seconds between two looks at the clock by the caller's loop


class WrongResultError(Exception):
    """A contender's bytes are not those of the data set."""


def _nothing(_: Any) -> None:
    """What most contenders do before and after a request."""


@dataclass(slots=True)
class Method:
    """A contender of one peer.

    Attributes:
        name: what it is called in the report, without the peer.
        destination: ``"fresh"`` where results go to new memory, ``"given"`` where to memory used before, else empty.
        run: the request, timed.
        prepare: called before each request, untimed.
        settle: called with what ``run`` returned, untimed.
        found: what the verification compares with the tiles asked for, made of what ``run`` returned; None where
            there is nothing to compare, as with a limit of the device.
        cached: how much of its file is in the page cache, where that matters.
        brief: whether curves have it.
        reference: whether it is a limit that others are measured against, and not a peer.
    """

    name: str
    destination: str
    run: Callable[[Picks], Any]
    prepare: Callable[[Picks], Any] = _nothing
    settle: Callable[[Any], Any] = _nothing
    found: Callable[[Any, Picks], Any] | None = lambda result, _: result
    cached: Callable[[], float] | None = None
    brief: bool = False
    reference: bool = False

    def verify(self, picks: Picks, expected: NDArray[Any]) -> None:
        """Do it once and compare every bit with what is expected.

        Raises:
            WrongResultError: something else came out.
        """
        if self.found is None:
            return
        self.prepare(picks)
        result = self.once(picks)
        self.settle(result)
        found = np.ascontiguousarray(self.found(result, picks))
        if found.nbytes != expected.nbytes:
            raise WrongResultError(f"{found.nbytes} bytes came out, {expected.nbytes} were asked for")
        wrong = np.flatnonzero(found.reshape(-1).view(np.uint32) != expected.reshape(-1).view(np.uint32))
        if len(wrong):
            raise WrongResultError(
                f"{len(wrong)} of {found.size} values differ, the first is number {wrong[0]}"
            )

    def once(self, picks: Picks) -> Any:
        """The request, untimed."""
        return self.run(picks)

    def sample(self, requests: Iterable[Picks], budget: float) -> Sample:
        """Time requests one after the other."""
        seconds: list[float] = []
        clock, deadline = time.perf_counter, time.perf_counter() + budget
        with _no_collection():
            for picks in requests:
                self.prepare(picks)
                started = clock()
                result = self.run(picks)
                seconds.append(clock() - started)
                self.settle(result)
                del result
                if clock() > deadline:
                    break
        return {"seconds": seconds}


@dataclass(slots=True)
class AwaitedMethod(Method):
    """A contender whose ``run`` gives an awaitable, awaited in a loop of the caller's.

    Attributes:
        watched: whether to measure by how much the loop is late meanwhile (milliseconds, ``late_ms``).
    """

    run: Callable[[Picks], Awaitable[Any]]
    watched: bool = False

    def once(self, picks: Picks) -> Any:
        """The request, untimed."""

        async def main() -> Any:
            return await self.run(picks)

        return asyncio.run(main())

    def sample(self, requests: Iterable[Picks], budget: float) -> Sample:
        """Time requests one after the other in one loop."""
        return asyncio.run(self._sample(requests, budget))

    async def _sample(self, requests: Iterable[Picks], budget: float) -> Sample:
        seconds: list[float] = []
        late: list[float] = []
        clock, deadline = time.perf_counter, time.perf_counter() + budget
        with _no_collection():
            for picks in requests:
                self.prepare(picks)
                beats: list[float] = []
                watcher = asyncio.create_task(_beat(beats)) if self.watched else None
                await asyncio.sleep(0)  # the watcher's first look
                started = clock()
                result = await self.run(picks)
                seconds.append(clock() - started)
                if watcher is not None:
                    await asyncio.sleep(2 * _BEAT)  # a beat that is due is counted
                    watcher.cancel()
                    late.append(1e3 * max(beats, default=0.0))
                self.settle(result)
                del result
                if clock() > deadline:
                    break
        return {"seconds": seconds, "late_ms": late} if self.watched else {"seconds": seconds}


async def _beat(late: list[float]) -> None:
    """Note at every beat by how many seconds the loop is late."""
    clock = time.perf_counter
    while True:
        due = clock() + _BEAT
        await asyncio.sleep(_BEAT)
        late.append(clock() - due)


def _not_set(_: Picks, __: int) -> Callable[[], Any]:
    raise NotImplementedError("an OverlappingMethod needs begin")


@dataclass(slots=True)
class OverlappingMethod(Method):
    """A contender that begins the next request before it waits for the one before; ``run`` is one by itself.

    The figure of a turn is its time divided by its requests. ``prepare`` is called once, before the first one.

    Attributes:
        begin: begins a request and gives what waits for it and returns its result. The number says which of the
            requests under way it is, so that each has a destination of its own.
        under_way: how many requests are under way at a time.
    """

    begin: Callable[[Picks, int], Callable[[], Any]] = _not_set
    under_way: int = 2

    def once(self, picks: Picks) -> Any:
        """The request beside others for the same tiles in another order, untimed.

        Raises:
            WrongResultError: one of them has other bytes.
        """
        if self.found is None:
            return self.run(picks)
        orders = [np.roll(picks, number) for number in range(self.under_way)]
        waits = [self.begin(one, number) for number, one in enumerate(orders)]
        results = [wait() for wait in waits]
        expected = np.ascontiguousarray(self.found(results[0], picks)).reshape(len(picks), -1).view(np.uint32)
        for number, result in enumerate(results):
            found = np.ascontiguousarray(self.found(result, orders[number])).reshape(len(picks), -1)
            if not np.array_equal(found.view(np.uint32), np.roll(expected, number, axis=0)):
                raise WrongResultError(f"request {number} of {self.under_way} has other bytes than the first")
        return results[0]

    def sample(self, requests: Iterable[Picks], budget: float) -> Sample:
        """Time requests that overlap."""
        asked = list(requests)
        clock = time.perf_counter
        waiting: deque[Callable[[], Any]] = deque()
        done = 0
        with _no_collection():
            self.prepare(asked[0])
            started = clock()
            for picks in asked:
                if len(waiting) == self.under_way:
                    self.settle(waiting.popleft()())
                    if clock() - started > budget:
                        break
                waiting.append(self.begin(picks, done % self.under_way))
                done += 1
            while waiting:
                self.settle(waiting.popleft()())
            seconds = clock() - started
        return {"seconds": [seconds / done]}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the collector of cycles, whose turn would come at random, out of the timed part."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
