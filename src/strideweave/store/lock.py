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

from strideweave.io.file_lock import Claim, is_still_at

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
        self._claim: Claim | None = None
        complete = False
        try:
            claim = self._take()
            # Hooks stay for ever; this one keeps nothing alive.
            os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))
            self._say_who(claim.number)
            complete = True
        finally:
            if not complete:
                self.close()

    def close(self) -> None:
        """Let others write; idempotent, and done to its end by another call where it was interrupted."""
        if self._claim is not None:
            self._claim.close()

    def _take(self) -> Claim:
        """Open and lock the file that is at the path when both are done."""
        while True:
            claim = self._claim = Claim(os.open(self.path, _FLAGS, 0o666))
            locked = claim.take(self.path)
            if locked and is_still_at(claim.number, Path(self.path)):
                return claim
            holder = _holder(claim.number)
            claim.close()
            if not locked:  # and otherwise it is of a store that was just replaced
                message = (
                    f"{holder} has this store open for writing, and only one may; release its carrier there, or open "
                    'the store with mode="r"'
                )
                raise OSError(errno.EBUSY, message, self.path)

    def _say_who(self, number: int) -> None:
        try:
            os.ftruncate(number, 0)
            os.pwrite(number, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            message = f"{error.strerror}; the number of this process was to be written"
            raise OSError(error.errno, message, self.path) from error


def _holder(number: int) -> str:
    with suppress(OSError, ValueError):
        process = int(os.pread(number, 32, 0))
        return "this process" if process == os.getpid() else f"process {process}"
    return "another process"


def _leave_to_parent(lock: weakref.ref[WriterLock]) -> None:
    found = lock()
    if found is not None:
        found.close()  # or the lock would last as long as this child
