"""``strideweave verify``: every tile of a store against its checksum."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strideweave.cli.output import JsonOption, print_json
from strideweave.cli.program import BROKEN
from strideweave.cli.progress import progress
from strideweave.cli.values import size_in_words
from strideweave.errors import printable
from strideweave.formats.opening import detect_format
from strideweave.store import verify_tiles

if TYPE_CHECKING:
    from strideweave.errors import DamagedTileError

__all__ = ["verify"]

_SHOWN = 20  # damaged tiles that people see


def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A store.")],
    json_output: JsonOption = False,
) -> None:
    """Read every tile of a store, compare it with its checksum, and list the damaged ones.

    A store that is being written may be verified at the same time. Other formats have no checksums; inspect checks
    their headers and sizes.

    Exit status: 0 when every tile is right, 1 when one is damaged or the store's description is, 2 when there is no
    store or it cannot be read.
    """
    found = detect_format(str(path))
    if found != "store":
        raise ValueError(
            f"{str(path)!r} is {found}, which has no checksums; strideweave inspect checks its headers and sizes"
        )
    tiles = nbytes = 0
    damaged: list[DamagedTileError] = []
    with progress(quiet=json_output) as advance:
        for step in verify_tiles(path):
            tiles, nbytes = step.tiles, step.nbytes
            damaged += step.damaged
            advance(f"verifying {path.name}", tiles / step.tile_count)
    if json_output:
        about = {"path": str(path), "format": "store", "tiles": tiles, "bytes": nbytes}
        print_json(about | {"damaged": [_fields(error) for error in damaged], "passed": not damaged})
    elif damaged:
        typer.echo(f"{printable(str(path))}: {len(damaged):,} of {tiles:,} tiles are damaged")
        for error in damaged[:_SHOWN]:
            typer.echo(f"  tile {error.tile}: wanted checksum {error.wanted}, found {error.found}")
        if len(damaged) > _SHOWN:
            typer.echo(f"  and {len(damaged) - _SHOWN:,} more; --json has all of them")
    else:
        typer.echo(f"{printable(str(path))}: all {tiles:,} tiles are right ({size_in_words(nbytes)})")
    if damaged:
        raise typer.Exit(BROKEN)


def _fields(error: DamagedTileError) -> dict[str, Any]:
    return {
        "file": error.path,
        "tile": list(error.tile or ()),
        "ordinal": error.ordinal,
        "offset": error.offset,
        "wanted": error.wanted,
        "found": error.found,
    }
