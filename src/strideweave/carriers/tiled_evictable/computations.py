"""Computations of worker threads and the end of the interpreter.

A worker is a daemon thread, which the end of the interpreter leaves where it is. In the middle of a product of
matrices that is not harmless: OpenBLAS ends its own threads when the process exits, and waits for ever for one that
was given work meanwhile. So whoever ends the runtime waits here for the block that is being computed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Computations"]

_END_SECONDS = 10.0  # many times what a block of matrices takes; what takes longer is left alone


class Computations:
    """Counts the computations that run: a context manager for each, in any number of threads.

    A service of the runtime, which calls ``close`` when it ends.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("the interpreter is exiting; nothing more is computed")
            self._running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let none begin any more, and wait for those that run, ten seconds at the most."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running, _END_SECONDS)
