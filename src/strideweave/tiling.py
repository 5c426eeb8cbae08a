"""``tiled``: from an array to a Tensor whose tiles move between memory and storage."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.carriers.base import Carrier
from strideweave.carriers.cpu import CPU
from strideweave.carriers.file_backed import FileBacked
from strideweave.carriers.move.operations import Transfer
from strideweave.carriers.move.registry import dispatch_move
from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
from strideweave.carriers.tiled_evictable.memory_limit import check_memory_limit
from strideweave.carriers.tiled_evictable.tiers import bind_policy
from strideweave.dtype import DType, as_numbers
from strideweave.flags import as_flag
from strideweave.layout import Layout
from strideweave.runtime.await_result import AwaitResult
from strideweave.tensor import Tensor
from strideweave.tiles.grid import TileGrid

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from strideweave.tiles.part_map import PartOrder
    from strideweave.tiles.policy import ResidencyPolicy

__all__ = ["fill_tiles", "tile_grid", "tile_major_layout", "tile_views", "tiled"]

_WAVE_BYTES = 8 << 20  # what is held at once of an array on its way to the secondary tier


def tiled(
    array: npt.ArrayLike,
    tile_shape: int | Iterable[int],
    *,
    secondary: Carrier | None = None,
    residency_policy: ResidencyPolicy | None = None,
    dtype: DType | None = None,
    resident: bool = True,
    memory_limit: int | None = None,
) -> Tensor:
    """Cut an array into tiles and give the full Tensor over a fresh ``TiledEvictable``.

    Values are laid tile by tile, first-mode-fastest over the grid and row-major inside each tile; the Tensor
    has the array's shape. Blocks until that is done.

    Args:
        array: any array-like of at least one axis; a ``numpy.memmap`` is read piece by piece.
        tile_shape: elements of one tile along each axis; each divides the array's extent.
        secondary: an empty mutable carrier for the slow tier; None makes a ``FileBacked``.
        residency_policy: decides what stays primary.
        dtype: element type, converted to as NumPy does; None keeps the array's.
        resident: True copies the values to a CPU primary tier, where every tile starts dirty; False writes
            them straight to the secondary tier, holding no more than a few tiles at a time.
        memory_limit: bytes that tiles may take in memory at any instant; None is no limit. Values that do not
            fit can only start in the secondary tier, with ``resident=False``.

    Returns:
        The full Tensor; ``tensor.carrier`` is the ``TiledEvictable``.

    Raises:
        TypeError: the values are no real numbers, no DType stands for the array's dtype and none is asked for,
            ``tile_shape`` is not made of integers, ``secondary`` is not a Carrier of the same dtype, the policy has no
            method ``plan``, or the limit is not an integer.
        ValueError: the ranks differ, an extent is not a multiple of the tile's, ``secondary`` has values, or the
            limit is less than a tile, or less than the array with ``resident=True``.
        OverflowError: a Python integer does not fit ``dtype``.
        RuntimeError: ``secondary`` is released, owned or immutable.
        OSError, MemoryError: there is no room for the values. A ``secondary`` is empty again then.
    """
    resident = as_flag(resident, "resident")
    source, chosen = as_numbers(array, dtype)
    grid = tile_grid(source.shape, tuple(tile_shape) if isinstance(tile_shape, Iterable) else (tile_shape,))
    tile_bytes = grid.tile_size * chosen.itemsize
    limit = check_memory_limit(memory_limit, tile_bytes, grid.tile_count * tile_bytes if resident else 0)
    bind_policy(residency_policy, grid, chosen)
    if secondary is not None:
        _check_secondary(secondary, chosen)
    slow = FileBacked(dtype=chosen) if secondary is None else secondary
    built = False
    try:
        primary = CPU(grid.slot_count if resident else 0, dtype=chosen, empty=True)
        if resident:
            fill_tiles(primary.numpy(writable=True), grid, tile_views(source, grid))
        else:
            _write_through(source, grid, slow, _WAVE_BYTES if limit is None else min(_WAVE_BYTES, limit))
        carrier = TiledEvictable(
            primary,
            slow,
            grid.grid_shape,
            grid.tile_shape,
            residency_policy=residency_policy,
            memory_limit=limit,
        )
        built = True
    finally:
        if not built and secondary is None:
            slow.release()
    return Tensor(carrier, 0, tile_major_layout(grid))


def tile_major_layout(grid: TileGrid, order: PartOrder = "C") -> Layout:
    """The Layout of a full Tensor whose tiles are row-major inside, or column-major with ``order="F"``.

    Shapes: top-level extents are ``grid.logical_shape``; a mode cut inside is nested, ``(tile, grid)``.
    """
    shape: list[Any] = []
    stride: list[Any] = []
    extents = grid.tile_shape if order == "F" else grid.tile_shape[::-1]
    inner = list(itertools.accumulate(extents, operator.mul, initial=1))[:-1]
    if order == "C":
        inner.reverse()
    outer = grid.tile_size
    for tile, count, within in zip(grid.tile_shape, grid.grid_shape, inner, strict=True):
        if tile > 1 and count > 1:
            shape.append((tile, count))
            stride.append((within, outer))
        else:
            shape.append(tile * count)
            stride.append(within if tile > 1 else outer)
        outer *= count
    return Layout(tuple(shape), tuple(stride))


def tile_grid(shape: tuple[int, ...], tile_shape: tuple[int, ...]) -> TileGrid:
    """The grid of tiles that cut an array evenly.

    Raises:
        TypeError: an extent of ``tile_shape`` is not an integer.
        ValueError: the ranks differ, or an extent is 0 or no multiple of the tile's.
    """
    if len(shape) != len(tile_shape) or not shape:
        raise ValueError(
            f"an array of shape {shape} needs a tile shape of as many axes, at least one; found {tile_shape}"
        )
    TileGrid((1,) * len(tile_shape), tile_shape)  # checks that these are integers of at least 1
    if any(extent % tile or not extent for extent, tile in zip(shape, tile_shape, strict=True)):
        raise ValueError(
            f"tiles of shape {tile_shape} do not cut an array of shape {shape} evenly; pad the array, or "
            "choose extents that divide it"
        )
    return TileGrid(tuple(extent // tile for extent, tile in zip(shape, tile_shape, strict=True)), tile_shape)


def _check_secondary(secondary: object, dtype: DType) -> None:
    if not isinstance(secondary, Carrier):
        raise TypeError(f"secondary must be a Carrier, found {type(secondary).__name__}")
    secondary._require_mutable()
    if secondary.dtype() is not dtype:
        raise TypeError(f"secondary holds {secondary.dtype().name}, the values are {dtype.name}")
    if secondary.size():
        raise ValueError(f"secondary holds {secondary.size()} values already; pass an empty carrier")


def tile_views(source: npt.NDArray[Any], grid: TileGrid) -> Iterator[npt.NDArray[Any]]:
    """The tiles of an array as views, in the order of their ordinals."""
    for last_first in np.ndindex(*grid.grid_shape[::-1]):
        yield source[
            tuple(
                slice(index * tile, (index + 1) * tile)
                for index, tile in zip(last_first[::-1], grid.tile_shape, strict=True)
            )
        ]


def fill_tiles(slots: npt.NDArray[Any], grid: TileGrid, tiles: Iterable[npt.NDArray[Any]]) -> None:
    """Copy tiles to slots, one behind the other from the first on, as far as there are any or have room."""
    # Not by tile_shape, for NumPy has 64 axes at most.
    for place, tile in zip(slots.reshape(-1, grid.tile_size), tiles, strict=False):
        place.reshape(grid.tile_shape)[...] = tile


def _write_through(source: npt.NDArray[Any], grid: TileGrid, secondary: Carrier, wave_bytes: int) -> None:
    """Write the tiles of an array to an empty carrier, in waves of so many bytes or a tile."""
    dtype = secondary.dtype()
    per_wave = min(grid.tile_count, max(1, wave_bytes // (grid.tile_size * dtype.itemsize)))
    staging = CPU(per_wave * grid.tile_size, dtype=dtype, empty=True)
    operation = dispatch_move(CPU, type(secondary))
    secondary._allocate_in_place(grid.slot_count)
    handle, complete = AwaitResult[Any].completed(None), False
    try:
        tiles = tile_views(source, grid)
        for first in range(0, grid.tile_count, per_wave):
            count = min(per_wave, grid.tile_count - first)
            fill_tiles(staging.numpy(writable=True), grid, itertools.islice(tiles, count))
            transfer = Transfer(staging, 0, secondary, first * grid.tile_size, count * grid.tile_size)
            handle = AwaitResult()
            staging._scope.start(handle, operation().transfer, [transfer]).wait()
        complete = True
    finally:
        # Where Ctrl-C ended the waiting, the transfer goes on and needs the storage.
        if not complete and handle.done:
            secondary._empty_in_place()
    staging.release()
