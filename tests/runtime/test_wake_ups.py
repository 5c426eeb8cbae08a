"""WakeUps: many tasks of one loop are woken by one call, and a loop that is gone harms nobody."""

import asyncio
import contextlib
import contextvars
import gc
import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
import uvloop

from interruptions import interrupted_everywhere
from strideweave.runtime import AwaitResult
from strideweave.runtime.wake_ups import WakeUps, wake_ups_of

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def loop(request):
    loop = request.param()
    yield loop
    loop.close()


class Watched:
    """A loop that counts the calls that come from other threads; the real one does the rest."""

    def __init__(self, loop):
        self.loop = loop
        self.calls = 0

    def call_soon_threadsafe(self, *args):
        self.calls += 1
        self.loop.call_soon_threadsafe(*args)


def test_one_call_wakes_all_who_were_to_be_woken_by_then(loop):
    watched = Watched(loop)
    wake_ups = WakeUps(watched)
    futures = [loop.create_future() for _ in range(20)]
    for future in futures:
        wake_ups.wake(future)
    assert watched.calls == 1
    loop.run_until_complete(asyncio.wait_for(asyncio.gather(*futures), 60))
    late = loop.create_future()
    wake_ups.wake(late)
    loop.run_until_complete(asyncio.wait_for(late, 60))
    assert watched.calls == 2


def test_what_has_ended_by_then_is_left_alone(loop):
    wake_ups = WakeUps(loop)
    cancelled, woken = loop.create_future(), loop.create_future()
    cancelled.cancel()
    wake_ups.wake(cancelled)
    wake_ups.wake(woken)
    loop.run_until_complete(asyncio.wait_for(woken, 60))
    assert cancelled.cancelled()


def test_an_interrupted_wake_up_leaves_the_loop_reachable(loop):
    """Ctrl-C may come at any statement of the thread that wakes."""

    class Interrupted(Watched):
        def call_soon_threadsafe(self, *args):
            if not self.calls:
                self.calls += 1
                other = threading.Thread(target=wake_ups.wake, args=(relying,))
                other.start()
                other.join()
                raise KeyboardInterrupt
            super().call_soon_threadsafe(*args)

    relying = loop.create_future()
    interrupted = Interrupted(loop)
    wake_ups = WakeUps(interrupted)
    with pytest.raises(KeyboardInterrupt):
        wake_ups.wake(loop.create_future())
    assert interrupted.calls == 2
    loop.run_until_complete(asyncio.wait_for(relying, 60))
    future = loop.create_future()
    wake_ups.wake(future)
    assert interrupted.calls == 3
    loop.run_until_complete(asyncio.wait_for(future, 60))


def test_a_loop_that_is_interrupted_while_it_wakes_goes_on_when_it_runs_again():
    """Ctrl-C stops ``run_until_complete`` in the middle of a callback; the caller may run the loop again."""
    loop = asyncio.new_event_loop()

    class Interrupting:
        times = 0

        def done(self):
            self.times += 1
            if self.times == 1:
                raise KeyboardInterrupt
            return True

    interrupting, future = Interrupting(), loop.create_future()
    wake_ups = WakeUps(loop)
    wake_ups.wake(interrupting)
    wake_ups.wake(future)
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(future)
    loop.run_until_complete(asyncio.wait_for(future, 60))
    assert interrupting.times == 2
    loop.close()


@pytest.mark.parametrize("late", [False, True])
def test_wherever_ctrl_c_stops_the_answer_the_loop_still_wakes_who_was_to_be_woken(loop, monkeypatch, late):
    wake_ups = WakeUps(loop)
    waiting, asked = [], []
    orders, answers = SimpleQueue(), SimpleQueue()  # whose methods are no Python, so nothing interrupts them
    read = os.eventfd_read

    def wake_when_told():
        for order in iter(orders.get, None):
            if order == "wake":
                waiting.append(loop.create_future())
                wake_ups.wake(waiting[-1])
            answers.put(order)

    def read_late(counter):
        if late and not asked:
            # Another thread wakes when all were delivered, before the counter is read.
            asked.append(True)
            orders.put("wake")
            answers.get()
        return read(counter)

    other = threading.Thread(target=wake_when_told, daemon=True)
    other.start()
    monkeypatch.setattr("strideweave.runtime.wake_ups.os.eventfd_read", read_late)

    def begin():
        asked.clear()
        waiting[:] = [loop.create_future()]
        wake_ups.wake(waiting[0])
        return lambda: wake_ups._answer(wake_ups._counter)

    async def all_woken():
        orders.put("that is all")
        while answers.get() == "wake":
            pass
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        waiting[:] = [loop.create_future()]  # one that comes later, too
        wake_ups.wake(waiting[0])
        await asyncio.wait_for(waiting[0], 5)

    places = 0
    for _ in interrupted_everywhere(begin):
        loop.run_until_complete(all_woken())
        places += 1
    assert places > 5 or sys.version_info >= (3, 13)  # which tells a trace function of few instructions
    loop.run_until_complete(all_woken())
    orders.put(None)
    other.join()


