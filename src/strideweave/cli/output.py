"""What commands print: one JSON object, or lines and tables for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["JsonOption", "as_lines", "as_table", "print_json"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
"""The option that every command has."""


def print_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(fields, indent=2))


def as_lines(fields: Mapping[str, object]) -> str:
    """One line a field, its name before it."""
    width = max([len(name) for name in fields])
    return "\n".join([f"{name.ljust(width)}  {value}" for name, value in fields.items()])


def as_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns as wide as they must be; the first ``left`` ones begin at the left, the others end at the right."""
    widths = [max([len(cell) for cell in column]) for column in zip(heads, *rows, strict=True)]
    lines = []
    for row in (heads, *rows):
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
