"""``strideweave demo``: the main job."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strideweave.cli.output import JsonOption
from strideweave.cli.program import BROKEN
from strideweave.cli.progress import progress
from strideweave.cli.tracing import DEFAULT_BOUND
from strideweave.cli.values import parse_bytes
from strideweave.demo.memory_proof import prove_memory
from strideweave.demo.plot import require_matplotlib, save_plot
from strideweave.demo.report import as_json, as_text
from strideweave.demo.run import DEFAULT_QUERY, DemoOptions, run_demo

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["demo"]


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
    ] = DEFAULT_BOUND,
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
    json_output: JsonOption = False,
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
    if plot is not None:
        require_matplotlib()
    with _limited_threads(threads), progress(quiet=json_output, lines=True) as advance:
        report = run_demo(options, advance)
        if prove_memory_limit:
            advance("running three programs under a memory limit", 0.0)
            report.checks += prove_memory(model, options.budget)
            advance("running three programs under a memory limit", 1.0)
    if plot is not None:
        save_plot(report, plot)
    typer.echo(as_json(report) if json_output else as_text(report))
    if not report.passed:
        raise typer.Exit(BROKEN)


@contextmanager
def _limited_threads(threads: int) -> Iterator[None]:
    try:
        from threadpoolctl import threadpool_limits  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError("the demo needs threadpoolctl: pip install 'strideweave[demo]'") from error
    with threadpool_limits(threads, user_api="blas"):
        yield
