"""What must hold, as ratios formed within turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import Quartiles, Row, fastest, find, quartiles, seconds, speed, turns
from benchmarks.method import FRESH, GIVEN
from benchmarks.peers import OURS, TWO_UNDER_WAY
from benchmarks.task import KIB, MIB

__all__ = ["Verdict", "verdicts"]

GROWTH = 1.5  # a thousand times as many tiles; what is left is caches that hold less of the state
SLACK_MIB = 8.0  # stacks of threads and what the interpreter and the allocator keep

Chooser = Callable[[Sequence[Row]], Row | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target at one size.

    Attributes:
        what: what is asked for.
        title: the task.
        ours: our contender.
        reference: what it is measured against.
        found: the figure and its quartiles.
        must: the bound.
        at_least: whether the figure must reach the bound, or must not exceed it.
        unit: of the figure; empty for a ratio of speeds.
    """

    what: str
    title: str
    ours: str
    reference: str
    found: Quartiles
    must: float
    at_least: bool = True
    unit: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the median is on the right side of the bound."""
        median = self.found.median
        return median >= self.must if self.at_least else median <= self.must


@dataclass(frozen=True, slots=True)
class Target:
    """A speed that ours must have, as a share of a reference's.

    Attributes:
        what: what the report calls it.
        case: the task's case.
        ours: names our contender.
        reference: chooses among all contenders.
        must: the least share; or one for each least size of a tile, the largest first.
    """

    what: str
    case: str
    ours: Chooser
    reference: Chooser
    must: Callable[[int], float | None]

    def judge(self, result: dict[str, Any]) -> Verdict | None:
        """The verdict about one task; None where it does not apply."""
        must, ours = self.must(result["tile_bytes"]), self.ours(result["rows"])
        reference = self.reference(result["rows"])
        if result["case"] != self.case or must is None or ours is None or reference is None:
            return None
        found = speed(ours, reference)
        return Verdict(self.what, result["title"], _name(ours), _name(reference), found, must)


def verdicts(results: Sequence[dict[str, Any]]) -> list[Verdict]:
    """All verdicts, in the order of the targets."""
    own = [result for result in results if result["group"] == result["case"]]
    judged = (target.judge(result) for target in TARGETS for result in own)
    found = (verdict for verdict in judged if verdict is not None)
    return [*found, *_absolute(own), *_growth(own), *_peaks(own)]


def _ours(name: str, destination: str | None = None) -> Chooser:
    return lambda rows: next(iter(find(rows, OURS, name, destination)), None)


def _best_of_ours(name: str, destination: str | None = None, *, but: str | None = None) -> Chooser:
    """Our fastest contender whose name has the one text and lacks the other."""

    def choose(rows: Sequence[Row]) -> Row | None:
        found = find(rows, OURS, name, destination)
        return fastest([row for row in found if but is None or but not in row["name"]])

    return choose


def _best(peer: str | None = None, name: str = "", destination: str | None = None) -> Chooser:
    """The fastest among the others, or among those of one peer."""

    def choose(rows: Sequence[Row]) -> Row | None:
        others = [row for row in rows if not row["peer"].startswith(OURS)]
        if peer is None:
            others = [row for row in others if not row["reference"]]
        return fastest(find(others, peer, name, destination))

    return choose


def _from(bounds: dict[int, float]) -> Callable[[int], float | None]:
    """The bound for a size of tiles: that of the largest key it reaches."""

    def must(tile_bytes: int) -> float | None:
        return next((bounds[least] for least in sorted(bounds, reverse=True) if tile_bytes >= least), None)

    return must


TARGETS = (
    Target(
        "cold projection, one request at a time, beside the device",
        "cold",
        _best_of_ours("BlockDevice", GIVEN, but=TWO_UNDER_WAY),
        _best("fio"),
        _from({16 * KIB: 0.90}),
    ),
    Target(
        f"cold projection, {TWO_UNDER_WAY}, beside the device",
        "cold",
        _ours(TWO_UNDER_WAY, GIVEN),
        _best("fio"),
        _from({16 * KIB: 0.90}),
    ),
    Target(
        "hot projection to a given destination beside the fastest copy",
        "hot",
        _ours("project", GIVEN),
        _best(destination=GIVEN),
        _from({256 * KIB: 0.90}),
    ),
    Target(
        "hot projection to a fresh tensor beside a[idx]",
        "hot",
        _ours("project", FRESH),
        _best("numpy", "a[idx]"),
        _from({16 * KIB: 1.0, 4 * MIB: 3.0}),
    ),
    Target(
        "warm page cache beside the fastest peer",
        "warm",
        _best_of_ours(""),  # results are recycled memory, so a fresh one need not be slower than a given one
        _best(),
        _from({16 * KIB: 1.0}),
    ),
    Target(
        "durable eviction beside the device",
        "write",
        _best_of_ours("durable"),
        _best("fio"),
        _from({256 * KIB: 0.90}),
    ),
    Target(
        "durable eviction beside pwritev and fdatasync",
        "write",
        _best_of_ours("durable"),
        _best("system"),
        _from({16 * KIB: 1.0}),
    ),
    Target(
        "64 clients beside one batch",
        "clients",
        _ours("a project a client", GIVEN),
        _ours("one project"),
        _from({16 * KIB: 1 / 1.15}),
    ),
    Target(
        "an awaited call beside TensorStore",
        "call",
        _ours("await project()", FRESH),
        _best("tensorstore", "await"),
        _from({4 * KIB: 1.0}),
    ),
    Target(
        "an awaited call beside anyio.to_thread",
        "call",
        _ours("await project()", FRESH),
        _best("anyio", "to_thread"),
        _from({4 * KIB: 1.0}),
    ),
    Target(
        "a call that is waited for beside a bare task round trip",
        "call",
        _ours("project().wait()", FRESH),
        _ours("bare task round trip, wait"),
        _from({4 * KIB: 1 / 1.5}),
    ),
)


def _absolute(results: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    """What is bounded in units of time."""
    for result in results:
        if result["case"] == "call":
            for row in find(result["rows"], OURS, "until it returns"):
                found = quartiles([1e6 * value for value in turns(row)])
                yield Verdict(
                    "initiation", result["title"], _name(row), "", found, 25, at_least=False, unit="us"
                )
        if result["case"] == "clients":
            for row in find(result["rows"], OURS, "a project a client"):
                found = quartiles(turns(row, "late_ms"))
                what = "worst lateness of the caller's loop"
                yield Verdict(what, result["title"], _name(row), "", found, 5, at_least=False, unit="ms")


def _growth(results: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    """How many times as long the largest grid takes as the smallest; construction fills arrays of its size besides."""
    grids = [result for result in results if result["case"] == "grid"]
    if len(grids) < 2:
        return
    least, most = grids[0], grids[-1]
    for name in ("select", "project", "evict"):
        small, large = _ours(name)(least["rows"]), _ours(name)(most["rows"])
        if small is not None and large is not None:
            # Of different runs: no pairs of turns, so each turn of the large one beside the small one's median.
            base = seconds(small).median
            found = quartiles([value / base for value in turns(large)])
            yield Verdict(
                "independent of the grid's size",
                most["title"],
                _name(large),
                least["title"],
                found,
                GROWTH,
                at_least=False,
                unit="times",
            )


def _peaks(results: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    """Memory beyond the values asked for that a projection takes at its peak."""
    for result in results:
        for row in find(result["rows"], OURS, ""):
            if result["case"] == "memory" and all("peak_mib" in turn for turn in row["turns"]):
                found = quartiles(turns(row, "peak_mib"))
                staging = max(turns(row, "staging_mib"))
                what, reference = "memory beyond the values asked for", f"staging of {staging:.1f} MiB"
                must = staging + SLACK_MIB
                yield Verdict(
                    what, result["title"], _name(row), reference, found, must, at_least=False, unit="MiB"
                )


def _name(row: Row) -> str:
    kind = f", {row['destination']}" if row["destination"] else ""
    return f"{row['peer']}: {row['name']}{kind}"
