"""What one table row group measures: which bytes are asked for, how, and how often."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["KIB", "MIB", "Picks", "Task", "size_name"]

KIB, MIB = 1 << 10, 1 << 20

_TITLES = {
    "open_warm": "opened and read, warm, {tiles} tiles of {size}",
    "open_cold": "opened and read, cold, {tiles} tiles of {size}",
    "save": "saved for good, {tiles} tiles of {size}",
    "first": "the first tile of {size} of a sparse checkpoint of {whole}, cold, in a fresh process",
}

Picks = NDArray[np.int64]
"""The tiles of one request, as rows of the data set, in the order asked for."""


@dataclass(frozen=True, slots=True)
class Task:
    """One case at one size; every contender of it does the same work in every turn.

    Attributes:
        group: the part of the report that it belongs to.
        case: the kind of work; a peer has a method of this name where it takes part.
        tile_bytes: bytes of one tile, a multiple of 4.
        tiles: tiles that one request asks for; of all clients together where there are several.
        count: tiles with values in the data set.
        folder: where files go; removed afterwards.
        rounds: requests of one turn, at the most; a turn's figure is their mean.
        budget: seconds after which a turn starts no other request.
        clients: requests that one round has under way at a time.
        spread: the grid has one tile with values in so many.
        brief: only the contenders that a curve needs.
        quick: a smoke run, as little work as possible.
    """

    group: str
    case: str
    tile_bytes: int
    tiles: int
    count: int
    folder: str
    rounds: int
    budget: float
    clients: int = 1
    spread: int = 1
    brief: bool = False
    quick: bool = False

    @property
    def payload(self) -> int:
        """Bytes that one round moves."""
        return self.tiles * self.tile_bytes

    @property
    def values(self) -> int:
        """Float32 values of one tile."""
        return self.tile_bytes // 4

    @property
    def grid(self) -> int:
        """Tiles of the grid."""
        return self.count * self.spread

    @property
    def title(self) -> str:
        """How the report names it."""
        size = size_name(self.tile_bytes)
        if self.case == "call":
            return f"one tile of {size}"
        if self.case == "clients":
            return f"{self.clients} clients, {self.tiles // self.clients} tiles of {size} each"
        if self.case in _TITLES:
            return _TITLES[self.case].format(
                tiles=self.tiles, size=size, whole=size_name(self.grid * self.tile_bytes)
            )
        if self.case == "grid":
            return f"{self.tiles} tiles of {size} in a grid of {self.grid:,}"
        return f"{self.case}, {self.tiles} {'tile' if self.tiles == 1 else 'tiles'} of {size}"

    def requests(self, turn: int) -> Iterator[Picks]:
        """The tiles of each round of one turn; the same ones in every process."""
        for number in range(self.rounds):
            yield self.picks(turn, number)

    def picks(self, turn: int, number: int = 0) -> Picks:
        """The tiles of one round, in random order."""
        return np.random.default_rng([turn, number]).permutation(self.count)[: self.tiles]

    def to_json(self) -> str:
        """The task for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The task of another process."""
        return cls(**json.loads(text))


def size_name(nbytes: int) -> str:
    """A size as people write it."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"
