"""Resident and read bytes over time as a picture (extra ``strideweave[plot]``)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from strideweave.demo.run import DemoReport

__all__ = ["require_matplotlib", "save_plot"]

_MIB = 1 << 20


def require_matplotlib() -> None:
    """Find out before the work whether there will be a picture after it.

    Raises:
        ImportError: matplotlib is not installed; the message names the extra.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("--save-plot needs matplotlib: pip install 'strideweave[plot]'")


def save_plot(report: DemoReport, path: Path) -> None:
    """Draw the primary tier over time and save it; the ending of the name chooses the format.

    Args:
        report: a finished report.
        path: where to, such as ``resident.svg`` or ``resident.png``.

    Raises:
        ImportError: matplotlib is not installed; the message names the extra.
        ValueError: matplotlib does not write such files.
        OSError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - optional
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    tile_mib = report.disk_bytes / report.tiles / _MIB

    def to_tiles(mib: Any) -> Any:
        return mib / tile_mib

    def to_mib(tiles: Any) -> Any:
        return tiles * tile_mib

    seconds = [sample.seconds for sample in report.samples]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.step(
        seconds, [sample.resident_bytes / _MIB for sample in report.samples], where="post", label="resident"
    )
    axes.axhline(report.budget_bytes / _MIB, linestyle="--", color="tab:red", label="budget")
    axes.set(xlabel="seconds", ylabel="MiB in the primary tier", title=report.model, ylim=(0, None))
    axes.secondary_yaxis("right", functions=(to_tiles, to_mib)).set_ylabel("tiles")
    read = axes.twinx()
    read.plot(
        seconds,
        [sample.bytes_read / _MIB for sample in report.samples],
        color="tab:green",
        label="read since the start",
    )
    read.set(ylabel="MiB read", ylim=(0, None))
    read.spines["right"].set_position(("axes", 1.12))
    axes.legend(handles=[*axes.lines, *read.lines], loc="lower right")
    figure.savefig(path)
