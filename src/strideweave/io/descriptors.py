"""File descriptors: who keeps one open, and what Linux and macOS do with one that Python has no function for."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CANNOT_PUNCH", "HeldDescriptor", "punch", "synchronize"]

CANNOT_PUNCH = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV})
"""The error numbers by which a file system, or the system, says that it cannot free a range of a file."""

# <linux/falloc.h>: free the range and leave the size of the file as it is.
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS, whose fsync stops at the drive's cache


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    # The 64-bit name where it exists: plain fallocate takes a 32-bit offset on some 32-bit systems.
    function = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


_FALLOCATE = _find_fallocate()


class HeldDescriptor:
    """The descriptors of one file, closed when the last user lets go of them.

    A system call under way holds a reference, so closing the file meanwhile cannot hand its number to a file
    opened by somebody else.

    Attributes:
        number: the descriptor.
        direct: the one that goes past the page cache, or -1.
    """

    __slots__ = ("direct", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.direct = -1

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        # Ctrl-C may have ended the making.
        for number in (getattr(self, "number", -1), getattr(self, "direct", -1)):
            if number >= 0:
                with suppress(OSError):  # what a late close could report belongs to nobody any more
                    _close(number)


def synchronize(number: int) -> None:
    """Wait until what was written to a file is on the medium itself; blocks.

    Raises:
        OSError: the storage failed.
    """
    if _FULL_SYNC is not None:
        with suppress(OSError):  # a file system that knows nothing of it
            fcntl.fcntl(number, _FULL_SYNC)
            return
    getattr(os, "fdatasync", os.fsync)(number)


def punch(number: int, offset: int, length: int) -> int:
    """Free a range of a file, which reads zero then, and leave its size; returns 0 or the error number."""
    if _FALLOCATE is None:
        return errno.ENOSYS
    while _FALLOCATE(number, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0
