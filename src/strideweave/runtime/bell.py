"""Bell: the quickest way to wake a loop from another thread.

``call_soon_threadsafe`` writes to a socket and costs the loop two turns: one to read the socket, one to make the
call. The kernel's event counter costs less to write and to read, and the reader makes the call itself.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["Bell"]


class Bell:
    """Has a loop call a function; several rings before it gets to it count as one. Made in the loop's thread.

    Args:
        loop: the running loop.
        answer: called in it; must not raise.
        counter: False takes the loop's own way, as where the system has no event counter.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: Callable[[], None],
        *,
        counter: bool = hasattr(os, "eventfd"),
    ) -> None:
        self._loop = loop
        self._answer = answer
        self._counter: int | None = None
        if counter:
            self._counter = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            # Not when the loop closes: whoever rings then must not write to what has the same number by now.
            weakref.finalize(self, os.close, self._counter).atexit = False
            loop.add_reader(self._counter, _answer_ring, self._counter, answer)

    def ring(self) -> None:
        """Wake the loop; any thread, never blocks.

        Raises:
            RuntimeError: the loop has ended. Where it could not be told, nothing happens.
        """
        if self._counter is None:
            self._loop.call_soon_threadsafe(self._answer)
        else:
            os.eventfd_write(self._counter, 1)


def _answer_ring(counter: int, answer: Callable[[], None]) -> None:
    os.eventfd_read(counter)
    answer()
