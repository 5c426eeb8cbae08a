"""Worker threads: one hop per worker and batch, bare errors, no waiting inside."""

import asyncio
import gc
import os
import threading
import weakref
from functools import partial
from queue import SimpleQueue

import anyio
import anyio.lowlevel
import pytest

from strideweave.runtime import AwaitResult, TaskScope, WorkerPool, current_runtime, run_jobs, worker_count
from strideweave.runtime import workers as workers_module
from strideweave.runtime.workers import _Worker, share_bytes
from waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def pool():
    pool = WorkerPool()
    yield pool
    pool.shutdown()


class HeldJob:
    """A job that begins, says so, and ends when it is told to."""

    def __init__(self):
        self.started, self.release = threading.Event(), threading.Event()
        self.ended = []

    def __call__(self):
        self.started.set()
        self.release.wait()
        self.ended.append(1)


@pytest.fixture
def held():
    job = HeldJob()
    yield job
    job.release.set()


@pytest.fixture
def hops(monkeypatch):
    """The calls handed to workers."""
    calls = []
    post = WorkerPool.post

    def counted(self, call):
        calls.append(call)
        post(self, call)

    monkeypatch.setattr(WorkerPool, "post", counted)
    return calls


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_worker_finds_two_pieces_of_a_copy_unless_they_become_too_small_or_too_large(
    workers, monkeypatch
):
    monkeypatch.setattr("strideweave.runtime.workers.worker_count", lambda: workers)
    mib = 1 << 20
    assert share_bytes(1) == share_bytes(2 * mib * workers) == mib
    assert share_bytes(6 * mib * workers) == 3 * mib
    assert share_bytes(6 * mib * workers + 1) == 3 * mib + 1
    assert share_bytes(1 << 40) == 8 * mib


def test_worker_count_is_the_usable_cpus_and_four_at_most(monkeypatch):
    for usable, expected in [(1, 1), (3, 3), (4, 4), (64, 4)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=usable: set(range(n)), raising=False)
        assert worker_count() == expected
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert worker_count() == 1


@pytest.mark.parametrize("jobs", [0, 1, 2, 3, 100])
async def test_a_batch_hops_once_per_worker_and_never_once_per_job(hops, jobs):
    """Facts, section 0: *one worker hop per worker, never one per tile*."""
    done = []
    await run_jobs([lambda i=i: done.append(i) for i in range(jobs)])
    assert sorted(done) == list(range(jobs))
    assert len(hops) == min(jobs, worker_count())


async def test_jobs_run_in_workers_and_not_in_the_callers_thread():
    threads = set()
    await run_jobs([lambda: threads.add(threading.current_thread().name)] * 4)
    assert threads
    assert all(name.startswith("strideweave-worker-") for name in threads)


