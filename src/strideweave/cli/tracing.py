"""``strideweave trace``: policies scored by a recorded run."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strideweave.carriers.tiled_evictable import (
    LRU,
    S3FIFO,
    KeepResident,
    Streaming,
    Trace,
    replay,
)
from strideweave.cli.output import JsonOption, as_table, print_json
from strideweave.cli.values import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strideweave.carriers.tiled_evictable import ReplayReport, ResidencyPolicy

__all__ = ["DEFAULT_BOUND", "PolicyName", "trace"]

DEFAULT_BOUND = "8MiB"
"""Bytes of tiles that a policy with a bound keeps, where nobody says."""


class PolicyName(StrEnum):
    """The policies by the names that the command line has for them."""

    LRU = "lru"
    S3FIFO = "s3fifo"
    KEEP = "keep"
    STREAMING = "streaming"

    def make(self, max_tiles: int) -> ResidencyPolicy:
        """Make a fresh policy of this name; the bound is for those that have one."""
        match self:
            case PolicyName.LRU:
                return LRU(max_tiles=max_tiles)
            case PolicyName.S3FIFO:
                return S3FIFO(max_tiles=max_tiles)
            case PolicyName.KEEP:
                return KeepResident()
            case PolicyName.STREAMING:
                return Streaming()


def trace(
    file: Annotated[
        Path, typer.Argument(metavar="TRACE", help="What a TraceRecorder, or demo --save-trace, wrote.")
    ],
    policy: Annotated[
        list[PolicyName] | None,
        typer.Option(help="A policy to score; may be repeated.", show_default="all of them"),
    ] = None,
    max_tiles: Annotated[
        int | None, typer.Option(min=0, help="The most tiles that lru and s3fifo keep resident.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(help="Or the most bytes of them, such as 500kB.", show_default=DEFAULT_BOUND),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Score residency policies by the requests of a recorded run: no carrier, no reading.

    Exit status: 0, or 2 when the arguments or the trace are unusable.
    """
    if max_tiles is not None and max_bytes is not None:
        raise typer.BadParameter("give --max-tiles or --max-bytes, not both")
    nbytes = parse_bytes(max_bytes or DEFAULT_BOUND)
    recorded = Trace.load(file)
    bound = nbytes // recorded.tile_bytes if max_tiles is None else max_tiles
    names = dict.fromkeys(policy or PolicyName)
    scores = {name: replay(recorded, name.make(bound)) for name in names}
    if json_output:
        policies = {
            name.value: {"hit_rate": report.hit_rate} | asdict(report) for name, report in scores.items()
        }
        about = {"tiles": recorded.grid.tile_count, "tile_bytes": recorded.tile_bytes, "max_tiles": bound}
        print_json(about | {"policies": policies})
    else:
        typer.echo(_scores(recorded, bound, scores))


def _scores(recorded: Trace, bound: int, scores: Mapping[PolicyName, ReplayReport]) -> str:
    required = sum([len(request.tiles) for request in recorded.requests])
    heads = ("policy", "hit rate", "hits", "misses", "streamed", "evictions", "peak resident", "MiB read")
    rows = [
        (
            name.value,
            f"{report.hit_rate:.2%}",
            *[f"{count:,}" for count in (report.hits, report.misses, report.streamed, report.evictions)],
            f"{report.peak_resident:,}",
            f"{report.bytes_read / (1 << 20):,.2f}",
        )
        for name, report in scores.items()
    ]
    lines = [
        f"trace      {len(recorded.requests):,} requests for {required:,} tiles, of {recorded.grid.tile_count:,} "
        f"tiles with {recorded.tile_bytes:,} bytes",
        f"bound      {bound:,} tiles for lru and s3fifo",
        "",
        as_table(heads, rows),
    ]
    return "\n".join(lines)
