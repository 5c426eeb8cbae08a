"""The one background loop of the process: start it, hand it a call, give it services, count what it did.

The loop is an anyio loop on asyncio in a daemon thread, started by the first request. What happens to it when
the interpreter ends or the process forks is in ``lifecycle.py``.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio

from strideweave.runtime.inbox import Inbox
from strideweave.runtime.locks import settling_lock
from strideweave.runtime.pacing import paced_loop
from strideweave.runtime.thread_role import forbid_waiting, park_daemon_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from anyio.abc import TaskGroup

    from strideweave.runtime.task_scope import TaskScope

with suppress(ImportError):  # not a public name: without it anyio finds the module by itself
    # Else the first request would import it, tens of milliseconds in which the caller's loop stands still.
    import anyio._backends._asyncio

__all__ = ["EventLoop", "RuntimeStatistics", "current_runtime", "process", "statistics"]

S = TypeVar("S")

_logger = logging.getLogger("strideweave")


class EventLoop:
    """A daemon thread that runs one event loop; made by ``current_runtime``, one at a time per process.

    Attributes:
        root: the task group that the scopes' hosts live in; touched by the runtime thread only.
        scopes: the task scopes that are open in this loop.
        finished: requests that have ended.
        failed: those among them that ended with an exception.
    """

    def __init__(self) -> None:
        self.root: TaskGroup
        self.scopes: set[TaskScope] = set()
        self.finished = 0  # counted by the scopes, under both locks
        self.failed = 0
        self._closed = False
        self._stop_asked = False
        self._inbox = Inbox()
        self._crash: BaseException | None = None
        self._services: dict[Callable[[], Any], Any] = {}
        self._services_lock = threading.RLock()  # reentrant: a service may be built on another
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: contextvars.Context
        self._stopping: anyio.Event
        self._up = threading.Event()
        # An empty context: nothing of the thread that happens to come first may leak into the requests of
        # others.
        self._thread = threading.Thread(
            target=contextvars.Context().run, args=(self._main,), name="strideweave-runtime", daemon=True
        )

    def launch(self) -> None:
        """Start the thread and return when the loop takes calls.

        Raises:
            RuntimeError: the thread or its loop could not start.
        """
        try:
            self._thread.start()
            self._up.wait()
        except BaseException:  # Ctrl-C while starting: no half-started loop may stay behind
            self.ask_to_stop()
            raise
        if self._crash is not None:
            raise RuntimeError("the StrideWeave runtime could not start its event loop") from self._crash

    @property
    def is_open(self) -> bool:
        """Whether the loop takes calls."""
        return not (self._closed or self._stop_asked)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call ``function(*args)`` soon, in the order posted; any thread, never blocks.

        A loop that sleeps is woken, once for all that is posted until it gets to it. ``function`` must not raise:
        the loop could only log it.

        Raises:
            RuntimeError: the loop has ended.
        """
        if self._loop is None or not self.is_open:
            refuse_work()
        self._inbox.post(function, *args)

    @property
    def is_stopping(self) -> bool:
        """Whether the loop has been asked to end."""
        return self._stop_asked

    @property
    def service_count(self) -> int:
        """How many services this runtime has made."""
        return len(self._services)

    def service(self, factory: Callable[[], S]) -> S:
        """Return the one instance that ``factory`` makes for this runtime, made at the first call.

        Thread-safe. A service that has a method ``close()`` is closed once, when the runtime ends, after the
        last request; a forked child makes its own services and never closes the inherited ones.

        Args:
            factory: a class or function without arguments; also the key.

        Raises:
            RuntimeError: the runtime has ended.
        """
        with self._services_lock:
            if factory not in self._services:
                if not self.is_open:
                    refuse_work()
                self._services[factory] = factory()
            return cast("S", self._services[factory])

    def find_service(self, factory: Callable[[], S]) -> S | None:
        """Return the instance that ``service(factory)`` has made, or None; makes and starts nothing.

        Args:
            factory: as for ``service``.
        """
        return cast("S | None", self._services.get(factory))

    def ask_to_stop(self) -> None:
        """Have the loop cancel what is left and end; returns at once."""
        self._stop_asked = True
        if self._loop is None or self._closed:
            return  # it has ended, or it is not up yet and will look at the flag
        try:
            self._loop.call_soon_threadsafe(self._stop, context=self._context)
        except RuntimeError:  # it ended this very moment
            return

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; False when it has not after ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close_services(self) -> None:
        """Close the services, the last made first."""
        with self._services_lock:
            services = list(self._services.values())
            self._services.clear()
        for service in reversed(services):
            close = getattr(service, "close", None)
            if close is None:
                continue
            try:
                close()
            except Exception:  # one that fails must not keep the others open, and the process is ending
                _logger.debug("closing %r failed", service, exc_info=True)

    def disown(self) -> None:
        """Refuse calls for ever: in a forked child this loop is the parent's and must not be touched."""
        self._closed = True

    def _main(self) -> None:
        forbid_waiting()
        try:
            anyio.run(
                self._serve,
                backend="asyncio",
                backend_options={"loop_factory": partial(paced_loop, self._inbox)},
            )
        except (
            BaseException
        ) as crash:  # whatever it was, the observers must hear of it instead of sleeping for ever
            self._crash = crash
        finally:
            self._closed = True
            self._up.set()
            for scope in tuple(self.scopes):
                scope.fail_pending(self._explain)

    async def _serve(self) -> None:
        self._context = contextvars.copy_context()
        self._stopping = anyio.Event()
        async with anyio.create_task_group() as self.root:
            loop = asyncio.get_running_loop()
            # In the loop's own context: in a caller's, anyio would see the caller's event loop, or none.
            self._inbox.serve(loop, self._context)
            self._loop = loop
            self._up.set()
            if not self._stop_asked:
                await self._stopping.wait()
            self.root.cancel_scope.cancel()

    def _explain(self) -> RuntimeError:
        error = RuntimeError("the StrideWeave runtime has ended")
        error.__cause__ = self._crash
        return error

    def _stop(self) -> None:
        self._stopping.set()


