"""AwaitResult: one outcome, observed any number of times from threads and event loops."""

import asyncio
import concurrent.futures
import contextlib
import signal
import sys
import threading
import weakref
from fractions import Fraction

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import trio

from strideweave.runtime import AwaitResult
from strideweave.runtime.await_result import DroppedAtExit
from strideweave.runtime.locks import short_lock
from strideweave.runtime.thread_role import forbid_waiting

pytestmark = pytest.mark.anyio


class Marked(AwaitResult[object]):
    """A subclass with a name and an attribute of its own."""


@pytest.fixture
def tiny_switch_interval():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def any_loop(request):
    """Run a coroutine function in a new loop of each kind."""
    if request.param == "uvloop":
        return lambda function: anyio.run(function, backend_options={"use_uvloop": True})
    return lambda function: anyio.run(function, backend=request.param)


def observe(handle):
    """The exception that a handle raises."""
    try:
        handle.wait()
    except BaseException as error:
        return error
    raise AssertionError("the handle did not raise")


def depth(error):
    count, trace = 0, error.__traceback__
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


def raised(error):
    """The same error with a traceback, as the runtime stores it."""

    def fail():
        raise error

    with contextlib.suppress(type(error)):
        fail()
    return error


# --- outcomes ---


def test_every_observation_returns_the_same_object():
    value = object()
    handle = AwaitResult.completed(value)
    assert handle.done
    assert all(handle.wait(timeout) is value for timeout in (None, 0, -1, 1e9, float("inf")))


async def test_awaiting_a_finished_handle_returns_the_same_object():
    value = object()
    handle = Marked.completed(value)
    assert [await handle, await handle, handle.wait()] == [value] * 3


async def test_every_observation_raises_the_same_exception_and_its_traceback_does_not_grow():
    """Contract section 6: *every observation … raises the same exception object*."""
    error = raised(OSError("disk"))
    handle = AwaitResult.failed(error)
    first = observe(handle)
    depths = {depth(observe(handle)) for _ in range(5)}
    assert first is error
    assert depths == {depth(first)}
    awaited = set()
    for _ in range(5):
        try:
            await handle
        except OSError as caught:
            assert caught is error
            awaited.add(depth(caught))
    assert len(awaited) == 1


def test_the_first_outcome_counts():
    handle = AwaitResult()
    assert handle._finish(1)
    assert not handle._finish(2)
    assert not handle._finish(exception=OSError())
    assert handle.wait() == 1


def test_subclasses_need_no_constructor_arguments():
    handle = Marked()
    assert isinstance(handle, AwaitResult)
    assert not handle.done
    assert isinstance(Marked.completed(3), Marked)
    assert isinstance(Marked.failed(OSError()), Marked)


@pytest.mark.parametrize(
    ("handle", "text"),
    [
        (Marked(), "<Marked pending>"),
        (Marked.completed(3), "<Marked done>"),
        (AwaitResult.failed(OSError("disk")), "<AwaitResult failed: OSError('disk')>"),
    ],
)
def test_repr_says_the_state(handle, text):
    assert repr(handle) == text


@pytest.mark.parametrize(
    "signal_of_a_loop",
    [asyncio.CancelledError(), StopIteration(3), GeneratorExit()],
    ids=lambda e: type(e).__name__,
)
async def test_what_a_loop_takes_for_its_own_signal_is_stored_as_an_ordinary_error(signal_of_a_loop):
    """An awaiting task must neither look cancelled nor seem to return."""
    handle = AwaitResult.failed(signal_of_a_loop)
    error = observe(handle)
    assert type(error) is RuntimeError
    assert error.__cause__ is signal_of_a_loop
    with pytest.raises(RuntimeError) as caught:
        await handle
    assert caught.value is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_other_exceptions_pass_unchanged(error):
    assert observe(AwaitResult.failed(error)) is error


@pytest.mark.parametrize("awaited", [False, True])
def test_a_raised_exception_and_its_handle_are_no_cycle(no_collector, awaited):
    """A failed request's handle, and what its traceback keeps, go without waiting for the garbage collector."""

    def wait(handles):
        with contextlib.suppress(OSError):
            handles.pop().wait()  # a frame that holds the handle would be the caller's own cycle

    async def wait_async(handles):
        with contextlib.suppress(OSError):
            await handles.pop()

    handle = AwaitResult.failed(raised(OSError()))
    gone, handles = weakref.ref(handle), [handle, handle]
    del handle
    for _ in range(2):
        if awaited:
            anyio.run(wait_async, handles)
        else:
            wait(handles)
    assert gone() is None


