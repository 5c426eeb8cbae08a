"""Bars for long work, on standard error and only on a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["progress"]


@contextmanager
def progress(*, quiet: bool = False, lines: bool = False) -> Iterator[Callable[[str, float], None]]:
    """Give a function that takes a stage and its share done, from 0 to 1.

    Args:
        quiet: show nothing.
        lines: where there is no terminal, print a line at the beginning of each stage.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        seen: set[str] = set()

        def line(stage: str, _share: float) -> None:
            if lines and not quiet and stage not in seen:
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
