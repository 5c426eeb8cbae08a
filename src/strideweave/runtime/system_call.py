"""System calls of Linux for which Python, and often the C library, has no function."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Any

__all__ = ["system_call"]


def _find_syscall() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


_SYSCALL = _find_syscall()


def system_call(number: int, *arguments: Any) -> int:
    """Make a system call; the interpreter's lock is free meanwhile.

    Args:
        number: of the call, on the machine's architecture.
        arguments: what ctypes can pass on.

    Returns:
        What the kernel answered, 0 or more.

    Raises:
        OSError: the kernel refused, or the system is not Linux (ENOSYS).
    """
    if _SYSCALL is None:
        raise OSError(errno.ENOSYS, f"Linux has system calls of these numbers, and this is {sys.platform}")
    result: int = _SYSCALL(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
