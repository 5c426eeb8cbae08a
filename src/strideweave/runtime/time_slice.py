"""A thread's wish for long turns on its processor, so that one that wakes up there goes first.

Linux's scheduler lets a thread that wakes up interrupt the one that runs where it asks for shorter turns. Where copies
occupy every processor, a caller's loop would otherwise wait for the end of a worker's turn, again and again. A worker
has no less of the processors for it: its turns are fewer and longer.
"""

from __future__ import annotations

import os
import platform
import struct
import sys
from types import MappingProxyType

from strideweave.runtime.system_call import system_call

__all__ = ["LONG_TURN_NANOSECONDS", "ask_for_long_turns"]

LONG_TURN_NANOSECONDS = 20_000_000
"""What is asked for. Others have some milliseconds by default; the system allows 0.1 to 100 ms."""

# sched_setattr(2), for which few C libraries have a function.
_SET_ATTRIBUTES = MappingProxyType({"x86_64": 314, "aarch64": 274})

# struct sched_attr: size, policy, flags, nice, priority, and the length of a turn with two more that deadlines have.
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
_KEEP_POLICY = 0x08


def ask_for_long_turns() -> bool:
    """Have the calling thread take longer turns than others, where the system knows of such (Linux 6.12 and later).

    Its class and its nice value stay as they are.

    Returns:
        Whether the system took the wish; an older one takes it and does nothing. A filter of system calls may refuse.
    """
    number = _SET_ATTRIBUTES.get(platform.machine())
    if number is None or sys.maxsize < 1 << 32:  # the numbers are those of 64-bit programs
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # of the thread, on Linux
    wish = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, _KEEP_POLICY, nice, 0, LONG_TURN_NANOSECONDS, 0, 0)
    try:
        system_call(number, 0, wish, 0)
    except OSError:
        return False
    return True
