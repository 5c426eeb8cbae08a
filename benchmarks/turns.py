"""Contenders that take turns, verified first, and the table of what they took."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Picks = np.ndarray
Contender = Callable[[Picks], np.ndarray]
Row = dict[str, Any]


@dataclass
class Case:
    """Contenders that do the same work in every turn.

    Attributes:
        name: the case and the size of a tile.
        payload: bytes that one turn gathers.
        ours: our contenders, by name.
        peers: the others. A name ends with the kind of its destination, ``fresh`` or ``given``.
        prepare: called before each contender's turn, untimed.
    """

    name: str
    payload: int
    ours: dict[str, Contender]
    peers: dict[str, Contender]
    prepare: Callable[[], None] = lambda: None
    times: dict[str, list[float]] = field(default_factory=dict)

    def verify(self, picks: Picks, expected: np.ndarray) -> None:
        """Compare every result with the source, bit for bit."""
        for name, run in (self.ours | self.peers).items():
            self.prepare()
            found = np.asarray(run(picks)).reshape(expected.shape)
            if not np.array_equal(found.view(np.uint32), expected.view(np.uint32)):
                sys.exit(f"{self.name}: {name} gave a wrong result")

    def measure(self, turns: Sequence[Picks]) -> None:
        """Let the contenders take turns."""
        contenders = self.ours | self.peers
        self.times = {name: [] for name in contenders}
        for picks in turns:
            for name in random.sample(list(contenders), len(contenders)):
                self.prepare()
                started = time.perf_counter()
                result = contenders[name](picks)
                self.times[name].append(time.perf_counter() - started)
                del result

    def rows(self) -> list[Row]:
        """One row a contender."""
        return [self._row(name) for name in self.times]

    def _row(self, name: str) -> Row:
        times = self.times[name]
        low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        row: Row = {"case": self.name, "contender": name, "median_us": median * 1e6}
        row |= {"quartiles_us": [low * 1e6, high * 1e6], "gb_per_s": self.payload / median / 1e9}
        if name in self.ours:
            row["best_peer"] = best = self._best_peer(name.rpartition(", ")[2])
            row["ratio"] = statistics.median(
                [own / other for own, other in zip(times, self.times[best], strict=True)]
            )
        return row

    def _best_peer(self, kind: str) -> str:
        alike = [name for name in self.peers if name.endswith(kind)] or list(self.peers)
        return min(alike, key=lambda name: statistics.median(self.times[name]))


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| case | contender | median, us | quartiles, us | GB/s | ours / best peer | best peer |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        low, high = row["quartiles_us"]
        ratio = f"{row['ratio']:.2f} | {row['best_peer']}" if "ratio" in row else "|"
        lines.append(
            f"| {row['case']} | {row['contender']} | {row['median_us']:,.0f} | {low:,.0f} .. {high:,.0f} | "
            f"{row['gb_per_s']:.2f} | {ratio} |"
        )
    return "\n".join(lines)
