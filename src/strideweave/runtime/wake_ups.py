"""WakeUps: how other threads wake the tasks of one asyncio loop, many of them by one call.

A call into a loop from another thread writes to a socket, which gives the interpreter away in the midst of the
runtime's work, and costs the loop a turn and two reads. So the loop watches a counter of the kernel's instead, where
it can. The first wake-up rings; those that come before the loop has got to it go along. The runtime's loop rings when
it has nothing else to do, or has been busy for a while: a thread that wakes up while there is more to do would take the
interpreter in turns with it, which costs both of them more than what they do.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from strideweave.runtime.thread_role import this_thread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WakeUps", "current_task", "wake_ups_of"]


class WakeUps:
    """The tasks of one asyncio loop that are to be woken; any thread wakes, the loop delivers.

    Made in the loop's thread. The counter is closed once neither the loop nor anybody who sleeps in it refers to
    this any more: a loop that closes lets go of it.

    Args:
        loop: the loop; it is not kept alive.
        counter: False calls into the loop in its own way, as where the system or the loop knows no counter.
    """

    __slots__ = ("__weakref__", "_asked", "_counter", "_futures", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, counter: bool = hasattr(os, "eventfd")) -> None:
        self._loop = weakref.ref(loop)
        self._futures: deque[asyncio.Future[None]] = deque()
        self._asked = False  # the loop has been asked to deliver, and has not begun to
        self._counter = self._watched_counter(loop) if counter else None

    def are_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether they are those of that loop."""
        return self._loop() is loop

    def wake(self, future: asyncio.Future[None]) -> None:
        """Have the loop end a future soon, unless it has ended by then. Any thread; never blocks."""
        loop = self._loop()
        if loop is None or (self._counter is not None and loop.is_closed()):
            self._futures.clear()  # nobody is left to be woken, and each would keep the loop alive
            return
        self._futures.append(future)
        if self._asked:
            return
        if this_thread.put_off is None:
            self._ring(loop)
        else:
            self._asked = True
            this_thread.put_off.append(partial(self._ring, loop))

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._asked = True
            self._ask(loop)
        except RuntimeError:  # "Event loop is closed": nobody is left to be woken
            self._asked = False
            self._futures.clear()
        except BaseException:  # such as Ctrl-C
            self._asked = False  # the next wake-up has to ask again
            self._ask(loop)  # and so has this one: other threads may have relied on it
            raise

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._counter is None:
            loop.call_soon_threadsafe(self._deliver)
        else:
            os.eventfd_write(self._counter, 1)

    def _watched_counter(self, loop: asyncio.AbstractEventLoop) -> int | None:
        """Have the loop watch a new counter; None where there is none to be had, or the loop watches no files."""
        try:
            counter = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:  # too many files are open
            return None
        try:
            # The loop would keep the context of whichever task happens to come first.
            contextvars.Context().run(loop.add_reader, counter, self._answer, counter)
        except Exception:  # whatever a loop of somebody else's says, its own way is left
            os.close(counter)
            return None
        # Not when the loop closes: whoever wakes then must not write to what has the same number by now.
        weakref.finalize(self, os.close, counter).atexit = False
        return counter

    def _answer(self, counter: int) -> None:
        self._deliver()
        # Not before: Ctrl-C may stop this loop, to be run again later, and until it was read the loop calls again.
        try:
            os.eventfd_read(counter)
        except BlockingIOError:  # it was read already, as by a forked child, which has the same one
            pass
        finally:
            if self._futures:  # rung for since they were delivered, and that was read too
                os.eventfd_write(counter, 1)

    def _deliver(self) -> None:
        self._asked = False  # first: a wake-up from here on finds it so, and asks anew
        futures = self._futures
        try:
            while futures:
                # It stays until it has ended: Ctrl-C may stop this loop, to be run again later.
                future = futures[0]
                if not future.done():
                    future.set_result(None)
                futures.popleft()
        finally:
            loop = self._loop()
            if futures and loop is not None:
                loop.call_soon(self._deliver)


def _none() -> None:
    """The wake-ups of no loop."""


class _OfThread(threading.local):
    """The wake-ups of the loops that tasks of this thread slept in, and those of the last one."""

    def __init__(self) -> None:
        self.last: Callable[[], WakeUps | None] = _none  # weakly: its loop may be the thread's last
        self.of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, WakeUps] = weakref.WeakKeyDictionary()


_of_thread = _OfThread()


def wake_ups_of(loop: asyncio.AbstractEventLoop) -> WakeUps:
    """Give the wake-ups of the loop that runs in the calling thread."""
    found = _of_thread.last()
    if found is None or not found.are_of(loop):
        known = _of_thread.of
        found = known.get(loop)
        if found is None:
            for other in [other for other in known if other.is_closed()]:
                del known[other]  # with its counter
            found = known[loop] = WakeUps(loop)
        _of_thread.last = weakref.ref(found)
    return found


def current_task() -> asyncio.Task[Any] | None:
    """Give the asyncio task that runs in the calling thread; None in a trio task, or outside of any."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no asyncio loop runs here
        return None
