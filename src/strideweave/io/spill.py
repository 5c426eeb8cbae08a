"""The private directory of this process, where values go that do not fit in memory."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import stat
import tempfile
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strideweave.io.descriptors import HeldDescriptor
from strideweave.io.file_lock import is_still_at, lock
from strideweave.io.files import OpenFile
from strideweave.runtime.event_loop import current_runtime
from strideweave.runtime.workers import WorkerPool

__all__ = ["SPILL_VARIABLE", "SpillDirectory", "SpillStatistics", "remove_abandoned"]

SPILL_VARIABLE = "STRIDEWEAVE_SPILL_DIR"
"""Environment variable: where spill directories are made, instead of the system's temporary directory."""

_CANNOT_LOCK = frozenset({errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class SpillStatistics:
    """What a :class:`SpillDirectory` holds.

    Attributes:
        path: where it is; ``None`` before the first file and after the end.
        created: files made in it so far.
    """

    path: str | None
    created: int


class SpillDirectory:
    """Makes spill files in a directory that only this process uses, and removes it at the end.

    Made without arguments, as a service: ``current_runtime().service(SpillDirectory)``. The runtime closes
    it at the interpreter's end, after the last request; a forked child gets one of its own. The directory is
    made with the first file, in the one that the environment variable ``STRIDEWEAVE_SPILL_DIR`` names then,
    else in ``tempfile.gettempdir()``. Where that is held in memory (a tmpfs), so are spilled values.

    It is locked (``flock``) for as long as this process lives, or a forked child that inherits it. So the next process
    that makes one beside it can tell that its owner was killed, and removes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._path: Path | None = None
        self._held: HeldDescriptor | None = None  # of the directory, with the lock
        self._created = 0
        self._numbers = itertools.count()

    def create(self, name: str | None = None, *, size: int = 0) -> OpenFile:
        """Make a spill file of ``size`` zero bytes that occupy no space yet.

        Args:
            name: the file's name inside the directory; ``None`` finds one.
            size: bytes.

        Raises:
            TypeError: ``name`` is not a string.
            ValueError: ``name`` is not a plain file name, or is taken.
            FileNotFoundError: the directory that ``STRIDEWEAVE_SPILL_DIR`` names does not exist.
            OSError: the system refused, with the path.
        """
        if name is not None:
            _require_plain(name)
        with self._lock:
            try:
                file = self._create(name, size)
            except FileNotFoundError:
                # Cleaners of temporary directories remove old ones; open files live on without a name.
                self._path = None
                file = self._create(name, size)
            self._created += 1
        return file

    def close(self) -> None:
        """Remove the directory and what is in it, unless it is the parent process's. Idempotent."""
        path, self._path = self._path, None
        if path is not None and self._process == os.getpid():
            shutil.rmtree(path, ignore_errors=True)
        self._held = None

    def statistics(self) -> SpillStatistics:
        """Return where the directory is and how many files were made in it."""
        path = self._path
        return SpillStatistics(None if path is None else str(path), self._created)

    def _create(self, name: str | None, size: int) -> OpenFile:
        if self._path is None:
            self._path, self._held = _make_directory()
            with suppress(RuntimeError):  # the interpreter is exiting, and has no worker for it any more
                current_runtime().service(WorkerPool).post(partial(remove_abandoned, self._path.parent))
        if name is not None:
            try:
                return OpenFile.create(self._path / name, size=size)
            except FileExistsError:
                raise ValueError(
                    f"the spill directory {str(self._path)!r} has a file {name!r} already; choose another "
                    "name, or none to get a fresh one"
                ) from None
        while True:
            try:
                return OpenFile.create(self._path / f"spill-{next(self._numbers)}.bin", size=size)
            except FileExistsError:  # somebody chose this very name
                continue


def remove_abandoned(parent: Path) -> None:
    """Remove the spill directories whose processes are gone for certain, as far as that is possible; blocks.

    Certain is what was made by this user, on this machine, and has lost its lock. Nothing is removed where a file
    system has no locks for directories, as NFS.
    """
    mine = re.compile(re.escape("strideweave-") + r"[0-9]+-" + _machine() + r"-[a-z0-9_]+")
    with suppress(OSError):
        place = HeldDescriptor(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for name in os.listdir(place.number):  # noqa: PTH208  of the very directory that is open
            if mine.fullmatch(name):
                with suppress(OSError):  # somebody has it, or it is gone
                    _remove_if_abandoned(name, place.number)


def _remove_if_abandoned(name: str, parent: int) -> None:
    held = _locked(name, parent)
    if held is None:
        return
    found = os.fstat(held.number)
    if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
        shutil.rmtree(name, dir_fd=parent)


def _make_directory() -> tuple[Path, HeldDescriptor | None]:
    """Make a directory and lock it, where the file system can."""
    parent = os.environ.get(SPILL_VARIABLE) or tempfile.gettempdir()
    prefix = f"strideweave-{os.getpid()}-{_machine()}-"
    try:
        while True:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            # Until it has its lock it looks abandoned, and may go.
            with suppress(FileNotFoundError, BlockingIOError):
                held = _locked(path)
                if held is None or is_still_at(held.number, path):
                    return path, held
    except OSError as error:
        message = (
            f"{error.strerror}; spill files are made there, {SPILL_VARIABLE} in the environment says where"
        )
        raise OSError(error.errno, message, parent) from error


def _locked(path: str | Path, parent: int | None = None) -> HeldDescriptor | None:
    """Open a directory and lock it; None where the file system has no such locks.

    Raises:
        BlockingIOError: somebody else has the lock.
        OSError: there is no such directory, or no right to open it.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    held = HeldDescriptor(os.open(path, flags, dir_fd=parent))
    try:
        locked = lock(held.number, str(path))
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        return None
    if not locked:
        raise BlockingIOError(errno.EWOULDBLOCK, "its process has it locked", str(path))
    return held


def _machine() -> str:
    """Which machine this is: locks on what several share may be known to one of them only."""
    return f"{zlib.crc32(os.fsencode(os.uname().nodename)):08x}"


def _require_plain(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a spill file's name must be a str, found {type(name).__name__}")
    separators = {os.sep, os.altsep or os.sep, "\0"}
    if name in {"", ".", ".."} or any(separator in name for separator in separators):
        raise ValueError(
            f"{name!r} is not a plain file name; spill files have no path (FileBacked.open takes one)"
        )
