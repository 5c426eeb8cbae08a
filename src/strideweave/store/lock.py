"""The right to write to a store, which one open store at a time has.

The lock is on an open descriptor (``flock``), so the system takes it back from a process that ends in whatever way.
The file says who has it, for the message to the next one; what it says without a lock means nothing.
"""

from __future__ import annotations

import errno
import os
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path

from strideweave.io.file_lock import is_still_at, let_go, lock, unlock_and_close

__all__ = ["WriterLock"]

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class WriterLock:
    """The lock of one store, until it is closed or this object dies.

    A forked child does not have it, and closes what it inherits, so that the lock ends with the parent.

    Args:
        path: the lock file, which is made where there is none.

    Raises:
        OSError: another open store has it (``EBUSY``), with the process; or the system refused.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        number = _locked(path)
        self._finalizer = weakref.finalize(self, unlock_and_close, number, os.getpid())
        self._finalizer.atexit = False  # unfinished writes may still go on; the system unlocks after them
        # Hooks stay for ever; this one keeps nothing alive.
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))
        self._say_who(number)

    def close(self) -> None:
        """Let others write; idempotent, and done to its end by another call where it was interrupted."""
        let_go(self._finalizer)

    def _say_who(self, number: int) -> None:
        try:
            os.ftruncate(number, 0)
            os.pwrite(number, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            self.close()
            message = f"{error.strerror}; the number of this process was to be written"
            raise OSError(error.errno, message, self.path) from error


def _locked(path: str) -> int:
    """Open and lock the file that is at the path when both are done."""
    while True:
        number = os.open(path, _FLAGS, 0o666)
        try:
            locked = lock(number, path)
            if locked and is_still_at(number, Path(path)):
                return number
            holder = _holder(number)
        except OSError:
            os.close(number)
            raise
        os.close(number)
        if not locked:  # and otherwise it is of a store that was just replaced
            message = (
                f"{holder} has this store open for writing, and only one may; release its carrier there, or open the "
                'store with mode="r"'
            )
            raise OSError(errno.EBUSY, message, path)


def _holder(number: int) -> str:
    with suppress(OSError, ValueError):
        process = int(os.pread(number, 32, 0))
        return "this process" if process == os.getpid() else f"process {process}"
    return "another process"


def _leave_to_parent(lock: weakref.ref[WriterLock]) -> None:
    found = lock()
    if found is not None:
        found.close()  # or the lock would last as long as this child
