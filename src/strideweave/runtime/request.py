"""Request: one unit of work of a carrier, from its first step in the loop to its one outcome.

Nothing a request raises reaches its task group or the loop. It ends by *settling*, once: the cleanup runs, the
request is taken off its scope's pending list, and only then the outcome becomes visible.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from strideweave.runtime.await_result import DroppedAtExit
from strideweave.runtime.locks import settling_lock, short_lock
from strideweave.runtime.thread_role import waiting_is_forbidden

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from strideweave.runtime.await_result import AwaitResult
    from strideweave.runtime.task_scope import TaskScope

__all__ = ["Request"]

_logger = logging.getLogger("strideweave")


class Request:
    """One request: what to run, and whom to tell."""

    __slots__ = ("args", "cleanup", "function", "handle", "nested", "scope", "settled")

    def __init__(
        self,
        scope: TaskScope,
        handle: AwaitResult[Any],
        function: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        *,
        cleanup: Callable[[], None] | None,
    ) -> None:
        self.scope = scope
        self.handle = handle
        self.function = function
        self.args = args
        self.cleanup = cleanup
        self.nested = waiting_is_forbidden()  # started from inside the runtime, by another request
        self.settled = False

    async def run(self) -> None:
        """Run the request to its end, in the runtime loop; never raises."""
        try:
            value = await self.function(*self.args)
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
        handle = self.handle
        if error is not None and self.scope.is_stopping:
            error = DroppedAtExit()  # what failed is the loop
        with settling_lock:
            if self.settled:
                return
            self.settled = True
            if self.cleanup is not None:
                error = self._clean_up(self.cleanup, error)
            with short_lock:
                self.scope.forget(self, failed=error is not None)
                handle._settle(value, error)
            # A task that is stuck must not keep the carrier alive.
            del self.function, self.args, self.cleanup
        if wake and not isinstance(error, DroppedAtExit):
            handle._wake()

    def _clean_up(self, cleanup: Callable[[], None], error: BaseException | None) -> BaseException | None:
        """Run the cleanup and return the request's error, or the cleanup's own if there was none."""
        try:
            cleanup()
        except BaseException as failure:  # the handle must end all the same
            _logger.exception("the cleanup of a request of %s failed", self.scope.name)
            return failure if error is None else error
        return error
