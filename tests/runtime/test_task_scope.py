"""TaskScope: requests of one carrier, from start to settled."""

import contextvars
import gc
import sys
import threading
import weakref

import anyio
import pytest

from strideweave.errors import PendingWorkError, ReleasedError
from strideweave.runtime import AwaitResult, ScopeStatistics, TaskScope, current_runtime
from strideweave.runtime import statistics as runtime_statistics
from strideweave.runtime.await_result import DroppedAtExit
from waiting import until

pytestmark = pytest.mark.anyio


class Handle(AwaitResult[object]):
    """What a room's own handle looks like."""


async def give(value=None):
    return value


async def fail(error):
    raise error


def flush():
    """Return when the loop has done what was posted before, and what that has led to in a few more turns."""
    for _ in range(8):
        done = threading.Event()
        current_runtime().post(done.set)
        done.wait()


# --- results ---


def test_start_returns_the_handle_it_was_given(scope):
    handle = Handle()
    assert scope.start(handle, give, 5) is handle
    assert handle.wait() == 5


async def test_requests_start_from_any_thread_and_loop(scope):
    """Contract section 6: *from any thread, with or without a loop*."""
    from_thread = []
    thread = threading.Thread(target=lambda: from_thread.append(scope.start(Handle(), give, 1).wait()))
    thread.start()
    assert await scope.start(Handle(), give, 2) == 2
    assert scope.start(Handle(), give, 3).wait() == 3
    thread.join()
    assert from_thread == [1]


def test_start_does_not_wait_for_the_request(scope, gate):
    handle = scope.start(Handle(), gate.hold, 1)
    assert not handle.done
    gate.entered.wait()
    assert not handle.done
    gate.open()
    assert handle.wait() == 1


def test_requests_of_one_scope_run_at_the_same_time(scope, make_gate):
    gates = [make_gate() for _ in range(5)]
    handles = [scope.start(Handle(), gate.hold, i) for i, gate in enumerate(gates)]
    for gate in gates:
        gate.entered.wait()
    for gate in reversed(gates):
        gate.open()
    assert [handle.wait() for handle in handles] == list(range(5))


def test_every_request_runs_when_a_scope_opens_under_a_burst(scope):
    handles = [scope.start(Handle(), give, i) for i in range(200)]
    assert [handle.wait() for handle in handles] == list(range(200))


@pytest.mark.parametrize(
    "error",
    [OSError("disk"), KeyboardInterrupt(), SystemExit(3), ExceptionGroup("own", [OSError()])],
    ids=repr,
)
def test_a_failure_is_the_original_exception_and_harms_no_other_request(scope, gate, error):
    """Contract section 6: *the exception is the original one …, never an exception group*."""
    other = scope.start(Handle(), gate.hold, "other")
    handle = scope.start(Handle(), fail, error)
    with pytest.raises(BaseException) as caught:
        handle.wait()
    assert caught.value is error
    gate.open()
    assert other.wait() == "other"
    assert scope.start(Handle(), give, 1).wait() == 1


def test_a_traceback_shows_the_request_and_nothing_of_the_runtime(scope):
    handle = scope.start(Handle(), fail, OSError())
    with pytest.raises(OSError) as caught:
        handle.wait()
    names = [entry.name for entry in caught.traceback]
    assert names[-1] == "fail"
    assert "run" not in names


@pytest.mark.parametrize(
    "function",
    [lambda: 5, lambda: next(iter(())), None, lambda x: x],
    ids=["int", "StopIteration", "None", "arity"],
)
def test_a_function_that_gives_no_awaitable_fails_the_handle(scope, function):
    handle = scope.start(Handle(), function)
    with pytest.raises((TypeError, RuntimeError)):
        handle.wait()


def test_a_request_that_cancels_itself_fails_alone_cancel(scope, gate):
    other = scope.start(Handle(), gate.hold, "other")

    async def cancelled():
        raise anyio.get_cancelled_exc_class()

    with pytest.raises(RuntimeError, match="ended by CancelledError inside the runtime"):
        scope.start(Handle(), cancelled).wait()
    gate.open()
    assert other.wait() == "other"


async def test_cancelled_awaiter_leaves_the_request_running_cancel(scope, gate):
    """Contract section 6: *cancelling an awaiter or dropping the handle never cancels the request*."""
    handle = scope.start(Handle(), gate.hold, "value")
    with anyio.move_on_after(0) as cancelled:
        await handle
    assert cancelled.cancelled_caught
    assert scope.pending == 1
    gate.open()
    assert await handle == "value"


