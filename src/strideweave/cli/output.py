"""What commands print: one JSON object, or lines and tables for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strideweave.errors import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["JsonOption", "as_lines", "as_table", "print_json"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
"""The option that every command has."""


def print_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(fields, indent=2))


def as_lines(fields: Mapping[str, object]) -> str:
    """One line a field, its name before it; whatever a file calls something, it stays on its line."""
    width = max([len(name) for name in fields])
    return "\n".join([f"{name.ljust(width)}  {printable(str(value))}" for name, value in fields.items()])


def as_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns as wide as they must be; the first ``left`` ones begin at the left, the others end at the right."""
    shown = [[printable(cell) for cell in row] for row in (heads, *rows)]
    widths = [max([len(cell) for cell in column]) for column in zip(*shown, strict=True)]
    lines = []
    for row in shown:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
