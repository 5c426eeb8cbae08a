"""The command line (extra ``strideweave[cli]``)."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from strideweave.carriers.tiled_evictable import (
    LRU,
    S3FIFO,
    KeepResident,
    Streaming,
    Trace,
    replay,
)
from strideweave.demo.memory_proof import prove_memory
from strideweave.demo.plot import require_matplotlib, save_plot
from strideweave.demo.report import as_json, as_text
from strideweave.demo.run import DEFAULT_QUERY, DemoOptions, run_demo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from strideweave.carriers.tiled_evictable import ReplayReport, ResidencyPolicy

__all__ = ["app"]

app = typer.Typer(
    name="strideweave",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Tensors larger than memory, served tile by tile.",
)

_UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_DEFAULT_BOUND = "8MiB"
_FAILED = 1  # a check did not hold
_UNUSABLE = 2  # the arguments, or what they name, cannot be used


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


def parse_bytes(text: str) -> int:
    """Read a number of bytes such as ``8MiB``, ``500kB`` or ``4096``.

    Raises:
        typer.BadParameter: it is not one.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise typer.BadParameter(f"{text!r} is not a number of bytes such as 8MiB, 500kB or 4096")
    return int(float(found[1]) * unit)


@app.callback(invoke_without_command=True)
def _strideweave(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        typer.echo(version("strideweave"))
        raise typer.Exit


@app.command()
def demo(
    query: Annotated[
        list[str] | None, typer.Option(help="A question; may be repeated.", show_default=DEFAULT_QUERY)
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A file of passages, one a line, instead of Python's own help.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A folder with the model, instead of the installed package.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Weights in memory at the most, such as 500kB; a number alone is bytes.")
    ] = _DEFAULT_BOUND,
    sentences: Annotated[int, typer.Option(min=1, help="Passages at the most.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Passages computed together.")] = 32,
    experts: Annotated[
        int | None, typer.Option(min=5, max=16, help="Feed-forward blocks of 16 that each passage uses.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Passages to show for each question.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads for matrix products.")] = 1,
    prove_memory_limit: Annotated[
        bool, typer.Option("--prove-memory", help="Show that the dense program dies under a memory limit.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--save-plot", help="Draw resident bytes over time to this file.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--save-trace", help="Write which tiles were required to this file (see trace)."),
    ] = None,
) -> None:
    """Search real text with a real transformer whose weights live on disk.

    Exit status: 0 when every check holds, 1 when one does not, 2 when the arguments or what they name are
    unusable.
    """
    options = DemoOptions(
        queries=tuple(query or [DEFAULT_QUERY]),
        text=text,
        sentences=sentences,
        model=model,
        budget=parse_bytes(budget),
        batch_size=batch_size,
        experts=experts,
        top=top,
        trace=trace,
    )
    try:
        if plot is not None:
            require_matplotlib()
        with _limited_threads(threads), _progress(quiet=json_output) as progress:
            report = run_demo(options, progress)
            if prove_memory_limit:
                progress("running three programs under a memory limit", 0.0)
                report.checks += prove_memory(model, options.budget)
                progress("running three programs under a memory limit", 1.0)
        if plot is not None:
            save_plot(report, plot)
    except (OSError, ImportError, ValueError) as error:
        typer.echo(f"strideweave demo: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    typer.echo(as_json(report) if json_output else as_text(report))
    if not report.passed:
        raise typer.Exit(_FAILED)


@app.command()
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
        typer.Option(help="Or the most bytes of them, such as 500kB.", show_default=_DEFAULT_BOUND),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Score residency policies by the requests of a recorded run: no carrier, no reading.

    Exit status: 0, or 2 when the arguments or the trace are unusable.
    """
    if max_tiles is not None and max_bytes is not None:
        raise typer.BadParameter("give --max-tiles or --max-bytes, not both")
    nbytes = parse_bytes(max_bytes or _DEFAULT_BOUND)
    try:
        recorded = Trace.load(file)
        bound = nbytes // recorded.tile_bytes if max_tiles is None else max_tiles
        names = dict.fromkeys(policy or PolicyName)
        scores = {name: replay(recorded, name.make(bound)) for name in names}
    except (OSError, ValueError, MemoryError) as error:
        typer.echo(f"strideweave trace: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    typer.echo(_scores_as_json(recorded, bound, scores) if json_output else _scores(recorded, bound, scores))


def _scores_as_json(recorded: Trace, bound: int, scores: Mapping[PolicyName, ReplayReport]) -> str:
    policies = {name.value: {"hit_rate": report.hit_rate} | asdict(report) for name, report in scores.items()}
    about = {"tiles": recorded.grid.tile_count, "tile_bytes": recorded.tile_bytes, "max_tiles": bound}
    return json.dumps(about | {"policies": policies}, indent=2)


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
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        f"trace      {len(recorded.requests):,} requests for {required:,} tiles, of {recorded.grid.tile_count:,} "
        f"tiles with {recorded.tile_bytes:,} bytes",
        f"bound      {bound:,} tiles for lru and s3fifo",
        "",
    ]
    for name, *cells in (heads, *rows):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join(lines)


@contextmanager
def _limited_threads(threads: int) -> Iterator[None]:
    try:
        from threadpoolctl import threadpool_limits  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError("the demo needs threadpoolctl: pip install 'strideweave[demo]'") from error
    with threadpool_limits(threads, user_api="blas"):
        yield


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, a line at the beginning of each stage elsewhere; both on standard error."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        seen: set[str] = set()

        def line(stage: str, _share: float) -> None:
            if stage not in seen and not quiet:
                seen.add(stage)
                print(f"{stage} ...", file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn("{task.description:45}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, share: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=1.0)
            bar.update(tasks[stage], completed=share)

        yield advance
