"""The grid of tiles as a picture (extra ``strideweave[plot]``)."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.cli.contents import ArrayContents
from strideweave.cli.geometry import extents_in_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.cli.contents import StoreContents

__all__ = ["grid_cells", "require_matplotlib", "save_grid", "tile_kinds"]

_MOST_CELLS = 256
"""Cells along a side; in larger grids several tiles share one."""

_LOST, _NOWHERE = -2, -1
_BEYOND = np.iinfo(np.int64).max  # no tile
_COLOURS = (
    *("tab:red", "lightgrey"),
    *("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:cyan", "tab:olive", "tab:pink"),
)


def require_matplotlib() -> None:
    """Find out before the work whether there can be a picture.

    Raises:
        ImportError: matplotlib is not installed; the message names the extra.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'strideweave[plot]'")


def save_grid(found: ArrayContents | StoreContents, path: Path) -> None:
    """Draw the grid, one cell a tile, coloured by file; the ending of the name chooses the format.

    The first axis goes down; the others lie side by side. A grid of one axis is folded into rows.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not write such files.
        OSError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - optional
    from matplotlib.colors import ListedColormap  # noqa: PLC0415 - optional
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    shape = found.grid.grid_shape
    kinds = tile_kinds(found)
    is_folded = max(shape) == prod(shape)  # one axis alone has several tiles
    rows = max(1, round(found.grid.tile_count**0.5)) if is_folded else shape[0]
    columns = -(-found.grid.tile_count // rows)
    cells, steps = grid_cells(kinds, rows, columns)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    indices = np.ma.masked_array(_colour_indices(cells), cells == _BEYOND)
    axes.pcolormesh(
        indices,
        cmap=ListedColormap(_COLOURS),
        vmin=0,
        vmax=len(_COLOURS),
        edgecolors="white" if max(cells.shape) <= _MOST_CELLS // 4 else "none",
        linewidth=0.3,
    )
    for kind, name in _names(found, kinds).items():
        colour = _COLOURS[int(_colour_indices(np.array(kind)))]
        axes.scatter([], [], marker="s", color=colour, label=name)
    axes.invert_yaxis()
    for ticks in (axes.xaxis, axes.yaxis):
        ticks.get_major_locator().set_params(integer=True)
    sampled = f", {steps[0]} x {steps[1]} in a cell" if max(steps) > 1 else ""
    title = f"{found.grid.tile_count:,} tiles in a grid of {extents_in_words(shape)}{sampled}"
    axes.set(title=title, xlabel="tiles along the other axes", ylabel="tiles along axis 0")
    if is_folded:
        axes.set(xlabel="tiles", ylabel="rows of tiles")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def tile_kinds(found: ArrayContents | StoreContents) -> NDArray[np.int64]:
    """For each tile, the first axis slowest, the number of the file with its first element; -1 none, -2 lost."""
    grid = found.grid
    if not isinstance(found, ArrayContents):
        kinds = np.zeros(grid.tile_count, np.int64)  # by ordinal: the first axis fastest
        for one in found.damage:
            if one.first_tile is not None:
                kinds[one.first_tile : one.first_tile + one.tiles] = _LOST
        return kinds.reshape(grid.grid_shape, order="F").reshape(-1)
    array = found.array
    parts = np.zeros(grid.grid_shape, np.int64)
    for axis, (count, tile) in enumerate(zip(grid.grid_shape, grid.tile_shape, strict=True)):
        along = np.arange(count) * tile // array.part_shape[axis]
        parts = parts * -(-array.shape[axis] // array.part_shape[axis])
        parts = parts + along.reshape([-1 if place == axis else 1 for place in range(grid.rank)])
    return array.file_of[parts.reshape(-1)].astype(np.int64)


def grid_cells(kinds: NDArray[np.int64], rows: int, columns: int) -> tuple[NDArray[np.int64], list[int]]:
    """Lay the kinds of tiles out row by row, in at most 256 cells along a side.

    Returns:
        The least kind of each block of tiles that share a cell, so that no lost tile is hidden, and how many rows and
        columns a block has.
    """
    padded = np.full(rows * columns, _BEYOND)
    padded[: len(kinds)] = kinds
    cells = padded.reshape(rows, columns)
    steps = [-(-extent // _MOST_CELLS) for extent in cells.shape]
    for axis, step in enumerate(steps):
        cells = np.minimum.reduceat(cells, np.arange(0, cells.shape[axis], step), axis)
    return cells, steps


def _colour_indices(kinds: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place in ``_COLOURS`` of each kind; files take those after the first two in turn."""
    return np.where(kinds < 0, kinds + 2, 2 + kinds % (len(_COLOURS) - 2))


def _names(found: ArrayContents | StoreContents, kinds: NDArray[np.int64]) -> dict[int, str]:
    """What the legend says of the kinds that there are; of many files it has the first ones."""
    files = [Path(file["path"]).name for file in found.fields()["files"]]
    present = np.unique(kinds).tolist()
    names = {_LOST: "lost", _NOWHERE: "in no file"}
    return {
        kind: names[kind] if kind in names else files[kind] for kind in present if kind < len(_COLOURS) - 2
    }
