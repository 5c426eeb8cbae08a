"""Moves from and to a tiled carrier: slot for slot, tile by tile, through its own traffic.

Contract: values move, slots keep their number. A move covers its tiles in the ledger, as a residency request does,
so it meets no other work; what it stages is bounded. Values pass between the other carrier and memory of the
compute class by the moves registered for those classes, and between the tiers as ever.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from strideweave.carriers.move.operations import MoveOperation, Transfer, run_transfers
from strideweave.carriers.move.planning import checked_runs
from strideweave.carriers.move.registry import dispatch_move
from strideweave.carriers.tiled_evictable.move_admission import admitted
from strideweave.carriers.tiled_evictable.spans import Span
from strideweave.carriers.tiled_evictable.store import by_carrier, note_change

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.move_admission import TileMove
    from strideweave.carriers.tiled_evictable.traffic import TileTraffic

    Ordinals = npt.NDArray[np.int64]
    Place = tuple[Carrier, int]

__all__ = ["MoveFromTiles", "MoveToTiles"]


class MoveFromTiles(MoveOperation):
    """Copies slots of a tiled carrier, wherever their tiles are, without moving a tile.

    Resident tiles are read where they lie. Others go straight to a destination of the compute class, and through
    staging to any other.
    """

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans, one after the other; see :meth:`MoveOperation.transfer`.

        Raises:
            InvalidTileError: a tile has no value yet.
            TileConflictError: unfinished work needs, moves or covers one of the tiles.
        """
        for run in checked_runs(transfers):
            source = cast("TiledEvictable", run.source)
            span = Span(run.source_start, run.destination_start, run.slots, source._traffic.grid.tile_size)
            async with admitted(source, span.tiles(), reads=True) as move:
                await _send(source, move, span, run.destination)


