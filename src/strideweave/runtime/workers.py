"""Worker threads for work that would hold up the loop: large copies and blocking file access.

A hop to a thread and back costs as much as copying a quarter of a mebibyte, so a batch makes at most one hop
per worker, never one per tile: the workers take their jobs from one shared iterator.

The workers are daemon threads of our own. ``concurrent.futures`` refuses work, and Python 3.12 starts no
thread, once the interpreter has begun to exit; unfinished writes still need a worker then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.event_loop import current_runtime
from strideweave.runtime.thread_role import forbid_waiting

__all__ = ["INLINE_BYTES", "WorkerPool", "run_jobs", "share_bytes", "worker_count"]

INLINE_BYTES = 256 * 1024
"""Copies of at most so many bytes stay in the loop: a hop to a worker would take longer than they do."""

_MOST_WORKERS = 4  # more threads than this gained nothing in memory copies and hot reads

_SMALLEST_SHARE = 1 << 20  # after each piece a worker has to take the interpreter's lock
_LARGEST_SHARE = 8 << 20  # so that all workers end at about the same time

P = ParamSpec("P")
T = TypeVar("T")


def worker_count() -> int:
    """Return how many worker threads a batch is spread over: the CPUs this process may use, four at most."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        usable = os.cpu_count() or 1
    return max(1, min(_MOST_WORKERS, usable))


def share_bytes(nbytes: int) -> int:
    """Return how much of a copy of so many bytes a worker is to do at once, so that one that wakes late finds a part.

    Half of an equal share, but 1 MiB at the least and 8 MiB at the most.
    """
    return min(max(-(-nbytes // (2 * worker_count())), _SMALLEST_SHARE), _LARGEST_SHARE)


class WorkerPool(Executor):
    """A fixed number of daemon threads that take calls from one queue; started by the first call.

    An ``Executor`` for ``loop.run_in_executor`` and aiofiles. Made without arguments, so that a runtime can
    keep it: ``current_runtime().service(WorkerPool)``. ``AwaitResult.wait()`` raises in its threads.
    """

    def __init__(self) -> None:
        self._size = worker_count()
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._closed = False

    def post(self, call: Callable[[], object]) -> None:
        """Have a worker run ``call``, which must not raise. Any thread; never blocks.

        Where no thread can be started any more, since the interpreter is exiting, the calling thread runs it.

        Raises:
            RuntimeError: the pool is closed.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        if len(self._threads) < self._size:
            self._start_threads()
        if self._threads:
            self._calls.put(call)
        else:
            call()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a worker call ``fn(*args, **kwargs)`` and return the future of its result.

        Raises:
            RuntimeError: the pool is closed.
        """
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # the future carries whatever it is; the worker lives on
                future.set_exception(error)
            else:
                future.set_result(result)

        self.post(call)
        return future

    def close(self) -> None:
        """Let the threads end after the calls they have; does not wait for them. Idempotent."""
        with self._starting:
            self._closed = True
            for _ in self._threads:
                self._calls.put(None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Close the pool (see ``concurrent.futures.Executor``); calls already posted are run in any case."""
        self.close()
        if wait:
            for thread in self._threads:
                thread.join()

    def _start_threads(self) -> None:
        with self._starting:
            while len(self._threads) < self._size:
                thread = threading.Thread(
                    target=_work,
                    args=(self._calls,),
                    name=f"strideweave-worker-{len(self._threads)}",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError:
                    return  # out of threads, or the interpreter is exiting: go on with those we have
                self._threads.append(thread)


def _work(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    """Run posted calls until told to end."""
    forbid_waiting()
    while (call := calls.get()) is not None:
        call()
        del call  # while this thread sleeps it must not keep the last call's arrays alive


class _Batch:
    """Jobs that workers take one at a time, and what became of them."""

    def __init__(self, jobs: Sequence[Callable[[], None]], workers: int) -> None:
        self.finished: AwaitResult[None] = AwaitResult()
        self._jobs: Iterator[Callable[[], None]] = iter(jobs)
        self._running = workers
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()

    def work(self) -> None:
        """Run jobs until none is left or one has failed; the last worker to get here ends the batch."""
        job: Callable[[], None] | None = None
        try:
            while (job := self._take()) is not None:
                job()
        except BaseException as error:  # whatever it is goes to the awaiting task; the worker lives on
            trace = error.__traceback__
            self._errors.append(error.with_traceback(trace.tb_next if trace else None))  # without this frame
            del trace
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self.finished._finish(exception=self._first_error())
        # A failed job's frame leads back to this one: no cycle error -> frames -> batch -> error.
        del self, job

    def _take(self) -> Callable[[], None] | None:
        with self._lock:
            return None if self._errors else next(self._jobs, None)

    def _first_error(self) -> BaseException | None:
        if not self._errors:
            return None
        first, *others = self._errors
        self._errors.clear()  # no cycle: the error's traceback will hold the frame that holds this batch
        for other in others:
            if other is not first:
                first.add_note(f"another job of the same batch failed too: {other!r}")
        return first


async def run_jobs(jobs: Sequence[Callable[[], None]]) -> None:
    """Run blocking jobs in worker threads, one hop per worker for the whole batch.

    Returns when no job runs any more, cancelled or not: the buffers that the jobs touch are the caller's
    again.

    Args:
        jobs: the calls, in the order in which workers take them. They must not wait for an ``AwaitResult``.

    Raises:
        BaseException: what the first failing job raised, bare, with a note on each other one. Jobs that had
        not
            begun by then are skipped.
    """
    if not jobs:
        await checkpoint()
        return
    pool = current_runtime().service(WorkerPool)
    hops = min(worker_count(), len(jobs))
    batch = _Batch(jobs, hops)
    for _ in range(hops):
        pool.post(batch.work)
    try:
        with anyio.CancelScope(shield=True):
            await batch.finished
    finally:
        del batch, jobs  # an error's traceback keeps this frame: no cycle error -> frame -> batch -> error
