"""The two process-wide locks that ``fork()`` takes first, so that a child always finds them free.

A lock that another thread holds while the process forks stays locked in the child for ever. The runtime's
fork hook takes both locks before the fork and releases them on both sides, so a child finds everything they
guard whole. Both are reentrant, because a finalizer may run at any statement of the thread that holds them.
"""

from __future__ import annotations

import threading

__all__ = ["holds_short_lock", "settling_lock", "short_lock"]

short_lock = threading.RLock()
"""For short critical sections: a few plain statements, no I/O, no await, no foreign callback.

Use it for all state that a request's ``cleanup`` touches: in a forked child the cleanups of inherited
requests run inside ``os.fork()``, where a private lock could hang the child.
"""

settling_lock = threading.RLock()
"""Held while a request settles (its cleanup, then its outcome), so that no child sees a half-settled request.

Only the runtime takes it, and always before ``short_lock``.
"""


def holds_short_lock() -> bool:
    """Tell whether the calling thread is inside such a section: then what called is a finalizer that interrupted it."""
    return short_lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # what threading.Condition asks it