def test_a_loop_that_has_closed_is_no_error():
    loop = asyncio.new_event_loop()
    wake_ups, future = WakeUps(loop), loop.create_future()
    loop.close()
    wake_ups.wake(future)
    wake_ups.wake(future)
    assert not future.done()
    gone = weakref.ref(loop)
    del loop, future
    gc.collect()
    assert gone() is None, "what could not be woken must not keep it"


@pytest.mark.parametrize("make", LOOPS, ids=["asyncio", "uvloop"])
def test_no_loop_is_kept_alive(make):
    loop = make()
    gone, wake_ups = weakref.ref(loop), wake_ups_of(loop)
    assert wake_ups_of(loop) is wake_ups
    loop.close()
    del loop
    gc.collect()
    assert gone() is None
    elsewhere = asyncio.new_event_loop()
    wake_ups.wake(elsewhere.create_future())
    assert wake_ups_of(elsewhere) is not wake_ups
    elsewhere.close()


class Blind(asyncio.SelectorEventLoop):
    """A loop that watches no files, as some systems have."""

    def add_reader(self, fd, callback, *args):
        raise NotImplementedError


def open_counters():
    folder = Path("/proc/self/fd")
    found = 0
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            found += "eventfd" in str(entry.readlink())
    return found


counted = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no list of open files")


@pytest.mark.parametrize("make", [*LOOPS, Blind], ids=["asyncio", "uvloop", "blind"])
def test_a_task_is_woken_from_another_thread(make):
    async def main():
        wake_ups, woken = wake_ups_of(asyncio.get_running_loop()), []
        for _ in range(5):
            futures = [asyncio.get_running_loop().create_future() for _ in range(3)]
            thread = threading.Thread(target=lambda futures=futures: [wake_ups.wake(f) for f in futures])
            thread.start()
            await asyncio.wait_for(asyncio.gather(*futures), 60)
            thread.join()
            woken.append(1)
        return len(woken)

    loop = make()
    assert loop.run_until_complete(main()) == 5
    loop.close()


@counted
@pytest.mark.parametrize("make", LOOPS, ids=["asyncio", "uvloop"])
def test_loops_that_come_and_go_leave_no_counter(make):
    async def main():
        wake_ups_of(asyncio.get_running_loop())

    def run():
        loop = make()
        loop.run_until_complete(main())
        loop.close()

    def opened():
        gc.collect()
        before = open_counters()
        for _ in range(20):
            run()
        gc.collect()
        return open_counters() - before

    with ThreadPoolExecutor(1) as thread:  # a new one, which goes on when its last loop has closed
        assert thread.submit(opened).result() == 0


@counted
def test_loops_that_take_turns_keep_their_counters():
    loops = [asyncio.new_event_loop() for _ in range(2)]

    async def main():
        return wake_ups_of(asyncio.get_running_loop())

    first = [loop.run_until_complete(main()) for loop in loops]
    before = open_counters()
    for _ in range(5):
        assert [loop.run_until_complete(main()) for loop in loops] == first
    assert open_counters() == before
    for loop in loops:
        loop.close()


def test_the_loop_keeps_nothing_of_the_task_that_came_first():
    loop = asyncio.new_event_loop()
    variable = contextvars.ContextVar("variable")

    class Value:
        pass

    async def main():
        value = Value()
        variable.set(value)
        wake_ups_of(loop)
        return weakref.ref(value)

    gone = loop.run_until_complete(main())
    gc.collect()
    assert gone() is None
    loop.close()


def test_handles_that_end_together_call_a_loop_once(loop, monkeypatch):
    """However many tasks sleep in it."""
    handles = [AwaitResult() for _ in range(30)]
    calls = []
    deliver = WakeUps._deliver

    def counted(self):
        calls.append(len(self._futures))
        deliver(self)

    monkeypatch.setattr(WakeUps, "_deliver", counted)

    def finish():
        for i, handle in enumerate(handles):
            handle._finish(i)

    async def main():
        async def observe(handle):
            return await handle

        tasks = [asyncio.ensure_future(observe(handle)) for handle in handles]
        await asyncio.sleep(0)
        assert all(handle._wakers for handle in handles)
        thread = threading.Thread(target=finish)
        thread.start()
        thread.join()  # this loop cannot run meanwhile
        return await asyncio.gather(*tasks)

    assert loop.run_until_complete(asyncio.wait_for(main(), 60)) == list(range(30))
    assert calls == [30]
