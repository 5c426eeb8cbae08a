"""PacedSelector: a loop that is busy for long naps, one that waits does not."""

import asyncio
import contextvars
import socket

import pytest

from strideweave.runtime import current_runtime, pacing
from strideweave.runtime.inbox import Inbox
from strideweave.runtime.pacing import BUSY_SECONDS, NAP_SECONDS, PacedSelector, paced_loop
from strideweave.runtime.thread_role import this_thread
from strideweave.runtime.wake_ups import WakeUps


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


@pytest.fixture
def woken():
    """A loop of a caller's, how to wake a task of it, and how often it was asked to look."""
    rings = []

    class Asked:
        def call_soon_threadsafe(self, *_):
            rings.append(1)

    asked, loop = Asked(), asyncio.new_event_loop()
    yield WakeUps(asked, counter=False), loop.create_future, rings
    loop.close()


def test_a_busy_loop_wakes_others_as_it_naps(selector, clock, woken):
    wake_ups, future, rings = woken
    wake_ups.wake(future())
    for _ in range(4):
        selector.select(0)
        clock.now += BUSY_SECONDS / 4
        wake_ups.wake(future())
    assert (rings, clock.naps) == ([], [])
    selector.select(0)
    assert (rings, clock.naps) == ([1], [NAP_SECONDS])


def test_a_loop_that_has_nothing_to_do_wakes_others_first(selector, woken):
    wake_ups, future, rings = woken
    wake_ups.wake(future())
    selector._inbox.serve(None, contextvars.copy_context())
    selector._inbox.post(list)
    selector.select(1e-9)
    assert rings == [], "a call was to be made"
    selector.select(1e-9)
    assert rings == [1]


def test_others_are_woken_at_once_where_no_loop_of_the_runtime_runs(clock, woken):
    wake_ups, future, rings = woken
    selector = PacedSelector(Inbox())
    wake_ups.wake(future())
    assert rings == []
    selector.close()
    assert rings == [1], "the loop has ended"
    wake_ups._asked = False  # the caller's loop has looked
    wake_ups.wake(future())
    assert rings == [1, 1]
    assert this_thread.put_off is None


def test_a_caller_s_loop_that_cannot_be_woken_ends_neither_the_runtime_s_nor_the_wait_of_others(
    selector, woken, caplog
):
    class Broken:
        def call_soon_threadsafe(self, *_):
            raise OSError("bad file descriptor")

    wake_ups, future, rings = woken
    broken = Broken()
    for each in (WakeUps(broken, counter=False), wake_ups, WakeUps(broken, counter=False)):
        each.wake(future())
    selector.select(1e-9)
    assert rings == [1]
    assert [record.message for record in caplog.records] == [
        "the loop of a caller whose request has ended could not be woken"
    ] * 2
    assert this_thread.put_off == []


def test_what_is_put_off_while_others_are_woken_is_not_lost(selector, woken):
    """A finalizer may end a request at any statement."""
    wake_ups, future, rings = woken

    class Interrupted:
        def call_soon_threadsafe(self, *_):
            wake_ups.wake(future())

    interrupted = Interrupted()
    WakeUps(interrupted, counter=False).wake(future())
    selector.select(1e-9)
    assert rings == [1]
