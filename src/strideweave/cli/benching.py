"""``strideweave bench``: projections of one array measured on this machine."""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from strideweave.cli.byte_map import ByteMap
from strideweave.cli.geometry import counted, extents_in_words, geometry_fields
from strideweave.cli.measuring import Case, Measurement
from strideweave.cli.output import JsonOption, as_table, print_json
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
from strideweave.cli.values import parse_bytes, parse_extents, size_in_words
from strideweave.io.engine import statistics

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bench"]

_SCRATCH_TILE = 256 << 10
_PAYLOAD = 64 << 20
_BLOCK = 4 << 20


def bench(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]", help="A file or directory that open_tiled opens; a scratch file where left out."
        ),
    ] = None,
    tensor: TensorOption = None,
    tile_shape: TileShapeOption = None,
    format: FormatOption = None,  # noqa: A002  the option's name
    dtype: DTypeOption = None,
    shape: ShapeOption = None,
    offset: OffsetOption = 0,
    tiles: Annotated[int, typer.Option(min=1, help="Tiles of one request; fewer above 64 MiB.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Measured turns of each case.")] = 9,
    size: Annotated[
        str, typer.Option(help="Bytes of the scratch file, and of tiles held for hot.")
    ] = "256MiB",
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder of the scratch file, on the disk to measure.", show_default="the system's"),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Time projections of random tiles beside os.preadv and np.memmap on the same bytes, on this machine, now.

    Hot: the tiles are in memory. Warm: they are in the page cache only. Cold: in neither; the system is asked to drop
    the pages of the files, and what it kept is said. Contenders take turns, and their bytes are compared first.
    Medians and quartiles; compare figures of one table only.

    Exit status: 0; 1 when PATH is damaged or cannot be read; 2 when the arguments are unusable.
    """
    nbytes = parse_bytes(size)
    with _source(path, nbytes, scratch) as made:
        source = made or Source(path or Path(), tensor, format, dtype, shape, offset)
        cut = tile_shape if made is None else f"1,{_SCRATCH_TILE}"
        byte_map = _byte_map(source, cut)
        measurement = Measurement(
            lambda policy: source.open(cut, policy),
            byte_map,
            tiles=tiles,
            turns=turns,
            payload=_PAYLOAD,
            hot_bytes=nbytes,
        )
        with measurement, progress(quiet=json_output) as advance:
            cases = measurement.run(advance)
        found: dict[str, Any] = {
            "path": None if made else str(source.path),
            "format": source.kind,
            **geometry_fields(byte_map.dtype, byte_map.shape, byte_map.grid),
            "request": {"tiles": measurement.tiles, "bytes": measurement.payload, "axis": measurement.axis},
            "turns": turns,
            "engine": statistics().engine,
            "checks_tiles": source.kind == "store",
            "cases": {case.name: _fields(case) for case in cases},
        }
    if json_output:
        print_json(found)
    else:
        typer.echo(_in_words(found, cases))


@contextmanager
def _source(path: Path | None, nbytes: int, folder: Path | None) -> Iterator[Source | None]:
    """A scratch file of random bytes as a source where no path is given; it goes afterwards."""
    if path is not None:
        yield None
        return
    count = max(1, nbytes // _SCRATCH_TILE)
    with tempfile.TemporaryDirectory(prefix="strideweave-bench-", dir=folder) as made:
        free = shutil.disk_usage(made).free
        if count * _SCRATCH_TILE > free:
            message = (
                f"{size_in_words(free)} are free, less than the {size_in_words(count * _SCRATCH_TILE)} of the scratch "
                "file; give a smaller --size, or another --scratch"
            )
            raise OSError(errno.ENOSPC, message, str(Path(made).parent))
        file = Path(made, "scratch.bin")
        random = np.random.default_rng(0)
        with file.open("wb") as target:
            left = count * _SCRATCH_TILE
            while left:
                target.write(random.bytes(min(left, _BLOCK)))
                left -= min(left, _BLOCK)
        yield Source(file, format="raw", dtype="UInt8", shape=f"{count},{_SCRATCH_TILE}")


def _byte_map(source: Source, tile_shape: str | None) -> ByteMap:
    if source.kind == "store":
        return ByteMap.of_store(str(source.path))
    return ByteMap.of_array(source.describe(), parse_extents(tile_shape))


def _fields(case: Case) -> dict[str, Any]:
    return {
        "skipped": case.skipped,
        "cached": max(case.cached, default=None),
        "contenders": {
            name: {
                "median": found.median,
                "quartiles": [found.low, found.high],
                "seconds": case.samples[name],
            }
            for name, found in case.figures().items()
        },
    }


def _in_words(found: dict[str, Any], cases: list[Case]) -> str:
    request = found["request"]
    lines = [
        f"{found['path'] or 'a scratch file'}: {counted(found['tiles'], 'tile')} of "
        f"{size_in_words(found['tile_bytes'])} ({extents_in_words(found['tile_shape'])}); a request has "
        f"{request['tiles']} random ones along axis {request['axis']}, {size_in_words(request['bytes'])}; "
        f"{found['turns']} turns, engine {found['engine']}"
    ]
    if found["checks_tiles"]:
        lines.append("project compares every tile that it reads with its checksum; the others do not")
    for case in cases:
        lines.append("")
        if case.skipped is not None:
            lines.append(f"{case.name}: left out: {case.skipped}")
            continue
        rows = [
            (
                name,
                f"{1e3 * one.median:.3f}",
                f"{1e3 * one.low:.3f} to {1e3 * one.high:.3f}",
                f"{request['bytes'] / one.median / 1e9:.2f}",
            )
            for name, one in case.figures().items()
        ]
        lines.append(as_table((case.name, "median ms", "quartiles", "GB/s"), rows))
        lines += _remark(case)
    return "\n".join(lines)


def _remark(case: Case) -> list[str]:
    if case.name == "cold":
        if not case.cached:
            return ["whether the page cache was empty is not known here"]
        kept = [share for share in case.cached if share > 0.01]
        if kept:
            return [
                f"not cold: before {len(kept)} of {len(case.cached)} requests, up to {max(kept):.0%} of the tiles were "
                "in the page cache still"
            ]
    if case.name == "warm" and case.cached and min(case.cached) < 0.99:
        return [f"not warm: only {min(case.cached):.0%} of the tiles were in the page cache"]
    return []
