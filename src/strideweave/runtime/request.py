"""Request: one unit of work of a carrier, from its admission to its one outcome.

Nothing a request raises reaches its task group or the loop. It ends by *settling*, once: the cleanup runs, the
request is taken off its scope's pending list, and only then the outcome becomes visible.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from strideweave.runtime.await_result import DroppedAtExit
from strideweave.runtime.locks import settling_lock, short_lock
from strideweave.runtime.thread_role import this_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from strideweave.runtime.await_result import AwaitResult
    from strideweave.runtime.task_scope import TaskScope

__all__ = ["Call", "Request"]

_logger = logging.getLogger("strideweave")


class Request:
    """One request: what it takes, does and gives back, and whom to tell. Subclasses say what that is.

    Args:
        scope: the carrier's scope.
        handle: a new handle, which gets the outcome.
    """

    __slots__ = ("accepted", "begun", "handle", "nested", "scope", "settled")

    def __init__(self, scope: TaskScope, handle: AwaitResult[Any]) -> None:
        self.scope = scope
        self.handle = handle
        self.nested = this_thread.waiting_forbidden  # started from inside the runtime, by another request
        self.accepted = False  # by the loop, which sees to its end
        self.begun = False
        self.settled = False

    def enter(self) -> None:
        """Take what the request needs and ``leave`` gives back, or raise.

        It may be interrupted at any place: ``revoke`` gives back what it had taken. Called under ``short_lock``, in
        the step that makes the request pending: a fork finds both done or neither, and a forked child gives back what
        it inherits. Must not wait.
        """

    async def work(self) -> Any:
        """Do it, in the runtime's loop, and return the value; not called where the request ends before."""
        raise NotImplementedError

    def leave(self) -> None:
        """Give back what was taken. Called exactly once when the request ends, before ``handle.done`` is true.

        On every path: a value, an exception, the end of the runtime, a forked child that inherits the request (and
        fails it; the parent's own call is the parent's). It must not await, block or raise, and may take no lock but
        ``short_lock``.
        """

    def revoke(self) -> None:
        """Give back what was taken, if anything was, since the request cannot start after all; as ``leave``."""
        self.leave()

    def drop(self) -> None:
        """Let go of what the request needs no more, having ended; a task of it may be under way all the same."""

    async def run(self) -> None:
        """Run the request to its end, in the runtime loop; never raises."""
        self.begun = True
        try:
            value = await self.work()
        except BaseException as error:  # whatever it is goes to the handle; group and loop must survive it
            self._fail(error)
        else:
            self.settle(value, None)
        finally:
            del self  # a stored traceback's frames keep this one, their f_back: no cycle to the handle

    def _fail(self, error: BaseException) -> None:
        trace = error.__traceback__
        # Without the caller's frame: the traceback would keep the request, and so its own handle, alive.
        self.settle(None, error.with_traceback(trace.tb_next if trace else None))

    def settle(self, value: Any, error: BaseException | None, *, wake: bool = True) -> None:
        """End the request; only the first call counts.

        A request dropped at the interpreter's end wakes nobody: only daemon threads can still sleep on it, and
        they would race the end to print a traceback.

        Args:
            value: the outcome without an error.
            error: the outcome otherwise.
            wake: False leaves sleeping observers asleep, where waking them could only do harm.
        """
        if error is not None and self.scope.is_stopping:
            error = DroppedAtExit()  # what failed is the loop
        with settling_lock:
            if self.settled:
                return
            self.settled = True
            handle = self.handle
            try:
                self.leave()
            except BaseException as failure:  # the handle must end all the same
                _logger.exception("the cleanup of a request of %s failed", self.scope.name)
                error = failure if error is None else error
            with short_lock:
                self.scope.forget(self, failed=error is not None)
                handle._settle(value, error)
            # An error's traceback refers to the request, and a task that is stuck must not keep the carrier alive.
            del self.handle
            self.drop()
        if wake and not isinstance(error, DroppedAtExit):
            handle._wake()


class Call(Request):
    """A request made of plain callables; see ``TaskScope.start``."""

    __slots__ = ("_args", "_cleanup", "_enter", "_function")

    def __init__(
        self,
        scope: TaskScope,
        handle: AwaitResult[Any],
        function: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        *,
        enter: Callable[[], None] | None,
        cleanup: Callable[[], None] | None,
    ) -> None:
        super().__init__(scope, handle)
        self._function = function
        self._args = args
        self._enter = enter
        self._cleanup = cleanup

    def enter(self) -> None:
        """As told."""
        if self._enter is not None:
            self._enter()

    async def work(self) -> Any:
        """As told."""
        return await self._function(*self._args)

    def leave(self) -> None:
        """As told."""
        if self._cleanup is not None:
            self._cleanup()

    def revoke(self) -> None:
        """As told; a cleanup without anything to take gives back nothing that ``start`` has taken."""
        if self._enter is not None:
            self.leave()

    def drop(self) -> None:
        """As told."""
        del self._function, self._args, self._enter, self._cleanup
