"""Inbox: the calls that any thread posts to one loop, which the loop's selector takes as it wakes up.

``call_soon_threadsafe`` writes to a socket, which lets go of the interpreter, and costs the loop two turns: one to
read the socket, one to make the call. A loop that is awake looks into its inbox at every turn, so nobody has to wake
it; one that sleeps is woken through the kernel's event counter. The calls are made before the turn begins, so that a
task which a call starts takes its first step in that very turn.
"""

from __future__ import annotations

import logging
import os
import select
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from contextvars import Context

__all__ = ["Inbox"]

# Most calls begin a request, whose first step, half a millisecond at the most, comes right after: so others, who want
# the interpreter too, have their turn after one millisecond.
_CALLS_OF_A_TURN = 2

_logger = logging.getLogger("strideweave")


class Inbox:
    """Calls from other threads for one loop. ``serve`` binds it to the loop, in the loop's thread.

    Args:
        counter: False wakes the loop in its own way, as where the system has no event counter.
    """

    def __init__(self, *, counter: bool = hasattr(os, "eventfd")) -> None:
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._asleep = False  # whoever posts has to wake the loop
        self._loop: asyncio.AbstractEventLoop
        self._context: Context
        self._counter: int | None = None
        if counter:
            self._counter = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            # Not when the loop closes: whoever rings then must not write to what has the same number by now.
            weakref.finalize(self, os.close, self._counter).atexit = False

    @property
    def has_calls(self) -> bool:
        """Whether some are to be made."""
        return bool(self._calls)

    def attach(self, selector_number: int) -> None:
        """Have the counter wake an epoll object, known by its number."""
        if self._counter is None:
            return
        # Of the same epoll, but closed on its own. Edge-triggered: every ring is an event, and none has to be read
        # away. A selector skips what it has not registered itself.
        with select.epoll.fromfd(os.dup(selector_number)) as poll:
            poll.register(self._counter, select.EPOLLIN | select.EPOLLET)

    def serve(self, loop: asyncio.AbstractEventLoop, context: Context) -> None:
        """Take calls from now on, to be made in this context."""
        self._loop, self._context = loop, context

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call ``function(*args)`` soon, in the order posted; any thread, never blocks.

        Raises:
            RuntimeError: the loop has ended. Where that could not be told, nothing happens.
        """
        self._calls.append((function, args))
        if not self._asleep:
            return
        try:
            self._asleep = False  # one ring serves all that is posted until the loop is up
            self.ring()
        except BaseException:  # such as Ctrl-C
            self._asleep = True  # the next post has to wake the loop again
            self.ring()  # and so has this one: calls of other threads may have relied on it meanwhile
            raise

    def ring(self) -> None:
        """Wake the loop; any thread, never blocks.

        Raises:
            RuntimeError: as ``post``.
        """
        if self._counter is None:
            self._loop.call_soon_threadsafe(_nothing)
        else:
            os.eventfd_write(self._counter, 1)

    def fall_asleep(self) -> bool:
        """Say that the loop is about to wait, and has to be woken; False where calls have come already."""
        self._asleep = True
        # Only now: whoever posts after this look finds the loop asleep.
        if self._calls:
            self._asleep = False
            return False
        return True

    def wake_up(self) -> None:
        """Say that the loop is awake, and looks into its inbox by itself."""
        self._asleep = False

    def take(self) -> None:
        """Make some of the calls, in the loop; the others are for the next turn, after what these began."""
        self._context.run(self._take)

    def _take(self) -> None:
        calls = self._calls
        for _ in range(min(len(calls), _CALLS_OF_A_TURN)):
            function, args = calls.popleft()
            try:
                function(*args)
            except Exception:  # whatever it is, it must not keep the calls of others from being made
                _logger.exception("a call posted to the runtime's loop failed")


def _nothing() -> None:
    """What wakes a loop in its own way; the inbox is looked into in any case."""
