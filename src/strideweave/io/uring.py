"""One io_uring: set up, submit a whole batch as NumPy records, reap what is done.

The kernel and the process share two rings in memory (``io_uring_setup(2)``, ``io_uring_enter(2)``,
``io_uring_register(2)``, ``io_uring(7)``; the structures are those of ``<linux/io_uring.h>``). Here the mapped
rings are NumPy structured arrays, so that hundreds of requests are filled in by a few assignments, and three
system calls through ctypes are all that is needed: no compiled helper.

A ring belongs to one thread. After a fork it belongs to the parent: the child may close its descriptors and must
not touch the rings, which are shared memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.runtime.system_call import system_call

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ASYNC",
    "COMPLETION",
    "DATA_ONLY",
    "NOP",
    "PERSIST",
    "READ",
    "SUBMISSION",
    "WRITE",
    "Ring",
    "why_unavailable",
]

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same on every architecture that has them

_SETUP_CLAMP = 1 << 4  # as many entries as the kernel allows, where more are asked for
# The last came with Linux 5.6, and with it the two operations that move bytes.
_FEATURE_SINGLE_MMAP, _FEATURE_NODROP, _FEATURE_CURRENT_POSITION = 1 << 0, 1 << 1, 1 << 3
_ENTER_GETEVENTS = 1 << 0
_REGISTER_EVENTFD = 4
_SQ_CQ_OVERFLOW = 1 << 1
_SQES_OFFSET = 0x10000000  # where in the descriptor the submission entries are mapped from

NOP, PERSIST, READ, WRITE = 0, 3, 22, 23
"""Operation codes of ``io_uring_enter(2)``: nothing, ``fsync``, ``pread``, ``pwrite``."""

DATA_ONLY = 1 << 0
"""In ``rw_flags`` of ``PERSIST``: as ``fdatasync``, without what is not needed to find the bytes again."""

ASYNC = 1 << 4
"""Flag of an entry: have a kernel thread do it at once, instead of trying it inside the system call first."""

SUBMISSION = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "u2"),
        ("fd", "i4"),
        ("offset", "u8"),
        ("address", "u8"),
        ("length", "u4"),
        ("rw_flags", "u4"),
        ("user_data", "u8"),
        ("unused", "u8", (3,)),
    ]
)
"""An entry: what is asked for (``NOP``, ``PERSIST``, ``READ`` or ``WRITE``), of which descriptor, from which byte
on, between which addresses, how many bytes (below 2 GiB), and a name for the completion."""

COMPLETION = np.dtype([("user_data", "u8"), ("result", "i4"), ("flags", "u4")])
"""A completion: what the entry was called, and how many bytes it moved or the negative error number."""


class _Offsets(ctypes.Structure):
    """``struct io_sqring_offsets`` and ``struct io_cqring_offsets``; ``fifth`` and ``sixth`` differ in meaning."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("head", "tail", "mask", "entries", "fifth", "sixth")),
        *((name, ctypes.c_uint32) for name in ("seventh", "reserved")),
        ("user_address", ctypes.c_uint64),
    )