@pytest.mark.parametrize("daemon", [True, False])
def test_a_daemon_thread_is_held_back_before_it_hears_that_the_interpreter_exits(monkeypatch, daemon):
    """It is frozen meanwhile; its traceback would be noise at the end of a program that ended well."""
    naps = []
    monkeypatch.setattr("strideweave.runtime.thread_role.time.sleep", naps.append)
    errors = []
    handle = AwaitResult.failed(DroppedAtExit())
    thread = threading.Thread(target=lambda: errors.append(observe(handle)), daemon=daemon)
    thread.start()
    thread.join()
    assert isinstance(errors[0], DroppedAtExit)
    assert naps == [1.0] * daemon


# --- waiting ---


@pytest.mark.parametrize("timeout", [0, -1, 0.001])
def test_a_timeout_leaves_the_request_running(timeout):
    """Contract section 6: *a timeout raises TimeoutError and leaves the request running*."""
    handle = AwaitResult()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"unfinished after .* s and goes on"):
            handle.wait(timeout)
    assert not handle.done
    assert handle._wakers == []
    handle._finish(5)
    assert handle.wait(timeout) == 5


def test_a_request_that_ends_as_the_time_is_up_has_ended():
    class Late(AwaitResult):
        def _add_waker(self, waker):
            super()._add_waker(lambda: None)  # the time will be up before this observer is woken
            self._finish("value")
            return True

    assert Late().wait(0) == "value"


@pytest.mark.parametrize("timeout", ["1", b"", True, np.bool_(False), [], np.zeros(1), 1j, object()])
@pytest.mark.parametrize("handle", [AwaitResult(), AwaitResult.completed()])
def test_what_is_no_number_of_seconds_is_refused(handle, timeout):
    with pytest.raises(TypeError, match="timeout must be a number of seconds or None, found"):
        handle.wait(timeout)


@pytest.mark.parametrize("handle", [AwaitResult(), AwaitResult.completed()])
def test_nan_seconds_are_refused(handle):
    for nan in (float("nan"), np.float32("nan")):
        with pytest.raises(ValueError, match="found NaN"):
            handle.wait(nan)


@pytest.mark.parametrize("timeout", [np.float32(0), np.int64(0), Fraction(1, 1000), -(10**400), 0])
def test_every_real_number_is_a_timeout(timeout):
    assert AwaitResult.completed(5).wait(timeout) == 5
    with pytest.raises(TimeoutError):
        AwaitResult().wait(timeout)


@pytest.mark.parametrize("exception", [None, "full", ValueError, object()])
def test_a_handle_fails_with_an_exception_only(exception):
    with pytest.raises(TypeError, match="exception must be an exception, found"):
        AwaitResult.failed(exception)


def test_a_request_that_failed_with_a_timeout_raises_its_own():
    error = TimeoutError("the device")
    assert observe(AwaitResult.failed(error)) is error


@pytest.mark.parametrize("done", [False, True])
def test_waiting_is_refused_where_it_could_deadlock(done):
    """It raises whether or not the handle is done, so that the mistake does not hide behind luck."""
    handle = AwaitResult.completed(1) if done else AwaitResult()
    forbid_waiting()
    try:
        with pytest.raises(RuntimeError, match="await the handle instead"):
            handle.wait()
    finally:
        forbid_waiting(False)


def test_ctrl_c_interrupts_wait_and_the_handle_stays_usable():
    waiting = threading.Event()

    class Watched(AwaitResult):
        def _add_waker(self, waker):
            added = super()._add_waker(waker)
            waiting.set()
            return added

    handle = Watched()
    interrupted = threading.Event()

    def ctrl_c(_signal, _frame):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def interrupt():
        waiting.wait()
        # To this very thread: the kernel may hand a signal for the process to one that is not asleep. And again
        # until it is heard: CPython notices one that comes just before the thread falls asleep only when it wakes.
        while not interrupted.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, ctrl_c)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert handle._wakers == []
    handle._finish("later")
    assert handle.wait() == "later"


def test_wait_inside_a_running_loop_blocks_that_loop_and_completes(any_loop):
    """Contract section 6: *inside a running loop of the caller it blocks that loop and completes*."""
    handle = AwaitResult()

    async def main():
        threading.Thread(target=handle._finish, args=(7,)).start()
        return handle.wait()

    assert any_loop(main) == 7