def test_a_request_awaits_requests_and_may_not_wait_for_them(scope):
    other = TaskScope("other")

    async def nested():
        inner = other.start(Handle(), give, 4)
        with pytest.raises(RuntimeError, match="await the handle instead"):
            inner.wait()
        return await inner + await scope.start(Handle(), give, 1)

    assert scope.start(Handle(), nested).wait() == 5
    other.close()


def test_requests_do_not_see_the_context_variables_of_whoever_starts_them(scope):
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("the caller's")

    async def read():
        return variable.get()

    assert scope.start(Handle(), read).wait() == "unset"


# --- cleanup ---


@pytest.mark.parametrize("error", [None, OSError("disk")], ids=repr)
def test_cleanup_runs_once_and_before_the_handle_is_done(scope, error):
    seen = []
    handle = Handle()

    def clean_up():
        seen.append((handle.done, scope.pending))

    scope.start(handle, give if error is None else fail, error, cleanup=clean_up)
    if error is None:
        handle.wait()
    else:
        with pytest.raises(OSError, match="disk"):
            handle.wait()
    assert seen == [(False, 1)]


def test_cleanup_runs_once_when_the_request_could_not_become_a_task(scope, monkeypatch):
    scope.start(Handle(), give).wait()
    seen = []

    def refuse(*_, **__):
        raise OSError("no task")

    monkeypatch.setattr(scope._group, "start_soon", refuse)
    handle = scope.start(Handle(), give, cleanup=lambda: seen.append(1))
    with pytest.raises(OSError, match="no task"):
        handle.wait()
    assert seen == [1]


def test_cleanup_that_fails_is_an_error_of_its_request_and_not_of_the_loop(scope, caplog):
    def clean_up():
        raise OSError("cleanup")

    with pytest.raises(OSError, match="cleanup"):
        scope.start(Handle(), give, cleanup=clean_up).wait()
    with pytest.raises(ValueError, match="request"):
        scope.start(Handle(), fail, ValueError("request"), cleanup=clean_up).wait()
    assert caplog.text.count("the cleanup of a request of test carrier failed") == 2
    assert scope.start(Handle(), give, 1).wait() == 1


def test_start_that_raises_has_not_cleaned_up_and_leaves_nothing_pending(scope, monkeypatch):
    seen = []

    def refuse(*_):
        raise RuntimeError("no loop")

    with monkeypatch.context() as patch:
        patch.setattr(current_runtime(), "post", refuse)
        with pytest.raises(RuntimeError, match="no loop"):
            scope.start(Handle(), give, cleanup=lambda: seen.append(1))
    assert seen == []
    assert scope.pending == 0
    assert scope.start(Handle(), give, 1, cleanup=lambda: seen.append(1)).wait() == 1
    assert seen == [1]


def test_a_handle_serves_one_request(scope):
    with pytest.raises(ValueError, match="a request needs a new handle"):
        scope.start(Handle.completed(1), give)
    assert scope.pending == 0


# --- the end of a scope ---


def test_close_refuses_while_requests_are_unfinished_and_changes_nothing(gate):
    scope = TaskScope("CPU carrier")
    handles = [scope.start(Handle(), gate.hold, i) for i in range(2)]
    with pytest.raises(PendingWorkError, match=r"CPU carrier has 2 unfinished request") as caught:
        scope.close()
    assert caught.value.pending == 2
    assert scope.start(Handle(), give, 7).wait() == 7
    gate.open()
    assert [handle.wait() for handle in handles] == [0, 1]
    scope.close()
    scope.close()


def test_a_closed_scope_starts_nothing():
    scope = TaskScope("CPU carrier")
    scope.close()
    seen = []
    with pytest.raises(ReleasedError, match="CPU carrier is released"):
        scope.start(Handle(), give, cleanup=lambda: seen.append(1))
    assert seen == []
    assert scope.statistics() == ScopeStatistics(started=0, finished=0, failed=0, pending=0, closed=True)


def test_closing_takes_the_task_group_out_of_the_loop():
    flush()
    before = runtime_statistics().scopes
    scope = TaskScope("test")
    scope.start(Handle(), give).wait()
    assert runtime_statistics().scopes == before + 1
    scope.close()
    flush()
    assert runtime_statistics().scopes == before


