"""A bounded pool of mappings that the system need not fill with zeros anew.

Page faults decide how fast a large gather is: a copy into memory that was touched before runs several times faster
than one into fresh pages. So when the last view of a result dies, its mapping serves the next result of about that
size. What nobody asked for within ten seconds goes back to the system, as does at once what lived long.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
import time
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.io.buffers import PrivateMapping, advise_huge, map_memory
from strideweave.io.memory_limits import memory_limits
from strideweave.runtime.event_loop import process
from strideweave.runtime.locks import holds_short_lock, short_lock
from strideweave.runtime.workers import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["SMALLEST_BYTES", "RecyclingPool", "RecyclingStatistics", "size_class"]

SMALLEST_BYTES = 1 << 20
"""Bytes: smaller memory comes from NumPy's allocator, which keeps what was freed for the next array."""

LARGEST_LIMIT = 4 << 30
"""Bytes: no pool holds more, whatever the machine has."""

IDLE_SECONDS = 10.0
"""How long memory is held that nobody asks for."""

LENT_SECONDS = 30.0
"""Memory that is in use for longer is not recycled: it goes back to the system when its last view dies."""

_TICK_SECONDS = 1.0  # how often a pool that has lent or holds something looks what has become of it


@dataclass(frozen=True, slots=True)
class RecyclingStatistics:
    """What a :class:`RecyclingPool` holds and has done.

    Attributes:
        held_bytes: bytes held for the next results, which nobody uses.
        lent_bytes: bytes in use that will be held once their last view dies, or were when the pool last looked.
        limit_bytes: the bound of both together.
        taken: arrays handed out.
        reused: how many of these lie in memory that was used before.
        returned_bytes: bytes that went back to the system so far.
    """

    held_bytes: int = 0
    lent_bytes: int = 0
    limit_bytes: int = 0
    taken: int = 0
    reused: int = 0
    returned_bytes: int = 0


class _Lease(weakref.ref["NDArray[np.uint8]"]):
    """The root array of a mapping in use, which every view of the memory keeps alive."""

    __slots__ = ("gives_way", "mapping", "since", "token")

    mapping: mmap.mmap
    since: float
    token: object  # by which its bytes are counted
    gives_way: bool  # to results that find no room


