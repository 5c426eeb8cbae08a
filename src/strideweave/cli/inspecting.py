"""``strideweave inspect``: what is at a path, without reading it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strideweave.cli.contents import ArrayContents, CheckpointContents, Damage, Pattern, StoreContents
from strideweave.cli.geometry import counted, extents_in_words, geometry_lines
from strideweave.cli.grid_picture import require_matplotlib, save_grid
from strideweave.cli.output import JsonOption, as_lines, as_table, print_json
from strideweave.cli.program import BROKEN
from strideweave.cli.source import (
    DTypeOption,
    FormatOption,
    OffsetOption,
    ShapeOption,
    Source,
    TensorOption,
    TileShapeOption,
)
from strideweave.cli.values import size_in_words
from strideweave.errors import printable

__all__ = ["inspect"]

Contents = ArrayContents | CheckpointContents | StoreContents


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file or directory that open_tiled opens.")],
    tensor: TensorOption = None,
    tile_shape: TileShapeOption = None,
    format: FormatOption = None,  # noqa: A002  the option's name
    dtype: DTypeOption = None,
    shape: ShapeOption = None,
    offset: OffsetOption = 0,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the grid of tiles to this file, such as grid.svg (extra 'plot')."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Say what is at a path: shapes, dtypes, tiles, bytes, and damage that sizes and headers show.

    No values are read. A safetensors checkpoint without --tensor is listed, tensor by tensor.

    Exit status: 0; 1 when something is damaged or of a kind that cannot be read; 2 when the arguments are unusable
    or nothing is there.
    """
    if plot is not None:
        require_matplotlib()
    found = _read(Source(path, tensor, format, dtype, shape, offset), tile_shape)
    if plot is not None:
        if isinstance(found, CheckpointContents):
            raise ValueError("--plot draws the tiles of one array; --tensor says which")
        save_grid(found, plot)
    if json_output:
        print_json(found.fields())
    else:
        typer.echo(_in_words(found))
        if plot is not None:
            typer.echo(printable(f"drawn in {plot}"))
    if found.damage:
        raise typer.Exit(BROKEN)


def _read(source: Source, tile_shape: str | None) -> Contents:
    kind = source.kind
    if kind == "store":
        asked: dict[str, object] = {"--tensor": source.tensor, "--tile-shape": tile_shape}
        asked |= {"--dtype": source.dtype, "--shape": source.shape, "--offset": source.offset or None}
        wrong = [name for name, value in asked.items() if value is not None]
        if wrong:
            raise ValueError(
                f"{str(source.path)!r} is a store, which says itself what it is; leave out {wrong[0]}"
            )
        return StoreContents.read(str(source.path))
    if kind == "safetensors" and source.tensor is None:
        return CheckpointContents.read(str(source.path))
    return ArrayContents.read(source, tile_shape)


def _in_words(found: Contents) -> str:
    if isinstance(found, CheckpointContents):
        return "\n".join([_list(found), *_damage(found.damage)])
    fields = found.fields()
    lines = {"path": fields["path"], "format": fields["format"]}
    if fields["tensor"] is not None:
        lines["tensor"] = fields["tensor"]
    lines |= geometry_lines(fields)
    if isinstance(found, ArrayContents):
        missing = fields["missing_parts"]
        files = counted(len(fields["files"]), "file")
        lines["parts"] = f"{fields['parts']:,} of {extents_in_words(fields['part_shape'])} in {files}" + (
            f", {missing:,} in none, which have the fill value" if missing else ""
        )
    else:
        lines["layout"] = fields["layout_fingerprint"]
        lines["files"] = ", ".join(
            [
                f"{Path(file['path']).name} {'missing' if file['bytes'] is None else size_in_words(file['bytes'])}"
                for file in fields["files"]
            ]
        )
    return "\n".join([as_lines(lines), *_damage(found.damage)])


def _list(found: CheckpointContents) -> str:
    rows = []
    for one in found.patterns():
        if isinstance(one, Pattern):
            shape = f"{extents_in_words(one.extents)} x ({extents_in_words(one.shape)})"
            rows.append((one.pattern, one.dtype, shape, size_in_words(one.nbytes)))
        else:
            rows.append((one.name, one.dtype, extents_in_words(one.shape), size_in_words(one.nbytes)))
    total = sum([entry.nbytes for _, entry in found.entries])
    tensors, files = counted(len(found.entries), "tensor"), counted(len(found.files), "file")
    head = f"{printable(str(found.path))}: {tensors} in {files}, {size_in_words(total)}"
    return "\n".join([head, "", as_table(("tensor", "dtype", "shape", "bytes"), rows, left=2)])


def _damage(found: tuple[Damage, ...]) -> list[str]:
    lines = []
    for one in found:
        message = one.message if one.file in one.message else f"{one.file}: {one.message}"
        tiles = (
            ""
            if one.first_tile is None
            else f"; {counted(one.tiles, 'tile')} lost, from number {one.first_tile} on"
        )
        lines.append(printable(f"damaged: {message}{tiles}"))
    return lines
