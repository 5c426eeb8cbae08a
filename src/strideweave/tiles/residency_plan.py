"""`ResidencyPlan`: what a policy answers."""

from __future__ import annotations

from typing import Any

from strideweave.tiles.immutable import Immutable
from strideweave.tiles.selection import TileSet

__all__ = ["NO_TILES", "ResidencyPlan"]

NO_TILES = TileSet()


class ResidencyPlan(Immutable):
    """One decision of a policy about one request.

    Spec: *Residency requests use arbitrary immutable tile sets*.

    Args:
        promote: tiles to make primary before the request consumes its values; None is the empty set.
        retain: tiles that stay primary, where they are, until the request is terminal.
        evict: tiles to evict once the request no longer needs them.

    Raises:
        TypeError: an argument is neither a `TileSet` nor None.
        ValueError: a tile occurs in more than one of them.
    """

    __slots__ = ("evict", "promote", "retain")
    promote: TileSet
    retain: TileSet
    evict: TileSet

    def __init__(
        self, promote: TileSet | None = None, retain: TileSet | None = None, evict: TileSet | None = None
    ) -> None:
        given = {"promote": promote, "retain": retain, "evict": evict}
        fields = {name: _tile_set(name, tiles) for name, tiles in given.items()}
        for first, second in (("promote", "retain"), ("promote", "evict"), ("retain", "evict")):
            if common := fields[first]._common(fields[second]):
                raise ValueError(
                    f"a tile has one place in a plan, but {first} and {second} both hold {TileSet(common)!r}"
                )
        self._set(**fields)

    @classmethod
    def _disjoint(cls, promote: TileSet, retain: TileSet, evict: TileSet) -> ResidencyPlan:
        """Make a plan of sets that are known to be disjoint."""
        plan = cls.__new__(cls)
        put = object.__setattr__
        put(plan, "promote", promote)
        put(plan, "retain", retain)
        put(plan, "evict", evict)
        return plan

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ResidencyPlan):
            return NotImplemented
        mine, theirs = (self.promote, self.retain, self.evict), (other.promote, other.retain, other.evict)
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.promote, self.retain, self.evict))

    def __repr__(self) -> str:
        return f"ResidencyPlan(promote={self.promote!r}, retain={self.retain!r}, evict={self.evict!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.promote, self.retain, self.evict)


def _tile_set(name: str, tiles: Any) -> TileSet:
    if tiles is None:
        return NO_TILES
    if not isinstance(tiles, TileSet):
        raise TypeError(f"{name} must be a TileSet or None, not {type(tiles).__name__}")
    return tiles