@dataclass(frozen=True, slots=True)
class RuntimeStatistics:
    """What the runtime of this process has done since it started.

    Attributes:
        running: whether the loop is up.
        scopes: task scopes (carriers) with an open task group.
        services: services alive in the loop.
        started: requests accepted.
        finished: requests that ended, with a value or an exception.
        failed: those among them that ended with an exception.
        pending: requests not ended yet.
    """

    running: bool = False
    scopes: int = 0
    services: int = 0
    started: int = 0
    finished: int = 0
    failed: int = 0
    pending: int = 0


class Process:
    """The only module-level state: the loop this process has, and whether it may have one.

    Attributes:
        runtime: the loop, once a request has started it.
        ended: whether the interpreter is past the point where a loop may start.
        starting: held while a loop starts, and by fork.
    """

    __slots__ = ("ended", "runtime", "starting")

    def __init__(self) -> None:
        self.runtime: EventLoop | None = None
        self.ended = False
        # Reentrant, so that only its owner can release it, whatever became of a fork's hook.
        self.starting = threading.RLock()

    def find_service(self, factory: Callable[[], S]) -> S | None:
        """Return what ``current_runtime().service(factory)`` has made, or None; makes and starts nothing."""
        return None if self.runtime is None else self.runtime.find_service(factory)

    def start(self) -> EventLoop:
        """Start the loop unless another thread just did."""
        with self.starting:
            if self.runtime is None or not self.runtime.is_open:
                if self.ended:
                    refuse_work()
                runtime = EventLoop()
                runtime.launch()
                if self.runtime is not None and self.runtime.is_open:
                    runtime.ask_to_stop()  # a signal handler or a finalizer of this thread has started one meanwhile
                else:
                    self.runtime = runtime
            return self.runtime


process = Process()


def current_runtime() -> EventLoop:
    """Return the process's event loop, and start it if this is the first use.

    Raises:
        RuntimeError: the interpreter is exiting, or the thread could not start.
    """
    runtime = process.runtime
    if runtime is not None and runtime.is_open:
        return runtime
    return process.start()


def refuse_work() -> NoReturn:
    """Refuse work for a loop that has ended.

    Raises:
        RuntimeError: always.
    """
    if process.ended:
        park_daemon_thread()
        raise RuntimeError(
            "the interpreter is exiting and the StrideWeave runtime has ended; no request can start"
        )
    raise RuntimeError("this StrideWeave runtime has ended; start the request again")


def statistics() -> RuntimeStatistics:
    """Return what the runtime of this process has done; never starts it."""
    runtime = process.runtime
    if runtime is None:
        return RuntimeStatistics()
    with settling_lock:  # nothing settles meanwhile, so the numbers add up
        pending = sum(scope.pending for scope in tuple(runtime.scopes))
        return RuntimeStatistics(
            running=runtime.is_open,
            scopes=len(runtime.scopes),
            services=runtime.service_count,
            started=runtime.finished + pending,
            finished=runtime.finished,
            failed=runtime.failed,
            pending=pending,
        )
