"""What the shipped policies have in common: a lock, counters, the bound geometry, and a bound on residency."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Never

from strideweave.layout.int_tuple import as_integer
from strideweave.runtime.locks import short_lock
from strideweave.tiles.one_carrier import OneCarrier
from strideweave.tiles.residency_plan import NO_TILES, ResidencyPlan
from strideweave.tiles.selection import TileSet

if TYPE_CHECKING:
    from strideweave.tiles.grid import TileGrid

__all__ = ["BoundedPolicy", "Key", "PolicyStatistics", "ShippedPolicy"]

# A tile as a policy remembers it: its ordinal once a carrier has bound its grid, its coordinate before.
Key = int | tuple[int, ...]


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


class ShippedPolicy(OneCarrier):
    """The base of every shipped policy; a subclass decides in ``_decide``.

    A copy, or what is unpickled, is a new policy with the same bound that serves nobody and remembers nothing. A
    subclass whose constructor takes something else has a ``__reduce__`` of its own.

    Subclasses have constructors of their own, so that an error about their arguments names them.

    Args:
        capacity: the most tiles to keep resident; None means no bound, or one that is not known in tiles yet.
    """

    def __init__(self, capacity: int | None) -> None:
        self._lock = short_lock  # a lock of its own could stay locked for ever in a forked child
        self._grid: TileGrid | None = None
        self._tile_bytes: int | None = None
        self._capacity = capacity
        # Believed resident, least recently required first. Not a dict: taking the first of many would
        # scan what was taken before.
        self._resident: OrderedDict[Key, None] = OrderedDict()
        self._planned = self._hits = self._misses = self._evictions = self._streamed = 0

    def __reduce__(self) -> Any:
        return type(self), ()

    def bind(self, grid: TileGrid, tile_bytes: int) -> None:
        """Learn the geometry of the carrier that is being constructed; forget every tile of an earlier one.

        Args:
            grid: the carrier's tile grid.
            tile_bytes: the bytes of one tile.

        Raises:
            ValueError: the policy serves a carrier that is not released, or served one of another grid or other
                tile bytes: make one per carrier.
        """
        if tile_bytes <= 0:
            raise ValueError(f"a tile has at least one byte, got tile_bytes={tile_bytes}")
        with self._lock:
            self._require_free()
            if self._grid is not None and (self._grid != grid or self._tile_bytes != tile_bytes):
                raise ValueError(
                    f"{self!r} has served a carrier with {self._grid!r} and {self._tile_bytes} bytes a tile, "
                    f"not {grid!r} and {tile_bytes}; make one policy for each carrier"
                )
            self._grid, self._tile_bytes = grid, tile_bytes
            self._forget()
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
                resident=self._resident_count(),
                capacity=self._capacity,
                tile_bytes=self._tile_bytes,
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _rebound(self, tile_bytes: int) -> None:
        """Adapt to the bytes of one tile, under the lock."""

    def _forget(self) -> None:
        """Forget every tile, under the lock."""
        self._resident.clear()

    def _resident_count(self) -> int:
        """The number of tiles believed resident, under the lock."""
        return len(self._resident)

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

    def _plan(
        self,
        required: TileSet,
        kept: Sequence[Key],
        known: Sequence[Key],
        victims: list[Key],
        streamed: list[Key],
    ) -> ResidencyPlan:
        """Count and make the plan that keeps, retains and drops these tiles.

        Args:
            required: what the request requires: ``kept``, ``known`` and ``streamed`` together.
            kept: required tiles that become resident.
            known: required tiles that are resident.
            victims: resident tiles that are not required and go.
            streamed: required tiles that do not become resident.
        """
        count = len(required)
        self._count(required, count - len(known))
        self._streamed += len(streamed)
        self._evictions += len(victims)
        # Where all of it has one fate, the required set itself goes back: no other has to be made.
        promote = required if len(kept) == count else self._tiles(kept)
        retain = required if len(known) == count else self._tiles(known)
        evict = required if len(streamed) == count and not victims else self._tiles(victims + streamed)
        return ResidencyPlan._disjoint(promote, retain, evict)


class BoundedPolicy(ShippedPolicy):
    """The base of the policies that keep up to a number of tiles, or of bytes of them.

    Args:
        unnamed: none; a number alone would not say of what.
        max_tiles: the most tiles to keep resident; or
        max_bytes: the most bytes of tiles to keep resident. The carrier tells the size of a tile (``bind``).

    Raises:
        TypeError: the bound is not an integer, or has no name.
        ValueError: not exactly one bound is given, or it is negative.
    """

    def __init__(self, *unnamed: Never, max_tiles: int | None = None, max_bytes: int | None = None) -> None:
        name = type(self).__name__
        if unnamed:
            raise TypeError(
                f"{name} takes its bound by name, {name}(max_tiles=...) or {name}(max_bytes=...); "
                f"got {name}({', '.join(map(repr, unnamed))})"
            )
        if (max_tiles is None) == (max_bytes is None):
            raise ValueError(
                f"{name} takes exactly one of max_tiles and max_bytes, got "
                f"max_tiles={max_tiles}, max_bytes={max_bytes}"
            )
        self._max_tiles = _bound("max_tiles", max_tiles)
        self._max_bytes = _bound("max_bytes", max_bytes)
        super().__init__(self._max_tiles)

    def __reduce__(self) -> Any:
        return partial(type(self), max_tiles=self._max_tiles, max_bytes=self._max_bytes), ()

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._max_tiles is not None:
            return f"{name}(max_tiles={self._max_tiles})"
        return f"{name}(max_bytes={self._max_bytes})"

    def _rebound(self, tile_bytes: int) -> None:
        if self._max_bytes is not None:
            self._capacity = self._max_bytes // tile_bytes

    def _bounded(self) -> int:
        """The most tiles to keep resident.

        Raises:
            RuntimeError: the bound is in bytes, and no carrier has told the bytes of a tile.
        """
        if self._capacity is None:
            raise RuntimeError(
                f"{self!r} does not know the bytes of a tile; give it to a tiled carrier first"
            )
        return self._capacity


def _bound(name: str, value: Any) -> int | None:
    if value is None:
        return None
    bound = as_integer(value, name)
    if bound < 0:
        raise ValueError(f"{name} must not be negative, got {bound}")
    return bound
