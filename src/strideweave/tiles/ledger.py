"""Which unfinished request needs which tiles.

The ledger decides conflicts when a request is initiated, raises at once and never waits (contract,
the conflict table). It is plain bookkeeping on arrays indexed by tile ordinal: the carrier's one short lock
guards every call, and nothing here awaits, blocks or calls back.

Three facts are kept for each tile:

``needed``
    how many unfinished data requests (project, scatter, operation, backward) still need its value;
``changing``
    whether an unfinished residency request (promote, evict, a write that has to fetch) covers it;
``moving``
    whether a data request is fetching it or writing it back at this moment.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING

import numpy as np

from strideweave.errors import TileConflictError
from strideweave.runtime.await_result import AwaitResult
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.selection import TileSet

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.tiles.grid import TileGrid

    Ordinals = npt.NDArray[np.int64]

__all__ = ["Ledger", "LedgerEntry"]

_FEW_TILES = 8  # up to so many, one after the other takes less time than one NumPy call
_NAMED_TILES = 4  # a conflict message names this many tiles; the error's ``tiles`` has them all


class LedgerEntry:
    """One unfinished request: its kind, its age and the tiles it holds. Compared by identity.

    Whoever makes a request makes its entry first, so that what interrupts the admission leaves nothing behind that
    nobody knows of.

    Args:
        kind: the name of the request, for messages.
    """

    __slots__ = ("changes", "counted", "kind", "moves", "needs", "started")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.needs: Ordinals = NO_ORDINALS
        self.changes: Ordinals = NO_ORDINALS
        self.moves: set[int] = set()
        self.started = time.monotonic()
        self.counted = False  # its tiles are, all of them

    def describe(self) -> str:
        """Say what kind of request this is and its age in seconds."""
        return f"{self.kind}, {time.monotonic() - self.started:.3f} s old"


class Ledger:
    """The unfinished requests of one tiled carrier, and the tiles they hold.

    Not thread-safe by itself: the carrier calls it under its lock.

    Args:
        grid: the tile grid of the carrier.
    """

    def __init__(self, grid: TileGrid) -> None:
        self._grid = grid
        self.needed: npt.NDArray[np.int32] = np.zeros(grid.tile_count, np.int32)
        self._counts = self.needed.data  # the same numbers, as plain integers
        self.changing: npt.NDArray[np.bool_] = np.zeros(grid.tile_count, np.bool_)
        self.moving: npt.NDArray[np.bool_] = np.zeros(grid.tile_count, np.bool_)
        self._entries: dict[LedgerEntry, None] = {}
        self._residency_entries = 0  # while there is none, nothing is ``changing``
        # Weakly: a caller that tries again and again drops one error after the other.
        self._watchers: list[tuple[Ordinals, weakref.ref[AwaitResult[None]]]] = []

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The unfinished requests, oldest first."""
        return tuple(self._entries)

    @property
    def is_empty(self) -> bool:
        """Whether no request is unfinished."""
        return not self._entries

    def enter_data(self, entry: LedgerEntry, ordinals: Ordinals) -> None:
        """Let a request that needs values in; overlapping data requests share their tiles.

        Args:
            entry: the request, a new one.
            ordinals: the distinct tiles it needs.

        Raises:
            TileConflictError: a residency request covers one of the tiles.
        """
        self.check_data(entry.kind, ordinals)
        entry.needs = ordinals
        self._entries[entry] = None  # first: from here on ``leave`` undoes what has been counted
        self._need(ordinals, 1)
        entry.counted = True

    def check_data(self, kind: str, ordinals: Ordinals) -> None:
        """Raise what ``enter_data`` would raise, and admit nothing.

        Raises:
            TileConflictError: as said there.
        """
        if self._residency_entries:
            blocked = self.changing[ordinals]
            if blocked.any():
                raise self._conflict(kind, ordinals[blocked])

    def enter_residency(
        self, entry: LedgerEntry, ordinals: Ordinals, would_change: npt.NDArray[np.bool_]
    ) -> None:
        """Let a request in that moves tiles between tiers.

        Args:
            entry: the request, a new one.
            ordinals: the distinct tiles it covers.
            would_change: for each of them, whether the request has something to do there.

        Raises:
            TileConflictError: a residency request covers one of the tiles, a data request needs one that
                would change, or one is being fetched or written back.
        """
        self.check_residency(entry.kind, ordinals, would_change)
        entry.changes = ordinals
        self._entries[entry] = None  # first, as above
        self.changing[ordinals] = True
        self._residency_entries += len(ordinals) > 0
        entry.counted = True

    def check_residency(self, kind: str, ordinals: Ordinals, would_change: npt.NDArray[np.bool_]) -> None:
        """Raise what ``enter_residency`` would raise, and admit nothing.

        Raises:
            TileConflictError: as said there.
        """
        blocked = self.changing[ordinals] | self.moving[ordinals]
        blocked |= would_change & (self.needed[ordinals] > 0)
        if blocked.any():
            raise self._conflict(kind, ordinals[blocked])

    def check_idle(self, kind: str, ordinal: int) -> None:
        """Refuse a write to a tile that any unfinished request needs, covers or moves.

        Raises:
            TileConflictError: as said.
        """
        if self.needed[ordinal] or self.changing[ordinal] or self.moving[ordinal]:
            raise self._conflict(kind, np.array([ordinal], np.int64))

    def check_still(self, kind: str, ordinal: int) -> None:
        """Refuse to read a slot of a tile that is in transit between the tiers.

        Raises:
            TileConflictError: as said.
        """
        if self.changing[ordinal] or self.moving[ordinal]:
            raise self._conflict(kind, np.array([ordinal], np.int64))

    def begin_move(self, entry: LedgerEntry, ordinals: Ordinals) -> None:
        """Mark tiles as fetched or written back by ``entry`` from now on."""
        self.moving[ordinals] = True
        entry.moves.update(ordinals.tolist())

    def end_move(self, entry: LedgerEntry, ordinals: Ordinals) -> None:
        """Mark tiles as at rest again."""
        self.moving[ordinals] = False
        entry.moves.difference_update(ordinals.tolist())

    def drop_needs(self, entry: LedgerEntry) -> None:
        """Say that ``entry`` no longer needs its tiles; it stays listed until ``leave``."""
        needs, entry.needs = entry.needs, NO_ORDINALS
        self._need(needs, -1)

    def leave(self, entry: LedgerEntry) -> list[AwaitResult[None]]:
        """Strike ``entry`` off, whatever became of it; a second call does nothing.

        Returns:
            Handles of conflict errors whose tiles are free now; finish them outside the lock.
        """
        if self._entries.pop(entry, self) is self:
            return []
        if not entry.counted:
            self._recount()
            return self.take_freed()
        self.drop_needs(entry)
        if len(entry.changes):
            self.changing[entry.changes] = False
            self._residency_entries -= 1
        if entry.moves:
            self.moving[list(entry.moves)] = False
            entry.moves.clear()
        return self.take_freed()

    def take_freed(self) -> list[AwaitResult[None]]:
        """Take the handles whose tiles nothing holds any more."""
        if not self._watchers:
            return []
        freed, kept = [], []
        for watcher in self._watchers:
            ordinals, watched = watcher
            handle = watched()
            if handle is None:
                continue
            if self._held(ordinals):
                kept.append(watcher)
            else:
                freed.append(handle)
        self._watchers = kept
        return freed

    def shares_any(self, ordinals: Ordinals) -> bool:
        """Tell whether more than one request needs any of some tiles."""
        if len(ordinals) > _FEW_TILES:
            return bool(np.count_nonzero(self.needed[ordinals] > 1))
        counts = self._counts
        for ordinal in ordinals.tolist():  # noqa: SIM110  a generator takes twice as long
            if counts[ordinal] > 1:
                return True
        return False

    def _need(self, ordinals: Ordinals, more: int) -> None:
        if len(ordinals) > _FEW_TILES:
            self.needed[ordinals] += more
            return
        counts = self._counts
        for ordinal in ordinals.tolist():
            counts[ordinal] += more

    def _recount(self) -> None:
        """Count the tiles of all entries anew, where the one that has gone was interrupted while it was counted."""
        self.needed[:], self.changing[:], self._residency_entries = 0, False, 0
        for entry in self._entries:
            self.needed[entry.needs] += 1
            self.changing[entry.changes] = True
            self._residency_entries += len(entry.changes) > 0

    def _held(self, ordinals: Ordinals) -> bool:
        return bool(
            self.needed[ordinals].any() or self.changing[ordinals].any() or self.moving[ordinals].any()
        )

    def _conflict(self, kind: str, ordinals: Ordinals) -> TileConflictError:
        holder = next(entry for entry in self._entries if _touches(entry, ordinals)).describe()
        named = ", ".join(map(str, self._grid.coordinates(ordinals[:_NAMED_TILES])))
        more = f" and {len(ordinals) - _NAMED_TILES} more" if len(ordinals) > _NAMED_TILES else ""
        free: AwaitResult[None] = AwaitResult()
        self._watchers = [watcher for watcher in self._watchers if watcher[1]() is not None]
        self._watchers.append((ordinals, weakref.ref(free)))
        return TileConflictError(
            f"{kind} meets an unfinished request ({holder}) on tiles {named}{more}; "
            "wait for that request's handle, or for this error's `free`, and try again",
            tiles=TileSet._from_ordinals(self._grid, ordinals),
            holder=holder,
            free=free,
        )


def _touches(entry: LedgerEntry, ordinals: Ordinals) -> bool:
    wanted = ordinals.tolist()
    held = (entry.needs, entry.changes)
    return bool(entry.moves.intersection(wanted)) or any(np.isin(wanted, tiles).any() for tiles in held)
