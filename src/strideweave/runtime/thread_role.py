"""What the calling thread may do: the runtime's own threads must not wait, daemon threads get a quiet end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["forbid_waiting", "park_daemon_thread", "this_thread", "waiting_is_forbidden"]


class _ThreadRole(threading.local):
    """What the calling thread may do."""

    waiting_forbidden = False  # True where blocking for a request could never end
    # Calls that can wait until a busy loop rests; None: none can.
    put_off: list[Callable[[], object]] | None = None


this_thread = _ThreadRole()


def forbid_waiting(forbidden: bool = True) -> None:
    """Make ``AwaitResult.wait()`` raise in the calling thread from now on (or allow it again).

    The runtime thread and its workers call this: a request that blocks the thread it needs would never end.

    Args:
        forbidden: False allows waiting again.
    """
    this_thread.waiting_forbidden = forbidden


def waiting_is_forbidden() -> bool:
    """Tell whether the calling thread belongs to the runtime, so that ``wait()`` raises in it."""
    return this_thread.waiting_forbidden


def park_daemon_thread() -> None:
    """Hold a daemon thread back for a second where it is about to hear that the interpreter is exiting.

    The interpreter freezes daemon threads a moment later. An exception at once would only print the traceback of
    a program that ended well.
    """
    if threading.current_thread().daemon and not this_thread.waiting_forbidden:
        time.sleep(1.0)
