"""``strideweave pack``: from any array that can be opened to a store."""

from __future__ import annotations

import errno
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from strideweave.carriers.tiled_evictable import Streaming
from strideweave.cli.geometry import geometry_fields, geometry_lines
from strideweave.cli.output import JsonOption, as_lines, print_json
from strideweave.cli.progress import progress
from strideweave.cli.source import (
    DTypeOption,
    FormatOption,
    OffsetOption,
    ShapeOption,
    Source,
    TensorOption,
    TileShapeOption,
)
from strideweave.store import read_manifest, save_tiled_async

if TYPE_CHECKING:
    from collections.abc import Callable

    from strideweave.carriers.tiled_evictable import TiledEvictable
    from strideweave.tensor import Tensor

__all__ = ["pack"]

_LOOK_SECONDS = 0.1


class _InterruptedError(Exception):
    """Ends a save from inside."""


def pack(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A file or directory that open_tiled opens.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The store: a directory that is made.")],
    tensor: TensorOption = None,
    tile_shape: TileShapeOption = None,
    format: FormatOption = None,  # noqa: A002  the option's name
    dtype: DTypeOption = None,
    shape: ShapeOption = None,
    offset: OffsetOption = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the store at DST, once the new one is complete.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Copy an array to a store: one file in tile order, with a checksum for every tile.

    The store is at DST when it is complete and on the device; until then nothing is there, or the old one.

    Exit status: 0; 1 when SRC is damaged or of a kind that cannot be read; 2 when the arguments are unusable or the
    system refuses; 130 when interrupted, with nothing left behind.
    """
    opened = Source(source, tensor, format, dtype, shape, offset).open(tile_shape, Streaming())
    started = time.perf_counter()
    with progress(quiet=json_output) as advance:
        _save(opened, target, lambda share: advance(f"packing {target.name}", share), overwrite=overwrite)
    seconds = time.perf_counter() - started
    opened.carrier.release()
    manifest = read_manifest(target)
    geometry = geometry_fields(manifest.dtype, manifest.shape, manifest.grid)
    if json_output:
        about = {"source": str(source), "path": str(target), "format": "store", "tensor": tensor}
        print_json(about | geometry | {"seconds": seconds})
        return
    rate = manifest.data_bytes / seconds / 1e6
    typer.echo(
        as_lines(
            {"packed": target}
            | geometry_lines(geometry)
            | {"time": f"{seconds:.2f} s, {rate:,.{0 if rate >= 10 else 1}f} MB/s"}
        )
    )


def _save(tensor: Tensor, target: Path, advance: Callable[[float], None], *, overwrite: bool) -> None:
    """Save, saying how far it is; an interruption ends it with nothing left behind."""
    stop, done = threading.Event(), [0]
    count = cast("TiledEvictable", tensor.carrier).statistics().tile_count

    def note(tiles: int) -> None:
        done[0] = tiles
        if stop.is_set():
            raise _InterruptedError

    try:
        handle = save_tiled_async(tensor, target, overwrite=overwrite, progress=note)
    except FileExistsError as error:
        message = "something is there already; --overwrite replaces a store"
        raise FileExistsError(errno.EEXIST, message, str(target)) from error
    try:
        advance(0.0)
        while not handle.done:
            try:
                handle.wait(_LOOK_SECONDS)
            except TimeoutError:
                advance(done[0] / count)
        handle.wait()
    except KeyboardInterrupt:
        stop.set()
        with suppress(_InterruptedError):
            handle.wait()
        raise
