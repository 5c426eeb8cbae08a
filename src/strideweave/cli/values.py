"""What options say: numbers of bytes, extents, element types."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from strideweave.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["dtype_names", "parse_bytes", "parse_dtype", "parse_extents", "size_in_words"]

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


def parse_bytes(text: str) -> int:
    """Read a number of bytes such as ``8MiB``, ``500kB`` or ``4096``.

    Raises:
        typer.BadParameter: it is not one.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise typer.BadParameter(f"{text!r} is not a number of bytes such as 8MiB, 500kB or 4096")
    size = float(found[1]) * unit
    if size >= 2**63:
        raise typer.BadParameter(f"{text!r} are more bytes than a file can have")
    return int(size)


def parse_extents(text: str | None) -> tuple[int, ...] | None:
    """Read extents such as ``8,128,512`` or ``8x128x512``; None stays None.

    Raises:
        typer.BadParameter: these are none.
    """
    if text is None:
        return None
    parts = re.split(r"\s*[,x]\s*", text.strip().strip("()").rstrip(", "))
    if not all(re.fullmatch(r"[0-9]{1,18}", part) for part in parts):
        raise typer.BadParameter(f"{text!r} are no extents such as 8,128,512 or 8x128x512")
    return tuple([int(part) for part in parts])


def parse_dtype(text: str | None) -> DType | None:
    """Read the name of an element type, in any case, or what NumPy calls it, such as ``f4``; None stays None.

    Raises:
        typer.BadParameter: there is no such type.
    """
    if text is None:
        return None
    found = next((dtype for dtype in DType.members() if dtype.name.lower() == text.lower()), None)
    if found is not None:
        return found
    # No more than a name: NumPy also reads records and null characters.
    if re.fullmatch(r"[<=|]?[A-Za-z]\w*", text):
        with suppress(TypeError):
            return DType.from_numpy(text)
    raise typer.BadParameter(
        f"{text!r} is no element type; there are {', '.join(dtype_names())}, and NumPy's names, such as f4"
    )


def dtype_names() -> list[str]:
    """The element types by name."""
    return [dtype.name for dtype in DType.members()]


def size_in_words(nbytes: int) -> str:
    """A number of bytes as people write it."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes} bytes"
