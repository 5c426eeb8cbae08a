"""A fair share of the interpreter for the callers' threads while the runtime's loop is busy.

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

__all__ = ["PacedSelector", "paced_loop"]

BUSY_SECONDS = 0.002
"""How long the loop works before it naps."""

NAP_SECONDS = 50e-6
"""How long it naps, at the least: as long as a thread takes to wake up."""


class PacedSelector(selectors.DefaultSelector):
    """The system's selector for a loop that naps when it has been busy for long."""

    def __init__(self) -> None:
        super().__init__()
        self._rested = time.perf_counter()

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Wait for what is registered, as the base does; a busy loop, which does not want to wait, may nap."""
        if timeout is None or timeout > 0:
            ready = super().select(timeout)
        elif time.perf_counter() - self._rested < BUSY_SECONDS:
            return super().select(timeout)
        else:
            time.sleep(NAP_SECONDS)
            ready = super().select(timeout)
        self._rested = time.perf_counter()
        return ready


def paced_loop() -> asyncio.AbstractEventLoop:
    """Make an asyncio loop on a ``PacedSelector``."""
    return asyncio.SelectorEventLoop(PacedSelector())
