"""A fair share of the interpreter for the callers' threads while the runtime's loop is busy, and its inbox's turn.

The loop lets go of the interpreter at each of its many short system calls, and has it back before a thread that
waits for it has woken up. That thread's claim, made after 5 ms of waiting, begins anew each time, so that a
caller's loop could be late by much more than that. A nap is long enough for the thread to wake up.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectors import SelectorKey

    from strideweave.runtime.inbox import Inbox

__all__ = ["PacedSelector", "paced_loop"]

BUSY_SECONDS = 0.002
"""How long the loop works before it naps."""

NAP_SECONDS = 50e-6
"""How long it naps, at the least: as long as a thread takes to wake up."""


class PacedSelector(selectors.DefaultSelector):
    """The system's selector for a loop that naps when it has been busy for long, and takes calls from its inbox.

    Args:
        inbox: calls of other threads, made as the loop wakes up or begins a turn.
    """

    def __init__(self, inbox: Inbox) -> None:
        super().__init__()
        self._inbox = inbox
        self._rested = time.perf_counter()
        inbox.attach(self.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Wait for what is registered, as the base does; a busy loop, which does not want to wait, may nap."""
        inbox = self._inbox
        if (timeout is None or timeout > 0) and inbox.fall_asleep():
            try:
                ready = super().select(timeout)
            finally:
                inbox.wake_up()
            self._rested = time.perf_counter()
        else:
            if time.perf_counter() - self._rested >= BUSY_SECONDS:
                time.sleep(NAP_SECONDS)
                self._rested = time.perf_counter()
            ready = super().select(0)
        if inbox.has_calls:
            inbox.take()
        return ready


def paced_loop(inbox: Inbox) -> asyncio.AbstractEventLoop:
    """Make an asyncio loop on a ``PacedSelector``."""
    return asyncio.SelectorEventLoop(PacedSelector(inbox))
