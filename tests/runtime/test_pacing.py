"""PacedSelector: a loop that is busy for long naps, one that waits does not."""

import asyncio
import socket

import pytest

from strideweave.runtime import current_runtime, pacing
from strideweave.runtime.inbox import Inbox
from strideweave.runtime.pacing import BUSY_SECONDS, NAP_SECONDS, PacedSelector, paced_loop


class Clock:
    """Time that passes where the test says so, and while somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.naps = []

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.naps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    return clock


@pytest.fixture
def selector(clock):
    selector = PacedSelector(Inbox())
    yield selector
    selector.close()


def test_a_busy_loop_naps_once_in_a_while(selector, clock):
    for _ in range(40):
        selector.select(0)
        clock.now += BUSY_SECONDS / 10
    assert clock.naps == [NAP_SECONDS] * 3


def test_a_loop_that_waits_now_and_then_is_not_busy(selector, clock):
    for _ in range(40):
        selector.select(0)
        clock.now += BUSY_SECONDS / 2
        selector.select(1e-9)
    assert clock.naps == []


def test_what_is_ready_is_found_after_a_nap_too(selector, clock):
    here, there = socket.socketpair()
    with here, there:
        selector.register(here, 1)
        there.send(b"x")
        clock.now += 2 * BUSY_SECONDS
        assert [key.fileobj for key, _ in selector.select(0)] == [here]
        assert [key.fileobj for key, _ in selector.select()] == [here]
    assert clock.naps == [NAP_SECONDS]


def test_the_runtime_s_loop_is_paced():
    loop = paced_loop(Inbox())
    assert isinstance(loop._selector, PacedSelector)
    loop.close()
    assert isinstance(current_runtime()._loop, asyncio.SelectorEventLoop)
    assert isinstance(current_runtime()._loop._selector, PacedSelector)
