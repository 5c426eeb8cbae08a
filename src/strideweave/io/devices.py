"""A block-special node, or a regular file in its place, held by one process alone."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strideweave.io.file_lock import Claim
from strideweave.io.files import ALIGNMENT, OpenFile

if TYPE_CHECKING:
    from typing import Self

__all__ = ["DeviceGeometry", "HeldDevice"]

# <linux/fs.h>
_IS_READ_ONLY = 0x125E  # BLKROGET
_LOGICAL_BLOCK = 0x1268  # BLKSSZGET
_PHYSICAL_BLOCK = 0x127B  # BLKPBSZGET
_DISCARD = 0x1277  # BLKDISCARD
_ZERO = 0x127F  # BLKZEROOUT

_ZERO_BYTES = 256 << 20  # in one call; between two of them a signal is noticed
_WRITTEN_ZEROES = 1 << 20
_NOT_OFFERED = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS})
_LARGEST_FILE_BLOCK = 64 << 10  # file systems on a network name megabytes, which are their packets


@dataclass(frozen=True, slots=True)
class DeviceGeometry:
    """What a device says of itself.

    Attributes:
        capacity: bytes.
        logical_block: bytes; the least that it addresses.
        physical_block: bytes; the least that it writes without reading first.
        is_block_special: whether it is a device, and not a regular file in the place of one.
    """

    capacity: int
    logical_block: int
    physical_block: int
    is_block_special: bool

    @property
    def granularity(self) -> int:
        """What extents are best multiples of: of the blocks, and of what goes past the page cache."""
        return math.lcm(ALIGNMENT, self.logical_block, self.physical_block)


class HeldDevice:
    """An open device that nobody else holds, as long as this object lives or until it is closed.

    A device is opened exclusively, which a mounted file system or another such holder prevents; a file is locked
    (``flock``). A forked child may read what it inherits and changes nothing.

    Attributes:
        path: where it was opened.
        geometry: what it said of itself when it was opened.
        file: for reading and writing.
    """

    def __init__(self, path: str, claim: Claim, *, direct: bool) -> None:
        self.path = path
        self._claim = claim
        self._process = os.getpid()
        self.geometry = _geometry(claim.number, path)
        self.file = OpenFile.open(path, writable=True, any_kind=True, direct=direct, private=True)
        if not os.path.sameopenfile(claim.number, self.file.fd):
            raise OSError(errno.EBUSY, "something else was put in its place while it was opened", path)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, direct: bool, size: int | None) -> Self:
        """Open a device or a file, or make a file of ``size`` bytes where nothing is.

        Args:
            path: where it is.
            direct: go past the page cache with what is aligned, where the system allows it.
            size: bytes of a file that is made, or that one which is there must have.

        Raises:
            TypeError: ``path`` is neither ``str`` nor ``os.PathLike[str]``.
            FileNotFoundError: nothing is there and ``size`` is None.
            ValueError: a file or device of another size is there, or something that is neither.
            OSError: somebody else holds it (``EBUSY``), or the system refused otherwise; with the path.
        """
        name = os.fspath(path)
        if not isinstance(name, str):
            raise TypeError(f"a device's path must be str or os.PathLike[str], not {type(name).__name__}")
        claim, made = _claim_path(name, create=size is not None)
        held: Self | None = None
        try:
            if made and size is not None:
                _extend(claim.number, size, name)
            held = cls(name, claim, direct=direct)
            _check_size(held.geometry, size, name)
        except BaseException:  # whatever it was, nothing is held and no file was made
            if held is not None:
                held.close()
            claim.close()
            if made:
                os.unlink(name)  # noqa: PTH108  the name stays as given
            raise
        return held

    def close(self) -> None:
        """Let go of it; idempotent. What a forked child has inherited stays open there."""
        self.file.close()
        self._claim.close()

    def is_inherited(self) -> bool:
        """Whether the parent of this process opened it."""
        return self._process != os.getpid()

    def zero(self, offset: int, nbytes: int) -> None:
        """Make whole blocks read zero, without writing them where the device or the file system can.

        Raises:
            OSError: the system failed, with the path.
        """
        if not self.geometry.is_block_special and self.file.punch(offset, nbytes):
            return
        for start in range(offset, offset + nbytes, _ZERO_BYTES):
            length = min(_ZERO_BYTES, offset + nbytes - start)
            try:
                if not self.geometry.is_block_special or not self._tell(_ZERO, start, length):
                    self._write_zeroes(start, length)
            except OSError as error:
                message = f"{error.strerror}; {length} bytes at offset {start} were to be zeroed"
                raise OSError(error.errno, message, self.path) from error

    def discard(self, offset: int, nbytes: int) -> bool:
        """Tell the device or the file system that bytes are not needed any more; it may ignore that.

        What they are afterwards is unspecified. A device is told of whole blocks only. In a forked child nothing
        happens.

        Returns:
            Whether it took the advice.
        """
        if self.is_inherited():
            return False
        try:
            if not self.geometry.is_block_special:
                return self.file.punch(offset, nbytes)
            return self._discard_blocks(offset, nbytes)
        except OSError:  # it was advice; a broken device will say so when something is read or written
            self.file.count(punches_refused=1)
            return False

    def _discard_blocks(self, offset: int, nbytes: int) -> bool:
        block = self.geometry.granularity
        start, stop = -(-offset // block) * block, (offset + nbytes) // block * block
        if start >= stop:
            return True
        taken = self._tell(_DISCARD, start, stop - start)
        self.file.count(bytes_punched=(stop - start) * taken, punches_refused=1 - taken)
        return taken

    def _tell(self, request: int, offset: int, nbytes: int) -> bool:
        """Have the device change a range itself; False where it offers no such thing."""
        try:
            # Through the exclusive descriptor: the kernel then drops what it has cached of the range.
            fcntl.ioctl(self._claim.number, request, struct.pack("QQ", offset, nbytes))
        except OSError as error:
            if error.errno in _NOT_OFFERED:
                return False
            raise
        return True

    def _write_zeroes(self, offset: int, nbytes: int) -> None:
        zeroes, done = bytes(min(nbytes, _WRITTEN_ZEROES)), 0
        while done < nbytes:
            done += os.pwrite(self._claim.number, zeroes[: nbytes - done], offset + done)


def _claim_path(path: str, *, create: bool) -> tuple[Claim, bool]:
    """Open what is at a path so that nobody else can; the second value tells whether it was made."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if create:
        try:
            claim, made = Claim(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)), True
        except FileExistsError:
            return _claim_path(path, create=False)
    else:
        claim, made = Claim(_open_existing(path, flags)), False
    if stat.S_ISBLK(os.fstat(claim.number).st_mode):
        return claim, made  # exclusive already; a lock would get in the way of whoever looks at new devices
    complete = False
    try:
        if not claim.take(path):
            made = False  # by somebody else, who has it
            raise _in_use(path)
        complete = True
    finally:
        if not complete:
            claim.close()
            if made:
                os.unlink(path)  # noqa: PTH108  the name stays as given
    return claim, made


