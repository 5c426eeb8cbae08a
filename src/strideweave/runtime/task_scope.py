"""TaskScope: the task group that one carrier owns in the runtime loop.

Every request of a carrier is a task in its group (contract). The group is opened by the carrier's
first request, hosted by a small task in the runtime's root group, and closed with the carrier. A request is
taken off the pending list before its outcome is visible, so ``handle.wait()`` followed by ``close()`` always
succeeds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from strideweave.errors import PendingWorkError, ReleasedError
from strideweave.runtime.event_loop import current_runtime
from strideweave.runtime.locks import short_lock
from strideweave.runtime.request import Call, Request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from strideweave.runtime.await_result import AwaitResult
    from strideweave.runtime.event_loop import EventLoop

__all__ = ["ScopeStatistics", "TaskScope"]

_TASK_NAME = "strideweave request"  # anyio would put one together for each


@dataclass(frozen=True, slots=True)
class ScopeStatistics:
    """What the requests of one carrier have come to.

    Attributes:
        started: requests accepted.
        finished: requests that ended, with a value or an exception.
        failed: those among them that ended with an exception.
        pending: requests not ended yet.
        closed: whether the scope takes no more requests.
    """

    started: int
    finished: int
    failed: int
    pending: int
    closed: bool


H = TypeVar("H", bound="AwaitResult[Any]")


class TaskScope:
    """The requests of one carrier and their task group.

    Args:
        name: what owns the scope, for messages, such as ``"CPU carrier"``.
    """

    __slots__ = (
        "__weakref__",
        "_closed",
        "_closing",
        "_failed",
        "_finished",
        "_group",
        "_hosted",
        "_pending",
        "_runtime",
        "_unopened",
        "_wake_host",
        "name",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self._closed = False
        self._pending: set[Request] = set()
        self._finished = 0
        self._failed = 0
        self._runtime: EventLoop | None = None
        self._reset_group()

    def _reset_group(self) -> None:
        # From here on these belong to the runtime thread.
        self._group: TaskGroup | None = None
        self._unopened: deque[Request] = deque()  # requests that came before the group was entered
        self._wake_host: anyio.Event | None = None
        self._hosted = False
        self._closing = False

    @property
    def pending(self) -> int:
        """How many requests have not ended."""
        return len(self._pending)

    @property
    def is_stopping(self) -> bool:
        """Whether the loop of the requests has been asked to end."""
        return self._runtime is not None and self._runtime.is_stopping

    def start(
        self,
        handle: H,
        function: Callable[..., Awaitable[Any]],
        *args: Any,
        enter: Callable[[], None] | None = None,
        cleanup: Callable[[], None] | None = None,
    ) -> H:
        """Start a request from any thread and return its handle at once.

        The request is ``await function(*args)`` as a task in the runtime loop. It sees the runtime's context
        variables, not the caller's.

        Args:
            handle: a new handle, which gets the value or the exception.
            function: called in the runtime loop.
            *args: its arguments.
            enter: takes what the request needs and ``cleanup`` gives back. Called under ``short_lock``, in the
                step that makes the request pending: a fork finds both done or neither, and a forked child gives
                back what it inherits. What it raises, ``start`` raises; it must not wait, and may be interrupted.
            cleanup: called exactly once when the request ends, before ``handle.done`` is true, on every path:
                a value, an exception, the end of the runtime, a forked child that inherits the request (and
                fails it; the parent's own call is the parent's). It must not await, block or raise, and may
                take no lock but ``short_lock``.

        Returns:
            ``handle``.

        Raises:
            ReleasedError: the scope is closed.
            RuntimeError: the runtime has ended or could not start.
            ValueError: the handle is done already.

        When it raises, nothing is pending; ``cleanup`` has been called if there was an ``enter``, however far that
        came. An exception from outside, such as Ctrl-C, may come when the loop has taken the request: that goes on
        then, as one whose handle was dropped.
        """
        if handle.done:
            raise ValueError("a request needs a new handle, and this one is done already")
        return self.admit(Call(self, handle, function, args, enter=enter, cleanup=cleanup), handle)

    def admit(self, request: Request, handle: H) -> H:
        """Start a new request of this scope from any thread, and return its handle, which is not done.

        Raises:
            ReleasedError, RuntimeError: as ``start``.

        When it raises, nothing is pending and ``request.revoke`` has been called, unless an exception from outside,
        such as Ctrl-C, came when the loop had taken the request.
        """
        runtime = current_runtime()
        try:
            with short_lock:
                self._enter(request, runtime)
                runtime.scopes.add(self)
                self._pending.add(request)  # before the post: now every way to the end settles it
            runtime.post(self._begin, request)
        except BaseException as error:
            with short_lock:
                settled = request.settled
                if not (settled or request.accepted):
                    request.settled = True
                    self._pending.discard(request)
                    request.revoke()
            # Where the ending runtime has settled it, and all, the handle tells.
            if not (settled and isinstance(error, RuntimeError)):
                raise
        return handle

    def _enter(self, request: Request, runtime: EventLoop) -> None:
        """Have a request take what it needs, or raise with nothing taken; under the lock."""
        if self._closed:
            raise ReleasedError(f"{self.name} is released; it starts no more requests")
        if self._runtime is not runtime:
            self._reset_group()
            self._runtime = runtime
        request.enter()

    def close(self) -> None:
        """Refuse requests from now on and end the task group. Idempotent.

        Raises:
            PendingWorkError: requests are unfinished; nothing has changed.
        """
        with short_lock:
            pending = len(self._pending)
            if pending:
                raise PendingWorkError(
                    f"{self.name} has {pending} unfinished request(s); wait for their handles first",
                    pending=pending,
                )
            self._closed = True
        self.abandon()

    def abandon(self) -> None:
        """End the task group once its requests have ended; takes no lock, for finalizers.

        A finalizer runs in any thread at any statement, so it may interrupt a thread that holds a lock.
        """
        runtime = self._runtime
        if runtime is None or not runtime.is_open:
            return
        try:
            runtime.post(self._end_host)
        except RuntimeError:  # it ended this very moment, and the group with it
            return

    def statistics(self) -> ScopeStatistics:
        """Return the counts of this scope's requests."""
        with short_lock:
            return ScopeStatistics(
                started=self._finished + len(self._pending),
                finished=self._finished,
                failed=self._failed,
                pending=len(self._pending),
                closed=self._closed,
            )

    def unfinished(self, *, nested_only: bool = False) -> list[AwaitResult[Any]]:
        """Return the handles of the unfinished requests, or of those that other requests have started."""
        with short_lock:
            return [request.handle for request in self._pending if request.nested or not nested_only]

    def forget(self, request: Request, *, failed: bool) -> None:
        """Take a settled request off the list; called under both locks."""
        self._pending.discard(request)
        runtime = self._runtime
        self._finished += 1
        self._failed += failed
        if runtime is not None:
            runtime.finished += 1
            runtime.failed += failed

    def fail_pending(self, make_error: Callable[[], BaseException], *, wake: bool = True) -> None:
        """End every unfinished request with an error of its own."""
        with short_lock:
            requests = list(self._pending)
        for request in requests:
            request.settle(None, make_error(), wake=wake)

    def lost_in_fork(self) -> None:
        """In a forked child, fail the unfinished requests (the parent runs them) and let go of its loop."""
        message = "the request was started before fork() and runs in the parent; start it again in the child"
        # Whoever sleeps on it is the parent's thread, or a loop on the parent's sockets: wake nobody.
        self.fail_pending(lambda: RuntimeError(message), wake=False)
        self._runtime = None
        self._reset_group()

    def _begin(self, request: Request) -> None:
        """Make the request a task of the group, and open the group if need be; called by the loop."""
        with short_lock:
            if request.settled:  # dropped on its way here
                return
            request.accepted = True  # from here on nobody revokes it
        try:
            if not self._hosted and self._runtime is not None:
                self._hosted = True
                self._runtime.root.start_soon(self._host, self._runtime)
            if self._group is not None:
                self._group.start_soon(request.run, name=_TASK_NAME)
            else:
                self._unopened.append(request)
        except BaseException as error:  # the loop could only log it, and the handle would never end
            request.settle(None, error)

    async def _host(self, runtime: EventLoop) -> None:
        """Hold the task group open until the carrier lets go of it."""
        self._wake_host = anyio.Event()
        try:
            async with anyio.create_task_group() as self._group:
                while self._unopened:  # no local variable: it would keep the last request's carrier alive
                    self._group.start_soon(self._unopened.popleft().run, name=_TASK_NAME)
                if not self._closing:
                    await self._wake_host.wait()
        finally:
            with short_lock:
                if not self._pending:  # else another request is on its way here and opens the group again
                    runtime.scopes.discard(self)
            self._reset_group()

    def _end_host(self) -> None:
        self._closing = True
        if self._wake_host is not None:
            self._wake_host.set()
