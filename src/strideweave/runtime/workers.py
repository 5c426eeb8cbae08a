"""Worker threads for work that would hold up the loop: large copies and blocking file access.

A hop to a thread and back costs as much as copying a quarter of a mebibyte, so a batch makes at most one hop
per worker, never one per tile: the workers take their jobs from one shared iterator.

The workers are daemon threads of our own. ``concurrent.futures`` refuses work, and Python 3.12 starts no
thread, once the interpreter has begun to exit; unfinished writes still need a worker then.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.event_loop import current_runtime
from strideweave.runtime.thread_role import forbid_waiting
from strideweave.runtime.time_slice import ask_for_long_turns

__all__ = ["INLINE_BYTES", "JobBatch", "WorkerPool", "run_jobs", "share_bytes", "worker_count"]

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

    Attributes:
        size: how many threads.
    """

    def __init__(self) -> None:
        self.size = worker_count()
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[_Worker] = []
        self._changing = (
            threading.Lock()
        )  # held while threads start, while a call is posted, while the pool closes
        self._closed = False

    def post(self, call: Callable[[], object]) -> None:
        """Have a worker run ``call``, which must not raise. Any thread; never blocks.

        Where no thread can be started any more, since the interpreter is exiting, the calling thread runs it.

        Raises:
            RuntimeError: the pool is closed.
        """
        with self._changing:  # behind what ends the threads, nobody would come for it
            self._get_ready()
            if self._threads:
                self._calls.put(call)
                return
        call()

    def post_to_each(self, call: Callable[[], object]) -> None:
        """Post ``call`` once for each worker, as ``post`` does; those that are idle wake on processors of their own."""
        with self._changing:
            self._get_ready()
        if len(self._threads) == self.size:
            _spread(self._threads)
        for _ in range(self.size):
            self.post(call)

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
        with self._changing:
            self._closed = True
            for _ in self._threads:
                self._calls.put(None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Close the pool (see ``concurrent.futures.Executor``); calls already posted are run in any case."""
        self.close()
        if wait:
            for thread in self._threads:
                thread.join()

    def _get_ready(self) -> None:
        """Start threads that are missing, unless the pool is closed; under the lock.

        Raises:
            RuntimeError: it is.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        while len(self._threads) < self.size:
            thread = _Worker(self._calls, len(self._threads))
            try:
                thread.start()
            except RuntimeError:
                return  # out of threads, or the interpreter is exiting: go on with those we have
            self._threads.append(thread)


class _Worker(threading.Thread):
    """One worker: runs posted calls until told to end.

    Args:
        calls: where they are posted; None ends it.
        number: of this worker.
    """

    def __init__(self, calls: SimpleQueue[Callable[[], object] | None], number: int) -> None:
        super().__init__(name=f"strideweave-worker-{number}", daemon=True)
        self._calls = calls
        self._placing = threading.Lock()
        self._place: int | None = None  # the processor that it is to wake up on
        self._placed_by = 0  # the thread whose processors it may use once it is awake

    def run(self) -> None:
        """Work."""
        forbid_waiting()
        ask_for_long_turns()  # the callers' loops are to go first
        while (call := self._calls.get()) is not None:
            if self._place is not None:
                self._let_free()
            call()
            del call  # while this thread sleeps it must not keep the last call's arrays alive

    def wake_on(self, processor: int, usable: set[int]) -> None:
        """Have the worker wake up on a processor; awake, it may use all of them again that the calling thread may.

        Args:
            processor: one of ``usable``.
            usable: those of the calling thread; a worker that has others stays as it is.
        """
        thread = self.native_id
        if thread is None:  # it has not begun, and 0 would be the calling thread
            return
        with suppress(OSError), self._placing:  # the thread has ended, or the processor has been taken away
            if self._place is None and os.sched_getaffinity(thread) != usable:
                return
            os.sched_setaffinity(thread, {processor})
            self._place, self._placed_by = processor, threading.get_native_id()

    def _let_free(self) -> None:
        with suppress(OSError), self._placing:  # none of the processors is left
            place, self._place = self._place, None
            if os.sched_getaffinity(0) == {place}:  # else it was placed by somebody else, as by taskset
                os.sched_setaffinity(0, os.sched_getaffinity(self._placed_by))


def _spread(workers: Sequence[_Worker]) -> None:
    """Have workers wake up on a processor each, where there is one for each and no more.

    In a virtual machine a processor that sleeps does not count as idle, for its host may have given it away. The
    kernel then wakes several threads on one, which they share for milliseconds until it moves some of them.
    """
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return
    processors = os.sched_getaffinity(0)
    if len(processors) == len(workers) > 1:
        for worker, processor in zip(workers, sorted(processors), strict=True):
            worker.wake_on(processor, processors)


class JobBatch:
    """Jobs that workers take one at a time, and what became of them.

    Args:
        jobs: the calls, in the order in which they are taken.
    """

    def __init__(self, jobs: Sequence[Callable[[], None]]) -> None:
        self._finished: AwaitResult[None] = AwaitResult()
        self._jobs: Iterator[Callable[[], None]] = iter(jobs)
        self._running = 0
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()

    def work(self) -> None:
        """Run jobs until none is left or one has failed; the last worker at it ends the batch.

        One that comes later finds nothing to do, and the batch has not waited for it.
        """
        job: Callable[[], None] | None = None
        with self._lock:
            self._running += 1
        try:
            while (job := self._take()) is not None:
                job()
        except BaseException as error:  # whatever it is goes to the awaiting task; the worker lives on
            trace = error.__traceback__
            self._give_up(error.with_traceback(trace.tb_next if trace else None))  # without this frame
            del trace
        self._leave()
        # A failed job's frame leads back to this one: no cycle error -> frames -> batch -> error.
        del self, job

    async def end(self) -> None:
        """Return when no job runs any more, cancelled or not.

        Raises:
            BaseException: what the first failing job raised, bare, with a note on each other one.
        """
        interrupted: asyncio.CancelledError | None = None
        try:
            with anyio.CancelScope(shield=True):
                while True:
                    try:
                        await self._finished
                        break
                    except asyncio.CancelledError as cancellation:  # one past anyio's shield
                        interrupted = cancellation
            if interrupted is not None:
                raise interrupted
        finally:
            del self, interrupted  # no cycle, as in `work`

    def fail(self, error: BaseException) -> None:
        """End the batch with an error, once no worker is at it: none can be had."""
        with self._lock:
            self._running += 1
        self._give_up(error)
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._finished._finish(exception=self._first_error())

    def _give_up(self, error: BaseException) -> None:
        self._errors.append(error)
        self._jobs = iter(())  # for nobody, nor for who comes when the batch has ended

    def _take(self) -> Callable[[], None] | None:
        with self._lock:
            return next(self._jobs, None)

    def _first_error(self) -> BaseException | None:
        if not self._errors:
            return None
        first, *others = self._errors
        self._errors.clear()  # no cycle: the error's traceback will hold the frame that holds this batch
        for other in others:
            if other is not first:
                first.add_note(f"another job of the same batch failed too: {other!r}")
        return first


async def run_jobs(jobs: Sequence[Callable[[], None]], pool: WorkerPool | None = None) -> None:
    """Run blocking jobs in worker threads, one hop per worker for the whole batch.

    Returns when no job runs any more, cancelled or not: the buffers that the jobs touch are the caller's
    again.

    Args:
        jobs: the calls, in the order in which workers take them. They must not wait for an ``AwaitResult``.
        pool: the workers; None takes those of the runtime, which wake on processors of their own.

    Raises:
        BaseException: what the first failing job raised, bare, with a note on each other one. Jobs that had
            not begun by then are skipped.
        RuntimeError: the pool is closed.
    """
    if not jobs:
        await checkpoint()
        return
    workers = current_runtime().service(WorkerPool) if pool is None else pool
    batch = JobBatch(jobs)
    try:
        if pool is None and len(jobs) >= workers.size:
            workers.post_to_each(batch.work)
        else:
            for _ in range(min(len(jobs), workers.size)):
                workers.post(batch.work)
    except RuntimeError as error:  # it was closed; the first of them may be at work
        batch.fail(error)
    try:
        await batch.end()
    finally:
        del batch, jobs  # an error's traceback keeps this frame: no cycle error -> frame -> batch -> error
