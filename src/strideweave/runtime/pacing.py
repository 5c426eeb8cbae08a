"""When the runtime's loop lets others have the interpreter: its naps, the wake-ups it puts off, its inbox's turn.

The loop lets go of the interpreter at each of its many short system calls, and has it back before a thread that
waits for it has woken up. That thread's claim, made after 5 ms of waiting, begins anew each time, so that a
caller's loop could be late by much more than that. A nap is long enough for the thread to wake up.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import time
from typing import TYPE_CHECKING

from strideweave.runtime.thread_role import this_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from selectors import SelectorKey

    from strideweave.runtime.inbox import Inbox

__all__ = ["PacedSelector", "paced_loop"]

_logger = logging.getLogger("strideweave")

BUSY_SECONDS = 0.002
"""How long the loop works before it naps, and wakes those whose requests have ended."""

NAP_SECONDS = 50e-6
"""How long it naps, at the least: as long as a thread takes to wake up."""


class PacedSelector(selectors.DefaultSelector):
    """The system's selector for a loop that naps when it has been busy for long, and takes calls from its inbox.

    Made and closed in the loop's thread, whose wake-ups wait meanwhile until the loop naps or has nothing to do.

    Args:
        inbox: calls of other threads, made as the loop wakes up or begins a turn.
    """

    def __init__(self, inbox: Inbox) -> None:
        super().__init__()
        self._inbox = inbox
        self._rested = time.perf_counter()
        self._put_off: list[Callable[[], object]] = []
        this_thread.put_off = self._put_off
        inbox.attach(self.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Wait for what is registered, as the base does; a busy loop, which does not want to wait, may nap."""
        inbox = self._inbox
        waits = timeout is None or timeout > 0
        if waits and self._put_off and not inbox.has_calls:
            self._wake_others()  # before it says that it sleeps: it is quick to find what they post in answer
        if waits and inbox.fall_asleep():
            try:
                ready = super().select(timeout)
            finally:
                inbox.wake_up()
            self._rested = time.perf_counter()
        else:
            if time.perf_counter() - self._rested >= BUSY_SECONDS:
                self._wake_others()
                time.sleep(NAP_SECONDS)
                self._rested = time.perf_counter()
            ready = super().select(0)
        if inbox.has_calls:
            inbox.take()
        return ready

    def _wake_others(self) -> None:
        while self._put_off:  # a finalizer may put off another one at any statement
            ring = self._put_off.pop()
            try:
                ring()
            except Exception:  # whatever it is, it belongs to one caller's loop and must not end this one
                _logger.exception("the loop of a caller whose request has ended could not be woken")

    def close(self) -> None:
        """Close the selector, as the base does; what still ends in this thread wakes others at once."""
        this_thread.put_off = None
        self._wake_others()
        super().close()


def paced_loop(inbox: Inbox) -> asyncio.AbstractEventLoop:
    """Make an asyncio loop on a ``PacedSelector``."""
    return asyncio.SelectorEventLoop(PacedSelector(inbox))
