"""Which bytes of a device are free, and which belong to whom: aligned, disjoint extents, lowest fit first."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from strideweave.runtime.locks import short_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Extent", "ExtentMap", "ExtentPool", "Lease"]


class Extent(NamedTuple):
    """A run of bytes.

    Attributes:
        offset: the first one.
        nbytes: how many.
    """

    offset: int
    nbytes: int


class Lease:
    """What has an extent, or none.

    It gets one, and loses it, in one step with the map of its device: Python looks for signals at calls, and between
    the statements that change both there are none. So whatever Ctrl-C interrupts, no extent belongs to nobody.

    Attributes:
        extent: the extent; None while there is none.
    """

    __slots__ = ("extent",)

    def __init__(self) -> None:
        self.extent: Extent | None = None


class ExtentMap:
    """Hands out extents of ``[0, capacity)`` and takes them back; plain bookkeeping, for one thread at a time.

    Free runs are kept in order and never touch each other: what is given back joins its neighbours at once. The
    lowest run that is long enough serves a request, from its beginning, so that what is in use stays together at
    the low end.

    Args:
        capacity: bytes; a part of ``granularity`` at the end is left unused.
        granularity: what every extent begins at a multiple of, and has a multiple of.
    """

    def __init__(self, capacity: int, granularity: int) -> None:
        self.granularity = granularity
        self.capacity = capacity - capacity % granularity
        self.live = 0
        self.free_bytes = self.capacity
        self._starts = [0] if self.capacity else []
        self._stops = [self.capacity] if self.capacity else []

    @property
    def largest_free(self) -> int:
        """Bytes of the longest free run."""
        return max((stop - start for start, stop in zip(self._starts, self._stops, strict=True)), default=0)

    @property
    def free_runs(self) -> list[tuple[int, int]]:
        """The free runs, half-open and in order."""
        return list(zip(self._starts, self._stops, strict=True))

    def take(self, nbytes: int, lease: Lease) -> None:
        """Take the lowest free extent of at least ``nbytes`` bytes, rounded up to the granularity.

        Args:
            nbytes: 1 or more.
            lease: gets it; it has none yet.

        Raises:
            ValueError: ``nbytes`` is less than 1, or the lease has an extent.
            MemoryError: no free run is long enough; nothing has changed.
        """
        if nbytes < 1:
            raise ValueError(f"an extent has at least one byte, {nbytes} were asked for")
        if lease.extent is not None:
            raise ValueError(f"one lease has one extent, and this one has {lease.extent}")
        wanted = -(-nbytes // self.granularity) * self.granularity
        runs = zip(self._starts, self._stops, strict=True)
        place = next((place for place, (start, stop) in enumerate(runs) if stop - start >= wanted), None)
        if place is None:
            raise MemoryError(
                f"{wanted} bytes were wanted in one piece, and the largest free one has {self.largest_free} "
                f"({self.free_bytes} of {self.capacity} bytes are free); release carriers, or take a larger device"
            )
        start = self._starts[place]
        extent = Extent(start, wanted)
        # From here on no calls; see Lease.
        if self._stops[place] - start == wanted:
            del self._starts[place], self._stops[place]
        else:
            self._starts[place] += wanted
        self.live += 1
        self.free_bytes -= wanted
        lease.extent = extent

    def give(self, lease: Lease) -> None:
        """Take the extent of a lease back, and join it to its free neighbours; nothing where it has none any more.

        Raises:
            ValueError: a part of it is free already, or lies outside; nothing has changed.
        """
        extent = lease.extent
        if extent is None:
            return
        start, stop = extent.offset, extent.offset + extent.nbytes
        place = bisect_right(self._starts, start)
        before = self._stops[place - 1] if place else 0
        after = self._starts[place] if place < len(self._starts) else self.capacity
        if not before <= start < stop <= after:
            raise ValueError(f"bytes [{start}, {stop}) were given back, and some of them are not in use")
        joins_before, joins_after = place > 0 and before == start, place < len(self._starts) and after == stop
        # From here on no calls; see Lease.
        if joins_before and joins_after:
            del self._stops[place - 1], self._starts[place]
        elif joins_before:
            self._stops[place - 1] = stop
        elif joins_after:
            self._starts[place] = start
        else:
            self._starts[place:place] = (start,)
            self._stops[place:place] = (stop,)
        self.live -= 1
        self.free_bytes += stop - start
        lease.extent = None


class ExtentPool:
    """An :class:`ExtentMap` that any thread may use, and any finalizer give back to.

    The garbage collector may run at any statement of a thread that is changing the map, and find a carrier whose
    finalizer gives its extent back. That extent then waits for the next use of the map.

    Args:
        capacity, granularity: as for ``ExtentMap``.

    Attributes:
        capacity: bytes that extents can have together.
    """

    def __init__(self, capacity: int, granularity: int) -> None:
        # Changed under short_lock, which no forked child finds held.
        self._extents = ExtentMap(capacity, granularity)
        self._returned: deque[Lease] = deque()
        self._in_use = False
        self.capacity = self._extents.capacity

    @contextmanager
    def settled(self) -> Iterator[ExtentMap]:
        """The map, under the lock, with everything in it that was given back; for a few plain statements."""
        with short_lock:
            self._in_use = True
            try:
                while self._returned:
                    self._extents.give(self._returned[0])
                    self._returned.popleft()  # after it: an interruption in between costs nothing
                yield self._extents
            finally:
                self._in_use = False

    def give(self, lease: Lease) -> None:
        """Take the extent of a lease back, at once unless this very thread is in the middle of a change."""
        self._returned.append(lease)
        with short_lock:
            if not self._in_use:
                with self.settled():
                    pass
