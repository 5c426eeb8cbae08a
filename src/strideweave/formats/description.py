"""What a reader of a format finds out: where the parts of one array lie, and nothing about how they are read."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from strideweave.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strideweave.dtype import DType
    from strideweave.io.file_pool import KnownFile
    from strideweave.tiles.part_map import PartOrder

__all__ = [
    "TARGET_TILE_BYTES",
    "StoredArray",
    "check_byte_order",
    "default_tile_shape",
    "nearest_divisor",
    "single_part",
]

TARGET_TILE_BYTES = 1 << 20
"""Bytes of a tile where nobody said how to cut: large enough for the device, small enough to choose from."""


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An array that lies in equal parts in files.

    Attributes:
        name: what the format calls it.
        dtype: its element type, little-endian in the files.
        shape: its extents.
        part_shape: extents of a part; those at the upper ends may reach beyond the array.
        order: which axis of a part is contiguous.
        files: the files, as they were when they were looked at.
        file_of: for each part the place of its file in ``files``, or -1 for one that is in none; parts are numbered
            row-major.
        offset_of: for each part its first byte in that file.
        tile_shape: how it is best cut.
        fill: the bytes of the value of parts that are in no file.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    part_shape: tuple[int, ...]
    order: PartOrder
    files: tuple[KnownFile, ...]
    file_of: NDArray[np.int32]
    offset_of: NDArray[np.int64]
    tile_shape: tuple[int, ...]
    fill: bytes = b""


def single_part(
    name: str, dtype: DType, shape: tuple[int, ...], file: KnownFile, offset: int, *, order: PartOrder = "C"
) -> StoredArray:
    """An array that lies in one piece in one file.

    Raises:
        FormatError: it has no axis or no elements, so it has no tiles.
    """
    if not shape or 0 in shape:
        raise FormatError(
            "a tiled tensor has one axis or more, and elements",
            path=file.path,
            tensor=name,
            offset=offset,
            wanted="extents of at least 1",
            found=f"shape {shape}",
        )
    return StoredArray(
        name,
        dtype,
        shape,
        shape,
        order,
        (file,),
        np.zeros(1, np.int32),
        np.array([offset], np.int64),
        default_tile_shape(shape, dtype.itemsize, order),
    )


def default_tile_shape(shape: Sequence[int], itemsize: int, order: PartOrder = "C") -> tuple[int, ...]:
    """Cut an array into whole rows of about ``TARGET_TILE_BYTES`` together, so that each tile is one run.

    Where a row alone is larger, tiles are parts of one row, cut in the same way.
    """
    axes = list(range(len(shape)))
    if order == "F":
        axes.reverse()
    tile = list(shape)
    row = prod(shape) * itemsize
    for axis in axes:
        row //= shape[axis]  # bytes of one step along this axis
        if row <= TARGET_TILE_BYTES:
            tile[axis] = nearest_divisor(shape[axis], TARGET_TILE_BYTES / row)
            break
        tile[axis] = 1
    return tuple(tile)


def check_byte_order(dtype: DType, path: str, name: str) -> None:
    """Refuse little-endian slots on a machine that is not.

    Raises:
        FormatError: this is such a machine, and the slots are wider than a byte.
    """
    if sys.byteorder != "little" and dtype.itemsize > 1:
        raise FormatError(
            f"{dtype.name} in files is little-endian and this machine is not", path=path, tensor=name
        )


_MOST_TRIALS = 1 << 20


def nearest_divisor(extent: int, target: float) -> int:
    """The divisor of ``extent`` that is nearest to ``target`` as a ratio."""
    best = 1
    for low in range(1, min(int(extent**0.5) + 1, _MOST_TRIALS)):
        if extent % low == 0:
            for divisor in (low, extent // low):
                if max(divisor / target, target / divisor) < max(best / target, target / best):
                    best = divisor
    return best