class RecyclingPool:
    """Lends mappings as arrays, and lends them again when the last view of an array has died.

    Sizes are rounded up to an eighth of a power of two, so that requests that differ little find each other's
    memory. A finalizer may run in any thread at any statement: it does nothing but note, in a queue, that an array
    is gone. What is in that queue is found at the next call, or once a second, as long as anything is lent or held.
    Other people's finalizers may even call the pool; one that interrupts it gets nothing and changes nothing.

    Made without arguments for a runtime; ``current_runtime().service(RecyclingPool)``.

    Args:
        limit_bytes: bound of the bytes lent and held together; None takes 4 GiB, an eighth of the memory that the
            machine has, or a sixteenth of what a limit leaves to this process, whichever is least.
        clock: gives the time in seconds.
    """

    def __init__(self, limit_bytes: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit = _default_limit() if limit_bytes is None else limit_bytes
        self._leases: dict[int, _Lease] = {}
        self._ended: deque[Any] = deque()  # leases whose array is gone
        # By size, each with the time since when it is idle; the last one is the warmest.
        self._held: defaultdict[int, deque[tuple[float, mmap.mmap]]] = defaultdict(deque)
        self._lent: dict[object, int] = {}  # bytes of what is in use, and of calls of ``take`` under way
        self._taken = self._reused = self._returned_bytes = 0
        self._watched = self._closed = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_forget_in_child, weakref.ref(self)))

    def take(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Lend memory of unspecified values that begins with a page.

        Args:
            nbytes: at least 1.

        Returns:
            An array of so many bytes; None where the bound leaves no room for it, and inside a finalizer that has
            interrupted the pool.

        Raises:
            MemoryError: the system has no such memory.
        """
        size = size_class(nbytes)
        if holds_short_lock():
            return None
        token = object()
        try:
            with short_lock:
                if not self._find_room(size):
                    return None
                self._lent[token] = size
                mapping = self._pop(nbytes, size)
                if mapping is not None:
                    self._lent[token] = size = len(mapping)
                self._taken += 1
                self._reused += mapping is not None
                dropped = self._drop(self._lent_bytes + self._held_bytes - self._limit)
            _return_soon(dropped)
            if mapping is None:
                mapping = self._map(size)
            else:
                advise_huge(mapping)  # pages that were given back out of its middle ended that advice
            array, now = np.frombuffer(mapping, np.uint8, nbytes), self._clock()
            with short_lock:
                self._lend(array, mapping, now, token)
            self._watch()
        except BaseException:  # no memory, or Ctrl-C: nobody has the array
            with short_lock:
                for key in [key for key, lease in self._leases.items() if lease.token is token]:
                    del self._leases[key]
                self._lent.pop(token, None)
            raise
        return array

    def exchange(self, kept: NDArray[np.uint8], given: NDArray[np.uint8]) -> None:
        """Leave lent memory to who keeps it, and hold other memory in its place, once its last view dies.

        Nothing changes where the first is not lent, or the second not of ``map_memory``.

        Args:
            kept: an array as ``take`` gave it.
            given: the root array of a mapping.
        """
        memory: object = given.base
        mapping: object = memory.obj if isinstance(memory, memoryview) else None
        now = self._clock()
        if not isinstance(mapping, PrivateMapping) or len(mapping) < SMALLEST_BYTES or holds_short_lock():
            return
        with short_lock:
            lease = self._lease_of(kept)
            if self._closed or lease is None:
                return
            self._forget(lease)
            if self._lease_of(given) is None:
                self._lend(given, mapping, now, object())

    def give_way(self, array: NDArray[np.uint8]) -> None:
        """Recycle lent memory only as long as no result needs its room: it may be in use for long.

        Nothing changes where it is not lent.

        Args:
            array: as ``take`` gave it.
        """
        if holds_short_lock():
            return
        with short_lock:
            lease = self._lease_of(array)
            if lease is not None:
                lease.gives_way = True

    def _lend(self, array: NDArray[np.uint8], mapping: mmap.mmap, now: float, token: object) -> None:
        """Count a mapping as lent until its root array dies; under the lock."""
        lease = _Lease(array, self._ended.append)
        lease.mapping, lease.since, lease.token, lease.gives_way = mapping, now, token, False
        self._lent[token] = len(mapping)
        self._leases[id(lease)] = lease

    def has_room(self, nbytes: int) -> bool:
        """Tell whether ``take`` would lend so much now."""
        if holds_short_lock():
            return False
        with short_lock:
            return self._has_room(size_class(nbytes))

    def trim(self) -> int:
        """Give everything that is held back to the system, at once; says how many bytes that was."""
        if holds_short_lock():
            return 0
        with short_lock:
            self._settle()
            nbytes = self._held_bytes
            dropped = self._drop(nbytes)
        _return_now(dropped)
        return nbytes

    def close(self) -> None:
        """Hold nothing any more; what is in use goes back to the system when its last view dies."""
        with short_lock:
            self._closed = True
            self._leases.clear()
            self._lent.clear()
        self.trim()

    def statistics(self) -> RecyclingStatistics:
        """Return what the pool holds and has done, as one consistent record."""
        settled = holds_short_lock()  # or is being settled
        with short_lock:
            if not settled:
                self._settle()
            return RecyclingStatistics(
                held_bytes=self._held_bytes,
                lent_bytes=self._lent_bytes,
                limit_bytes=self._limit,
                taken=self._taken,
                reused=self._reused,
                returned_bytes=self._returned_bytes,
            )

    def expire(self) -> bool:
        """Give back what has been idle for long and forget what is in use for long; says if anything is left."""
        now = self._clock()
        with short_lock:
            self._settle()
            for lease in tuple(self._leases.values()):
                if now - lease.since >= LENT_SECONDS:
                    self._forget(lease)
            dropped = []
            for size, idle in self._held.items():
                while idle and now - idle[0][0] >= IDLE_SECONDS:
                    dropped.append(self._forget_oldest(size))
            left = bool(self._leases or self._held_bytes)
        _return_soon(dropped)
        return left

    # Counted each time, and not kept beside what they count: Ctrl-C could come in between.

    @property
    def _lent_bytes(self) -> int:
        return sum(self._lent.values())

    @property
    def _held_bytes(self) -> int:
        return sum([size * len(idle) for size, idle in self._held.items()])

    def _has_room(self, size: int) -> bool:
        self._settle()
        return not self._closed and self._lent_bytes + size <= self._limit

    def _find_room(self, size: int) -> bool:
        """Have room for a result, for one of up to half the bound at the price of what gives way; under the lock."""
        if self._has_room(size):
            return True
        missing = self._lent_bytes + size - self._limit
        yielding = [lease for lease in self._leases.values() if lease.gives_way]
        if self._closed or size > self._limit // 2 or missing > sum([len(one.mapping) for one in yielding]):
            return False
        for lease in yielding:  # the oldest first
            if missing <= 0:
                break
            missing -= len(lease.mapping)
            self._forget(lease)
        return True

    def _forget(self, lease: _Lease) -> None:
        """Leave lent memory to whoever has it; under the lock."""
        self._lent.pop(lease.token, None)  # first: the next call finds what is left after a Ctrl-C
        del self._leases[id(lease)]

    def _settle(self) -> None:
        """Hold what has come to be free; under the lock."""
        again = []
        while self._ended:
            lease = self._ended.popleft()
            if id(lease) not in self._leases:
                continue  # in use for too long, or the pool is closed
            if sys.getrefcount(lease.mapping) > 2:
                # The collector tells of the end of what it has found before that ends, and a finalizer may revive it.
                again.append(lease)
                continue
            size, now = len(lease.mapping), self._clock()
            self._forget(lease)
            self._held[size].append((now, lease.mapping))
        self._ended.extend(again)

    def _pop(self, least: int, most: int) -> mmap.mmap | None:
        """Take the smallest mapping of that size at least and at most; under the lock."""
        size = min(
            [size for size, idle in self._held.items() if idle and least <= size <= most], default=None
        )
        return None if size is None else self._held[size].pop()[1]

    def _lease_of(self, array: NDArray[np.uint8]) -> _Lease | None:
        leases = [ref for ref in weakref.getweakrefs(array) if isinstance(ref, _Lease)]
        return next((lease for lease in leases if id(lease) in self._leases), None)

    def _drop(self, nbytes: int) -> list[mmap.mmap]:
        """Let go of so many held bytes, idle longest first; under the lock. The caller unmaps them."""
        dropped: list[mmap.mmap] = []
        while nbytes > 0 and any(self._held.values()):
            size = min((idle[0][0], size) for size, idle in self._held.items() if idle)[1]
            dropped.append(self._forget_oldest(size))
            nbytes -= size
        return dropped

    def _forget_oldest(self, size: int) -> mmap.mmap:
        _, mapping = self._held[size].popleft()
        self._returned_bytes += size
        return mapping

    def _map(self, size: int) -> mmap.mmap:
        try:
            return map_memory(size)
        except MemoryError:
            if not self.trim():
                raise
        return map_memory(size)

    def _watch(self) -> None:
        """Have the runtime's loop look after what is idle, as long as there is anything."""
        runtime = process.runtime
        if self._watched or runtime is None or runtime.find_service(RecyclingPool) is not self:
            return
        self._watched = True
        try:
            runtime.post(self._tick)
        except RuntimeError:  # it has just ended, and with it this pool
            self._watched = False
        except BaseException:  # such as Ctrl-C: the next call has to see to it
            self._watched = False
            raise

    def _tick(self) -> None:
        if self.expire():
            asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
        else:
            self._watched = False
            if self._leases:  # lent meanwhile, by a thread that found the pool still watched
                self._watch()


def _forget_in_child(pool: weakref.ref[RecyclingPool]) -> None:
    """A forked child has its own pool, and nobody else to give back what it inherited."""
    found = pool()
    if found is not None:
        found.close()


def size_class(nbytes: int) -> int:
    """Round a number of bytes, at least 1, up to an eighth of a power of two, and to whole pages."""
    step = max(mmap.PAGESIZE, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


def _return_soon(mappings: list[mmap.mmap]) -> None:
    """Unmap memory that nobody uses, in a worker: it takes the system a while, and the loop does not wait."""
    workers = process.find_service(WorkerPool)
    if not mappings:
        return
    if workers is not None:
        try:
            workers.post(partial(_return_now, mappings))
        except RuntimeError:  # the pool of threads has just closed
            _return_now(mappings)
    else:
        _return_now(mappings)


def _return_now(mappings: Sequence[mmap.mmap]) -> None:
    for mapping in mappings:
        mapping.close()  # unlike the end of the object, it lets go of the interpreter's lock


def _default_limit() -> int:
    """The bound for this machine and the limits of this process."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([LARGEST_LIMIT, physical // 8, *(size // 16 for size in memory_limits())])
