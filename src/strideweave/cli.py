"""The command line (extra ``strideweave[cli]``)."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from strideweave.demo.memory_proof import prove_memory
from strideweave.demo.plot import require_matplotlib, save_plot
from strideweave.demo.report import as_json, as_text
from strideweave.demo.run import DEFAULT_QUERY, DemoOptions, run_demo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
_FAILED = 1  # a check did not hold
_UNUSABLE = 2  # the arguments, or what they name, cannot be used


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
    ] = "8MiB",
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
