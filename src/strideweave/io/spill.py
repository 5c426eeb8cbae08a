"""The private directory of this process, where values go that do not fit in memory."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from strideweave.io.files import OpenFile

__all__ = ["SPILL_VARIABLE", "SpillDirectory", "SpillStatistics"]

SPILL_VARIABLE = "STRIDEWEAVE_SPILL_DIR"
"""Environment variable: where spill directories are made, instead of the system's temporary directory."""


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
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._path: Path | None = None
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

    def statistics(self) -> SpillStatistics:
        """Return where the directory is and how many files were made in it."""
        path = self._path
        return SpillStatistics(None if path is None else str(path), self._created)

    def _create(self, name: str | None, size: int) -> OpenFile:
        if self._path is None:
            self._path = _make_directory()
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


def _make_directory() -> Path:
    parent = os.environ.get(SPILL_VARIABLE) or tempfile.gettempdir()
    try:
        return Path(tempfile.mkdtemp(prefix=f"strideweave-{os.getpid()}-", dir=parent))
    except OSError as error:
        message = (
            f"{error.strerror}; spill files are made there, {SPILL_VARIABLE} in the environment says where"
        )
        raise OSError(error.errno, message, parent) from error


def _require_plain(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a spill file's name must be a str, found {type(name).__name__}")
    separators = {os.sep, os.altsep or os.sep, "\0"}
    if name in {"", ".", ".."} or any(separator in name for separator in separators):
        raise ValueError(
            f"{name!r} is not a plain file name; spill files have no path (FileBacked.open takes one)"
        )
