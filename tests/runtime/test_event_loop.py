"""EventLoop: one per process, started by its first use, with services that live as long as it does."""

import asyncio
import threading
import time

import anyio
import anyio.lowlevel
import pytest

from strideweave.runtime import AwaitResult, TaskScope, current_runtime, statistics
from strideweave.runtime.await_result import DroppedAtExit
from strideweave.runtime.event_loop import EventLoop, process


async def give(value=None):
    return value


@pytest.fixture
def fresh_runtime(monkeypatch):
    """A runtime of the test's own in place of the process's; ended afterwards."""
    monkeypatch.setattr(process, "runtime", None)
    yield current_runtime
    runtime = process.runtime
    if runtime is not None:
        runtime.ask_to_stop()
        assert runtime.join(30)
        runtime.close_services()


def test_threads_that_race_for_the_first_use_get_one_loop(fresh_runtime):
    barrier = threading.Barrier(8)
    found = []

    def first_use():
        barrier.wait()
        found.append(fresh_runtime())

    threads = [threading.Thread(target=first_use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1


def test_the_loop_is_asyncio_in_a_daemon_thread_of_its_own():
    seen = []
    done = threading.Event()

    def look():
        seen.extend([threading.current_thread(), asyncio.get_running_loop()])
        done.set()

    current_runtime().post(look)
    done.wait()
    thread, loop = seen
    assert (thread.name, thread.daemon) == ("strideweave-runtime", True)
    assert thread is not threading.main_thread()
    assert isinstance(loop, asyncio.AbstractEventLoop)


def test_the_first_use_has_no_module_to_import(run_program):
    """Which the loop of whoever happens to come first would wait for."""
    done = run_program("""
        before = set(sys.modules)
        found = start(value, 7).wait()
        say(found, sorted(name for name in set(sys.modules) - before if name.startswith("anyio")))
    """)
    assert (done.lines, done.code) == (["cleanup", "7 []"], 0), done.errors


def test_calls_run_in_the_order_posted():
    seen = []
    done = threading.Event()
    for i in range(100):
        current_runtime().post(seen.append, i)
    current_runtime().post(done.set)
    done.wait()
    assert seen == list(range(100))


@pytest.fixture
def busy_loop(fresh_runtime, monkeypatch):
    """A runtime whose loop makes no posted call until the test opens the gate; gives gate and wake-ups."""
    runtime = fresh_runtime()
    gate, busy, woken = threading.Event(), threading.Event(), []

    def hold():
        busy.set()
        gate.wait()

    runtime.post(hold)
    busy.wait()
    ring = runtime._inbox.ring

    def watched():
        woken.append(threading.current_thread())
        ring()

    monkeypatch.setattr(runtime._inbox, "ring", watched)
    yield runtime, gate, woken
    gate.set()


def test_a_loop_that_is_awake_needs_no_wake_up(busy_loop):
    runtime, gate, woken = busy_loop
    seen, done = [], threading.Event()
    for i in range(50):
        runtime.post(seen.append, i)
    runtime.post(done.set)
    assert woken == []
    gate.set()
    done.wait()
    assert seen == list(range(50))


def test_one_wake_up_serves_all_that_is_posted_until_the_loop_is_up(busy_loop, monkeypatch):
    runtime, gate, woken = busy_loop
    done = threading.Event()
    monkeypatch.setattr(runtime._inbox, "_asleep", True)  # as if it had just begun to wait
    for _ in range(50):
        runtime.post(list)
    runtime.post(done.set)
    assert woken == [threading.current_thread()]
    gate.set()
    assert done.wait(60)


def test_a_burst_of_posts_leaves_turns_to_what_the_loop_has_to_do_besides(busy_loop):
    runtime, gate, _ = busy_loop
    seen, done = [], threading.Event()
    runtime.post(lambda: asyncio.get_running_loop().call_soon(seen.append, "besides"))
    for i in range(50):
        runtime.post(seen.append, i)
    runtime.post(done.set)
    gate.set()
    assert done.wait(60)
    assert seen.index("besides") < 10
    seen.remove("besides")
    assert seen == list(range(50))


def test_a_posted_call_that_fails_does_not_keep_the_others_from_being_made(busy_loop, caplog):
    runtime, gate, _ = busy_loop
    done = threading.Event()
    runtime.post([].pop)
    runtime.post(done.set)
    gate.set()
    assert done.wait(60)
    assert "a call posted to the runtime's loop failed" in caplog.text


@pytest.fixture
def sleeping_loop(fresh_runtime):
    """A runtime whose loop waits in its selector."""
    runtime = fresh_runtime()
    while not runtime._inbox._asleep:
        time.sleep(0.001)
    return runtime


def test_an_interrupted_post_wakes_the_loop_for_those_who_relied_on_it(sleeping_loop, monkeypatch):
    ring, times, done = sleeping_loop._inbox.ring, [], threading.Event()

    def interrupted():
        times.append(None)
        if len(times) == 1:
            other = threading.Thread(target=sleeping_loop.post, args=(done.set,))
            other.start()
            other.join()
            raise KeyboardInterrupt
        ring()

    monkeypatch.setattr(sleeping_loop._inbox, "ring", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sleeping_loop.post(list)
    assert done.wait(60)


def test_an_interrupted_post_leaves_the_loop_reachable(sleeping_loop, monkeypatch):
    """Ctrl-C may come at any statement of the posting thread."""
    with monkeypatch.context() as patch:

        def interrupted(*_, **__):
            raise KeyboardInterrupt

        patch.setattr(sleeping_loop._inbox, "ring", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sleeping_loop.post(list)
    done = threading.Event()
    sleeping_loop.post(done.set)
    assert done.wait(60)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_first_use_inside_a_callers_loop_takes_nothing_of_it_along(fresh_runtime, backend):
    """A runtime started, or posted to, from a trio task must not take itself for trio."""
    scope = TaskScope("test")

    async def sleeping():
        await anyio.lowlevel.checkpoint()
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 0)
        return "slept"

    async def main():
        return await scope.start(AwaitResult(), sleeping)

    assert anyio.run(main, backend=backend) == "slept"
    assert statistics().running
    scope.close()


# --- statistics ---


def test_statistics_start_nothing(fresh_runtime):
    assert not statistics().running
    assert process.runtime is None


def test_statistics_of_the_process(fresh_runtime, gate):
    scope = TaskScope("test")
    scope.start(AwaitResult(), give).wait()
    handle = scope.start(AwaitResult(), gate.hold, OSError("disk"))
    now = statistics()
    assert (now.running, now.scopes, now.started, now.finished, now.failed, now.pending) == (
        True,
        1,
        2,
        1,
        0,
        1,
    )
    gate.open()
    with pytest.raises(OSError, match="disk"):
        handle.wait()
    now = statistics()
    assert (now.started, now.finished, now.failed, now.pending) == (2, 2, 1, 0)


# --- services ---


class Service:
    made = 0

    def __init__(self):
        type(self).made += 1
        self.closed = 0

    def close(self):
        self.closed += 1


def test_a_service_is_made_once_per_runtime(fresh_runtime):
    Service.made = 0
    barrier = threading.Barrier(8)
    found = []

    def use():
        barrier.wait()
        found.append(fresh_runtime().service(Service))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert Service.made == 1
    assert statistics().services == 1


def test_a_service_may_be_built_on_another(fresh_runtime):
    def outer():
        return [fresh_runtime().service(Service)]

    assert fresh_runtime().service(outer) == [fresh_runtime().service(Service)]


def test_services_close_once_and_one_that_fails_does_not_keep_the_others_open(fresh_runtime):
    class Failing(Service):
        def close(self):
            super().close()
            raise OSError("close")

    runtime = fresh_runtime()
    services = [runtime.service(factory) for factory in (Service, Failing, object)]
    runtime.close_services()
    runtime.close_services()
    assert [service.closed for service in services[:2]] == [1, 1]


def test_a_factory_that_fails_makes_no_service(fresh_runtime):
    def failing():
        raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        fresh_runtime().service(failing)
    assert statistics().services == 0


# --- a loop that ends ---


def test_a_loop_that_has_ended_refuses_work_and_the_next_request_starts_another(fresh_runtime):
    runtime = fresh_runtime()
    runtime.ask_to_stop()
    assert runtime.join(30)
    with pytest.raises(RuntimeError, match="has ended"):
        runtime.post(print)
    with pytest.raises(RuntimeError, match="has ended"):
        runtime.service(Service)
    assert fresh_runtime() is not runtime


def test_a_loop_that_is_asked_to_stop_drops_its_requests(fresh_runtime):
    scope = TaskScope("test")
    cleaned = []
    handle = scope.start(AwaitResult(), anyio.sleep_forever, cleanup=lambda: cleaned.append(1))
    runtime = fresh_runtime()
    runtime.ask_to_stop()
    assert runtime.join(30)
    with pytest.raises(DroppedAtExit):
        handle.wait()
    assert (cleaned, scope.pending) == ([1], 0)
    scope.close()


def test_a_crash_of_the_loop_fails_its_requests_and_the_next_one_starts_another(fresh_runtime):
    """Nobody may sleep for ever because the runtime's thread is gone."""
    scope = TaskScope("test")
    cleaned = []
    entered = threading.Event()

    async def held():
        entered.set()
        await anyio.sleep_forever()

    handle = scope.start(AwaitResult(), held, cleanup=lambda: cleaned.append(1))
    entered.wait()
    runtime = fresh_runtime()

    def crash():
        raise SystemExit("crash")

    runtime.post(crash)
    with pytest.raises(RuntimeError):
        handle.wait()
    assert cleaned == [1]
    assert runtime.join(30)
    assert scope.pending == 0
    assert scope.start(AwaitResult(), give, 1).wait() == 1
    assert fresh_runtime() is not runtime
    scope.close()


def test_a_loop_that_cannot_start_says_why(fresh_runtime, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no more sockets")

    monkeypatch.setattr(anyio, "run", refuse)
    with pytest.raises(RuntimeError, match="could not start its event loop") as caught:
        fresh_runtime()
    assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()


def test_ctrl_c_while_the_loop_starts_leaves_no_loop_behind(monkeypatch):
    runtime = EventLoop()

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            raise KeyboardInterrupt

    runtime._up = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        runtime.launch()
    assert runtime.join(30)
    assert not runtime.is_open
