"""Blocking reads and writes of many buffers at file offsets: the loops that every engine shares.

A file and memory meet in a :class:`FileSpan`. Spans that follow each other in a file become one system call
with several buffers; a call that moves less than asked is resumed where it stopped; what cannot be completed
is an error that names the path, the offset, how much was wanted and how much was moved.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

from strideweave.io.buffers import address_of
from strideweave.io.files import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from strideweave.io.files import OpenFile

    # Any: NumPy's type information lacks the buffer protocol below Python 3.12.
    SystemCall: TypeAlias = Callable[[int, list[Any], int], int]

__all__ = [
    "FileSpan",
    "INLINE_CACHED_BYTES",
    "INLINE_SPANS",
    "MAX_BUFFERS",
    "MAX_CALL_BYTES",
    "ShortFileError",
    "SpanBatch",
    "SpanBlock",
    "failure",
    "files_of",
    "preadv_cached",
    "raise_first",
    "read_cached_spans",
    "read_spans",
    "stuck",
    "write_spans",
]

MAX_CALL_BYTES = 1 << 20
"""Bytes that one system call moves, at most. The system could move 2 GiB, but may not put a copy in its kernel
aside: where every core is busy with one, the caller's loop would wait for its end. Calls of half as much make it no
less late and take a tenth longer, since each ends by taking the interpreter's lock; calls of four times as much are no
faster and make it half as late again."""

INLINE_SPANS, INLINE_CACHED_BYTES = 64, 1 << 20
"""A small batch, of at most so many spans and bytes, is read by the loop itself as far as it is in the page cache:
that takes 0.2 to 0.4 ms, and a hop to a worker and back up to half as much."""

MAX_BUFFERS = 1024
"""Buffers that one system call may be given: IOV_MAX on every system that has the calls."""


class FileSpan(NamedTuple):
    """``buffer.nbytes`` bytes of ``file`` from ``offset`` on, and the memory to read into or write from.

    Attributes:
        file: the open file.
        offset: first byte in the file, 0 or more.
        buffer: contiguous one-dimensional bytes; writable when the span is read.
    """

    file: OpenFile
    offset: int
    buffer: NDArray[np.uint8]


class SpanBlock(NamedTuple):
    """Many spans of one length between one file and one memory, as arrays instead of objects.

    Attributes:
        file: the open file.
        offsets: first byte of each span in the file.
        memory: contiguous one-dimensional bytes.
        starts: first byte of each span in the memory.
        nbytes: bytes of every span.
    """

    file: OpenFile
    offsets: NDArray[np.int64]
    memory: NDArray[np.uint8]
    starts: NDArray[np.int64]
    nbytes: int


class SpanBatch(Sequence[FileSpan]):
    """A batch of spans in blocks, for engines that take them as they are; to others a sequence like any.

    Args:
        blocks: the blocks, in order.
    """

    def __init__(self, blocks: Sequence[SpanBlock]) -> None:
        self.blocks = blocks
        self._count = sum([len(block.offsets) for block in blocks])

    @property
    def total(self) -> int:
        """Bytes of all spans."""
        return sum([len(block.offsets) * block.nbytes for block in self.blocks])

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> FileSpan: ...

    @overload
    def __getitem__(self, index: slice) -> list[FileSpan]: ...

    def __getitem__(self, index: int | slice) -> FileSpan | list[FileSpan]:
        return list(self)[index]

    def __iter__(self) -> Iterator[FileSpan]:
        for file, offsets, memory, starts, nbytes in self.blocks:
            for offset, start in zip(offsets.tolist(), starts.tolist(), strict=True):
                yield FileSpan(file, offset, memory[start : start + nbytes])


def files_of(spans: Sequence[FileSpan]) -> list[OpenFile]:
    """The files of a batch, each once, in the order of their first spans."""
    owners = spans.blocks if isinstance(spans, SpanBatch) else spans
    return list(dict.fromkeys([owner.file for owner in owners]))


class ShortFileError(EOFError):
    """A file ended before everything asked of it was read.

    Attributes:
        path: the file.
        offset: first byte asked for.
        wanted: bytes asked for from there on.
        got: bytes that were there.
    """

    def __init__(self, path: str, offset: int, wanted: int, got: int) -> None:
        super().__init__(
            f"{path!r}: {wanted} bytes were wanted at offset {offset}, got {got}: the file is shorter than "
            "what was stored in it; it was truncated meanwhile or is damaged"
        )
        self.path = path
        self.offset = offset
        self.wanted = wanted
        self.got = got


def read_spans(spans: Sequence[FileSpan], preadv: SystemCall = os.preadv) -> None:
    """Fill the buffers of all spans from their files, in order.

    Args:
        spans: what to read; empty buffers are passed over.
        preadv: the system call, replaced in tests.

    Raises:
        ShortFileError: a file ended early; buffers up to there are filled.
        OSError: the system failed, with the path.
        ValueError: a file is closed.
    """
    _run(spans, preadv, writing=False)


_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # Linux has it


def preadv_cached(number: int, buffers: list[Any], offset: int) -> int:
    """Read what is in the page cache; an ``OSError`` where the call would have to wait, or could not tell."""
    if _NOWAIT is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return os.preadv(number, buffers, offset, _NOWAIT)


def read_cached_spans(spans: Sequence[FileSpan], preadv: SystemCall = preadv_cached) -> int:
    """Fill the buffers of spans in order for as long as that needs no waiting for a device.

    What is in the page cache is copied; at the first span of which something is not, or where the file system
    cannot tell, this stops, and at one of a file that is to be read past the page cache.

    Args:
        spans: what to read.
        preadv: the system call, replaced in tests; it raises an ``OSError`` where it would have to wait.

    Returns:
        How many of the spans, from the first on, are filled.

    Raises:
        ShortFileError: a file ended early.
        ValueError: a file is closed.
    """
    return _run(spans, preadv, writing=False, cached=True)


def write_spans(spans: Sequence[FileSpan], pwritev: SystemCall = os.pwritev) -> None:
    """Write the buffers of all spans to their files, in order.

    Args:
        spans: what to write; empty buffers are passed over.
        pwritev: the system call, replaced in tests.

    Raises:
        PermissionError: a file is open for reading only or belongs to the parent process.
        OSError: the system failed (a full disk, a limit), with the path.
        ValueError: a file is closed.
    """
    _run(spans, pwritev, writing=True)


class _WouldWaitError(Exception):
    """A read from the page cache met something that is not in it."""


def _run(spans: Sequence[FileSpan], call: SystemCall, *, writing: bool, cached: bool = False) -> int:
    """Move spans in order; return how many were moved, which is all of them unless ``cached`` ended it."""
    most_buffers, most_bytes = MAX_BUFFERS, MAX_CALL_BYTES
    place, count = 0, len(spans)
    mover: _FileMover | None = None
    try:
        while place < count:
            first = place
            file, offset, buffer = spans[place]
            place += 1
            buffers, end = [buffer], offset + buffer.nbytes
            while place < count:
                follower, start, buffer = spans[place]
                if start != end or follower is not file or len(buffers) == most_buffers:
                    break
                if end + buffer.nbytes - offset > most_bytes:
                    break
                buffers.append(buffer)
                end += buffer.nbytes
                place += 1
            if mover is None or mover.file is not file:
                if mover is not None:
                    mover.count()
                    mover = None  # should the next file be refused, this one was counted
                mover = _FileMover(file, call, writing=writing, cached=cached)
            # The usual case, one call that moves everything, without another function: it is most of the cost.
            wanted = end - offset
            number = mover.number if mover.direct < 0 else mover.number_for(buffers, offset, wanted)
            try:
                got = call(number, buffers, offset) if 0 < wanted <= most_bytes else 0
            except OSError:
                got = 0  # `finish` makes the call again and says what is wrong
            if got:
                mover.calls += 1
                mover.moved += got
            if got != wanted:
                mover.finish(buffers, offset, wanted, got)
    except _WouldWaitError:
        return first
    finally:
        if mover is not None:
            mover.count()
    return count


class _FileMover:
    """Moves runs of bytes between one file and memory, wholly or with an error, and counts what it did."""

    __slots__ = ("_cached", "_call", "_held", "_writing", "calls", "direct", "file", "moved", "number")

    def __init__(self, file: OpenFile, call: SystemCall, *, writing: bool, cached: bool) -> None:
        if writing:
            file.require_writable()
        if cached and file.is_direct:
            raise _WouldWaitError  # even the attempt would read ahead into the page cache
        self.file = file
        self._held = file.descriptor()  # keeps the descriptor's number ours until the last call is over
        self.number = self._held.number
        self.direct = -1 if cached else file.direct_number(self._held, writing=writing)
        self._call = call
        self._writing = writing
        self._cached = cached
        self.calls = self.moved = 0

    def number_for(self, buffers: list[NDArray[np.uint8]], offset: int, wanted: int) -> int:
        """The descriptor for one call: that past the page cache where everything is aligned."""
        places = [address_of(buffer) | buffer.nbytes for buffer in buffers]
        aligned = not (offset | wanted) % ALIGNMENT and not any(place % ALIGNMENT for place in places)
        return self.direct if aligned else self.number

    def finish(self, buffers: list[NDArray[np.uint8]], offset: int, wanted: int, done: int) -> None:
        """Move what is left of the ``wanted`` bytes that ``buffers`` hold, the first ``done`` being moved."""
        buffers = _behind(buffers, done)
        direct_refused = False
        while done < wanted:
            batch = buffers if wanted - done <= MAX_CALL_BYTES else _front(buffers, MAX_CALL_BYTES)
            try:
                # The rest of a call that moved less than asked may be aligned no longer.
                cached = self.direct < 0 or direct_refused
                number = self.number if cached else self.number_for(batch, offset + done, ALIGNMENT)
                got = self._call(number, batch, offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EINVAL and number != self.number:
                    direct_refused = True  # the blocks of this device are larger than the alignment
                    continue
                if self._cached:
                    self.moved -= done  # the whole run will be read again, and counted then
                    raise _WouldWaitError from None
                raise self._failure(error, offset, wanted, done) from error
            if got <= 0:
                raise self._stuck(offset, wanted, done)
            self.calls += 1
            self.moved += got
            done += got
            if done < wanted:
                buffers = _behind(buffers, got)

    def count(self) -> None:
        """Add what was done to the file's own counters."""
        if self._writing:
            self.file.count(writes=self.calls, bytes_written=self.moved)
        else:
            self.file.count(reads=self.calls, bytes_read=self.moved)

    def _failure(self, error: OSError, offset: int, wanted: int, done: int) -> OSError:
        reason = error.strerror or str(error)
        message = _report(reason, offset, wanted, done, writing=self._writing)
        return OSError(error.errno, message, self.file.path)

    def _stuck(self, offset: int, wanted: int, done: int) -> Exception:
        return stuck(self.file.path, offset, wanted, done, writing=self._writing)


