"""Who stays in the primary tier: the `ResidencyPolicy` protocol and the plain policies that are shipped.

A policy optimises and never defines correctness: whatever it answers, a request gets the values it requires
(spec: *Residency policy can optimize but cannot define correctness*). The shipped policies remember what
their own plans made resident; they do not look at the carrier. Each object serves one carrier, until
that is released or gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Never, Protocol, runtime_checkable

from strideweave.tiles.policy_base import BoundedPolicy, Key, PolicyStatistics, ShippedPolicy
from strideweave.tiles.residency_plan import NO_TILES, ResidencyPlan

if TYPE_CHECKING:
    from strideweave.tiles.grid import TileGrid
    from strideweave.tiles.selection import TileSet

__all__ = [
    "LRU",
    "KeepResident",
    "PolicyStatistics",
    "ResidencyPlan",
    "ResidencyPolicy",
    "Streaming",
    "check_and_bind",
    "check_policy",
]


@runtime_checkable
class ResidencyPolicy(Protocol):
    """What a tiled carrier asks of the object given as ``residency_policy``: one method, ``plan``.

    An optional second method ``bind(grid, tile_bytes)`` is called when the carrier is constructed, before anything
    has changed; an exception it raises fails the construction.
    """

    def plan(self, required: TileSet, purpose: str) -> ResidencyPlan:
        """Decide which tiles a request promotes, retains and evicts.

        Called when a request is initiated, from the thread that initiates it, so an implementation is
        thread-safe and quick. An exception it raises reaches the caller before any work starts.

        Args:
            required: the tiles whose values the request must be able to read or write.
            purpose: ``"operation"``, ``"projection"``, ``"scatter"`` or ``"backward"``.
        """


def check_policy(policy: object, name: str) -> None:
    """Check what was given as a policy; None is none and fine.

    Raises:
        TypeError: it has no method ``plan``, or is a class and no object; ``name`` is what it is called.
    """
    if policy is None:
        return
    if isinstance(policy, type):
        raise TypeError(f"{name} must be an object, found the class {policy.__name__}; call it to make one")
    if not isinstance(policy, ResidencyPolicy) or not callable(policy.plan):
        raise TypeError(f"{name} must have a method plan(required, purpose), found {type(policy).__name__}")


def check_and_bind(policy: object, grid: TileGrid, tile_bytes: int, name: str) -> None:
    """Check what was given as a policy, and tell one that wants to know what its tiles are.

    Args:
        policy: any object; None is no policy and fine.
        grid: the tile grid that it is to serve.
        tile_bytes: the bytes of one tile.
        name: what messages call the policy.

    Raises:
        TypeError: it has no method ``plan``, or is a class and no object.
        ValueError: it serves a carrier, or was bound to another grid or to tiles of another size before.
    """
    check_policy(policy, name)
    bind = getattr(policy, "bind", None)
    if bind is not None:
        bind(grid, tile_bytes)


class KeepResident(ShippedPolicy):
    """Promote every required tile and evict none: residency only grows."""

    def __init__(self) -> None:
        super().__init__(None)

    def _decide(self, required: TileSet, keys: Sequence[Key]) -> ResidencyPlan:
        resident = self._resident
        missing = [key for key in keys if key not in resident]
        known = keys if not missing else [key for key in keys if key in resident]
        resident.update(dict.fromkeys(missing))
        return self._plan(required, missing, known, [], [])


class Streaming(ShippedPolicy):
    """Keep nothing: what a request requires passes the primary tier by, or is evicted when it is done."""

    def __init__(self) -> None:
        super().__init__(0)

    def _decide(self, required: TileSet, keys: Sequence[Key]) -> ResidencyPlan:
        self._count(required, len(required))
        self._streamed += len(required)
        return ResidencyPlan._disjoint(NO_TILES, NO_TILES, required)


class LRU(BoundedPolicy):
    """Keep the most recently required tiles, up to a bound.

    Tiles required together count as required in ascending order. A request that requires more tiles than the
    bound keeps the resident ones among them and the last of the others; the rest streams past the primary
    tier. A bound of 0 tiles, or of fewer bytes than one tile has, streams everything.

    Args:
        max_tiles: the most tiles to keep resident; or
        max_bytes: the most bytes of tiles to keep resident. The carrier tells the size of a tile (``bind``).

    Raises:
        TypeError: the bound is not an integer, or has no name.
        ValueError: not exactly one bound is given, or it is negative.
    """

    def __init__(self, *unnamed: Never, max_tiles: int | None = None, max_bytes: int | None = None) -> None:
        super().__init__(*unnamed, max_tiles=max_tiles, max_bytes=max_bytes)

    def _decide(self, required: TileSet, keys: Sequence[Key]) -> ResidencyPlan:
        capacity = self._bounded()
        resident = self._resident
        missing: list[Key] = []
        known: list[Key] = []
        for key in keys:
            (known if key in resident else missing).append(key)
        # Never negative: everything known is resident, and that is at most the capacity.
        streamed = missing[: max(0, len(known) + len(missing) - capacity)]
        kept = missing[len(streamed) :]
        self._refresh(keys, streamed)
        return self._plan(required, kept, known, self._shrink(capacity), streamed)

    def _refresh(self, keys: Sequence[Key], streamed: Iterable[Key]) -> None:
        """Put the required tiles that stay at the recent end, in their order."""
        resident, passing = self._resident, set(streamed)
        for key in keys:
            if key not in passing:
                resident[key] = None
                resident.move_to_end(key)

    def _shrink(self, capacity: int) -> list[Key]:
        """Take the least recent tiles out; none of the tiles just required is among them."""
        surplus = len(self._resident) - capacity
        return [self._resident.popitem(last=False)[0] for _ in range(surplus)]
