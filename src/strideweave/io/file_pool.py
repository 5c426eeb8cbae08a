"""Files that are known by path and identity, of which only a bounded number is open at any time.

A checkpoint may have thousands of shards, and a process few descriptors. What is known of a file is found out
once; whenever it is opened later, it must still be that very file.
"""

from __future__ import annotations

import errno
import os
import resource
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio

from strideweave.io.files import OpenFile
from strideweave.runtime.workers import run_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

__all__ = ["ChangedFile", "FilePool", "FilePoolStatistics", "KnownFile", "open_known", "still_known"]

MOST_OPEN = 64
"""Files that the pool keeps open, at most."""

SHARE_OF_LIMIT = 4
"""The pool takes at most one of so many descriptors that the process may have."""


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A regular file as it was when somebody looked at it.

    Attributes:
        path: where it is.
        device: the file system it is on.
        inode: its number there.
        size: its length in bytes.
        modified: when its bytes were last changed, in nanoseconds.
    """

    path: str
    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> KnownFile:
        """What is known of the file at ``path`` from its status."""
        return cls(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class ChangedFile(Exception):  # noqa: N818  it never reaches a caller: whoever knows the tensor says what is wrong
    """A known file is another one by now.

    Attributes:
        file: the file as it was.
        what: what about it differs.
        wanted: what that was.
        found: what it is now.
    """

    def __init__(self, file: KnownFile, what: str, wanted: object, found: object) -> None:
        super().__init__(f"{file.path!r}: {what}")
        self.file = file
        self.what = what
        self.wanted = wanted
        self.found = found


@dataclass(frozen=True, slots=True)
class FilePoolStatistics:
    """What a :class:`FilePool` has open.

    Attributes:
        open: files open now.
        in_use: those of them that batches under way read from.
        capacity: how many may be open.
        opened: files opened so far, those opened again included.
    """

    open: int
    in_use: int
    capacity: int
    opened: int


def still_known(known: KnownFile, number: int) -> None:
    """Check that the file behind a descriptor is as it was known.

    Raises:
        ChangedFile: it is another file, or has other bytes.
    """
    found = os.fstat(number)
    if (found.st_dev, found.st_ino) != (known.device, known.inode):
        raise ChangedFile(
            known,
            "another file has taken its place since it was opened",
            f"inode {known.inode} of device {known.device}",
            f"inode {found.st_ino} of device {found.st_dev}",
        )
    if found.st_size != known.size:
        raise ChangedFile(
            known,
            "the file has another size than when it was opened",
            f"{known.size} bytes",
            f"{found.st_size} bytes",
        )
    if found.st_mtime_ns != known.modified:
        raise ChangedFile(
            known,
            "the file was written to since it was opened",
            f"modified at {known.modified} ns",
            f"modified at {found.st_mtime_ns} ns",
        )


def open_known(known: KnownFile) -> OpenFile:
    """Open a known file for reading.

    Raises:
        ChangedFile: nothing is there any more, or something else.
        OSError: the system refused, with the path.
    """
    try:
        file = OpenFile.open(known.path)
    except (FileNotFoundError, NotADirectoryError):
        raise ChangedFile(
            known, "the file has disappeared since it was opened", "a file", "nothing"
        ) from None
    except ValueError as error:  # a directory or a device has taken its place
        raise ChangedFile(
            known, "another file has taken its place since it was opened", "a file", error
        ) from None
    try:
        still_known(known, file.fd)
    except ChangedFile:
        file.close()
        raise
    return file


class FilePool:
    """Keeps a bounded number of known files open, those used last.

    Made without arguments, as a service: ``current_runtime().service(FilePool)``. All but ``forget`` belongs to the
    runtime's loop. No lock: what a finalizer of any thread may do is one step of a dictionary.
    """

    def __init__(self) -> None:
        self._open: dict[KnownFile, OpenFile] = {}  # those used last come last
        self._pins: dict[KnownFile, int] = {}  # batches under way that read from each
        # Whoever waits for room is served before those who come later.
        self._waiting: deque[tuple[Sequence[KnownFile], anyio.Event]] = deque()
        self._opened = 0

    @property
    def capacity(self) -> int:
        """Files that may be open at once: what one batch may read from, too."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(MOST_OPEN, soft // SHARE_OF_LIMIT))

    @asynccontextmanager
    async def hold(self, files: Sequence[KnownFile]) -> AsyncIterator[Mapping[KnownFile, OpenFile]]:
        """Have files open for the length of an ``async with`` block.

        Args:
            files: distinct, at most ``capacity`` of them.

        Raises:
            ChangedFile: one of them is another file by now.
            OSError: the system refused to open one.
        """
        if self._waiting or not self._pin(files):
            await self._wait(files)
        try:
            yield await self._have_open(files)
        finally:
            self._unpin(files)

    def forget(self, files: Iterable[KnownFile]) -> None:
        """Close files, at the latest when the batches under way have ended. Any thread, also from a finalizer."""
        for file in files:
            self._open.pop(file, None)

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._open.clear()

    def statistics(self) -> FilePoolStatistics:
        """A frozen record of what is open."""
        return FilePoolStatistics(len(self._open), len(self._pins), self.capacity, self._opened)

    def _pin(self, files: Sequence[KnownFile]) -> bool:
        """Note that a batch reads from files, if there is room for them beside those of others."""
        if self._pins and len(self._pins.keys() | set(files)) > self.capacity:
            return False
        for file in files:
            self._pins[file] = self._pins.get(file, 0) + 1
        return True

    def _unpin(self, files: Sequence[KnownFile]) -> None:
        """A batch has done with files: let those go on who have waited for it."""
        for file in files:
            self._pins[file] -= 1
            if not self._pins[file]:
                del self._pins[file]
        while self._waiting and self._pin(self._waiting[0][0]):
            self._waiting.popleft()[1].set()

    async def _wait(self, files: Sequence[KnownFile]) -> None:
        """Wait until the files were pinned."""
        turn = files, anyio.Event()
        self._waiting.append(turn)
        try:
            await turn[1].wait()
        except BaseException:  # cancelled, at the end of the interpreter
            if turn[1].is_set():
                self._unpin(files)
            else:
                self._waiting.remove(turn)
            raise

    async def _have_open(self, files: Sequence[KnownFile]) -> dict[KnownFile, OpenFile]:
        held: dict[KnownFile, OpenFile] = {}
        for known in files:
            file = self._open.pop(known, None)
            if file is not None:
                held[known] = self._open[known] = file  # behind the others: it was used last
        missing = [known for known in files if known not in held]
        if not missing:
            return held
        self._close_idle(len(missing))
        fresh: dict[KnownFile, OpenFile] = {}
        try:
            await run_jobs([partial(_open_all, missing, fresh)])
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._close_idle(self.capacity)  # others have taken the descriptors
            await run_jobs([partial(_open_all, missing, fresh)])
        finally:
            self._opened += len(fresh)
        self._open.update(fresh)
        return held | fresh

    def _close_idle(self, wanted: int) -> None:
        """Close the files used longest ago, of those that nobody reads from, until there is room for others."""
        surplus = len(self._open) + wanted - self.capacity
        for known in [known for known in list(self._open) if known not in self._pins][: max(surplus, 0)]:
            self._open.pop(known, None)


def _open_all(missing: Sequence[KnownFile], fresh: dict[KnownFile, OpenFile]) -> None:
    for known in missing:
        if known not in fresh:
            fresh[known] = open_known(known)
