"""One zarr 3 array in a directory, its chunks uncompressed. Source: the zarr core specification, version 3."""

from __future__ import annotations

import itertools
import os
import re
import stat
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from strideweave.dtype import DType
from strideweave.errors import FormatError
from strideweave.formats.description import StoredArray, check_byte_order, nearest_divisor
from strideweave.formats.headers import MOST_HEADER_BYTES, HeaderFile, as_extents, parse_json
from strideweave.io.file_pool import KnownFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Protocol

    class Refuse(Protocol):
        """Raises the error that says what is wrong with the metadata."""

        def __call__(self, message: str, wanted: object = None, found: object = None) -> NoReturn:
            """Raise it."""


__all__ = ["METADATA", "read_zarr"]

METADATA = "zarr.json"

MOST_CHUNKS = 1_000_000
"""Chunks that are looked at, at most: each is a file, and looking at one takes some microseconds."""

_DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        "bool": DType.Bool,
        "int8": DType.Int8,
        "uint8": DType.UInt8,
        "int16": DType.Int16,
        "int32": DType.Int32,
        "int64": DType.Int64,
        "float8_e4m3fn": DType.Float8E4M3FN,
        "float8_e5m2": DType.Float8E5M2,
        "float16": DType.Float16,
        "bfloat16": DType.BFloat16,
        "float32": DType.Float32,
        "float64": DType.Float64,
    }
)
_WORDS: Mapping[str, float] = MappingProxyType(
    {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
)
_KNOWN_FIELDS = frozenset(
    {
        "zarr_format",
        "node_type",
        "shape",
        "data_type",
        "chunk_grid",
        "chunk_key_encoding",
        "fill_value",
        "codecs",
        "attributes",
        "storage_transformers",
        "dimension_names",
    }
)


class _Metadata(NamedTuple):
    """What ``zarr.json`` says, as far as it matters where bytes are."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: DType
    fill: bytes
    prefix: str
    separator: str


def read_zarr(path: str) -> StoredArray:
    """Read and check the metadata of a zarr 3 array and look at its chunks; of the values not a byte.

    A chunk that is not there has the fill value, as zarr has it: for as long as the array is open.

    Args:
        path: the array's directory.

    Raises:
        FormatError: the metadata are damaged, or those of a group, of another version, or of an array whose chunks
            are compressed, sharded, transposed or big-endian; a chunk has another size than its shape.
        OSError: a file could not be looked at.
    """
    file = f"{path}/{METADATA}"
    with HeaderFile(file) as header:
        if header.size > MOST_HEADER_BYTES:
            header.refuse("it is too long", 0, f"at most {MOST_HEADER_BYTES} bytes", f"{header.size} bytes")
        found = _metadata(header, parse_json(header.read(0, header.size, "metadata"), file, "the metadata"))
    check_byte_order(found.dtype, file, path)
    counts = tuple([-(-extent // part) for extent, part in zip(found.shape, found.chunk, strict=True)])
    if prod(counts) > MOST_CHUNKS:
        raise FormatError(
            "there are too many chunks to look at each",
            path=file,
            wanted=f"at most {MOST_CHUNKS}",
            found=prod(counts),
        )
    files, file_of = _look_at_chunks(path, found, counts)
    tile = tuple(
        [nearest_divisor(extent, part) for extent, part in zip(found.shape, found.chunk, strict=True)]
    )
    zeros = np.zeros(len(file_of), np.int64)
    return StoredArray(
        path, found.dtype, found.shape, found.chunk, "C", files, file_of, zeros, tile, found.fill
    )


def _look_at_chunks(
    path: str, found: _Metadata, counts: tuple[int, ...]
) -> tuple[tuple[KnownFile, ...], Any]:
    wanted = prod(found.chunk) * found.dtype.itemsize
    files: list[KnownFile] = []
    file_of = np.full(prod(counts), -1, np.int32)
    for number, key in enumerate(_keys(found, counts)):
        chunk = f"{path}/{key}"
        try:
            status = os.stat(chunk)  # noqa: PTH116  one call a chunk, and there may be very many
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_size != wanted:
            size = f"{status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "no regular file"
            raise FormatError(
                "the chunk does not match its shape",
                path=chunk,
                tensor=path,
                wanted=f"{wanted} bytes for {found.dtype.name} {found.chunk}",
                found=size,
            )
        file_of[number] = len(files)
        files.append(KnownFile.of(chunk, status))
    return tuple(files), file_of


def _keys(found: _Metadata, counts: tuple[int, ...]) -> Iterator[str]:
    """The file of each chunk, row-major."""
    names = [[str(index) for index in range(count)] for count in counts]
    return (found.prefix + found.separator.join(index) for index in itertools.product(*names))


def _metadata(file: HeaderFile, fields: dict[str, Any]) -> _Metadata:
    def refuse(message: str, wanted: object = None, found: object = None) -> NoReturn:
        file.refuse(message, None, wanted, found)

    if fields.get("zarr_format") != 3 or fields.get("node_type") != "array":
        found = f"zarr_format {fields.get('zarr_format')!r}, node_type {fields.get('node_type')!r}"
        refuse("this is no zarr 3 array", "zarr_format 3, node_type 'array'", found)
    for name in sorted(fields.keys() - _KNOWN_FIELDS):
        field = fields[name]
        if not (isinstance(field, dict) and field.get("must_understand") is False):
            refuse("the metadata have a field that must be understood", sorted(_KNOWN_FIELDS), repr(name))
    if fields.get("storage_transformers"):
        refuse("storage transformers are not supported", "none", fields["storage_transformers"])
    dtype = _DTYPES.get(fields["data_type"]) if isinstance(fields.get("data_type"), str) else None
    if dtype is None:
        refuse("a tensor here cannot have this dtype", ", ".join(_DTYPES), repr(fields.get("data_type")))
    shape = as_extents(fields.get("shape"), refuse)
    grid = _named(fields.get("chunk_grid"), refuse)
    if grid[0] != "regular":
        refuse("the chunk grid is not supported", "'regular'", repr(grid[0]))
    chunk = as_extents(grid[1].get("chunk_shape"), refuse)
    if len(chunk) != len(shape) or not shape or 0 in chunk or 0 in shape:
        refuse(
            "shape and chunk shape need one extent each per axis, at least 1", None, f"{shape} and {chunk}"
        )
    if prod(shape) * dtype.itemsize >= 2**62 or prod(chunk) * dtype.itemsize >= 2**62:
        refuse("the array is too large", "less than 2**62 bytes", f"{shape} and {chunk}")
    _check_codecs(fields.get("codecs"), dtype, refuse)
    prefix, separator = _key_encoding(fields.get("chunk_key_encoding"), refuse)
    return _Metadata(shape, chunk, dtype, _fill(fields.get("fill_value"), dtype, refuse), prefix, separator)


def _named(field: Any, refuse: Refuse) -> tuple[str, dict[str, Any]]:
    """The name and the configuration of an extension point."""
    if isinstance(field, str):
        return field, {}
    configuration = field.get("configuration", {}) if isinstance(field, dict) else None
    if not isinstance(configuration, dict) or not isinstance(field.get("name"), str):
        refuse("an extension is given by its name and configuration", None, repr(field))
    return str(field["name"]), configuration


def _check_codecs(codecs: Any, dtype: DType, refuse: Refuse) -> None:
    if not isinstance(codecs, list) or not codecs:
        refuse("codecs must be a list", "[{'name': 'bytes', ...}]", repr(codecs))
    named = [_named(codec, refuse) for codec in codecs]
    if [name for name, _ in named] != ["bytes"]:
        refuse(
            "only chunks that are stored as they are can be read in place; rewrite the array without these codecs",
            ["bytes"],
            [name for name, _ in named],
        )
    endian = named[0][1].get("endian")
    if dtype.itemsize > 1 and endian != "little":
        refuse("the chunks must be little-endian; convert the array first", "'little'", repr(endian))


def _key_encoding(field: Any, refuse: Refuse) -> tuple[str, str]:
    name, configuration = _named(field, refuse)
    if name not in ("default", "v2"):
        refuse("the chunk key encoding is unknown", "'default' or 'v2'", repr(name))
    separator = configuration.get("separator", "/" if name == "default" else ".")
    if separator not in ("/", "."):
        refuse("the separator of chunk keys is unknown", "'/' or '.'", repr(separator))
    return ("c" + separator if name == "default" else ""), separator


def _fill(value: Any, dtype: DType, refuse: Refuse) -> bytes:
    """The bytes of the fill value."""
    found = value
    if isinstance(value, str) and dtype.is_differentiable:
        digits = value.removeprefix("0x")
        if value != digits and len(digits) == 2 * dtype.itemsize and re.fullmatch("[0-9a-fA-F]+", digits):
            return bytes.fromhex(digits)[::-1]
        found = _WORDS.get(value)
    if isinstance(found, bool) is not (dtype is DType.Bool) or not isinstance(found, int | float):
        refuse("the fill value does not fit the dtype", dtype.name, repr(value))
    try:
        return dtype.convert(found).tobytes()
    except (OverflowError, ValueError):
        refuse("the fill value does not fit the dtype", dtype.name, repr(value))
