"""The arguments that say which array a command is about, and completion of the names in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strideweave.cli.values import dtype_names, parse_dtype, parse_extents
from strideweave.formats.checkpoint import open_checkpoint
from strideweave.formats.opening import FORMATS, describe, detect_format, open_tiled

if TYPE_CHECKING:
    from strideweave.formats.description import StoredArray
    from strideweave.tensor import Tensor
    from strideweave.tiles.policy import ResidencyPolicy

__all__ = [
    "DTypeOption",
    "FormatOption",
    "OffsetOption",
    "ShapeOption",
    "Source",
    "TensorOption",
    "TileShapeOption",
]


def _complete_tensor(ctx: Any, incomplete: str) -> list[str]:
    """The tensors of the checkpoint that stands before on the line; none where it cannot be read."""
    # The parser gives up at the option whose value is being typed, and leaves the words before it.
    path = ctx.params.get("source") or ctx.params.get("path") or next(iter(ctx.args), None)
    try:
        names = sorted(open_checkpoint(str(path)).shards) if path else []
    except (OSError, ValueError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def _complete_dtype(incomplete: str) -> list[str]:
    # What is offered must begin with what was typed, and any case will do.
    names = dtype_names() if incomplete[:1].isupper() else [name.lower() for name in dtype_names()]
    return [name for name in names if name.startswith(incomplete)]


def _complete_format(incomplete: str) -> list[str]:
    return [name for name in FORMATS if name.startswith(incomplete)]


TensorOption = Annotated[
    str | None,
    typer.Option(
        help="A tensor of a safetensors checkpoint, or a pattern such as 'experts.{e}.w1'.",
        autocompletion=_complete_tensor,
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        help=f"One of {', '.join(FORMATS)}.",
        autocompletion=_complete_format,
        show_default="what the file says",
    ),
]
DTypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Element type of a raw file, such as Float32 or f4; of others it is checked.",
        autocompletion=_complete_dtype,
    ),
]
ShapeOption = Annotated[
    str | None, typer.Option(help="Extents of a raw file's array, such as 8,128,512; of others checked.")
]
OffsetOption = Annotated[int, typer.Option(min=0, help="Bytes of a raw file before the array.")]
TileShapeOption = Annotated[
    str | None,
    typer.Option(
        help="Extents of one tile, such as 1,128,512.", show_default="a part, a chunk, or rows of about 1 MiB"
    ),
]


@dataclass(frozen=True, slots=True)
class Source:
    """Which array, in the words of the command line.

    Attributes:
        path: the file or directory.
        tensor: the name or pattern.
        format: what it is, where it does not say itself.
        dtype: element type.
        shape: extents.
        offset: bytes before the array.
    """

    path: Path
    tensor: str | None = None
    format: str | None = None
    dtype: str | None = None
    shape: str | None = None
    offset: int = 0

    @property
    def kind(self) -> str:
        """One of ``FORMATS``."""
        return detect_format(
            str(self.path), self.format, has_description=self.dtype is not None and self.shape is not None
        )

    def describe(self) -> StoredArray:
        """Where the array lies."""
        return describe(self.path, **self._arguments())

    def open(self, tile_shape: str | None = None, policy: ResidencyPolicy | None = None) -> Tensor:
        """The array as a tiled tensor."""
        extents = parse_extents(tile_shape)
        return open_tiled(self.path, extents, residency_policy=policy, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {
            "tensor": self.tensor,
            "format": self.format,
            "dtype": parse_dtype(self.dtype),
            "shape": parse_extents(self.shape),
            "offset": self.offset,
        }
