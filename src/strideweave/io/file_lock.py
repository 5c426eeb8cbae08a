"""The lock that one holder has of a file or a directory, and that ends with the holder in whatever way (``flock``)."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from strideweave.runtime.locks import short_lock

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Claim", "is_still_at", "lock"]


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


class Claim:
    """An open file, and the lock of it once it was taken, until both are let go of or this object dies.

    What lets go of them is there before the lock is: an interruption in between could leave a lock that nobody has, and
    that nobody else would get as long as the process lives.

    Args:
        number: the file's descriptor, which belongs to this object from then on.

    Attributes:
        number: the same.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._finalizer = weakref.finalize(self, _unlock_and_close, number, os.getpid())
        self._finalizer.atexit = False  # unfinished work may still go on; the system unlocks after it

    def take(self, path: str) -> bool:
        """``lock`` the file; arguments and errors are those of that."""
        return lock(self.number, path)

    def close(self) -> None:
        """Let others lock the file and close it; idempotent, and done to its end by another call where interrupted.

        In a forked child the lock stays, since its parent has it.
        """
        last = None
        try:
            with (
                short_lock
            ):  # or another thread could close it before it is unlocked, and its number be another file's
                found = self._finalizer.peek()
                if found is not None:
                    _unlock(
                        *found[2]
                    )  # before the finalizer goes, which is all that another call would look at
                    last = self._finalizer.detach()
        finally:
            if last is not None:
                os.close(self.number)


def _unlock_and_close(number: int, process: int) -> None:
    """Let others lock a file and close it, which alone would not do while a forked child has it open."""
    _unlock(number, process)
    os.close(number)


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
