"""The pictures: rates by tile size, and how the time of a request grows."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Row, seconds
from benchmarks.peers import OURS
from benchmarks.task import size_name

__all__ = ["why_no_plots", "write_plots"]

Curves = dict[str, dict[int, tuple[float, float, float]]]

_BY_SIZE = ("hot", "warm", "cold", "write", "clients")
_GB = 1e9


def why_no_plots() -> str | None:
    """What is missing for pictures; None where nothing is."""
    return "matplotlib is not installed" if importlib.util.find_spec("matplotlib") is None else None


def write_plots(run: dict[str, Any], folder: Path) -> list[str]:
    """Draw what the run has at more than one place; returns the names of the files."""
    results: list[dict[str, Any]] = run["results"]
    written: list[str] = []

    def draw(name: str, chosen: Sequence[dict[str, Any]], key: str, title: str, *, rate: bool) -> None:
        if len({result[key] for result in chosen}) > 1:
            curves = _curves(chosen, key, _rate if rate else _milliseconds)
            _draw(folder / name, curves, title, key, "GB/s" if rate else "milliseconds")
            written.append(name)

    for case in _BY_SIZE:
        alike = [result for result in results if result["group"] == case]
        draw(f"{case}.svg", alike, "tile_bytes", case, rate=True)
    for case in ("hot", "warm", "cold"):
        growing = [result for result in results if result["group"] == "tiles" and result["case"] == case]
        draw(f"tiles-{case}.svg", growing, "tiles", f"{case}, tiles of a request", rate=False)
        growing = [result for result in results if result["group"] == "sizes" and result["case"] == case]
        draw(f"sizes-{case}.svg", growing, "tile_bytes", f"{case}, size of a tile", rate=True)
    grids = [
        result | {"grid": result["count"] * result["spread"]}
        for result in results
        if result["case"] == "grid"
    ]
    draw("grid.svg", grids, "grid", "tiles of the grid", rate=False)
    return written


def _rate(result: dict[str, Any], row: Row) -> tuple[float, float, float]:
    low, median, high = seconds(row)
    return result["payload"] / high / _GB, result["payload"] / median / _GB, result["payload"] / low / _GB


def _milliseconds(_: dict[str, Any], row: Row) -> tuple[float, float, float]:
    low, median, high = (1e3 * value for value in seconds(row))
    return low, median, high


def _curves(
    results: Sequence[dict[str, Any]],
    key: str,
    figure: Callable[[dict[str, Any], Row], tuple[float, float, float]],
) -> Curves:
    curves: Curves = defaultdict(dict)
    for result in results:
        for row in result["rows"]:
            kind = f", {row['destination']}" if row["destination"] else ""
            if not (row["reference"] and result["case"] == "clients"):
                curves[f"{row['peer']}: {row['name']}{kind}"][result[key]] = figure(result, row)
    return curves


def _draw(path: Path, curves: Curves, title: str, key: str, unit: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  optional

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, points) in enumerate(curves.items()):
        places = sorted(points)
        low, middle, high = zip(*(points[place] for place in places), strict=True)
        errors = [
            [m - lo for m, lo in zip(middle, low, strict=True)],
            [hi - m for hi, m in zip(high, middle, strict=True)],
        ]
        style = "-" if name.startswith(OURS) else "--" if number % 2 else ":"
        width = 2.0 if name.startswith(OURS) else 1.0
        axes.errorbar(
            places,
            middle,
            errors,
            label=name,
            linestyle=style,
            linewidth=width,
            capsize=2,
            marker="o",
            markersize=3,
        )
    axes.set(title=title, xlabel="bytes of a tile" if key == "tile_bytes" else key, ylabel=unit)
    axes.set_xscale("log", base=2 if key != "grid" else 10)
    axes.set_yscale("log")
    if key == "tile_bytes":
        places = sorted({place for points in curves.values() for place in points})
        axes.set_xticks(places, [size_name(place) for place in places])
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="x-small")
    figure.savefig(path, metadata={"Date": None})
