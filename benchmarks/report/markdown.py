"""The page: what must hold, every case as a table, what was left out, and the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.figures import Quartiles, Row, fastest, find, quartiles, seconds, speed, turns
from benchmarks.peers import OURS
from benchmarks.targets import Verdict, verdicts
from benchmarks.task import size_name

__all__ = ["page"]

_UNITS = ((1.0, "s"), (1e-3, "ms"), (0.0, "us"))
_FACTORS = {"s": 1.0, "ms": 1e3, "us": 1e6}
_FEWEST = 7
_BY_SIZE = ("hot", "warm", "cold", "write", "clients")
_MEASURES = {
    "open_warm": "open_tiled",
    "open_cold": "open_tiled",
    "call": "await project()",
    "clients": "a project a client",
}
_MUCH_OF_A_FILE = 0.01


def page(run: dict[str, Any], plots: Sequence[str] = ()) -> str:
    """The whole report as Markdown."""
    options = run["options"]
    lines = ["# StrideWeave beside its peers", ""]
    lines += [
        f"{options['repetitions']} turns of every contender, in alternation, one process a peer; every result was "
        "compared bit for bit before it was timed. Medians, with the quartiles in brackets. Ratios are formed "
        "within turns.",
        "",
    ]
    if options["quick"] or options["repetitions"] < _FEWEST:
        lines += ["**A smoke run: these figures say nothing about speed.**", ""]
    lines += _target_table(verdicts(run["results"]))
    lines += [line for plot in plots for line in (f"![{plot}]({plot})", "")]
    lines += ["## Rates", "", *_overview(run["results"]), "## Every case", ""]
    for result in run["results"]:
        lines += _case_table(result)
    lines += _left_out(run) + _machine(run)
    return "\n".join(lines).rstrip() + "\n"


def _target_table(found: Sequence[Verdict]) -> list[str]:
    if not found:
        return []
    lines = [
        "## What must hold",
        "",
        "A figure without a unit is the speed of ours, the reference's being 1.",
        "",
        "| what | at | ours | reference | found | must | met |",
        "| --- | --- | --- | --- | ---: | ---: | --- |",
    ]
    for one in found:
        unit = f" {one.unit}" if one.unit else ""
        bound = f"{'at least' if one.at_least else 'at most'} {one.must:.2f}{unit}"
        lines.append(
            f"| {one.what} | {one.title} | {one.ours} | {one.reference} | {_spread(one.found)}{unit} | {bound} | "
            f"{'yes' if one.is_met else 'no'} |"
        )
    return [*lines, ""]


def _case_table(result: dict[str, Any]) -> list[str]:
    rows: list[Row] = result["rows"]
    ours = _measure(result)
    extra = sorted({name for row in rows for turn in row["turns"] for name in turn} - {"seconds"})
    head = ["contender", "destination", "time of one request", "GB/s", "speed, ours = 1", *extra]
    lines = [f"### {_heading(result)}", "", f"| {' | '.join(head)} |"]
    lines.append(f"| --- | --- |{' ---: |' * (len(head) - 2)}")
    for row in sorted(rows, key=lambda row: seconds(row).median):
        cells = [f"{row['peer']}: {row['name']}", row["destination"], _time(seconds(row))]
        cells.append(f"{result['payload'] / seconds(row).median / 1e9:.2f}" if _moves(result, row) else "")
        cells.append("**1**" if row is ours else _spread(speed(row, ours)) if ours is not None else "")
        cells += [_spread(quartiles(turns(row, name))) if name in row["turns"][0] else "" for name in extra]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *_notes(result)]


def _heading(result: dict[str, Any]) -> str:
    whole = result["title"]
    return f"Growing {result['group']}: {whole}" if result["brief"] else f"{whole[0].upper()}{whole[1:]}"


def _measure(result: dict[str, Any]) -> Row | None:
    """The contender of ours that the others of a case are compared with."""
    own = [row for row in find(result["rows"], OURS) if not row["reference"]]
    if result["case"] == "grid":  # every one does something else
        return None
    name = _MEASURES.get(result["case"], "")
    return fastest([row for row in own if row["name"].startswith(name)])


def _overview(results: Sequence[dict[str, Any]]) -> list[str]:
    """One table a group, a column a size: GB/s, fast and slow alike."""
    lines: list[str] = []
    for group in _BY_SIZE:
        alike = [result for result in results if result["group"] == group]
        if not alike:
            continue
        sizes = [size_name(result["tile_bytes"]) for result in alike]
        lines += [f"### {group.capitalize()}, GB/s", "", f"| contender | destination | {' | '.join(sizes)} |"]
        lines.append(f"| --- | --- |{' ---: |' * len(sizes)}")
        rates: dict[tuple[str, str], dict[int, str]] = {}
        for result in alike:
            for row in filter(lambda row: _moves(result, row), result["rows"]):
                key = f"{row['peer']}: {row['name']}", row["destination"]
                rates.setdefault(key, {})[result["tile_bytes"]] = _rate(result["payload"], seconds(row))
        for (name, destination), cells in rates.items():
            shown = " | ".join(cells.get(result["tile_bytes"], "") for result in alike)
            lines.append(f"| {name} | {destination} | {shown} |")
        lines.append("")
    return lines


def _rate(payload: int, found: Quartiles) -> str:
    high, median, low = (payload / value / 1e9 for value in found)
    return f"{_short(median)} ({_short(low)} to {_short(high)})"


def _moves(result: dict[str, Any], row: Row) -> bool:
    """Whether a contender moves the payload, so that it has a rate."""
    return result["case"] in {"hot", "warm", "cold", "write", "memory", "open_warm", "open_cold", "save"} or (
        result["case"] == "clients" and not row["reference"]
    )


def _notes(result: dict[str, Any]) -> list[str]:
    notes = [f"- {one['peer']}: {one['name']} is left out: {one['reason']}" for one in result["failures"]]
    for row in result["rows"]:
        shares = row.get("cached")
        if shares and result["case"] in {"cold", "open_cold"} and max(shares) > _MUCH_OF_A_FILE:
            notes.append(
                f"- {row['peer']}: {row['name']} was not cold: up to {max(shares):.0%} of its file was cached"
            )
        if (
            shares
            and result["case"] in {"warm", "open_warm"}
            and "direct=False" not in row["name"]
            and min(shares) < 0.99
        ):
            notes.append(
                f"- {row['peer']}: {row['name']} was not warm: only {min(shares):.0%} of its file was cached"
            )
    return [*notes, ""] if notes else []


def _left_out(run: dict[str, Any]) -> list[str]:
    if not run["skipped"]:
        return []
    return ["## Left out", "", *(f"- {name}: {reason}" for name, reason in run["skipped"].items()), ""]


def _machine(run: dict[str, Any]) -> list[str]:
    lines = ["## The machine", "", *_table(run["machine"].items()), "", "## Versions", ""]
    peers = ((name, ", ".join(f"{k} {v}" for k, v in facts.items())) for name, facts in run["peers"].items())
    return [*lines, *_table(peers), ""]


def _table(rows: Any) -> Iterator[str]:
    yield "| | |"
    yield "| --- | --- |"
    for name, value in rows:
        yield f"| {name} | {value} |"


def _spread(found: Quartiles) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def _time(found: Quartiles) -> str:
    unit = next(name for least, name in _UNITS if found.median >= least)
    low, median, high = (_FACTORS[unit] * value for value in found)
    return f"{_short(median)} {unit} ({_short(low)} to {_short(high)})"


def _short(value: float) -> str:
    """Three digits, without powers of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