def test_an_awaiter_whose_loop_is_blocked_does_not_hold_up_the_others():
    """The case that completing observers through a token of their loop would deadlock."""
    handle = AwaitResult()

    async def main():
        async with anyio.create_task_group() as group:

            async def observer():
                assert await handle == 3

            group.start_soon(observer)
            while not handle._wakers:
                await anyio.lowlevel.checkpoint()
            finisher = threading.Thread(target=handle._finish, args=(3,))
            finisher.start()
            assert handle.wait() == 3  # this loop cannot run meanwhile
            finisher.join()

    anyio.run(main)


# --- many observers ---


def test_threads_and_loops_of_every_kind_get_the_identical_object():
    """Contract section 6: *asyncio and trio callers, any loop, any number of times*."""
    handle, value = AwaitResult(), object()

    async def observe_twice():
        results = []

        async def observer():
            results.append(await handle)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(observer)
        return [*results, await handle]

    jobs = [lambda: [handle.wait()]] * 6 + [
        lambda: anyio.run(observe_twice, backend="asyncio"),
        lambda: anyio.run(observe_twice, backend_options={"use_uvloop": True}),
        lambda: anyio.run(observe_twice, backend="trio"),
    ]
    awaiters = sum(4 for _ in jobs[6:])
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(job) for job in jobs]
        while len(handle._wakers) < 6 + awaiters:
            pass
        handle._finish(value)
        results = [result for future in futures for result in future.result()]
    assert len(results) == 6 + awaiters + len(jobs[6:])
    assert all(result is value for result in results)
    assert handle._wakers == []


def test_asyncio_in_a_worker_thread_of_trio():
    handle = AwaitResult()

    async def inner():
        return await handle

    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, handle._finish, 9)
            return await trio.to_thread.run_sync(asyncio.run, inner())

    assert trio.run(main) == 9


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_usual_combinators_accept_handles():
    handle = AwaitResult()
    asyncio.get_running_loop().call_soon(handle._finish, 4)
    assert await asyncio.gather(handle, handle, asyncio.wait_for(handle, 60)) == [4, 4, 4]
    assert await asyncio.shield(asyncio.ensure_future(handle)) == 4


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncio_wait_takes_futures_and_is_told_how_to_get_one():
    handle = AwaitResult()
    asyncio.get_running_loop().call_soon(handle._finish, 4)
    with pytest.raises(AttributeError, match=r"ensure_future\(handle\) makes"):
        await asyncio.wait([handle])
    done, pending = await asyncio.wait([asyncio.ensure_future(handle)])
    assert ([future.result() for future in done], pending) == ([4], set())
    assert [await soon for soon in asyncio.as_completed([handle])] == [4]


# --- races ---


@pytest.mark.usefixtures("tiny_switch_interval")
def test_completion_racing_with_waiting_threads_loses_no_wake_up():
    rounds, threads = 300, 3
    handles = [AwaitResult() for _ in range(rounds)]
    barrier = threading.Barrier(threads + 1)
    seen = [[] for _ in range(threads)]

    def observer(mine):
        for handle in handles:
            barrier.wait()
            mine.append(handle.wait(60))

    workers = [threading.Thread(target=observer, args=(mine,)) for mine in seen]
    for worker in workers:
        worker.start()
    for i, handle in enumerate(handles):
        barrier.wait()
        handle._finish(i)
    for worker in workers:
        worker.join()
    assert seen == [list(range(rounds))] * threads
    assert all(handle._wakers == [] for handle in handles)


@pytest.mark.usefixtures("tiny_switch_interval")
async def test_completion_racing_with_awaiting_tasks_loses_no_wake_up():
    rounds = 300
    handles = [AwaitResult() for _ in range(rounds)]
    turn = threading.Semaphore(0)

    def finish():
        for i, handle in enumerate(handles):
            turn.acquire()
            handle._finish(i)

    thread = threading.Thread(target=finish)
    thread.start()
    for i, handle in enumerate(handles):
        turn.release()
        with anyio.fail_after(60):
            assert await handle == i
    thread.join()


