"""Tiles that stream past the primary tier: read to where they are wanted, or through staging, and not kept.

What one request streams, others that want the same tiles read from it. Coroutines run in the runtime's loop only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strideweave.carriers.move.operations import may_move_at_once, moved_at_once
from strideweave.carriers.move.registry import dispatch_move
from strideweave.carriers.tiled_evictable.passages import Passage, Staging, joined
from strideweave.carriers.tiled_evictable.store import Places, tile_rows
from strideweave.carriers.tiled_evictable.transfers import Transfers
from strideweave.io.positioned import INLINE_CACHED_BYTES
from strideweave.tiles.coordinates import NO_ORDINALS, without

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.room import Grant
    from strideweave.tiles.ledger import LedgerEntry
    from strideweave.tiles.plan import RequestPlan

    Ordinals = npt.NDArray[np.int64]
    TileRow = npt.NDArray[np.unsignedinteger]
    Consumer = Callable[[Ordinals, list[TileRow]], Awaitable[None]]
    Landing = Callable[[Ordinals], tuple[Carrier, Ordinals]]

__all__ = ["STAGING_BYTES", "Streaming"]

STAGING_BYTES = 8 << 20
"""Bytes: a request stages at most this much, or one tile, of what streams past the primary tier."""


class Streaming(Transfers):
    """Reads tiles of one carrier without making them primary."""

    def staging_room(self, most: int, tiles: int = 0) -> int:
        """How many bytes a request is to stage, a tile at the least and no more than a quarter of the limit.

        Args:
            most: what it could make use of.
            tiles: how many tiles it needs primary besides.
        """
        if self.budget is None:
            return most
        limit = self.budget.limit
        room = max(self.tile_bytes, min(limit // 4, limit - tiles * self.tile_bytes))
        return min(most, room // self.tile_bytes * self.tile_bytes)

    def primary_count(self, plan: RequestPlan) -> int:
        """How many tiles a plan wants primary at once: what stays, and what it promotes besides."""
        tiles = len(plan.staying)
        if len(plan.extra):
            with self.lock:
                promoted = self.table.is_valid(plan.extra) & ~self.ledger.changing[plan.extra]
            tiles += int(np.count_nonzero(promoted))
        return tiles

    def check_plan(self, kind: str, plan: RequestPlan, *, in_place: bool = False) -> int:
        """Refuse a plan that the memory limit could never hold, and say what it is to stage.

        Args:
            kind: the name of the request, for messages.
            plan: its tiles.
            in_place: whether tiles that stream are read to where they are wanted, so that none are staged.

        Returns:
            The bytes for ``reserve_plan``.

        Raises:
            MemoryError: as said.
        """
        if self.budget is None:
            return 0
        tiles = self.primary_count(plan)
        staged = 0 if in_place else len(plan.passing)
        self.check_fits(kind, tiles, self.tile_bytes if staged else 0)
        most = min(staged * self.tile_bytes, max(STAGING_BYTES, self.tile_bytes))
        return self.staging_room(most, tiles) if staged else 0

    async def stream(
        self,
        ordinals: Ordinals,
        consume: Consumer,
        landing: Landing | None = None,
        *,
        entry: LedgerEntry | None = None,
    ) -> None:
        """Hand over the values of tiles that do not stay, wave by wave, without making them primary.

        Tiles that are primary by now are handed over from there.

        Args:
            ordinals: distinct tiles that the calling request holds.
            consume: called with ordinals and one row of values for each, which are valid until it returns.
            landing: gives for tiles the carrier and the first slots where the caller wants them, if that is one
                run of slots for each. Tiles that have to be read are then read to there, and not handed over.
            entry: the calling request, which has reserved its staging; only a memory limit asks for it.
        """
        stored = self.table.are_stored(ordinals)
        if stored and landing is not None and self._read_few(ordinals, landing):
            count = len(ordinals)
            self.count(misses=count, streamed=count, bytes_read=count * self.tile_bytes)
            return
        at_hand = 0
        if not stored:
            at_hand = int(
                np.count_nonzero(self.table.is_resident(ordinals) | self.table.is_implicit(ordinals))
            )
        missing = len(ordinals) - at_hand
        missed = 0
        while len(ordinals):
            if not stored and (resident := self.table.is_resident(ordinals)).any():
                wave, ordinals = ordinals[resident], ordinals[~resident]
                await consume(wave, self.rows(wave))
            elif not stored and (implicit := self.table.is_implicit(ordinals)).any():
                wave, ordinals = ordinals[implicit], ordinals[~implicit]
                await consume(wave, [np.zeros(self.grid.tile_size, self.unit)] * len(wave))
            else:
                ordinals, read = await self._read_missing(ordinals, consume, landing, entry)
                missed += read
            stored = self.table.are_stored(ordinals)
        self.count(hits=at_hand, misses=missed, streamed=missed, shared=missing - missed)

    async def _read_missing(
        self, ordinals: Ordinals, consume: Consumer, landing: Landing | None, entry: LedgerEntry | None
    ) -> tuple[Ordinals, int]:
        """Read missing tiles that nobody else is reading, and hand over those that others have read by then.

        Returns:
            The tiles that are still to be handed over, and how many were read.
        """
        passages, mine = self._sort_out(ordinals)
        # Joined first: what others read may have come and gone when this request has read its own. Not under a
        # limit, where they wait for those who have joined, and would wait for these reads too.
        join = self.budget is None or not len(mine)
        with joined(passages if join else {}, self._unstage) as arriving:
            if not len(mine):
                read = NO_ORDINALS
            elif landing is not None:
                read = await self._read_in_place(np.sort(mine), landing)
            else:
                read = await self._read_waves(entry, np.sort(mine), consume)
            everything = len(read) == len(ordinals)
            ordinals = NO_ORDINALS if everything else without(ordinals, set(read.tolist()))
            for passage in arriving:
                await passage.done.wait()
                ready = [ordinal for ordinal in ordinals.tolist() if ordinal in passage.staged]
                if ready:
                    await consume(np.array(ready, np.int64), [passage.staged[one] for one in ready])
                    ordinals = without(ordinals, passage.staged.keys())
        return ordinals, len(read)

    def _read_few(self, ordinals: Ordinals, landing: Landing) -> bool:
        """Read a few missing tiles to where they are wanted, in this turn of the loop; False where that takes longer.

        Nobody else comes to want them meanwhile, so that they need not be announced.
        """
        if self._passages or len(ordinals) * self.tile_bytes > INLINE_CACHED_BYTES:
            return False
        primary, secondary = self._classes
        operation = dispatch_move(secondary, primary)
        with self.lock:
            places = self.secondary.place_arrays(ordinals)
        if not may_move_at_once(operation, [place.carrier for place in places]):
            return False
        return moved_at_once(self._transfers(places, [Places(None, *landing(ordinals))]))

    async def _read_in_place(self, ordinals: Ordinals, landing: Landing) -> Ordinals:
        """Read missing tiles to where they are wanted; gives those that no other request has claimed."""
        landed: list[Ordinals] = []
        lent: list[Passage] = []

        async def read(batch: Ordinals) -> None:
            wave = self._unclaimed(batch)
            if not len(wave):
                return
            with self._passage(wave) as passage:
                carrier, starts = landing(wave)
                await self._read(wave, carrier, starts)
                if passage.readers:
                    shared = [
                        place for place, ordinal in enumerate(wave.tolist()) if ordinal in passage.wanted
                    ]
                    rows = self._rows_at(carrier, starts[shared])
                    # Whose place this is may write to it before the others have read.
                    if self.budget is None:
                        rows = await self._copies(passage, rows)
                    else:  # no room for copies: so it is not given back before they have
                        lent.append(passage)
                    passage.staged = dict(zip(wave[shared].tolist(), rows, strict=True))
            landed.append(wave)

        await self._in_batches(ordinals, read)
        for passage in lent:
            await passage.empty()
        return np.concatenate((NO_ORDINALS, *landed))

    async def _copies(self, passage: Passage, rows: list[TileRow]) -> list[TileRow]:
        """Copy rows that others have joined in for, and leave the copies to them."""
        staging = self._stage(len(rows))
        try:
            passage.stage_in(staging)
            copies = list(tile_rows(staging.carrier, self.grid.tile_size))
            await self.copy(list(zip(copies, rows, strict=True)))
        finally:
            self._unstage(staging)
        return copies

    async def _read_waves(self, entry: LedgerEntry | None, ordinals: Ordinals, consume: Consumer) -> Ordinals:
        """Read missing tiles through staging and hand them over; gives those that no other request has claimed."""
        handed: list[Ordinals] = []
        grant = None if self.budget is None else self.budget.grant_of(entry)
        most = STAGING_BYTES if grant is None else grant.staging - grant.used
        per_wave = min(len(ordinals), max(1, most // self.tile_bytes))
        staging: Staging | None = None
        try:
            for first in range(0, len(ordinals), per_wave):
                wave = self._unclaimed(ordinals[first : first + per_wave])
                if not len(wave):
                    continue
                if staging is None:
                    staging = self._stage(per_wave, grant)
                with self._passage(wave, staging) as passage:
                    starts = np.arange(len(wave)) * self.grid.tile_size
                    await self._read(wave, staging.carrier, starts)
                    rows = self._rows_at(staging.carrier, starts)
                    passage.staged = dict(zip(wave.tolist(), rows, strict=True))
                handed.append(wave)
                await consume(wave, rows)
                if passage.readers and grant is None:  # leave that memory to those who still read these rows
                    self._unstage(staging)
                    staging = None
                elif passage.readers and first + per_wave < len(ordinals):  # there is room for no other
                    await passage.empty()
        finally:
            if staging is not None:
                self._unstage(staging)
        return np.concatenate((NO_ORDINALS, *handed))

    def stage(self, entry: LedgerEntry, slots: int) -> Staging:
        """Stage some slots of what a request has reserved; ``_unstage`` gives them back.

        Raises:
            MemoryError: the system has no such memory.
        """
        return self._stage_for(slots, None if self.budget is None else self.budget.grant_of(entry))

    def _stage(self, tiles: int, grant: Grant | None = None) -> Staging:
        return self._stage_for(tiles * self.grid.tile_size, grant)

    def _stage_for(self, slots: int, grant: Grant | None) -> Staging:
        staging = Staging(self.stage_slots(slots), slots * self.tile_bytes // self.grid.tile_size, grant)
        if grant is not None:
            with self.lock:
                grant.used += staging.nbytes
        return staging

    def _unstage(self, staging: Staging) -> None:
        """Staged memory has a user less; the last one gives it back."""
        staging.users -= 1
        if staging.users:
            return
        self.unstage(staging.carrier)
        if self.budget is not None and staging.grant is not None:
            with self.lock:
                self.budget.unstage(staging.grant, staging.nbytes)

    def stage_slots(self, slots: int) -> Carrier:
        """Take memory on the compute class that counts as staging until ``unstage``; reserve it before."""
        if self.budget is None:
            carrier = self.prototype._allocate_result(slots)
        else:  # in a mapping of its own, which goes back to the system
            carrier = self.prototype.allocate_like(slots, mutable=True, empty=True)
        self.note_staging(slots * carrier.dtype().itemsize)
        return carrier

    def unstage(self, carrier: Carrier) -> None:
        """Give staged memory back, which nobody reads any more."""
        slots = carrier.size()
        if self.budget is not None:  # an error's traceback may refer to it for long
            carrier._discard(0, slots)
        self.note_staging(-slots * carrier.dtype().itemsize)

    def _unclaimed(self, ordinals: Ordinals) -> Ordinals:
        """Those tiles that no other request has made primary, or put on their way, since they were sorted out."""
        if self.table.resident_count:
            ordinals = ordinals[~self.table.is_resident(ordinals)]
        return without(ordinals, self._passages.keys())

    async def _read(self, wave: Ordinals, carrier: Carrier, starts: Ordinals) -> None:
        """Read tiles from the secondary tier to these slots of a carrier."""
        with self.lock:
            transfers = self._transfers(self.secondary.place_arrays(wave), [Places(None, carrier, starts)])
        await self._transfer(transfers, inbound=True)

    def _rows_at(self, carrier: Carrier, starts: Ordinals) -> list[TileRow]:
        """The tiles at these slots of a carrier, each as a row."""
        flat, size = carrier._bytes().view(self.unit), self.grid.tile_size
        return [flat[start : start + size] for start in starts.tolist()]
