"""Files held open for positioned reads and writes."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strideweave.io.descriptors import CANNOT_PUNCH, HeldDescriptor, punch, synchronize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self

__all__ = ["ALIGNMENT", "FileStatistics", "OpenFile"]

ALIGNMENT = 4096
"""Bytes: what reads and writes past the page cache begin with a multiple of, in the file and in memory, and move a
multiple of. Some devices take less; none that is known wants more."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


@dataclass(frozen=True, slots=True)
class FileStatistics:
    """What was done with an :class:`OpenFile`.

    Attributes:
        bytes_read: bytes that system calls have read.
        bytes_written: bytes that system calls have written.
        reads: read system calls.
        writes: write system calls.
        bytes_punched: bytes whose space was given back to the file system.
        punches_refused: ranges that the file system could not give back.
        persists: times that everything written was made to survive a loss of power.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    reads: int = 0
    writes: int = 0
    bytes_punched: int = 0
    punches_refused: int = 0
    persists: int = 0


class OpenFile:
    """An open file that is read and written at offsets; it has no position, so any thread may use it.

    Made by :meth:`open` (a file that exists and stays) or :meth:`create` (a new one, private to the process).
    Closing is idempotent and also happens when the object dies. A forked child shares an open file; one that
    its parent created, or opened as private, it may read, and leaves it as it is: writing raises, freeing and
    removing do nothing.

    Attributes:
        path: where the file was opened.
        writable: whether it was opened for writing.
        direct_obstacle: why nothing goes past the page cache; None where what is aligned does.
        queue_depth: operations of one batch that an io_uring may have under way on it; None leaves that to the
            engine.
    """

    def __init__(self, path: str, number: int, *, writable: bool, creator: int | None = None) -> None:
        self.path = path
        self.writable = writable
        self._creator = creator  # the process that may change the file, where that is one alone
        self._descriptor: HeldDescriptor | None = HeldDescriptor(number)
        self._counts: dict[int, list[int]] = {}
        self.direct_obstacle: str | None = "it was not asked for"
        self.queue_depth: int | None = None
        self._durable_writers = 0  # changed by the runtime's loop only
        self._cannot_be_direct = False
        self._reads_no_further = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        writable: bool = False,
        any_kind: bool = False,
        direct: bool = False,
        private: bool = False,
    ) -> Self:
        """Open an existing file.

        Args:
            path: where it is.
            writable: open for reading and writing instead of reading only.
            any_kind: also accept what is not a regular file, such as a device.
            direct: read and write past the page cache (``O_DIRECT``) what is aligned to ``ALIGNMENT``. Where the
                system refuses that, ``direct_obstacle`` says so and everything goes through the cache.
            private: no forked child may change the file through this object, as for one that was created.

        Raises:
            TypeError: ``path`` is neither ``str`` nor ``os.PathLike[str]``.
            FileNotFoundError: nothing is there.
            ValueError: something else than a regular file is there.
            OSError: the system refused, with the path.
        """
        name = os.fspath(path)
        if not isinstance(name, str):
            raise TypeError(f"a file's path must be str or os.PathLike[str], not {type(name).__name__}")
        if not any_kind:
            _require_regular(name, os.stat(name).st_mode)  # noqa: PTH116  one call, and the name stays as given
        # Non-blocking: should a FIFO have taken the place meanwhile, opening it must not wait for its writer.
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
        file = cls(name, os.open(name, flags), writable=writable, creator=os.getpid() if private else None)
        if not any_kind:
            _require_regular(name, os.fstat(file.fd).st_mode)
        # Some kernels answer an io_uring read of what is not in the page cache with EAGAIN for ever otherwise, and
        # others do it inside the system call.
        os.set_blocking(file.fd, True)
        if direct:
            file.direct_obstacle = file._open_direct(flags & ~os.O_NONBLOCK)
        return file

    def _open_direct(self, flags: int) -> str | None:
        """Open a second descriptor that goes past the page cache, or say why there is none."""
        held = self.descriptor()
        if not hasattr(os, "O_DIRECT"):
            return f"{sys.platform} has no O_DIRECT"
        try:
            number = os.open(self.path, flags | os.O_DIRECT)
        except OSError as error:
            return f"opening it with O_DIRECT failed: {error.strerror}"
        if not os.path.sameopenfile(number, held.number):
            os.close(number)
            return "the path leads to another file by now"
        held.direct = number
        return None

    @property
    def is_direct(self) -> bool:
        """Whether what is aligned goes past the page cache."""
        return self.direct_obstacle is None

    @contextmanager
    def writing_durably(self) -> Iterator[None]:
        """Send what is aligned past the page cache while the block runs, where it is written and the system allows it.

        For writes that are to be durable in the end: to the device they have to go in any case, and many at once get
        there sooner than pages that ``persist`` has to look for. A file with holes is left to the cache, since
        giving blocks to direct writes is done one after the other.
        """
        if not self.is_direct and self.occupied() >= self.size():
            held = self.descriptor()
            if held.direct < 0 and not self._cannot_be_direct:
                flags = os.O_RDWR if self.writable else os.O_RDONLY
                self._cannot_be_direct = self._open_direct(flags | os.O_CLOEXEC) is not None
            self._durable_writers += 1
            try:
                yield
            finally:
                self._durable_writers -= 1
        else:
            yield

    def direct_number(self, held: HeldDescriptor, *, writing: bool) -> int:
        """The descriptor for what goes past the page cache now, or -1."""
        return held.direct if self.is_direct or (writing and self._durable_writers) else -1

    def read_no_further(self) -> None:
        """Have the system read from the device what is asked for through this file, and nothing behind it.

        For large pieces in no order: what their system calls ask for looks like a file that is read from one end to
        the other, so that the system would read far ahead of each piece's end. It cannot be taken back.
        """
        if self._reads_no_further or not hasattr(os, "posix_fadvise"):
            return
        self._reads_no_further = True
        with suppress(OSError):  # advice is worth nothing on some files; that is no error of the read
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, size: int = 0) -> Self:
        """Create a file of ``size`` zero bytes that occupy no space yet, open for reading and writing.

        Raises:
            FileExistsError: something is there already.
            OSError: the system refused, with the path.
        """
        name = os.fspath(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = cls(name, os.open(name, flags, 0o600), writable=True, creator=os.getpid())
        if size:
            try:
                file.truncate(size)
            except OSError:
                file.remove()
                raise
        return file

    def __repr__(self) -> str:
        state = "closed" if self.is_closed() else "writable" if self.writable else "read-only"
        return f"<{type(self).__name__} {self.path!r}, {state}>"

    def descriptor(self) -> HeldDescriptor:
        """Return the holder of the descriptor; keep it for as long as a system call uses its number.

        Raises:
            ValueError: the file is closed.
        """
        held = self._descriptor
        if held is None:
            raise ValueError(f"{self.path!r} is closed: no more bytes can be read or written through it")
        return held

    def require_writable(self) -> None:
        """Raise unless this process may write to the file.

        Raises:
            PermissionError: it is open for reading only, or the parent of this forked process created it.
        """
        if not self.writable:
            reason = "the file is open for reading only; open it with mutable=True to write to it"
        elif self._is_inherited():
            reason = "the file belongs to the parent of this process; what a fork inherits can only be read"
        else:
            return
        raise PermissionError(errno.EACCES, reason, self.path)

    def _is_inherited(self) -> bool:
        return self._creator is not None and self._creator != os.getpid()

    @property
    def fd(self) -> int:
        """The file descriptor's number.

        Raises:
            ValueError: the file is closed.
        """
        return self.descriptor().number

    def is_same_file(self, other: OpenFile) -> bool:
        """Return whether both were opened on one file, whatever its paths are."""
        return os.path.sameopenfile(self.fd, other.fd)

    def is_closed(self) -> bool:
        """Return whether the file was closed through this object."""
        return self._descriptor is None

    def size(self) -> int:
        """Return the file's present size in bytes."""
        return os.fstat(self.fd).st_size

    def occupied(self) -> int:
        """Return how many bytes of storage the file occupies; holes occupy none."""
        return os.fstat(self.fd).st_blocks * 512

    def truncate(self, size: int) -> None:
        """Make the file ``size`` bytes long; what is added reads as zero and occupies no space.

        Raises:
            OSError: the system refused, with the path.
        """
        self.require_writable()
        held = self.descriptor()
        try:
            os.ftruncate(held.number, size)
        except OverflowError:
            message = f"{os.strerror(errno.EFBIG)}; the file was to be {size} bytes long"
            raise OSError(errno.EFBIG, message, self.path) from None
        except OSError as error:
            message = f"{error.strerror}; the file was to be {size} bytes long"
            raise OSError(error.errno, message, self.path) from error

    def punch(self, offset: int, length: int) -> bool:
        """Give the space of ``[offset, offset + length)`` back to the file system; it reads zero then.

        Where the file system or the platform cannot do that, nothing happens but a count in
        ``punches_refused``.

        Args:
            offset: first byte.
            length: bytes; partly covered blocks are zeroed and keep their space.

        Returns:
            Whether the space was given back.

        Raises:
            ValueError: a negative offset or length, or the file is closed.
            OSError: the system failed otherwise, with the path.
        """
        if offset < 0 or length < 0:
            raise ValueError(f"cannot free {length} bytes at offset {offset} of {self.path!r}")
        held = self.descriptor()
        if length == 0:
            return True
        code = errno.ENOSYS if self._is_inherited() else punch(held.number, offset, length)
        if code == 0:
            self.count(bytes_punched=length)
            return True
        if code in CANNOT_PUNCH:
            self.count(punches_refused=1)
            return False
        message = f"{os.strerror(code)}; {length} bytes at offset {offset} were to be freed"
        raise OSError(code, message, self.path)

    def persist(self) -> None:
        """Return once everything that was written to the file would survive a loss of power; blocks.

        What was written through other descriptors counts too, and the file's size does. The entry of a file in its
        directory is another matter.

        Raises:
            ValueError: the file is closed.
            OSError: the storage failed, with the path; what was written before may be lost.
        """
        held = self.descriptor()
        try:
            synchronize(held.number)
        except OSError as error:
            raise self.not_persistent(error.errno or errno.EIO) from error
        self.count(persists=1)

    def not_persistent(self, code: int) -> OSError:
        """The error of a file that could not be made to survive a loss of power."""
        message = f"{os.strerror(code)}; what was written before was to be made durable, and may be lost"
        return OSError(code, message, self.path)

    def close(self) -> None:
        """Close the file, at the latest when the system calls under way have ended; idempotent."""
        self._descriptor = None

    def remove(self) -> None:
        """Close the file and delete it, unless it was inherited from a parent process; idempotent."""
        if self._descriptor is not None and not self._is_inherited():
            try:
                os.unlink(self.path)  # noqa: PTH108  also called by finalizers, late: as few imports as possible
            except FileNotFoundError:
                pass
            except OSError:
                self.close()
                raise
        self.close()  # last: what was interrupted before can be done again

    def count(self, **amounts: int) -> None:
        """Add to the counters named as the fields of :class:`FileStatistics`, from any thread."""
        # One row per thread: nothing is lost between threads, and no lock could be inherited held by a fork.
        row = self._counts.setdefault(threading.get_ident(), [0] * len(_FIELDS))
        for name, amount in amounts.items():
            row[_FIELDS[name]] += amount

    def statistics(self) -> FileStatistics:
        """Return what was done with the file so far."""
        rows = list(self._counts.values())
        return FileStatistics(*(sum(column) for column in zip(*rows, strict=True)))


_FIELDS: Mapping[str, int] = {name: place for place, name in enumerate(FileStatistics.__dataclass_fields__)}


def _require_regular(path: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((name for test, name in _KINDS if test(mode)), "something of an unknown kind")
    raise ValueError(f"{path!r} is {kind}; a regular file was asked for")
