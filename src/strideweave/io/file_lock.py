"""The lock that one holder has of a file or a directory, and that ends with the holder in whatever way (``flock``)."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["is_still_at", "let_go", "lock", "unlock_and_close"]


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


def unlock_and_close(number: int, process: int) -> None:
    """Let others lock a file and close it, which alone would not do while a forked child has it open.

    Args:
        number: the file's descriptor.
        process: the number of the process that locked it; in a forked child the lock stays, since its parent has it.
    """
    _unlock(number, process)
    os.close(number)


def let_go(finalizer: weakref.finalize[..., Any]) -> None:
    """Have a finalizer that is to ``unlock_and_close`` a file do so now.

    Idempotent, and done to its end by another call where it was interrupted.
    """
    found = finalizer.peek()
    if found is not None:
        _unlock(*found[2])  # by itself, since a finalizer that was interrupted runs no more
        finalizer()


def _unlock(number: int, process: int) -> None:
    if process == os.getpid():
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_UN)


def is_still_at(number: int, path: Path) -> bool:
    """Whether a path leads to this open file: between its opening and its lock it may have been replaced or removed."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False
