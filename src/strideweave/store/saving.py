"""``save_tiled``: a Tensor becomes a store."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
from strideweave.carriers.tiled_evictable.streaming import STAGING_BYTES
from strideweave.carriers.tiled_evictable.traffic import Changes
from strideweave.flags import as_flag
from strideweave.io.buffers import aligned_array
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.workers import run_jobs
from strideweave.store.checksums import checksum_function
from strideweave.store.opening import store_path
from strideweave.store.writer import StoreWriter, check_target
from strideweave.tensor import Tensor
from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.plan import RequestPlan
from strideweave.tiling import fill_tiles, tile_grid, tile_major_layout, tile_views

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import numpy.typing as npt

    from strideweave.tiles.grid import TileGrid
    from strideweave.tiles.ledger import LedgerEntry

    Ordinals = npt.NDArray[np.int64]

__all__ = ["save_tiled", "save_tiled_async"]

# Tiles that are looked after at once; what is held of them is bounded elsewhere.
_STEP_BYTES = 64 << 20
_STEP_TILES = 2048


def save_tiled(
    tensor: Tensor,
    path: str | os.PathLike[str],
    *,
    tile_shape: int | Iterable[int] | None = None,
    overwrite: bool = False,
    durable: bool = True,
) -> None:
    """Save a Tensor as a store, a directory that ``open_tiled`` opens; ``save_tiled_async(...).wait()``.

    Blocks the calling thread until the store is at its place. Arguments and errors are those of ``save_tiled_async``.
    """
    save_tiled_async(tensor, path, tile_shape=tile_shape, overwrite=overwrite, durable=durable).wait()


def save_tiled_async(
    tensor: Tensor,
    path: str | os.PathLike[str],
    *,
    tile_shape: int | Iterable[int] | None = None,
    overwrite: bool = False,
    durable: bool = True,
    progress: Callable[[int], object] | None = None,
) -> AwaitResult[None]:
    """Start saving a Tensor as a store, a directory that ``open_tiled`` opens, and return the handle.

    A tiled Tensor is saved as it is, tile by tile, wherever its tiles are, and stays as it is; a bounded number of
    tiles is held for it. Zeros without storage become holes of the file. Another Tensor is cut into tiles that are
    row-major inside; its values must not change until the handle is done.

    The store is written beside its place and put there when it is complete: whatever happens before, what was at
    the place is what it was. What a process that was killed has left beside it, the next save to this place removes.

    Args:
        tensor: a full Tensor on a ``TiledEvictable`` whose tiles all have values, or one on any other carrier.
        path: where the store is to be.
        tile_shape: elements of one tile along each axis; needed for a Tensor that is not tiled.
        overwrite: replace the store that is there. One that is open for writing is not replaced; openers that read
            go on reading what they have opened.
        durable: wait until everything is on the device, so that it survives the loss of power.
        progress: called in StrideWeave's own thread with the number of tiles that were written, every some megabytes;
            it must not block. What it raises ends the save as any failure does.

    Returns:
        The handle, whose value is None.

    Raises:
        ReleasedError: the tensor's carrier was released.
        TypeError: not a Tensor, no path, ``tile_shape`` is not made of integers, or a flag is no bool.
        ValueError: the Tensor is not the full one of its carrier; ``tile_shape`` is missing, does not divide the
            shape, or is not that of the tiled Tensor.
        FileExistsError: something is there, and ``overwrite`` is false.
        FormatError: it is to be replaced, and is no store.
        InvalidTileError: a tile has no value yet.
        TileConflictError: an unfinished residency request covers one of the tiles.
        OSError: the system failed, such as on a full disk; nothing is left behind.
        ImportError: the extra ``strideweave[store]`` is not installed.
    """
    _require_tensor(tensor)
    overwrite, durable = as_flag(overwrite, "overwrite"), as_flag(durable, "durable")
    name = store_path(path)
    checksum_function()
    check_target(Path(name), overwrite=overwrite)
    asked = None if tile_shape is None else _tuple(tile_shape)
    make_writer = partial(StoreWriter, name, tensor.dtype, overwrite=overwrite, durable=durable)
    carrier = tensor.carrier
    if isinstance(carrier, TiledEvictable):
        carrier._place(tensor)
        if asked is not None and asked != carrier.tile_shape:
            raise ValueError(
                f"the tensor has tiles of shape {carrier.tile_shape} and is saved with them, not with {asked}; "
                "project it to cut it anew"
            )
        return _save_tiles(carrier, make_writer(carrier._traffic.grid, tensor.layout), progress or _ignore)
    if asked is None:
        raise ValueError("a tensor that is not tiled is saved with tiles of some shape: give tile_shape")
    grid = tile_grid(tensor.shape, asked)
    carrier._require_live()
    writer = make_writer(grid, tile_major_layout(grid))
    return carrier._scope.start(
        AwaitResult[None](), _save_dense, tensor.numpy(), grid, writer, progress or _ignore
    )


def _save_tiles(
    carrier: TiledEvictable, writer: StoreWriter, progress: Callable[[int], object]
) -> AwaitResult[None]:
    """Start the request that holds every tile of a tiled carrier and writes them."""
    traffic = carrier._traffic
    tiles = np.arange(traffic.grid.tile_count)
    plan = RequestPlan(tiles, passing=tiles)
    staging = traffic.check_plan("a save", plan)

    async def consume(wave: Ordinals, rows: list[npt.NDArray[np.unsignedinteger]]) -> None:
        await writer.write(wave, [row.view(np.uint8) for row in rows])

    async def save(entry: LedgerEntry) -> None:
        changes, complete = Changes(), False
        try:
            await traffic.reserve_plan(entry, plan, staging, changes)
            await writer.begin_async()
            implicit = tiles[traffic.table.is_implicit(tiles)]
            writer.leave_zero(implicit)
            stored = np.setdiff1d(tiles, implicit, assume_unique=True)
            step = min(_STEP_TILES, max(1, _STEP_BYTES // traffic.tile_bytes))
            for first in range(0, len(stored), step):
                await traffic.stream(stored[first : first + step], consume, entry=entry)
                progress(len(implicit) + min(first + step, len(stored)))
            await writer.finish()
            complete = True
        finally:
            if not complete:
                await writer.abandon_async()
                await traffic.undo(entry, changes)
        await traffic.finish_with(entry, NO_ORDINALS)

    def enter(entry: LedgerEntry) -> None:
        traffic.enter_data(entry, plan)

    return carrier._start_work(AwaitResult[None](), "a save", enter, save)


async def _save_dense(
    source: npt.NDArray[Any], grid: TileGrid, writer: StoreWriter, progress: Callable[[int], object]
) -> None:
    """Write the tiles of an array, some megabytes at a time: from where they are, if each lies there in one piece."""
    nbytes = writer.manifest.tile_bytes
    per_wave = min(grid.tile_count, max(1, STAGING_BYTES // nbytes))
    views = tile_views(source, grid)
    is_staged = not next(tile_views(source, grid)).flags.c_contiguous
    staging = aligned_array(per_wave * nbytes if is_staged else 0)
    slots = staging.view(source.dtype).reshape(-1, grid.tile_size)
    rows: list[npt.NDArray[np.uint8]] = []

    def fill(count: int) -> None:
        tiles = list(islice(views, count))
        if is_staged:
            fill_tiles(slots, grid, tiles)
            tiles = list(slots[:count])
        rows[:] = [tile.reshape(-1).view(np.uint8) for tile in tiles]

    complete = False
    try:
        await writer.begin_async()
        for first in range(0, grid.tile_count, per_wave):
            count = min(per_wave, grid.tile_count - first)
            await run_jobs([partial(fill, count)])
            await writer.write(np.arange(first, first + count), rows)
            progress(first + count)
        await writer.finish()
        complete = True
    finally:
        if not complete:
            await writer.abandon_async()


def _require_tensor(tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        hint = "; wait() for the handle first" if isinstance(tensor, AwaitResult) else ""
        raise TypeError(f"save_tiled takes a Tensor, found {type(tensor).__name__}{hint}")


def _ignore(_: int) -> None:
    """What happens to progress that nobody asks for."""


def _tuple(shape: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(shape) if isinstance(shape, Iterable) else (shape,)
