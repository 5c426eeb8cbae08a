"""What is at a path, and what is known to be wrong with it without reading any values."""

from __future__ import annotations

import itertools
import re
import stat
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strideweave.cli.geometry import geometry_fields
from strideweave.cli.values import parse_extents
from strideweave.formats.checkpoint import open_checkpoint
from strideweave.formats.safetensors import read_safetensors_header
from strideweave.store import read_manifest
from strideweave.store.manifest import DATA, JOURNAL, TABLE
from strideweave.tiling import tile_grid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from strideweave.cli.source import Source
    from strideweave.formats.description import StoredArray
    from strideweave.formats.safetensors import SafetensorsHeader, TensorEntry
    from strideweave.tiles.grid import TileGrid

__all__ = ["ArrayContents", "CheckpointContents", "Damage", "Pattern", "StoreContents"]

_LABELS = "ijklmnopqrstuvwxyz"
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])(0|[1-9][0-9]{0,8})(?![A-Za-z0-9_])")


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it should be.

    Attributes:
        file: where.
        message: what.
        first_tile: ordinal of the first tile that is lost; None where it is not known.
        tiles: how many are, from that one on.
    """

    file: str
    message: str
    first_tile: int | None = None
    tiles: int = 0


@dataclass(frozen=True, slots=True)
class Pattern:
    """Tensors of one shape and dtype whose names differ in numbers, which can be opened as one.

    Attributes:
        pattern: their name with a placeholder for each number.
        extents: how many numbers each placeholder stands for.
        dtype: element type, as the format calls it.
        shape: extents of each.
        nbytes: bytes of all.
    """

    pattern: str
    extents: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ArrayContents:
    """An array that can be opened in place.

    Attributes:
        source: how it was asked for.
        array: where it lies.
        grid: its tiles.
    """

    source: Source
    array: StoredArray
    grid: TileGrid
    damage: tuple[Damage, ...] = ()

    @classmethod
    def read(cls, source: Source, tile_shape: str | None = None) -> ArrayContents:
        """Read and check the headers.

        Raises:
            ValueError, OSError: as ``open_tiled``.
        """
        array = source.describe()
        return cls(source, array, tile_grid(array.shape, parse_extents(tile_shape) or array.tile_shape))

    def fields(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        files = [{"path": file.path, "bytes": file.size} for file in self.array.files]
        return {
            "path": str(self.source.path),
            "format": self.source.kind,
            "tensor": self.source.tensor,
            **geometry_fields(self.array.dtype, self.array.shape, self.grid),
            "part_shape": list(self.array.part_shape),
            "parts": len(self.array.file_of),
            "missing_parts": int((self.array.file_of < 0).sum()),
            "order": self.array.order,
            "files": files,
            "damage": [],
        }


@dataclass(frozen=True)
class StoreContents:
    """A store of ``save_tiled``.

    Attributes:
        path: its directory.
        grid: its tiles.
        about: its manifest's fields and the sizes of its files.
        damage: what the sizes say.
    """

    path: str
    grid: TileGrid
    about: Mapping[str, Any]
    damage: tuple[Damage, ...]

    @classmethod
    def read(cls, path: str) -> StoreContents:
        """Read the manifest and look at the files.

        Raises:
            FormatError, OSError: as ``read_manifest``.
        """
        manifest = read_manifest(path)
        sizes = {name: _size(Path(path, name)) for name in (DATA, TABLE, JOURNAL)}
        about = {
            **geometry_fields(manifest.dtype, manifest.shape, manifest.grid),
            "layout_fingerprint": manifest.fingerprint,
            "files": [{"path": str(Path(path, name)), "bytes": size} for name, size in sizes.items()],
        }
        count = manifest.grid.tile_count
        wanted = {DATA: manifest.tile_bytes, TABLE: 8}  # bytes of one tile
        damage = [Damage(str(Path(path, JOURNAL)), "the file is missing")] if sizes[JOURNAL] is None else []
        for name, width in wanted.items():
            found, file = sizes[name], str(Path(path, name))
            if found is None:
                damage.append(Damage(file, "the file is missing", 0, count))
            elif found != count * width:
                whole = min(found // width, count)
                message = f"wanted {count * width} bytes, found {found}"
                damage.append(Damage(file, message, whole if whole < count else None, count - whole))
        return cls(path, manifest.grid, about, tuple(damage))

    def fields(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        damage = [asdict(one) for one in self.damage]
        return {"path": self.path, "format": "store", "tensor": None, **self.about, "damage": damage}


@dataclass(frozen=True)
class CheckpointContents:
    """The tensors of a safetensors checkpoint.

    Attributes:
        path: the file, index or directory.
        entries: each tensor, with its file.
        files: bytes of each file.
        damage: files that are missing or not what they should be, and tensors that are not in theirs.
    """

    path: str
    entries: Sequence[tuple[str, TensorEntry]]
    files: Mapping[str, int]
    damage: tuple[Damage, ...] = field(default=())

    @classmethod
    def read(cls, path: str) -> CheckpointContents:
        """Read every header; a file that is damaged does not hide the others.

        Raises:
            FormatError, OSError: as ``open_checkpoint``.
        """
        checkpoint = open_checkpoint(path)
        headers: dict[str, SafetensorsHeader] = {}
        damage: list[Damage] = []
        for file in dict.fromkeys(checkpoint.shards.values()):
            try:
                headers[file] = read_safetensors_header(file)
            except (ValueError, OSError) as error:
                message = error.strerror if isinstance(error, OSError) else None
                damage.append(Damage(file, message or str(error)))
        entries = []
        for name, file in sorted(checkpoint.shards.items(), key=lambda item: _natural(item[0])):
            entry = headers[file].entries.get(name) if file in headers else None
            if entry is not None:
                entries.append((file, entry))
            elif file in headers:
                damage.append(Damage(file, f"the index says that tensor {name!r} is in it, which is not so"))
        return cls(path, entries, {file: header.file.size for file, header in headers.items()}, tuple(damage))

    def patterns(self) -> Iterator[Pattern | TensorEntry]:
        """The tensors, those that can be opened as one together."""
        groups: dict[tuple[str, str, tuple[int, ...]], list[TensorEntry]] = {}
        for _, entry in self.entries:
            groups.setdefault((_pattern(entry.name), entry.dtype, entry.shape), []).append(entry)
        taken = [pattern for pattern, _, _ in groups]
        for (pattern, dtype, shape), group in groups.items():
            numbers = [tuple([int(number) for number in _NUMBER.findall(entry.name)]) for entry in group]
            columns = [
                max(column) + 1 if len(set(column)) > 1 else None for column in zip(*numbers, strict=True)
            ]
            extents = tuple([extent for extent in columns if extent is not None])
            if len(group) > 1 and prod(extents) == len(group) and taken.count(pattern) == 1:
                name = _named(group[0].name, columns)
                yield Pattern(name, extents, dtype, shape, sum([entry.nbytes for entry in group]))
            else:
                yield from group

    def fields(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "path": self.path,
            "format": "safetensors",
            "bytes": sum([entry.nbytes for _, entry in self.entries]),
            "tensors": [
                {
                    "name": entry.name,
                    "dtype": entry.dtype,
                    "shape": list(entry.shape),
                    "bytes": entry.nbytes,
                    "file": file,
                    "offset": entry.offset,
                }
                for file, entry in self.entries
            ],
            "patterns": [asdict(one) for one in self.patterns() if isinstance(one, Pattern)],
            "files": [{"path": file, "bytes": nbytes} for file, nbytes in self.files.items()],
            "damage": [asdict(one) for one in self.damage],
        }


def _pattern(name: str) -> str:
    """A name without the numbers that stand alone in it."""
    return _NUMBER.sub("{}", name)


def _named(name: str, columns: Sequence[int | None]) -> str:
    """A name with a placeholder for each of those numbers that varies."""
    extents, labels = iter(columns), itertools.count()

    def label(number: re.Match[str]) -> str:
        return number[0] if next(extents) is None else f"{{{_LABELS[next(labels) % len(_LABELS)]}}}"

    return _NUMBER.sub(label, name)


def _natural(name: str) -> list[tuple[int, str]]:
    """Order names so that 10 comes after 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _size(path: Path) -> int | None:
    """Bytes of a file; None where there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
