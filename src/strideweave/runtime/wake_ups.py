"""WakeUps: how other threads wake the tasks of one asyncio loop, many of them by one call.

A call into a loop from another thread writes to a socket, which gives the interpreter away in the midst of the
runtime's work. The first wake-up makes that call; those that come before the loop has got to it go along.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from typing import Any

__all__ = ["WakeUps", "current_task", "wake_ups_of"]


class WakeUps:
    """The tasks of one asyncio loop that are to be woken; any thread wakes, the loop delivers.

    Args:
        loop: the loop; it is not kept alive.
    """

    __slots__ = ("_asked", "_futures", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._futures: deque[asyncio.Future[None]] = deque()
        self._asked = False  # the loop has been asked to deliver, and has not begun to

    def are_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether they are those of that loop."""
        return self._loop() is loop

    def wake(self, future: asyncio.Future[None]) -> None:
        """Have the loop end a future soon, unless it has ended by then. Any thread; never blocks."""
        self._futures.append(future)
        if self._asked:
            return
        loop = self._loop()
        if loop is None:
            return  # and with it whoever slept there
        try:
            self._asked = True
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # "Event loop is closed": nobody is left to be woken
            self._asked = False
            self._futures.clear()  # each would keep the loop alive
        except BaseException:  # such as Ctrl-C
            self._asked = False  # the next wake-up has to ask again
            loop.call_soon_threadsafe(
                self._deliver
            )  # and so has this one: other threads may have relied on it
            raise

    def _deliver(self) -> None:
        self._asked = False  # first: a wake-up from here on finds it so, and asks anew
        futures = self._futures
        try:
            while futures:
                future = futures[
                    0
                ]  # it stays until it has ended, should Ctrl-C stop this loop to run it later again
                if not future.done():
                    future.set_result(None)
                futures.popleft()
        finally:
            loop = self._loop()
            if futures and loop is not None:
                loop.call_soon(self._deliver)


class _OfThread(threading.local):
    """The wake-ups of the loop that a task of this thread slept in last."""

    wake_ups: WakeUps | None = None


_of_thread = _OfThread()


def wake_ups_of(loop: asyncio.AbstractEventLoop) -> WakeUps:
    """Give the wake-ups of the loop that runs in the calling thread."""
    found = _of_thread.wake_ups
    if found is None or not found.are_of(loop):
        found = _of_thread.wake_ups = WakeUps(loop)
    return found


def current_task() -> asyncio.Task[Any] | None:
    """Give the asyncio task that runs in the calling thread; None in a trio task, or outside of any."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no asyncio loop runs here
        return None