def _open_existing(path: str, flags: int) -> int:
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  the name stays as given
    except FileNotFoundError as error:
        what_to_do = (
            "the link there leads nowhere" if os.path.lexists(path) else "pass size to make a file there"
        )
        message = f"{error.strerror}; {what_to_do}"
        raise FileNotFoundError(error.errno, message, path) from None
    if not (stat.S_ISBLK(mode) or stat.S_ISREG(mode)):
        raise ValueError(f"{path!r} is neither a block device nor a regular file")
    try:
        # Exclusive means for a device that no file system on it is mounted; without O_CREAT nothing for a file.
        return os.open(path, flags | (os.O_EXCL if stat.S_ISBLK(mode) else 0))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _in_use(path) from None
        raise


def _in_use(path: str) -> OSError:
    reason = (
        "it is in use: a BlockDevice holds it, here or in another process, or a file system on it is mounted; "
        "close or unmount that first"
    )
    return OSError(errno.EBUSY, reason, path)


def _extend(number: int, size: int, path: str) -> None:
    try:
        os.ftruncate(number, size)
    except OverflowError:
        message = f"{os.strerror(errno.EFBIG)}; it was to be {size} bytes long"
        raise OSError(errno.EFBIG, message, path) from None
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; it was to be {size} bytes long", path) from error


def _geometry(number: int, path: str) -> DeviceGeometry:
    status = os.fstat(number)
    if not stat.S_ISBLK(status.st_mode):
        block = os.fstatvfs(number).f_frsize
        block = block if 0 < block <= _LARGEST_FILE_BLOCK else ALIGNMENT
        return DeviceGeometry(status.st_size, block, block, is_block_special=False)
    if not sys.platform.startswith("linux"):
        raise OSError(errno.EOPNOTSUPP, f"the size of a device is not known on {sys.platform}", path)
    if _asked(number, _IS_READ_ONLY):  # some kernels let it be opened for writing all the same
        raise OSError(errno.EROFS, f"{os.strerror(errno.EROFS)}; a BlockDevice must be writable", path)
    return DeviceGeometry(
        capacity=os.lseek(number, 0, os.SEEK_END),
        logical_block=_asked(number, _LOGICAL_BLOCK),
        physical_block=_asked(number, _PHYSICAL_BLOCK),
        is_block_special=True,
    )


def _asked(number: int, request: int) -> int:
    """One integer that the device answers."""
    answer: int = struct.unpack("i", fcntl.ioctl(number, request, bytes(4)))[0]
    return answer


def _check_size(geometry: DeviceGeometry, size: int | None, path: str) -> None:
    if size is not None and size != geometry.capacity:
        raise ValueError(
            f"{path!r} has {geometry.capacity} bytes, and size says {size}; leave out size to use it"
        )
    if geometry.capacity < geometry.granularity:
        raise ValueError(
            f"{path!r} has {geometry.capacity} bytes, which is less than one block of {geometry.granularity}"
        )