def test_close_right_after_wait_never_meets_the_request_it_waited_for():
    """The request is off the list before its outcome is visible, whatever the switch interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(150):
            scope = TaskScope("test")
            scope.start(Handle(), give).wait()
            scope.close()
    finally:
        sys.setswitchinterval(before)


def test_starting_races_with_closing_and_every_accepted_request_ends():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(50):
            scope = TaskScope("test")
            accepted, cleaned = [], []
            barrier = threading.Barrier(3)

            def stream(scope=scope, accepted=accepted, cleaned=cleaned, barrier=barrier):
                barrier.wait()
                try:
                    for _ in range(20):
                        accepted.append(scope.start(Handle(), give, 1, cleanup=lambda: cleaned.append(1)))
                except ReleasedError:
                    return

            threads = [threading.Thread(target=stream) for _ in range(2)]
            for thread in threads:
                thread.start()
            barrier.wait()
            while True:
                try:
                    scope.close()
                    break
                except PendingWorkError:
                    continue
            for thread in threads:
                thread.join()
            assert [handle.wait(60) for handle in accepted] == [1] * len(accepted)
            assert len(cleaned) == len(accepted)
    finally:
        sys.setswitchinterval(before)


def test_an_abandoned_scope_lets_its_requests_end_and_then_goes(gate):
    flush()
    before = runtime_statistics().scopes
    scope = TaskScope("test")
    handle = scope.start(Handle(), gate.hold, 1)
    gate.entered.wait()
    scope.abandon()
    flush()
    assert runtime_statistics().scopes == before + 1
    gate.open()
    assert handle.wait() == 1
    flush()
    assert runtime_statistics().scopes == before
    scope.abandon()


def test_a_request_of_an_abandoned_scope_still_runs():
    scope = TaskScope("test")
    scope.start(Handle(), give).wait()
    scope.abandon()
    assert scope.start(Handle(), give, 1).wait() == 1
    flush()
    assert scope.start(Handle(), give, 2).wait() == 2
    scope.close()


def test_a_scope_stays_known_while_a_request_is_on_its_way_to_the_loop(monkeypatch):
    """Exit and fork look for requests among the open scopes, so one must not slip through as the group closes."""
    scope = TaskScope("test")
    scope.start(Handle(), give).wait()
    runtime = current_runtime()
    post = runtime.post
    known = []

    def post_late(*call):
        monkeypatch.undo()
        scope.abandon()
        flush()
        known.append(scope in runtime.scopes)
        post(*call)

    monkeypatch.setattr(runtime, "post", post_late)
    assert scope.start(Handle(), give, 1).wait() == 1
    assert known == [True]
    scope.close()
    flush()
    assert scope not in runtime.scopes


def test_a_request_dropped_at_exit_is_done_and_wakes_nobody(gate):
    """Only daemon threads can still sleep on it; they stay asleep."""
    scope = TaskScope("test")
    cleaned, woken = [], []
    handle = scope.start(Handle(), gate.hold, cleanup=lambda: cleaned.append(1))
    handle._add_waker(lambda: woken.append(1))
    scope.fail_pending(DroppedAtExit)
    assert (handle.done, scope.pending, cleaned, woken) == (True, 0, [1], [])
    with pytest.raises(RuntimeError, match="dropped because the interpreter is exiting"):
        handle.wait()
    gate.open()
    flush()
    assert (cleaned, woken) == ([1], [])
    scope.close()


# --- garbage ---


class Carrier:
    """What a carrier does with its scope."""

    def __init__(self):
        self.scope = TaskScope("test carrier")
        weakref.finalize(self, TaskScope.abandon, self.scope).atexit = False

    async def hold(self, gate):
        return await gate.hold(type(self).__name__)

    async def fail(self):
        raise OSError("disk")


def test_dropped_carriers_and_handles_leave_the_request_running_and_nothing_behind(make_gate):
    """Contract section 6: *dropping the handle never cancels the request*."""
    flush()
    before = runtime_statistics()
    gates = [make_gate() for _ in range(20)]
    ended = []
    carriers = []
    for gate in gates:
        carrier = Carrier()
        carriers.append(weakref.ref(carrier))
        carrier.scope.start(Handle(), carrier.hold, gate, cleanup=lambda: ended.append(1))
        gate.entered.wait()
        del carrier
    gc.collect()
    assert all(reference() is not None for reference in carriers)  # a pending request keeps its carrier
    for gate in gates:
        gate.open()
    del gate
    while runtime_statistics().scopes > before.scopes:
        gc.collect()
    assert len(ended) == 20
    assert all(reference() is None for reference in carriers)
    after = runtime_statistics()
    assert (after.pending, after.finished - before.finished) == (before.pending, 20)


def test_a_failed_request_keeps_its_carrier_no_longer_than_its_handle_lives():
    carrier = Carrier()
    reference = weakref.ref(carrier)
    handle = carrier.scope.start(Handle(), carrier.fail)
    with pytest.raises(OSError, match="disk"):
        handle.wait()
    flush()
    del carrier
    gc.collect()
    assert reference() is not None  # the traceback shows its frame
    del handle
    gc.collect()
    assert reference() is None


def test_a_finished_request_keeps_neither_its_carrier_nor_its_value():
    class Value:
        pass

    carrier = Carrier()
    handle = carrier.scope.start(Handle(), give, Value())
    references = [weakref.ref(carrier), weakref.ref(handle.wait())]
    flush()
    del carrier, handle
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# --- statistics ---


def test_statistics_count_what_started_ended_failed_and_pends(scope, gate):
    scope.start(Handle(), give).wait()
    with pytest.raises(OSError, match="x"):
        scope.start(Handle(), fail, OSError("x")).wait()
    handle = scope.start(Handle(), gate.hold)
    assert scope.statistics() == ScopeStatistics(started=3, finished=2, failed=1, pending=1, closed=False)
    assert scope.pending == 1
    gate.open()
    handle.wait()
    assert scope.statistics() == ScopeStatistics(started=3, finished=3, failed=1, pending=0, closed=False)


class Interrupted(set):
    """A set that Ctrl-C interrupts, before something is added or after."""

    def __init__(self, *, after):
        super().__init__()
        self.after = after

    def add(self, element):
        if self.after:
            super().add(element)
        raise KeyboardInterrupt


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", ["the runtime's scopes", "the pending requests", "the post"])
def test_ctrl_c_while_a_request_is_admitted_leaves_nothing_taken(monkeypatch, place, after):
    scope, runtime, taken, ran = TaskScope("a carrier"), current_runtime(), [], []
    with monkeypatch.context() as patch:
        if place == "the post":
            real = runtime.post

            def post(*call):
                if after:
                    real(*call)
                raise KeyboardInterrupt

            patch.setattr(runtime, "post", post)
        elif place == "the pending requests":
            patch.setattr(scope, "_pending", Interrupted(after=after))
        else:
            patch.setattr(runtime, "scopes", Interrupted(after=after))
        with pytest.raises(KeyboardInterrupt):
            scope.start(
                AwaitResult(),
                give,
                enter=lambda: taken.append("a tile"),
                cleanup=lambda: ran.append(taken.pop()),
            )
    if place != "the post" or not after:  # else the loop may have taken it by then, and it ends as usual
        assert (ran, scope.pending) == (["a tile"], 0)
    until(lambda: not scope.pending)
    assert (ran, taken) == (["a tile"], [])
    scope.close()


@pytest.mark.parametrize("asleep", [True, False])
def test_a_request_that_the_loop_has_taken_is_not_revoked(scope, gate, monkeypatch, asleep):
    """As one whose handle was dropped, it goes on; whatever it has taken is its own until it ends."""
    runtime, left = current_runtime(), []
    handle = AwaitResult()
    with monkeypatch.context() as patch:
        place = runtime._inbox if asleep else runtime
        name = "ring" if asleep else "post"
        real, rings = getattr(place, name), []

        def interrupted(*call):
            real(*call)
            rings.append(call)
            if len(rings) == 1:  # an inbox rings once more, for others
                gate.entered.wait()
                raise KeyboardInterrupt

        if asleep:
            until(lambda: runtime._inbox._asleep)
        patch.setattr(place, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            scope.start(handle, gate.hold, "a value", enter=lambda: None, cleanup=lambda: left.append(1))
    assert (scope.pending, handle.done, left) == (1, False, [])
    gate.open()
    assert handle.wait() == "a value"
    assert (scope.pending, left) == (0, [1])
