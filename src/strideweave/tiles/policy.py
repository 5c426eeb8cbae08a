"""Who stays in the primary tier: the `ResidencyPolicy` protocol and the three policies that are shipped.

A policy optimises and never defines correctness: whatever it answers, a request gets the values it requires
(spec: *Residency policy can optimize but cannot define correctness*). The shipped policies remember what
their own plans made resident; they do not look at the carrier. Each object serves one carrier at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from strideweave.layout.int_tuple import as_integer
from strideweave.runtime.locks import short_lock
from strideweave.tiles.residency_plan import NO_TILES, ResidencyPlan
from strideweave.tiles.selection import TileSet

if TYPE_CHECKING:
    from strideweave.tiles.grid import TileGrid

__all__ = ["LRU", "KeepResident", "PolicyStatistics", "ResidencyPlan", "ResidencyPolicy", "Streaming"]

# A tile as a policy remembers it: its ordinal once a carrier has bound its grid, its coordinate before.
Key = int | tuple[int, ...]


@runtime_checkable
class ResidencyPolicy(Protocol):
    """What a tiled carrier asks of the object given as ``residency_policy``: one method, ``plan``.

    An optional second method ``bind(grid, tile_bytes)`` is called once, when the carrier is constructed; an
    exception it raises fails the construction.
    """

    def plan(self, required: TileSet, purpose: str) -> ResidencyPlan:
        """Decide which tiles a request promotes, retains and evicts.

        Called when a request is initiated, from the thread that initiates it, so an implementation is
        thread-safe and quick. An exception it raises reaches the caller before any work starts.

        Args:
            required: the tiles whose values the request must be able to read or write.
            purpose: ``"operation"``, ``"projection"``, ``"scatter"`` or ``"backward"``.
        """
        ...


@dataclass(frozen=True, slots=True)
class PolicyStatistics:
    """What a shipped policy has decided so far; counts of tiles unless said otherwise.

    Attributes:
        planned: calls of ``plan``.
        hits: required tiles that an earlier plan had made resident.
        misses: required tiles that none had.
        evictions: tiles that were believed resident and that a plan evicted.
        streamed: required tiles that a plan did not keep: they pass the primary tier by.
        resident: tiles believed resident now.
        capacity: the most tiles that may be resident; None means no bound, or one in bytes before ``bind``.
        tile_bytes: the bytes of one tile; None before ``bind``.
    """

    planned: int
    hits: int
    misses: int
    evictions: int
    streamed: int
    resident: int
    capacity: int | None
    tile_bytes: int | None


class _ShippedPolicy:
    """What the shipped policies share: a lock, the counters, the bound geometry and tiles as keys."""

    def __init__(self) -> None:
        self._lock = short_lock  # a lock of its own could stay locked for ever in a forked child
        self._grid: TileGrid | None = None
        self._tile_bytes: int | None = None
        self._capacity: int | None = None
        # Believed resident, least recently required first. Not a dict: taking the first of many would
        # scan what was taken before.
        self._resident: OrderedDict[Key, None] = OrderedDict()
        self._planned = self._hits = self._misses = self._evictions = self._streamed = 0

    def bind(self, grid: TileGrid, tile_bytes: int) -> None:
        """Learn the geometry of the carrier that is being constructed; forget every tile of an earlier one.

        Args:
            grid: the carrier's tile grid.
            tile_bytes: the bytes of one tile.

        Raises:
            ValueError: the policy served a carrier of another grid or other tile bytes: make one per carrier.
        """
        if tile_bytes <= 0:
            raise ValueError(f"a tile has at least one byte, got tile_bytes={tile_bytes}")
        with self._lock:
            if self._grid is not None and (self._grid != grid or self._tile_bytes != tile_bytes):
                raise ValueError(
                    f"{self!r} already serves a carrier with {self._grid!r} and {self._tile_bytes} bytes a "
                    f"tile, not {grid!r} and {tile_bytes}; make one policy for each carrier"
                )
            self._grid, self._tile_bytes = grid, tile_bytes
            self._resident.clear()
            self._rebound(tile_bytes)

    def plan(self, required: TileSet, purpose: str) -> ResidencyPlan:
        """Decide about one request; every purpose is treated alike (see `ResidencyPolicy.plan`).

        Raises:
            TypeError: ``required`` is not a `TileSet`.
            ValueError: ``required`` does not fit the bound grid.
            RuntimeError: a bound in bytes is not known in tiles yet, because no carrier has called ``bind``.
        """
        if not isinstance(required, TileSet):
            raise TypeError(f"required must be a TileSet, not {type(required).__name__}")
        with self._lock:
            keys = required.coordinates if self._grid is None else required.bind(self._grid).tolist()
            plan = self._decide(required, keys)
            self._planned += 1
            return plan

    def statistics(self) -> PolicyStatistics:
        """Give the counters of this moment."""
        with self._lock:
            return PolicyStatistics(
                planned=self._planned,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                streamed=self._streamed,
                resident=len(self._resident),
                capacity=self._capacity,
                tile_bytes=self._tile_bytes,
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _rebound(self, tile_bytes: int) -> None:
        """Adapt to the bytes of one tile, under the lock."""

    def _decide(self, required: TileSet, keys: Sequence[Key]) -> ResidencyPlan:
        """Make the plan and count it, under the lock."""
        raise NotImplementedError

    def _tiles(self, keys: Iterable[Any]) -> TileSet:
        if not keys:
            return NO_TILES
        return TileSet(keys) if self._grid is None else TileSet._from_ordinals(self._grid, keys)

    def _count(self, required: TileSet, missing: int) -> None:
        self._misses += missing
        self._hits += len(required) - missing


class KeepResident(_ShippedPolicy):
    """Promote every required tile and evict none: residency only grows."""

    def _decide(self, required: TileSet, keys: Sequence[Key]) -> ResidencyPlan:
        resident = self._resident
        missing = [key for key in keys if key not in resident]
        self._count(required, len(missing))
        if not missing:
            return ResidencyPlan._disjoint(NO_TILES, required, NO_TILES)
        if len(missing) == len(required):
            resident.update(dict.fromkeys(missing))
            return ResidencyPlan._disjoint(required, NO_TILES, NO_TILES)
        known = [key for key in keys if key in resident]
        resident.update(dict.fromkeys(missing))
        return ResidencyPlan._disjoint(self._tiles(missing), self._tiles(known), NO_TILES)


class Streaming(_ShippedPolicy):
    """Keep nothing: what a request requires passes the primary tier by, or is evicted when it is done."""

    def __init__(self) -> None:
        super().__init__()
        self._capacity = 0

    def _decide(self, required: TileSet, keys: Sequence[Key]) -> ResidencyPlan:
        self._count(required, len(required))
        self._streamed += len(required)
        return ResidencyPlan._disjoint(NO_TILES, NO_TILES, required)


class LRU(_ShippedPolicy):
    """Keep the most recently required tiles, up to a bound.

    Tiles required together count as required in ascending order. A request that requires more tiles than the
    bound keeps the resident ones among them and the last of the others; the rest streams past the primary
    tier. A bound of 0 tiles, or of fewer bytes than one tile has, streams everything.

    Args:
        max_tiles: the most tiles to keep resident; or
        max_bytes: the most bytes of tiles to keep resident. The carrier tells the size of a tile (``bind``).

    Raises:
        TypeError: the bound is not an integer.
        ValueError: not exactly one bound is given, or it is negative.
    """

    def __init__(self, *, max_tiles: int | None = None, max_bytes: int | None = None) -> None:
        super().__init__()
        if (max_tiles is None) == (max_bytes is None):
            raise ValueError(
                f"LRU takes exactly one of max_tiles and max_bytes, got max_tiles={max_tiles}, "
                f"max_bytes={max_bytes}"
            )
        self._max_tiles = _bound("max_tiles", max_tiles)
        self._max_bytes = _bound("max_bytes", max_bytes)
        self._capacity = self._max_tiles

    def __repr__(self) -> str:
        if self._max_tiles is not None:
            return f"LRU(max_tiles={self._max_tiles})"
        return f"LRU(max_bytes={self._max_bytes})"

    def _rebound(self, tile_bytes: int) -> None:
        if self._max_bytes is not None:
            self._capacity = self._max_bytes // tile_bytes

    def _decide(self, required: TileSet, keys: Sequence[Key]) -> ResidencyPlan:
        if self._capacity is None:
            raise RuntimeError(
                f"{self!r} does not know the bytes of a tile; give it to a tiled carrier first"
            )
        resident = self._resident
        missing: list[Key] = []
        known: list[Key] = []
        for key in keys:
            (known if key in resident else missing).append(key)
        # Never negative: everything known is resident, and that is at most the capacity.
        streamed = missing[: max(0, len(known) + len(missing) - self._capacity)]
        kept = missing[len(streamed) :]
        self._refresh(keys, streamed)
        victims = self._shrink()
        self._count(required, len(missing))
        self._streamed += len(streamed)
        self._evictions += len(victims)
        return self._plan(required, kept, known, victims, streamed)

    def _refresh(self, keys: Sequence[Key], streamed: Iterable[Key]) -> None:
        """Put the required tiles that stay at the recent end, in their order."""
        resident, passing = self._resident, set(streamed)
        for key in keys:
            if key not in passing:
                resident[key] = None
                resident.move_to_end(key)

    def _shrink(self) -> list[Key]:
        """Take the least recent tiles out; none of the tiles just required is among them."""
        surplus = len(self._resident) - (self._capacity or 0)
        return [self._resident.popitem(last=False)[0] for _ in range(surplus)]

    def _plan(
        self, required: TileSet, kept: list[Key], known: list[Key], victims: list[Key], streamed: list[Key]
    ) -> ResidencyPlan:
        # Where all of it has one fate, the required set itself goes back: no other has to be made.
        count = len(required)
        promote = required if len(kept) == count else self._tiles(kept)
        retain = required if len(known) == count else self._tiles(known)
        evict = required if len(streamed) == count and not victims else self._tiles(victims + streamed)
        return ResidencyPlan._disjoint(promote, retain, evict)


def _bound(name: str, value: Any) -> int | None:
    if value is None:
        return None
    bound = as_integer(value, name)
    if bound < 0:
        raise ValueError(f"{name} must not be negative, got {bound}")
    return bound
