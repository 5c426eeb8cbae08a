"""The manifest of a store: a small JSON file that says what its other files are.

Everything in it is checked, also what follows from the rest, so that a manifest that lies is refused before any
other file is opened. ``docs/format.md`` describes the fields.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strideweave.dtype import DType
from strideweave.errors import FormatError
from strideweave.layout import Layout
from strideweave.store.checksums import ALGORITHM, checksum_function, digits
from strideweave.tiles.grid import TileGrid

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DATA", "FILES", "JOURNAL", "LOCK", "MANIFEST", "MOST_TILES", "TABLE", "Manifest", "require_plain"]

MANIFEST = "strideweave.json"
DATA = "tiles.bin"
TABLE = "checksums.bin"
JOURNAL = "journal.bin"
LOCK = "writer.lock"
FILES = frozenset({MANIFEST, DATA, TABLE, JOURNAL, LOCK})
"""Everything that is in the directory of a store."""

FORMAT = "strideweave tiles"
VERSION = 1
BYTE_ORDER = "little"
_MOST_BYTES = 1 << 20
_LARGEST = 1 << 62  # offsets in files are signed integers of 64 bits
MOST_TILES = 1 << 27
"""Tiles of a store, at most: their checksums take a gibibyte of memory."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a store is.

    Attributes:
        dtype: element type.
        grid: the tile grid.
        layout: from a coordinate of the tensor to a slot, as of the full Tensor on a ``TiledEvictable``.
        identity: 16 hexadecimal digits that the journal of this very store has too.
    """

    dtype: DType
    grid: TileGrid
    layout: Layout
    identity: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.layout.extents

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile; tile ``k`` begins at byte ``k * tile_bytes`` of the data file."""
        return self.grid.tile_size * self.dtype.itemsize

    @property
    def data_bytes(self) -> int:
        """Bytes of the data file."""
        return self.grid.tile_count * self.tile_bytes

    @property
    def fingerprint(self) -> str:
        """A checksum of all that says where an element lies: dtype, grid, tile and layout."""
        said = [
            self.dtype.name,
            BYTE_ORDER,
            self.grid.grid_shape,
            self.grid.tile_shape,
            _plain(self.layout.shape),
            _plain(self.layout.stride),
        ]
        return digits(checksum_function()(json.dumps(said, separators=(",", ":")).encode("ascii")))

    def fields(self) -> dict[str, Any]:
        """The fields of the file, in its order."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "identity": self.identity,
            "dtype": self.dtype.name,
            "byte_order": BYTE_ORDER,
            "shape": list(self.shape),
            "grid_shape": list(self.grid.grid_shape),
            "tile_shape": list(self.grid.tile_shape),
            "tile_count": self.grid.tile_count,
            "tile_bytes": self.tile_bytes,
            "layout": {"shape": _plain(self.layout.shape), "stride": _plain(self.layout.stride)},
            "layout_fingerprint": self.fingerprint,
            "checksum": ALGORITHM,
            "data": {"file": DATA, "offset": 0, "bytes": self.data_bytes},
            "table": {"file": TABLE, "bytes": 8 * self.grid.tile_count},
            "journal": {"file": JOURNAL},
            "lock": {"file": LOCK},
        }

    def encode(self) -> bytes:
        """The bytes of the file."""
        return (json.dumps(self.fields(), indent=2) + "\n").encode("ascii")

    @classmethod
    def read(cls, directory: str) -> Manifest:
        """Read and check the manifest of a store; blocks.

        Raises:
            FileNotFoundError: there is none.
            FormatError: it is not one, is a symbolic link, or contradicts itself; the message says where.
            OSError: the system refused.
        """
        path = str(Path(directory, MANIFEST))
        return cls.decode(_content(path), path)

    @classmethod
    def decode(cls, content: bytes, path: str) -> Manifest:
        """Check the bytes of a manifest.

        Args:
            content: the bytes.
            path: where they come from, for messages.

        Raises:
            FormatError: as ``read``.
        """
        fields = _Fields(_parsed(content, path), path)
        fields.require("format", FORMAT)
        fields.require("version", VERSION)
        fields.require("byte_order", BYTE_ORDER)
        fields.require("checksum", ALGORITHM)
        identity = fields.string("identity")
        if len(identity) != 16 or set(identity) - set("0123456789abcdef"):
            raise fields.wrong("identity", "16 hexadecimal digits", identity)
        dtype = next((one for one in DType.members() if one.name == fields.string("dtype")), None)
        if dtype is None:
            names = ", ".join(one.name for one in DType.members())
            raise fields.wrong("dtype", f"one of {names}", fields.string("dtype"))
        manifest = cls(dtype, fields.grid(dtype), fields.layout(), identity)
        manifest._check_against(fields)
        return manifest

    def _check_against(self, fields: _Fields) -> None:
        """Check what a manifest says twice."""
        try:
            self.grid.place(self.layout, 0)
        except (ValueError, TypeError, RecursionError) as error:
            raise fields.wrong("layout", "a layout of whole tiles of this grid", error) from error
        for name, wanted in self.fields().items():
            fields.require(name, wanted)


class _Fields:
    """The fields of a manifest as they were found."""

    def __init__(self, found: Mapping[str, Any], path: str) -> None:
        self._found = found
        self._path = path

    def wrong(self, name: str, wanted: object, found: object) -> FormatError:
        """The error about one field."""
        message = f"the manifest's field {name!r} is not what this version of StrideWeave reads"
        return FormatError(message, path=self._path, wanted=wanted, found=found)

    def get(self, name: str) -> Any:
        """A field that must be there."""
        if name not in self._found:
            raise self.wrong(name, "this field", "none")
        return self._found[name]

    def require(self, name: str, wanted: object) -> None:
        """Check a field whose value is known, type and all."""
        found = self.get(name)
        try:
            is_wanted = json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)
        except RecursionError:
            is_wanted = False
        if not is_wanted:
            raise self.wrong(name, wanted, found)

    def string(self, name: str) -> str:
        """A field that is a string."""
        found = self.get(name)
        if not isinstance(found, str):
            raise self.wrong(name, "a string", found)
        return found

    def grid(self, dtype: DType) -> TileGrid:
        """The tile grid, of a size that a file can have."""
        shapes = []
        for name in ("grid_shape", "tile_shape"):
            found = self.get(name)
            if not isinstance(found, list) or not found or not all(_is_extent(one) for one in found):
                raise self.wrong(name, "a list of integers of at least 1", found)
            shapes.append(tuple(found))
        if len(shapes[0]) != len(shapes[1]):
            raise self.wrong("tile_shape", f"{len(shapes[0])} integers, as many as grid_shape has", shapes[1])
        if prod(shapes[0]) * prod(shapes[1]) * dtype.itemsize > _LARGEST:
            raise self.wrong("grid_shape", f"tiles that together have at most {_LARGEST} bytes", shapes[0])
        if prod(shapes[0]) > MOST_TILES:
            raise self.wrong("grid_shape", f"at most {MOST_TILES} tiles", shapes[0])
        return TileGrid(*shapes)

    def layout(self) -> Layout:
        """The layout."""
        found = self.get("layout")
        parts = [found.get(key) if isinstance(found, dict) else None for key in ("shape", "stride")]
        if not all(isinstance(part, list) for part in parts):
            raise self.wrong("layout", "an object with the lists shape and stride", found)
        try:
            return Layout(*(_nested(part) for part in parts))
        except (ValueError, TypeError, RecursionError) as error:
            raise self.wrong("layout", "a shape and a stride that are nested alike", found) from error


def _is_extent(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= _LARGEST


def _nested(found: object) -> Any:
    """Tuples for lists; whatever else is no integer is refused."""
    if isinstance(found, list):
        return tuple(_nested(one) for one in found)
    if isinstance(found, bool) or not isinstance(found, int) or abs(found) > _LARGEST:
        raise TypeError(f"an integer is needed, found {found!r}")
    return found


def _plain(nested: Any) -> Any:
    """Lists for tuples, as JSON has them."""
    return [_plain(one) for one in nested] if isinstance(nested, tuple) else int(nested)


def _content(path: str) -> bytes:
    require_plain(path)
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("the manifest of a store must be a regular file", path=path)
        if status.st_size > _MOST_BYTES:
            raise FormatError(
                "the manifest is too large to be one",
                path=path,
                wanted=f"at most {_MOST_BYTES} bytes",
                found=status.st_size,
            )
        return os.read(number, _MOST_BYTES + 1)
    finally:
        os.close(number)


def require_plain(path: str) -> None:
    """Refuse a symbolic link: a store's files are in its directory, and nowhere else.

    Raises:
        FormatError: as said.
    """
    if Path(path).is_symlink():
        found = str(Path(path).readlink())
        raise FormatError("a file of a store must not be a symbolic link", path=path, found=found)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two alike, readers would take one or the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _parsed(content: bytes, path: str) -> dict[str, Any]:
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise FormatError(f"the manifest is no JSON: {error}", path=path) from error
    if not isinstance(found, dict):
        raise FormatError(
            "the manifest is no JSON object", path=path, wanted="an object", found=type(found).__name__
        )
    return found
