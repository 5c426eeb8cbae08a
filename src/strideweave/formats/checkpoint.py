"""Tensors of a checkpoint by name or pattern, in one safetensors file or in many shards."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strideweave.errors import FormatError
from strideweave.formats.description import StoredArray, check_byte_order, single_part
from strideweave.formats.headers import MOST_HEADER_BYTES, HeaderFile, check_density, parse_json
from strideweave.formats.safetensors import DTYPES, SafetensorsHeader, TensorEntry, read_safetensors_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from strideweave.dtype import DType
    from strideweave.io.file_pool import KnownFile

__all__ = ["INDEX_SUFFIX", "Checkpoint", "find_array", "open_checkpoint"]

INDEX_SUFFIX = ".safetensors.index.json"

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_FEW = 5  # names that an error lists
_LONG = 200  # characters of one of them, at most


class Checkpoint(NamedTuple):
    """Which file each tensor of a checkpoint is in.

    Attributes:
        path: what was opened: a file, an index or a directory.
        shards: the path of the file for each tensor.
        headers: what was read to find out, by the path of the file; an index tells without.
    """

    path: str
    shards: Mapping[str, str]
    headers: Mapping[str, SafetensorsHeader] = MappingProxyType({})


class _Found(NamedTuple):
    entry: TensorEntry
    file: KnownFile


def open_checkpoint(path: str) -> Checkpoint:
    """Find out which tensors are in which files.

    Args:
        path: a safetensors file, an index, or a directory that holds one or the other.

    Raises:
        FormatError: an index is damaged or leads out of its directory, a directory holds no checkpoint or several,
            or two files have a tensor of one name.
        OSError: a file could not be read.
    """
    place = Path(path)
    if place.is_dir():
        return _open_directory(place)
    if path.endswith(".json"):
        return _open_index(path)
    header = read_safetensors_header(path)
    return Checkpoint(path, dict.fromkeys(header.entries, path), {path: header})


def find_array(checkpoint: Checkpoint, tensor: str | None) -> StoredArray:
    """Find one tensor, or the tensors of a pattern as one.

    Args:
        checkpoint: where to look.
        tensor: a name; a pattern such as ``experts.{e}.w1``, whose placeholders become leading axes; or None for
            the only tensor that there is.

    Raises:
        FormatError: there is no such tensor, the parts of a pattern are not all there or differ, its dtype is none
            that a tensor here can have, or a file is damaged.
        ValueError: a pattern names a placeholder twice or has two side by side, or there is more than one tensor and
            no name.
    """
    names = checkpoint.shards
    if tensor is None:
        if not names:
            raise FormatError(
                "there is no tensor", path=checkpoint.path, wanted="one tensor", found="0 tensors"
            )
        if len(names) > 1:
            raise ValueError(
                f"{checkpoint.path!r} holds {len(names)} tensors; tensor= must say which one; there are "
                f"{_listed(names)}"
            )
        tensor = next(iter(names))
    if tensor in names or not _PLACEHOLDER.search(tensor):
        found = _find(checkpoint, [tensor])[0]
        dtype = _dtype(found)
        return single_part(tensor, dtype, found.entry.shape, found.file, found.entry.offset)
    extents, parts = _matches(checkpoint, tensor)
    return _stacked(tensor, extents, _find(checkpoint, parts))


def _open_index(path: str) -> Checkpoint:
    with HeaderFile(path) as file:
        if file.size > MOST_HEADER_BYTES:
            file.refuse(
                "the index is too long", 0, f"at most {MOST_HEADER_BYTES} bytes", f"{file.size} bytes"
            )
        text = file.read(0, file.size, "index")
        check_density(file, text, "the index")
        fields = parse_json(text, path, "the index")
    weights = fields.get("weight_map")
    if not isinstance(weights, dict):
        raise FormatError(
            "an index maps tensors to files",
            path=path,
            wanted="an object weight_map",
            found=sorted(fields) if weights is None else type(weights).__name__,
        )
    # The folder of the link itself where the index is one: caches link each file of a checkpoint by its name.
    folder = Path(path).parent
    return Checkpoint(
        path, {name: str(folder / _shard(path, name, shard)) for name, shard in weights.items()}
    )


def _shard(path: str, name: str, shard: object) -> str:
    """A file name of an index, which must stay in the index's directory."""
    if (
        not isinstance(shard, str)
        or not shard
        or "\0" in shard
        or _is_torn(shard)
        or ".." in PurePosixPath(shard).parts
        or ".." in PureWindowsPath(shard).parts
        or PurePosixPath(shard).is_absolute()
        or PureWindowsPath(shard).drive
    ):
        raise FormatError(
            "the index leads out of its directory",
            path=path,
            tensor=name,
            wanted="a file name inside the checkpoint",
            found=repr(shard),
        )
    return shard


def _is_torn(name: str) -> bool:
    """Whether a string of a JSON file has half of a character, which no path can have."""
    return any("\ud800" <= one <= "\udfff" for one in name)


def _open_directory(folder: Path) -> Checkpoint:
    present = sorted(entry.name for entry in folder.iterdir())
    indices = [name for name in present if name.endswith(INDEX_SUFFIX)]
    if "model" + INDEX_SUFFIX in indices or len(indices) == 1:
        name = "model" + INDEX_SUFFIX if "model" + INDEX_SUFFIX in indices else indices[0]
        return _open_index(str(folder / name))
    files = [name for name in present if name.endswith(".safetensors")]
    if indices or not files:
        raise FormatError(
            "the directory must hold one checkpoint, be a store or be a zarr 3 array; name the file or the index",
            path=str(folder),
            wanted=f"one *{INDEX_SUFFIX} or *.safetensors",
            found=indices or present[:_FEW] or "nothing",
        )
    shards: dict[str, str] = {}
    headers: dict[str, SafetensorsHeader] = {}
    for file in files:
        path = str(folder / file)
        headers[path] = read_safetensors_header(path)
        for name in headers[path].entries:
            if name in shards:
                raise FormatError(
                    f"the tensor is in {shards[name]!r} too; name the file",
                    path=path,
                    tensor=name,
                    wanted="one file that has it",
                    found="two",
                )
            shards[name] = path
    return Checkpoint(str(folder), shards, headers)