async def test_the_first_error_is_raised_bare_with_a_note_on_the_others():
    """Contract section 6: *the first, where several tiles fail, with a note on the others*."""
    both = threading.Barrier(2)
    second_may_fail = threading.Event()

    def first():
        both.wait()
        raise OSError("first")

    def second():
        both.wait()
        second_may_fail.wait()
        raise ValueError("second")

    batch = workers_module.JobBatch([first, second])
    threads = [threading.Thread(target=batch.work) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not batch._errors:
        await anyio.lowlevel.checkpoint()
    second_may_fail.set()
    with pytest.raises(OSError, match="first") as caught:
        await batch.end()
    assert caught.value.__notes__ == ["another job of the same batch failed too: ValueError('second')"]
    for thread in threads:
        thread.join()


async def test_jobs_after_an_error_are_skipped_also_by_who_comes_after_it():
    done = []

    def fail():
        raise OSError("disk")

    batch = workers_module.JobBatch([lambda: done.append(1), fail, lambda: done.append(2)])
    batch.work()
    with pytest.raises(OSError, match="disk") as caught:
        await batch.end()
    batch.work()
    assert done == [1]
    assert not hasattr(caught.value, "__notes__")


async def test_a_batch_does_not_wait_for_a_worker_that_is_busy_otherwise():
    pool, release = current_runtime().service(WorkerPool), threading.Event()
    busy = [pool.submit(release.wait) for _ in range(pool.size - 1)]
    done = []
    await run_jobs([lambda i=i: done.append(i) for i in range(5)])
    assert done == list(range(5)) or pool.size == 1
    release.set()
    for future in busy:
        future.result()


def affinity_of_two(monkeypatch):
    """Make believe that there are two processors; gives what threads are told about theirs."""
    told, places = [], {}

    def key(thread):
        return thread or threading.get_native_id()

    def place(thread, processors):
        told.append((thread, processors))
        places[key(thread)] = processors

    monkeypatch.setattr(
        os, "sched_getaffinity", lambda thread: places.get(key(thread), {3, 5}), raising=False
    )
    monkeypatch.setattr(os, "sched_setaffinity", place, raising=False)
    return told


def test_workers_wake_on_a_processor_each_and_may_then_use_all(monkeypatch):
    told = affinity_of_two(monkeypatch)
    pool, both = WorkerPool(), threading.Barrier(2)
    pool.post_to_each(both.wait)
    pool.shutdown()
    placed = [(worker.native_id, {place}) for worker, place in zip(pool._threads, (3, 5), strict=True)]
    assert told == [*placed, (0, {3, 5}), (0, {3, 5})]


@pytest.mark.parametrize("left", [3, 5])
def test_a_worker_that_somebody_else_has_placed_stays_there(left, monkeypatch):
    """``taskset --all-tasks`` of a process whose workers sleep, each on its place, which may be the very one."""
    affinity_of_two(monkeypatch)
    calls = SimpleQueue()
    worker = _Worker(calls, 0)
    worker.start()
    worker.wake_on(3, {3, 5})
    for thread in (threading.get_native_id(), worker.native_id):
        os.sched_setaffinity(thread, {left})
    calls.put(int)
    calls.put(None)
    worker.join()
    assert os.sched_getaffinity(worker.native_id) == {left}


def test_a_worker_is_let_free_however_often_it_was_placed(monkeypatch):
    affinity_of_two(monkeypatch)
    calls, found = SimpleQueue(), []
    worker = _Worker(calls, 0)
    worker.start()
    for places in ([3], [3, 3], [3, 5], [5, 3, 3]):
        for place in places:
            worker.wake_on(place, {3, 5})
        woken = threading.Event()
        calls.put(lambda woken=woken: (found.append(os.sched_getaffinity(0)), woken.set()))
        woken.wait()
    calls.put(None)
    worker.join()
    assert found == [{3, 5}] * 4


@pytest.mark.parametrize("processors", [{3}, {3, 5, 6}, {1, 2}])
def test_workers_are_left_alone_where_processors_are_others_or_more_or_fewer_than_they(
    processors, monkeypatch
):
    told = affinity_of_two(monkeypatch)
    pool, both = WorkerPool(), threading.Barrier(2)
    pool.submit(int).result()
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {3, 5} if thread else processors)
    pool.post_to_each(both.wait)
    pool.shutdown()
    assert told == []


def test_workers_whose_processors_cannot_be_set_work_where_they_are(monkeypatch):
    def refuse(*_):
        raise PermissionError("not here")

    affinity_of_two(monkeypatch)
    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    pool, both = WorkerPool(), threading.Barrier(2)
    pool.post_to_each(both.wait)
    pool.shutdown()
    assert not both.broken


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()], ids=repr)
async def test_workers_survive_whatever_a_job_raises(error):
    def fail():
        raise error

    for _ in range(worker_count() + 1):
        with pytest.raises(type(error)) as caught:
            await run_jobs([fail])
        assert caught.value is error
    await run_jobs([lambda: None])


async def test_a_batch_without_a_worker_ends_with_what_it_was_failed_with():
    done = []
    batch = workers_module.JobBatch([lambda: done.append(1)])
    batch.fail(RuntimeError("no worker"))
    with pytest.raises(RuntimeError, match="no worker"):
        await batch.end()
    batch.work()
    assert done == []


async def test_a_batch_that_is_failed_ends_when_the_job_under_way_has(held):
    batch = workers_module.JobBatch([held, lambda: held.ended.append(2)])
    thread = threading.Thread(target=batch.work)
    thread.start()
    held.started.wait()
    batch.fail(RuntimeError("no second worker"))
    async with anyio.create_task_group() as group:

        async def end():
            with pytest.raises(RuntimeError, match="no second worker"):
                await batch.end()
            held.ended.append(3)

        group.start_soon(end)
        await anyio.wait_all_tasks_blocked()
        assert held.ended == []
        held.release.set()
    assert held.ended == [1, 3]
    thread.join()


def test_cancelled_past_anyio_a_batch_ends_when_no_job_runs_any_more_cancel(held):
    async def main():
        pool = WorkerPool()
        task = asyncio.ensure_future(run_jobs([held], pool))
        await anyio.to_thread.run_sync(held.started.wait)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        assert held.ended == []
        held.release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.ended == [1]
        pool.shutdown()

    asyncio.run(main())