def failure(code: int, path: str, offset: int, wanted: int, done: int, *, writing: bool) -> OSError:
    """The error of an operation that ended with an error number."""
    return OSError(code, _report(os.strerror(code), offset, wanted, done, writing=writing), path)


def stuck(path: str, offset: int, wanted: int, done: int, *, writing: bool) -> Exception:
    """The error of an operation that moves nothing any more."""
    if not writing:
        return ShortFileError(path, offset, wanted, done)
    message = _report("the system took no more bytes", offset, wanted, done, writing=True)
    return OSError(errno.EIO, message, path)


def raise_first(errors: list[BaseException]) -> None:
    """Raise what went wrong first in a batch, with a note on what else did; nothing if nothing did.

    The list is emptied: whoever keeps it is on the error's traceback, and the two would keep each other alive.
    """
    if not errors:
        return
    first, *others = errors
    for other in others:
        first.add_note(f"another piece of the same batch failed too: {other!r}")
    try:
        raise first
    finally:
        errors.clear()
        del first, others


def _report(reason: str, offset: int, wanted: int, done: int, *, writing: bool) -> str:
    verb = "written" if writing else "read"
    return f"{reason}; {wanted} bytes were to be {verb} at offset {offset}, got {done}"


def _front(buffers: list[NDArray[np.uint8]], limit: int) -> list[NDArray[np.uint8]]:
    """Return the first ``limit`` bytes of what ``buffers`` hold."""
    front = []
    for buffer in buffers:
        if limit <= buffer.nbytes:
            front.append(buffer[:limit])
            break
        front.append(buffer)
        limit -= buffer.nbytes
    return front


def _behind(buffers: list[NDArray[np.uint8]], done: int) -> list[NDArray[np.uint8]]:
    """Return what ``buffers`` hold behind their first ``done`` bytes."""
    for place, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[place + 1 :]]
        done -= buffer.nbytes
    return []