class MoveToTiles(MoveOperation):
    """Copies slots to a tiled carrier, whose tiles all become valid.

    They become primary and dirty. Where the carrier has a policy, or they do not all fit its memory limit, they go
    through staging to the secondary tier instead: what becomes primary is the policy's to say, when it is asked.
    """

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans, one after the other; see :meth:`MoveOperation.transfer`.

        Of a tile that a span covers in part the other slots keep their value, zero if it had none.

        Raises:
            TileConflictError: unfinished work needs, moves or covers one of the tiles.
        """
        for run in checked_runs(transfers):
            destination = cast("TiledEvictable", run.destination)
            traffic = destination._traffic
            span = Span(run.destination_start, run.source_start, run.slots, traffic.grid.tile_size)
            tiles = span.tiles()
            async with admitted(destination, tiles, reads=False) as move:
                limit = destination.memory_limit
                fits = limit is None or len(tiles) * traffic.tile_bytes <= limit
                arrival = _Arrival(destination, move, span, run.source)
                if destination.residency_policy is None and fits:
                    await arrival.become_primary(tiles)
                else:
                    await arrival.pass_by(tiles)


@contextmanager
def _staged(traffic: TileTraffic, tiles: int) -> Iterator[Carrier]:
    """Memory of the compute class for some tiles."""
    staging = traffic.stage_slots(tiles * traffic.grid.tile_size)
    try:
        yield staging
    finally:
        traffic.unstage(staging)


async def _clear(traffic: TileTraffic, rows: Iterable[npt.NDArray[np.unsignedinteger]]) -> None:
    zero = np.zeros(1, traffic.unit)
    await traffic.copy([(row, np.broadcast_to(zero, row.shape)) for row in rows])


def _waves(tiles: Ordinals, count: int) -> Iterator[Ordinals]:
    return (tiles[first : first + count] for first in range(0, len(tiles), count))


async def _send(source: TiledEvictable, move: TileMove, span: Span, destination: Carrier) -> None:
    """Copy a span to another carrier; no tile changes its place."""
    traffic, table, size = source._traffic, source._traffic.table, span.size
    operation = dispatch_move(source._compute_class, type(destination))
    per_wave = await move.reserve(traffic)
    tiles = span.tiles()
    resident, implicit = table.is_resident(tiles), table.is_implicit(tiles)
    for batch in traffic._batches(tiles[resident]):
        with traffic.lock:
            places = list(traffic.primary.places(batch))
        await run_transfers(operation, span.outward(batch, places, destination))
    stored = tiles[~resident & ~implicit]
    if type(destination) is source._compute_class:
        for batch in traffic._batches(stored):
            with traffic.lock:
                places = list(traffic.secondary.places(batch))
            await traffic._transfer(span.outward(batch, places, destination), inbound=True)
    elif len(stored):
        with _staged(traffic, min(per_wave, len(stored))) as staging:
            for wave in _waves(stored, per_wave):
                starts = range(0, len(wave) * size, size)
                await traffic._read(wave, staging, np.array(starts, np.int64))
                there = [(staging, start) for start in starts]
                await run_transfers(operation, span.outward(wave, there, destination))
    if implicit.any():
        with _staged(traffic, 1) as zeros:
            await _clear(traffic, [zeros._bytes().view(traffic.unit)])
            for batch in traffic._batches(tiles[implicit]):
                await run_transfers(operation, span.outward(batch, [(zeros, 0)] * len(batch), destination))


@dataclass(slots=True, eq=False)
class _Arrival:
    """A span of another carrier on its way to a tiled one."""

    carrier: TiledEvictable
    move: TileMove
    span: Span
    source: Carrier

    @property
    def traffic(self) -> TileTraffic:
        return self.carrier._traffic

    async def become_primary(self, tiles: Ordinals) -> None:
        """Give tiles their values in the primary tier; those without a place there get one, all of them or none."""
        traffic, table, entry = self.traffic, self.traffic.table, self.move.entry
        await self.move.reserve(traffic, tiles)
        partial = self.span.partial(tiles)
        missing = partial[table.is_valid(partial) & ~table.is_resident(partial)]
        if len(missing):
            await traffic.fetch(entry, missing)
        resident = table.is_resident(tiles)
        kept, new = tiles[resident], tiles[~resident]

        async def fill(batch: Ordinals) -> None:
            await _clear(traffic, traffic.rows(self.span.partial(batch)))
            await self._bring(batch)

        async def overwrite() -> None:
            with traffic.lock:
                # Already: a failure may have changed them, and then nothing else has that.
                table.commit_fill(kept)
                for tier in {tier for tier, _ in traffic.primary.places(kept)}:
                    note_change(tier)
            for batch in traffic._batches(kept):
                await self._bring(batch)

        def commit() -> None:
            table.commit_fill(new)

        await traffic.install(entry, new, fill, commit, complete=overwrite if len(kept) else None)

    async def _bring(self, batch: Ordinals) -> None:
        with self.traffic.lock:
            places = list(self.traffic.primary.places(batch))
        await self._run(self.span.inward(batch, places, self.source))

    async def _run(self, transfers: list[Transfer]) -> None:
        await run_transfers(dispatch_move(type(self.source), self.carrier._compute_class), transfers)

    async def pass_by(self, tiles: Ordinals) -> None:
        """Write tiles to the secondary tier through staging, wave by wave; none of them stays primary."""
        traffic = self.traffic
        per_wave = min(len(tiles), await self.move.reserve(traffic))
        traffic.secondary.prepare_write()
        with _staged(traffic, per_wave) as staging:
            for wave in _waves(tiles, per_wave):
                places = [(staging, start) for start in range(0, len(wave) * self.span.size, self.span.size)]
                for ordinal in self.span.partial(wave).tolist():
                    await self._stage_value(ordinal, *places[ordinal - int(wave[0])])
                await self._run(self.span.inward(wave, places, self.source))
                await self._store(wave, places)

    async def _stage_value(self, ordinal: int, staging: Carrier, start: int) -> None:
        """Stage the value that a tile has, zero if it has none."""
        traffic, at = self.traffic, np.array([ordinal], np.int64)
        row = staging._bytes().view(traffic.unit)[start : start + self.span.size]
        if traffic.table.is_resident(at)[0]:
            await traffic.copy([(row, traffic.rows(at)[0])])
        elif traffic.table.is_valid(at)[0] and not traffic.table.is_implicit(at)[0]:
            await traffic._read(at, staging, np.array([start], np.int64))
        else:
            await _clear(traffic, [row])

    async def _store(self, wave: Ordinals, places: list[Place]) -> None:
        """Write staged tiles back; from then on the secondary tier has their values."""
        traffic, table, entry = self.traffic, self.traffic.table, self.move.entry
        resident = wave[table.is_resident(wave)]
        with traffic.lock:
            # While the write goes on, nothing but their place has a value of theirs.
            table.commit_fill(resident)
            transfers = traffic._transfers(by_carrier(places), traffic.secondary.write_places(wave))
        await traffic._transfer(transfers, inbound=False)
        with traffic.lock:
            traffic.secondary.commit_write(wave)
            table.commit_stored(wave[~np.isin(wave, resident)])
            table.commit_clean(resident)
            traffic.ledger.begin_move(entry, resident)
        await traffic.drop(entry, resident)
