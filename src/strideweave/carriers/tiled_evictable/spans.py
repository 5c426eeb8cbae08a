"""Consecutive slots of a tiled carrier, cut at the borders of its tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strideweave.carriers.move.operations import Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier

    Ordinals = npt.NDArray[np.int64]
    Place = tuple[Carrier, int]

__all__ = ["Span"]


class Span(NamedTuple):
    """Consecutive slots of a tiled carrier, and where their counterparts begin.

    Attributes:
        start: the first slot.
        other: the first slot at the other end.
        slots: how many.
        size: slots of a tile.
    """

    start: int
    other: int
    slots: int
    size: int

    def tiles(self) -> Ordinals:
        """The tiles that the span touches, ascending."""
        return np.arange(self.start // self.size, -(-(self.start + self.slots) // self.size))

    def is_partial(self, ordinal: int) -> bool:
        """Whether the span covers only a part of a tile."""
        first = ordinal * self.size
        return first < self.start or first + self.size > self.start + self.slots

    def partial(self, tiles: Ordinals) -> Ordinals:
        """Those of some ascending tiles that it covers in part: the first and the last of all, if any."""
        ends = sorted({*tiles[:1].tolist(), *tiles[-1:].tolist()})
        return np.array([ordinal for ordinal in ends if self.is_partial(ordinal)], np.int64)

    def pairs(
        self, tiles: Iterable[int], places: Iterable[Place], other: Carrier
    ) -> Iterator[tuple[Place, Place, int]]:
        """For each tile what lies in its place and at the other end, and how many slots."""
        for ordinal, (carrier, at) in zip(tiles, places, strict=True):
            first = max(self.start, ordinal * self.size)
            last = min(self.start + self.slots, (ordinal + 1) * self.size)
            near, far = at + first - ordinal * self.size, self.other + first - self.start
            yield (carrier, near), (other, far), last - first

    def outward(self, tiles: Ordinals, places: Iterable[Place], other: Carrier) -> list[Transfer]:
        """Transfers from the places of tiles to the other end."""
        return [
            Transfer(*near, *far, slots) for near, far, slots in self.pairs(tiles.tolist(), places, other)
        ]

    def inward(self, tiles: Ordinals, places: Iterable[Place], other: Carrier) -> list[Transfer]:
        """Transfers from the other end to the places of tiles."""
        return [
            Transfer(*far, *near, slots) for near, far, slots in self.pairs(tiles.tolist(), places, other)
        ]