@pytest.mark.usefixtures("tiny_switch_interval")
def test_racing_finishers_agree_on_one_outcome():
    for _ in range(200):
        handle = AwaitResult()
        barrier = threading.Barrier(3)
        won = []

        def finish(i, handle=handle, barrier=barrier, won=won):
            barrier.wait()
            if handle._finish(i):
                won.append(i)

        threads = [threading.Thread(target=finish, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        assert handle.wait(60) in (0, 1)
        for thread in threads:
            thread.join()
        assert won == [handle.wait()]


# --- cancellation ---


async def test_cancelled_awaiter_leaves_the_request_and_the_others_alone_cancel():
    """Contract section 6: *cancelling an awaiter … never cancels the request*."""
    handle = AwaitResult()
    results = []

    async def observer():
        results.append(await handle)

    async with anyio.create_task_group() as group:
        group.start_soon(observer)
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0) as cancelled:
            await handle
        assert cancelled.cancelled_caught
        assert not handle.done
        assert len(handle._wakers) == 1  # the cancelled one has unregistered
        handle._finish("value")
    assert results == ["value"]
    assert await handle == "value"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_task_cancelled_while_awaiting_cancel():
    handle = AwaitResult()
    task = asyncio.ensure_future(handle)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(handle._wakers) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle, 0)
    assert not handle.done
    assert handle._wakers == []


async def test_awaiter_cancelled_at_the_moment_of_completion_cancel():
    handle = AwaitResult()
    with anyio.CancelScope() as cancelled:
        async with anyio.create_task_group() as group:

            async def observer():
                await handle

            group.start_soon(observer)
            await anyio.wait_all_tasks_blocked()
            handle._finish("value")
            cancelled.cancel()
    assert handle.wait() == "value"
    assert handle._wakers == []


async def test_awaiting_a_finished_handle_is_a_checkpoint_cancel():
    """A loop that only meets finished handles must stay cancellable."""
    handle = AwaitResult.completed(1)
    with anyio.move_on_after(0) as cancelled:
        await handle
    assert cancelled.cancelled_caught


async def test_a_closed_coroutine_unregisters():
    handle = AwaitResult()

    async def observer():
        await handle

    coroutine = observer()
    coroutine.send(None)
    assert len(handle._wakers) == 1
    coroutine.close()
    assert handle._wakers == []


def test_an_awaiter_whose_loop_has_closed_harms_nobody(any_loop, caplog):
    handle = AwaitResult()
    leaked = []

    async def main():
        coroutine = handle.__await__()
        coroutine.send(None)  # asleep for ever: its loop ends first
        leaked.append(coroutine)

    any_loop(main)
    assert len(handle._wakers) == 1
    seen = []
    thread = threading.Thread(target=lambda: seen.append(handle.wait(60)))
    thread.start()
    while len(handle._wakers) < 2:
        pass
    handle._finish("value")
    thread.join()
    assert seen == ["value"]
    assert caplog.text == ""
    leaked[0].close()


def test_a_waker_that_fails_does_not_leave_others_asleep(caplog):
    handle = AwaitResult()
    woken = []

    def fail():
        raise OSError("observer")

    for waker in (lambda: woken.append(1), fail, lambda: woken.append(2)):
        assert handle._add_waker(waker)
    assert handle._finish()
    assert sorted(woken) == [1, 2]
    assert "could not be woken" in caplog.text
    assert not handle._add_waker(fail)


async def test_awaiting_outside_of_a_known_loop_says_so():
    coroutine = AwaitResult().__await__()
    result = []

    def outside():
        try:
            coroutine.send(None)
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=outside)
    thread.start()
    thread.join()
    assert isinstance(result[0], RuntimeError)


def test_a_forgotten_wait_is_named_where_an_attribute_is_missing():
    handle = AwaitResult()
    with pytest.raises(AttributeError, match=r"no attribute 'shape'; .* call wait\(\) or await it first"):
        _ = handle.shape
    assert not hasattr(handle, "numpy")
    assert not hasattr(handle, "__array__")


def test_waiting_in_a_signal_handler_that_interrupted_the_library_is_refused():
    """The thread holds the lock that the request needs to end, and goes on only when the handler returns."""
    handle: AwaitResult[None] = AwaitResult()
    before = signal.signal(signal.SIGUSR1, lambda *_: handle.wait(5))
    try:
        with short_lock, pytest.raises(RuntimeError, match="signal handler"):
            signal.raise_signal(signal.SIGUSR1)
        handle._finish()
        with short_lock:
            signal.raise_signal(signal.SIGUSR1)  # nobody has to be waited for
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_cancelled_observer_is_let_go_without_the_cycle_collector(no_collector):
    class Value:
        pass

    handle, values = AwaitResult(), []

    async def observe(value):
        await handle

    async def main():
        value = Value()
        values.append(weakref.ref(value))
        task = asyncio.ensure_future(observe(value))
        del value
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())
    assert values[0]() is None
