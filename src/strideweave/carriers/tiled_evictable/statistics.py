"""What a tiled carrier has done and holds, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import Self

    from strideweave.carriers.tiled_evictable.traffic import TileTraffic
    from strideweave.tiles.policy import PolicyStatistics

__all__ = ["TiledStatistics", "TrafficCounters"]


@dataclass(slots=True)
class TrafficCounters:
    """The running counts behind ``TiledStatistics``; guarded by the carrier's lock."""

    hits: int = 0
    misses: int = 0
    shared: int = 0
    streamed: int = 0
    promotions: int = 0
    evictions: int = 0
    failed_evictions: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    reserved_tiles: int = 0
    peak_tiles: int = 0
    staging_bytes: int = 0
    peak_staging_bytes: int = 0
    aside_bytes: int = 0
    peak_aside_bytes: int = 0
    in_flight_bytes: int = 0
    leaving_bytes: int = 0  # of places whose pages are on their way back to the system
    peak_memory_bytes: int = 0
    put_off: set[int] = field(default_factory=set)

    def note_reserved(self, tiles: int) -> None:
        """Tiles took (or, negative, gave back) a place in the primary tier."""
        self.reserved_tiles += tiles
        self.peak_tiles = max(self.peak_tiles, self.reserved_tiles)

    def note_staging(self, nbytes: int) -> None:
        """Staging memory was taken or given back."""
        self.staging_bytes += nbytes
        self.peak_staging_bytes = max(self.peak_staging_bytes, self.staging_bytes)

    def note_aside(self, nbytes: int) -> None:
        """Memory beside a given destination was taken or given back."""
        self.aside_bytes += nbytes
        self.peak_aside_bytes = max(self.peak_aside_bytes, self.aside_bytes)

    def note_released(self) -> None:
        """The carrier gave everything back: nothing has a place any more, nor is to leave later."""
        self.reserved_tiles = 0
        self.put_off.clear()

    def note_memory(self, nbytes: int) -> None:
        """So much memory is in use for tiles."""
        self.peak_memory_bytes = max(self.peak_memory_bytes, nbytes)


@dataclass(frozen=True, slots=True)
class TiledStatistics:
    """A snapshot of one ``TiledEvictable``.

    Attributes:
        tile_count: tiles in the grid.
        tile_bytes: bytes of one tile.
        resident_tiles: tiles whose value is in the primary tier.
        resident_bytes: bytes of primary storage that tiles occupy, those being fetched included.
        peak_resident_bytes: the largest value ``resident_bytes`` ever had.
        dirty_tiles: tiles whose value only the primary tier has.
        recycled_bytes: bytes of primary storage kept for the next tiles though no tile lies there.
        recycle_limit_bytes: the bound of ``recycled_bytes``.
        staging_bytes: bytes held right now for tiles that stream past the primary tier, and for short pieces of files
            in place, which are read as ranges.
        peak_staging_bytes: the largest value ``staging_bytes`` ever had.
        aside_bytes: bytes of results that wait beside a given destination for all of their tiles to be read, because a
            failure must leave it as it was. Like results they are the caller's, and no part of ``memory_bytes``.
        peak_aside_bytes: the largest value ``aside_bytes`` ever had.
        memory_limit_bytes: the hard limit of ``memory_bytes``; None without one.
        memory_bytes: bytes of tiles in memory: ``resident_bytes``, ``recycled_bytes``, ``staging_bytes``, and
            places whose pages are on their way back to the system.
        peak_memory_bytes: the largest value ``memory_bytes`` ever had.
        waiting_requests: requests that wait until the limit has room for them; they hold no memory.
        in_flight_bytes: bytes that transfers under way are moving.
        pinned_tiles: tiles that unfinished requests need, cover or move.
        pending_requests: requests that are not terminal.
        put_off_evictions: planned evictions that wait for other live work to end.
        hits: required tiles that were resident when their request ran.
        misses: required tiles that a request fetched itself, streamed ones included.
        shared: required tiles that a request got from another request's fetch.
        streamed: tiles that were read past the primary tier.
        promotions: tiles that became primary.
        evictions: tiles that left the primary tier.
        failed_evictions: planned evictions that failed and left their tile primary.
        bytes_read: bytes moved from the secondary tier.
        bytes_written: bytes moved to the secondary tier.
        policy: the statistics of the residency policy, where it has any.
    """

    tile_count: int
    tile_bytes: int
    resident_tiles: int
    resident_bytes: int
    peak_resident_bytes: int
    dirty_tiles: int
    recycled_bytes: int
    recycle_limit_bytes: int
    staging_bytes: int
    peak_staging_bytes: int
    aside_bytes: int
    peak_aside_bytes: int
    memory_limit_bytes: int | None
    memory_bytes: int
    peak_memory_bytes: int
    waiting_requests: int
    in_flight_bytes: int
    pinned_tiles: int
    pending_requests: int
    put_off_evictions: int
    hits: int
    misses: int
    shared: int
    streamed: int
    promotions: int
    evictions: int
    failed_evictions: int
    bytes_read: int
    bytes_written: int
    policy: PolicyStatistics | None

    @classmethod
    def of(
        cls,
        traffic: TileTraffic,
        *,
        recycle_limit_bytes: int,
        pending_requests: int,
        policy: PolicyStatistics | None,
    ) -> Self:
        """The record of a carrier by its traffic at one instant; takes the carrier's lock."""
        with traffic.lock:
            counters, ledger, budget = traffic.counters, traffic.ledger, traffic.budget
            return cls(
                tile_count=traffic.grid.tile_count,
                tile_bytes=traffic.tile_bytes,
                resident_tiles=traffic.table.resident_count,
                resident_bytes=counters.reserved_tiles * traffic.tile_bytes,
                peak_resident_bytes=counters.peak_tiles * traffic.tile_bytes,
                dirty_tiles=len(traffic.table.dirty()),
                recycled_bytes=traffic.primary.recycled_bytes,
                recycle_limit_bytes=recycle_limit_bytes,
                staging_bytes=counters.staging_bytes,
                peak_staging_bytes=counters.peak_staging_bytes,
                aside_bytes=counters.aside_bytes,
                peak_aside_bytes=counters.peak_aside_bytes,
                memory_limit_bytes=None if budget is None else budget.memory_limit,
                memory_bytes=traffic.memory_bytes,
                peak_memory_bytes=counters.peak_memory_bytes,
                waiting_requests=0 if budget is None else budget.waiting,
                in_flight_bytes=counters.in_flight_bytes,
                pinned_tiles=int(np.count_nonzero((ledger.needed > 0) | ledger.changing | ledger.moving)),
                pending_requests=pending_requests,
                put_off_evictions=len(counters.put_off),
                hits=counters.hits,
                misses=counters.misses,
                shared=counters.shared,
                streamed=counters.streamed,
                promotions=counters.promotions,
                evictions=counters.evictions,
                failed_evictions=counters.failed_evictions,
                bytes_read=counters.bytes_read,
                bytes_written=counters.bytes_written,
                policy=policy,
            )
