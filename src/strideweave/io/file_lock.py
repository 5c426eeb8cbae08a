"""The lock that one holder has of a file or a directory, and that ends with the holder in whatever way (``flock``)."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["is_still_at", "lock", "unlock", "unlock_and_close"]


def lock(number: int, path: str) -> bool:
    """Take the lock of an open file, unless somebody else has it; forked children inherit it.

    Args:
        number: its descriptor.
        path: where it was opened, for the message.

    Returns:
        Whether the lock is taken.

    Raises:
        OSError: the system or the file system refused, with the path.
    """
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; it was to be locked", path) from error
    return True


def unlock(number: int, process: int) -> None:
    """Let others lock a file, as often as one likes; in a forked child nothing happens, since its parent has the lock.

    Args:
        number: the file's descriptor.
        process: the number of the process that locked it.
    """
    if process == os.getpid():
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_UN)


def unlock_and_close(number: int, process: int) -> None:
    """``unlock`` a file and close it: the lock would last as long as a forked child has the file open."""
    unlock(number, process)
    os.close(number)


def is_still_at(number: int, path: Path) -> bool:
    """Whether a path leads to this open file: between its opening and its lock it may have been replaced or removed."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False
