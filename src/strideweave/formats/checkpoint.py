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
from strideweave.formats.safetensors import DTYPES, read_safetensors_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from strideweave.dtype import DType
    from strideweave.formats.safetensors import Kind, SafetensorsHeader, TensorEntry
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
        header = _find(checkpoint, tensor, dict(checkpoint.headers))
        entry = header.entries[tensor]
        return single_part(tensor, _dtype(header.file, entry), entry.shape, header.file, entry.offset)
    return _stacked(checkpoint, tensor, *_matches(checkpoint, tensor))


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
    places: dict[str, str] = {}
    for name, shard in weights.items():
        if not isinstance(shard, str) or shard not in places:  # many tensors are in each
            places[shard] = str(folder / _shard(path, name, shard))
    return Checkpoint(path, {name: places[shard] for name, shard in weights.items()})


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
    names: list[str] = []
    numbers: list[str] = []
    for name in checkpoint.shards:
        if match := expression.fullmatch(name):
            names.append(name)
            numbers += match.groups()
    if not names:
        raise FormatError(
            f"no tensor matches the pattern; there are {_listed(checkpoint.shards)}",
            path=checkpoint.path,
            tensor=pattern,
        )
    index = np.array(list(map(int, numbers)), np.int64).reshape(-1, len(labels))
    extents = tuple((index.max(axis=0) + 1).tolist())
    order = np.lexsort(index.T[::-1])
    if prod(extents) != len(names):
        gap = _first_missing(extents, map(tuple, index[order].tolist()))
        name = "".join([piece + str(label) for piece, label in zip(pieces, [*gap, ""], strict=True)])
        raise FormatError(
            f"a part is missing; the others reach up to {tuple(extent - 1 for extent in extents)}",
            path=checkpoint.path,
            tensor=name,
            wanted=f"{prod(extents)} parts",
            found=f"{len(names)} parts",
        )
    return extents, [names[place] for place in order.tolist()]


def _first_missing(extents: tuple[int, ...], present: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The first index of an array that is not among distinct ones in order; names may lie about how many there are."""
    wanted = [0] * len(extents)
    for index in present:
        if index != tuple(wanted):
            break
        for axis in reversed(range(len(extents))):  # count on
            wanted[axis] += 1
            if wanted[axis] < extents[axis]:
                break
            wanted[axis] = 0
    return tuple(wanted)


def _find(checkpoint: Checkpoint, tensor: str, headers: dict[str, SafetensorsHeader]) -> SafetensorsHeader:
    """Find the header that has a tensor.

    Args:
        checkpoint: where to look.
        tensor: its name.
        headers: those read so far, by the path of the file; another one is added.
    """
    path = checkpoint.shards.get(tensor)
    if path is None:
        raise FormatError(
            f"there is no such tensor; there are {_listed(checkpoint.shards)}",
            path=checkpoint.path,
            tensor=tensor,
        )
    header = headers.get(path)
    if header is None:
        try:
            header = headers[path] = read_safetensors_header(path)
        except OSError as error:
            error.add_note(f"tensor {tensor!r} of {checkpoint.path!r} is in that file")
            raise
    if tensor not in header.entries.rows:
        raise FormatError(
            "the index says that the tensor is in this file",
            path=path,
            tensor=tensor,
            wanted=tensor,
            found=_listed(header.entries),
        )
    return header


def _stacked(
    checkpoint: Checkpoint, pattern: str, extents: tuple[int, ...], names: Sequence[str]
) -> StoredArray:
    """Tensors of one shape and dtype as one array, each of them a part."""
    paths = [checkpoint.shards[name] for name in names]
    one_in = dict(zip(reversed(paths), reversed(names), strict=True))  # the first part of each file
    headers = dict(checkpoint.headers)
    files = {path: _find(checkpoint, one_in[path], headers) for path in dict.fromkeys(paths)}
    rows_in = {path: header.entries.rows for path, header in files.items()}
    rows = [rows_in[path].get(name, -1) for path, name in zip(paths, names, strict=True)]
    if min(rows) < 0:
        _find(checkpoint, names[rows.index(-1)], headers)  # which says that it is not there
    number = {path: place for place, path in enumerate(files)}
    file_of = np.array([number[path] for path in paths], np.int32)
    # The tables of all files, one after the other.
    tables = [header.entries for header in files.values()]
    place = np.cumsum([0, *map(len, tables)])[file_of] + rows
    offset_of = np.concatenate([table.offsets for table in tables])[place]
    kinds: dict[Kind, int] = {}
    same = [np.array([kinds.setdefault(kind, len(kinds)) for kind in table.kinds]) for table in tables]
    kind_of = np.concatenate([kind[table.kind_of] for kind, table in zip(same, tables, strict=True)])[place]
    first, other = (
        _find(checkpoint, names[part], headers).entries[names[part]]
        for part in (0, int(np.argmax(kind_of != kind_of[0])))
    )
    dtype = _dtype(files[paths[0]].file, first)
    if (other.dtype, other.shape) != (first.dtype, first.shape):
        raise FormatError(
            f"the parts of {pattern!r} differ",
            path=checkpoint.shards[other.name],
            tensor=other.name,
            offset=other.offset,
            wanted=f"{first.dtype} {first.shape} as {first.name!r}",
            found=f"{other.dtype} {other.shape}",
        )
    one = first.shape
    part_shape = (1,) * len(extents) + one
    if 0 in one:
        single_part(first.name, dtype, one, files[paths[0]].file, first.offset)  # which says so
    return StoredArray(
        pattern,
        dtype,
        (*extents, *one),
        part_shape,
        "C",
        tuple([header.file for header in files.values()]),
        file_of,
        offset_of,
        part_shape,
    )


def _dtype(file: KnownFile, entry: TensorEntry) -> DType:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise FormatError(
            "a tensor here cannot have this dtype",
            path=file.path,
            tensor=entry.name,
            offset=entry.offset,
            wanted=f"one of {', '.join(DTYPES)}",
            found=entry.dtype,
        )
    check_byte_order(dtype, file.path, entry.name)
    return dtype


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _FEW} more" if len(every) > _FEW else ""
    few = [repr(name) if len(name) <= _LONG else repr(name[:_LONG]) + "..." for name in every[:_FEW]]
    return ", ".join(few) + more if every else "none"