async def test_jobs_of_a_pool_that_closes_meanwhile_have_ended_when_they_are_refused(monkeypatch, held):
    pool = WorkerPool()
    pool.size = 2
    post = pool.post

    def post_and_close(call):
        post(call)
        held.started.wait()
        pool.close()

    monkeypatch.setattr(pool, "post", post_and_close)
    async with anyio.create_task_group() as group:

        async def run():
            with pytest.raises(RuntimeError, match="closed"):
                await run_jobs([held, held], pool)
            assert held.ended == [1]
            held.ended.append(2)

        group.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        assert held.ended == []
        held.release.set()
    assert held.ended == [1, 2]


async def test_jobs_of_a_closed_pool_are_refused():
    pool, done = WorkerPool(), []
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        await run_jobs([lambda: done.append(1)], pool)
    assert done == []


async def test_cancelled_batch_returns_only_when_no_job_runs_any_more_cancel(held):
    """The buffers of the jobs are the caller's again when the call ends, cancelled or not."""
    reached = []
    async with anyio.create_task_group() as group:

        async def batch():
            await run_jobs([held])
            reached.append("after")
            await anyio.lowlevel.checkpoint()
            reached.append("never")

        group.start_soon(batch)
        while not held.started.is_set():
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            assert (held.ended, reached) == ([], [])
            held.release.set()
    assert held.ended == [1]
    assert reached == ["after"]


async def test_jobs_may_not_wait_for_requests():
    """A worker that waits could be the one that the awaited request needs."""
    scope = TaskScope("test")
    refused = []

    def job():
        try:
            AwaitResult.completed(1).wait()
        except RuntimeError as error:
            refused.append(error)

    await scope.start(AwaitResult(), run_jobs, [job])
    assert "await the handle instead" in str(refused[0])
    scope.close()


async def test_finished_jobs_and_their_arrays_are_let_go(scope):
    class Array:
        pass

    array = Array()
    gone = weakref.ref(array)
    await scope.start(AwaitResult(), run_jobs, [lambda array=array: None])
    del array
    while gone() is not None:  # the worker lets go a moment after it has reported
        gc.collect()


@pytest.mark.parametrize("jobs", [1, 5])
async def test_failed_jobs_are_let_go_with_their_error_and_without_the_cycle_collector(
    scope, no_collector, jobs
):
    class Array:
        pass

    def fail(array):
        raise OSError("broken")

    array = Array()
    gone = weakref.ref(array)
    with pytest.raises(OSError, match="broken"):
        await scope.start(AwaitResult(), run_jobs, [partial(fail, array)] * jobs)
    del array
    until(lambda: gone() is None)  # the worker lets go a moment after it has reported


# --- the pool as an executor ---


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_pool_serves_run_in_executor(pool):
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(pool, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(pool, divmod, 7, 0)


def test_a_future_cancelled_before_a_worker_takes_it_is_not_run_cancel(pool):
    release, done = threading.Event(), []
    blockers = [pool.submit(release.wait) for _ in range(worker_count())]
    future = pool.submit(done.append, 1)
    assert future.cancel()
    release.set()
    for blocker in blockers:
        blocker.result()
    pool.shutdown()
    assert done == []


def test_a_pool_starts_no_thread_before_its_first_call():
    before = threading.active_count()
    pool = WorkerPool()
    assert threading.active_count() == before
    pool.submit(int).result()
    assert threading.active_count() == before + worker_count()
    assert all(thread.daemon for thread in pool._threads)
    pool.shutdown()
    assert threading.active_count() == before


def test_a_closed_pool_refuses_calls_and_runs_those_it_has(pool):
    done = []
    futures = [pool.submit(done.append, i) for i in range(20)]
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="the worker pool is closed"):
        pool.submit(int)
    for future in futures:
        future.result()
    assert sorted(done) == list(range(20))


def test_what_a_pool_takes_while_it_closes_is_run(pool, monkeypatch):
    """A call behind the marks that end the threads would never be."""
    pool.submit(int).result()
    put, closing = pool._calls.put, threading.Thread(target=pool.close)

    class Calls:
        get = pool._calls.get

        def put(self, call):
            if call is not None:
                closing.start()
                closing.join(0.2)  # as far as it comes
            put(call)

    monkeypatch.setattr(pool, "_calls", Calls())
    assert pool.submit(lambda: "run").result(10) == "run"
    closing.join()


def test_without_threads_to_be_had_the_caller_works_itself(pool, monkeypatch):
    """Python 3.12 starts no thread once the interpreter is exiting, and writes must still reach their file."""

    def refuse(_):
        raise RuntimeError("can't start new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert pool.submit(threading.get_ident).result() == threading.get_ident()
    assert pool.submit(threading.get_ident).result() != threading.get_ident()