class _Parameters(ctypes.Structure):
    """``struct io_uring_params``."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("sq_entries", "cq_entries", "flags", "cpu", "idle")),
        *((name, ctypes.c_uint32) for name in ("features", "wq_fd", "reserved0", "reserved1", "reserved2")),
        ("sq", _Offsets),
        ("cq", _Offsets),
    )


class Ring:
    """The two rings of one io_uring, and an eventfd that tells of completions.

    No more entries are ever in flight than the completion ring holds, so that it cannot overflow by this side's
    doing; should the kernel hold completions back all the same, ``reap`` asks it for them.

    Args:
        entries: how many entries one system call may hand over; the kernel rounds up to a power of two.

    Raises:
        OSError: the kernel has no io_uring, refuses it to this process, or has no memory or descriptors for it.
    """

    def __init__(self, entries: int) -> None:
        self.fd = self.event_fd = -1
        self.in_flight = 0
        parameters = _Parameters(flags=_SETUP_CLAMP)
        self.fd = system_call(_SETUP, entries, ctypes.byref(parameters))
        complete = False
        try:
            needed = _FEATURE_SINGLE_MMAP | _FEATURE_NODROP | _FEATURE_CURRENT_POSITION
            if parameters.features & needed != needed:
                raise OSError(errno.ENOSYS, "this kernel's io_uring is older than Linux 5.6")
            self._map(parameters)
            self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            number = ctypes.c_int(self.event_fd)
            system_call(_REGISTER, self.fd, _REGISTER_EVENTFD, ctypes.byref(number), 1)
            complete = True
        finally:
            if not complete:
                self.close()

    def _map(self, parameters: _Parameters) -> None:
        sq, cq = parameters.sq, parameters.cq
        self._entries, self._depth = int(parameters.sq_entries), int(parameters.cq_entries)
        # The seventh offset of the submission ring is its array of indices, the sixth of the other its entries.
        length = max(
            sq.seventh + self._entries * 4,
            cq.sixth + self._depth * COMPLETION.itemsize,
        )
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        rings = mmap.mmap(self.fd, length, flags=flags)
        submissions = mmap.mmap(
            self.fd, self._entries * SUBMISSION.itemsize, flags=flags, offset=_SQES_OFFSET
        )
        words = np.frombuffer(rings, np.uint32, length // 4)
        self._sq_head, self._sq_tail = words[sq.head // 4 :][:1], words[sq.tail // 4 :][:1]
        self._sq_flags = words[sq.fifth // 4 :][:1]
        self._cq_head, self._cq_tail = words[cq.head // 4 :][:1], words[cq.tail // 4 :][:1]
        # Entry i always stands at place i.
        words[sq.seventh // 4 :][: self._entries] = np.arange(self._entries)
        self._submissions = np.frombuffer(submissions, SUBMISSION, self._entries)
        self._completions = np.frombuffer(rings, COMPLETION, self._depth, cq.sixth)

    @property
    def queued(self) -> int:
        """Entries that were prepared and that the kernel has not taken."""
        return (int(self._sq_tail[0]) - int(self._sq_head[0])) & 0xFFFFFFFF

    @property
    def room(self) -> int:
        """How many entries may be prepared now."""
        return min(self._entries - self.queued, self._depth - self.in_flight)

    def prepare(self, entries: NDArray[Any]) -> None:
        """Put entries into the submission ring, at most ``room`` of them; ``enter`` hands them over.

        The caller keeps the memory at their addresses alive until the completions have come.

        Args:
            entries: records of ``SUBMISSION``. Fields without a meaning for their operation must be zero.

        Raises:
            ValueError: there is no room for so many.
        """
        count = len(entries)
        if count > self.room:
            raise ValueError(f"{count} entries for a ring with room for {self.room}")
        tail = int(self._sq_tail[0])
        first = tail & (self._entries - 1)
        if first + count <= self._entries:
            self._submissions[first : first + count] = entries
        else:
            self._submissions[np.arange(tail, tail + count) & (self._entries - 1)] = entries
        self._sq_tail[0] = (tail + count) & 0xFFFFFFFF  # only now may the kernel look at them
        self.in_flight += count

    def enter(self, wait: int = 0) -> bool:
        """Hand prepared entries over, and wait for so many completions.

        Returns:
            Whether the kernel took all of them. It may take some or none when it is short of memory, interrupted, or
            holds completions back: reap, then try again.

        Raises:
            OSError: the kernel refused for another reason; entries it did not take stay prepared.
        """
        flags = _ENTER_GETEVENTS if wait or self.is_overflown else 0
        try:
            system_call(_ENTER, self.fd, self.queued, wait, flags, None, 0)
        except OSError as error:
            if error.errno not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                raise
        return not self.queued

    def withdraw(self) -> NDArray[np.uint64]:
        """Take back the entries that the kernel has not taken, after ``enter`` has failed; gives their names."""
        head, count = int(self._sq_head[0]), self.queued
        entries = self._submissions[np.arange(head, head + count) & (self._entries - 1)]
        names: NDArray[np.uint64] = entries["user_data"]
        self._sq_tail[0] = head
        self.in_flight -= count
        return names

    @property
    def answered(self) -> int:
        """How many completions have come that ``reap`` has not taken, as far as the ring has room for them."""
        return (int(self._cq_tail[0]) - int(self._cq_head[0])) & 0xFFFFFFFF

    def reap(self) -> NDArray[Any]:
        """Take the completions that have come, as records of ``COMPLETION``; possibly none."""
        if self.is_overflown:
            self.enter()
        head, count = int(self._cq_head[0]), self.answered
        first = head & (self._depth - 1)
        found: NDArray[Any]
        if first + count <= self._depth:
            found = self._completions[first : first + count].copy()
        else:
            found = self._completions[np.arange(head, head + count) & (self._depth - 1)]
        self._cq_head[0] = (head + count) & 0xFFFFFFFF
        self.in_flight -= count
        return found

    def clear_event(self) -> None:
        """Take the eventfd's count back to zero; call it before ``reap``."""
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return

    @property
    def is_overflown(self) -> bool:
        """Whether the kernel holds completions back; ``reap`` asks for them."""
        return bool(self._sq_flags[0] & _SQ_CQ_OVERFLOW)

    def close(self) -> None:
        """Close the descriptors and unmap the rings, without touching their memory. Idempotent."""
        # A mapping keeps a copy of the descriptor, and with it the ring, for as long as an array leads to it.
        for name in [name for name in vars(self) if name.startswith("_")]:
            delattr(self, name)
        for name in ("fd", "event_fd"):
            number = getattr(self, name)
            setattr(self, name, -1)
            if number >= 0:
                os.close(number)

    def __del__(self) -> None:
        self.close()


def why_unavailable() -> str | None:
    """Try a ring for real and say why io_uring cannot be used by this process; None where it can.

    The kernel may lack it, a sysctl or a seccomp filter may refuse one of its calls, and limits on locked memory or
    descriptors may leave no room. A version number tells nothing of these.
    """
    if not sys.platform.startswith("linux"):
        return f"io_uring is a part of Linux, and this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        # The rings are read with plain loads; x86 keeps them in order, and nothing else was tried.
        return f"the rings have been tried on x86-64 only, and this is {platform.machine()}"
    if not hasattr(os, "eventfd"):
        return "this Python was built without os.eventfd"
    ring = None
    try:
        ring = Ring(8)
        entry = np.zeros(1, SUBMISSION)
        entry["fd"], entry["user_data"] = -1, 7
        ring.prepare(entry)
        ring.enter(1)
        found = ring.reap()
        if found["user_data"].tolist() != [7] or os.eventfd_read(ring.event_fd) < 1:
            return "a first request came back wrong"
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "an error")
        return f"the kernel refuses io_uring: {name}, {error.strerror}"
    finally:
        if ring is not None:
            ring.close()
    return None
