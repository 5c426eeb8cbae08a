"""How an array is cut: as fields, as lines for people, and its tiles in memory as in the grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strideweave.cli.values import size_in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strideweave.dtype import DType
    from strideweave.tiles.grid import TileGrid

__all__ = ["counted", "extents_in_words", "geometry_fields", "geometry_lines"]


def geometry_fields(dtype: DType, shape: Sequence[int], grid: TileGrid) -> dict[str, Any]:
    """Shape, grid and sizes, as JSON has them."""
    tile_bytes = grid.tile_size * dtype.itemsize
    return {
        "dtype": dtype.name,
        "shape": list(shape),
        "grid_shape": list(grid.grid_shape),
        "tile_shape": list(grid.tile_shape),
        "tiles": grid.tile_count,
        "tile_bytes": tile_bytes,
        "bytes": grid.tile_count * tile_bytes,
    }


def geometry_lines(fields: Mapping[str, Any]) -> dict[str, object]:
    """The same for people."""
    return {
        "dtype": fields["dtype"],
        "shape": extents_in_words(fields["shape"]),
        "tiles": f"{fields['tiles']:,} of {extents_in_words(fields['tile_shape'])}, "
        f"{size_in_words(fields['tile_bytes'])} each, in a grid of {extents_in_words(fields['grid_shape'])}",
        "bytes": f"{fields['bytes']:,} ({size_in_words(fields['bytes'])})",
    }


def extents_in_words(extents: Sequence[int]) -> str:
    """Extents as people write them."""
    return " x ".join([str(extent) for extent in extents]) or "scalar"


def counted(number: int, noun: str) -> str:
    """A number of things: ``1 file``, ``2 files``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
