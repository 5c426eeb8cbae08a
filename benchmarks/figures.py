"""Medians, quartiles and ratios of turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Quartiles", "Row", "fastest", "find", "quartiles", "seconds", "speed", "turns"]

Row = dict[str, Any]
"""One contender of one task, as the JSON file has it."""


class Quartiles(NamedTuple):
    """A median and the quartiles around it."""

    low: float
    median: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Reduce the values of turns."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(low, statistics.median(values), high)


def turns(row: Row, figure: str = "seconds") -> list[float]:
    """The figure of each turn: the mean of its rounds, or the worst one where a figure says how late something is."""
    reduce = max if figure != "seconds" else statistics.fmean
    return [reduce(turn[figure]) for turn in row["turns"]]


def seconds(row: Row) -> Quartiles:
    """How long one request takes."""
    return quartiles(turns(row))


def speed(row: Row, reference: Row) -> Quartiles:
    """How many times as fast as a reference; ratios are formed within turns, then reduced."""
    pairs = zip(turns(reference), turns(row), strict=True)
    return quartiles([theirs / ours for theirs, ours in pairs])


def fastest(rows: Sequence[Row]) -> Row | None:
    """The row with the least median."""
    return min(rows, key=lambda row: seconds(row).median, default=None)


def find(
    rows: Sequence[Row], peer: str | None = None, name: str = "", destination: str | None = None
) -> list[Row]:
    """The rows of a peer whose names contain something."""
    return [
        row
        for row in rows
        if (peer is None or row["peer"] == peer)
        and name in row["name"]
        and (destination is None or row["destination"] == destination)
    ]