def _matches(checkpoint: Checkpoint, pattern: str) -> tuple[tuple[int, ...], Sequence[str]]:
    """The extents of a pattern's placeholders, and the tensors that it names, row-major."""
    labels = _PLACEHOLDER.findall(pattern)
    if len(set(labels)) < len(labels):
        raise ValueError(f"the pattern {pattern!r} names a placeholder twice; each is an axis of its own")
    # Literal pieces and labels alternate.
    pieces = _PLACEHOLDER.split(pattern)[::2]
    if "" in pieces[1:-1]:
        raise ValueError(
            f"the pattern {pattern!r} has two placeholders side by side; nothing tells where one number ends and the "
            "next begins"
        )
    expression = re.compile(r"(0|[1-9][0-9]{0,8})".join(re.escape(piece) for piece in pieces))
    found = {
        tuple(map(int, match.groups())): name
        for name in checkpoint.shards
        if (match := expression.fullmatch(name))
    }
    if not found:
        raise FormatError(
            f"no tensor matches the pattern; there are {_listed(checkpoint.shards)}",
            path=checkpoint.path,
            tensor=pattern,
        )
    extents = tuple([max(column) + 1 for column in zip(*found, strict=True)])
    if prod(extents) != len(found):
        gap = _first_missing(extents, found)
        name = "".join([piece + str(label) for piece, label in zip(pieces, [*gap, ""], strict=True)])
        raise FormatError(
            f"a part is missing; the others reach up to {tuple(extent - 1 for extent in extents)}",
            path=checkpoint.path,
            tensor=name,
            wanted=f"{prod(extents)} parts",
            found=f"{len(found)} parts",
        )
    return extents, [found[index] for index in sorted(found)]


def _first_missing(extents: tuple[int, ...], present: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The first index of an array that is not among distinct ones; names may lie about how many there are."""
    wanted = [0] * len(extents)
    for index in sorted(present):
        if index != tuple(wanted):
            break
        for axis in reversed(range(len(extents))):  # count on
            wanted[axis] += 1
            if wanted[axis] < extents[axis]:
                break
            wanted[axis] = 0
    return tuple(wanted)


def _find(checkpoint: Checkpoint, tensors: Sequence[str]) -> list[_Found]:
    """Look tensors up in the headers of their files, each of which is read once."""
    headers = dict(checkpoint.headers)
    found: list[_Found] = []
    for name in tensors:
        path = checkpoint.shards.get(name)
        if path is None:
            raise FormatError(
                f"there is no such tensor; there are {_listed(checkpoint.shards)}",
                path=checkpoint.path,
                tensor=name,
            )
        header = headers.get(path)
        if header is None:
            try:
                header = headers[path] = read_safetensors_header(path)
            except OSError as error:
                error.add_note(f"tensor {name!r} of {checkpoint.path!r} is in that file")
                raise
        entry = header.entries.get(name)
        if entry is None:
            raise FormatError(
                "the index says that the tensor is in this file",
                path=path,
                tensor=name,
                wanted=name,
                found=_listed(header.entries),
            )
        found.append(_Found(entry, header.file))
    return found


def _stacked(pattern: str, extents: tuple[int, ...], found: Sequence[_Found]) -> StoredArray:
    """Tensors of one shape and dtype as one array, each of them a part."""
    first = found[0]
    dtype = _dtype(first)
    for other in found[1:]:
        if (other.entry.dtype, other.entry.shape) != (first.entry.dtype, first.entry.shape):
            raise FormatError(
                f"the parts of {pattern!r} differ",
                path=other.file.path,
                tensor=other.entry.name,
                offset=other.entry.offset,
                wanted=f"{first.entry.dtype} {first.entry.shape} as {first.entry.name!r}",
                found=f"{other.entry.dtype} {other.entry.shape}",
            )
    one = first.entry.shape
    part = (1,) * len(extents) + one
    if 0 in one:
        single_part(first.entry.name, dtype, one, first.file, first.entry.offset)  # which says so
    files = {other.file.path: other.file for other in found}
    places = {path: place for place, path in enumerate(files)}
    return StoredArray(
        pattern,
        dtype,
        (*extents, *one),
        part,
        "C",
        tuple(files.values()),
        np.array([places[other.file.path] for other in found], np.int32),
        np.array([other.entry.offset for other in found], np.int64),
        part,
    )


def _dtype(found: _Found) -> DType:
    dtype = DTYPES.get(found.entry.dtype)
    if dtype is None:
        raise FormatError(
            "a tensor here cannot have this dtype",
            path=found.file.path,
            tensor=found.entry.name,
            offset=found.entry.offset,
            wanted=f"one of {', '.join(DTYPES)}",
            found=found.entry.dtype,
        )
    check_byte_order(dtype, found.file.path, found.entry.name)
    return dtype


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _FEW} more" if len(every) > _FEW else ""
    few = [repr(name) if len(name) <= _LONG else repr(name[:_LONG]) + "..." for name in every[:_FEW]]
    return ", ".join(few) + more if every else "none"
