"""What the metadata of a zarr 3 array say of where its bytes are. Source: the zarr core specification, version 3."""

from __future__ import annotations

import re
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from strideweave.dtype import DType
from strideweave.formats.headers import HeaderFile, as_extents
from strideweave.formats.zarr_shards import ShardIndex

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    class Refuse(Protocol):
        """Raises the error that says what is wrong with the metadata."""

        def __call__(self, message: str, wanted: object = None, found: object = None) -> NoReturn:
            """Raise it."""


__all__ = ["MOST_CHUNKS", "Metadata", "parse_metadata"]

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


class Metadata(NamedTuple):
    """What ``zarr.json`` says, as far as it matters where bytes are.

    Attributes:
        shape: extents of the array.
        chunk: extents of a chunk as it is stored.
        dtype: element type, little-endian.
        fill: the bytes of the value of chunks that are not there.
        prefix: what the names of all files begin with.
        separator: what stands between the numbers in them.
        shards: what a shard is like; None where each chunk is a file.
        file_shape: extents of what one file holds.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: DType
    fill: bytes
    prefix: str
    separator: str
    shards: ShardIndex | None
    file_shape: tuple[int, ...]


def parse_metadata(file: HeaderFile, fields: dict[str, Any]) -> Metadata:
    """Take out of the metadata where the bytes are.

    Args:
        file: what errors name.
        fields: the metadata.

    Raises:
        FormatError: they are damaged, or those of a group, of another version, or of an array whose chunks are not
            stored as they are.
    """

    def refuse(message: str, wanted: object = None, found: object = None) -> NoReturn:
        file.refuse(message, None, wanted, found)

    if fields.get("zarr_format") != 3 or fields.get("node_type") != "array":
        found = f"zarr_format {fields.get('zarr_format')!r}, node_type {fields.get('node_type')!r}"
        refuse(
            "this is a zarr group; name the directory of one of its arrays"
            if fields.get("node_type") == "group"
            else "this is no zarr 3 array",
            "zarr_format 3, node_type 'array'",
            found,
        )
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
    shards, part = _layout(fields.get("codecs"), chunk, dtype, refuse)
    prefix, separator = _key_encoding(fields.get("chunk_key_encoding"), refuse)
    fill = _fill(fields.get("fill_value"), dtype, refuse)
    return Metadata(shape, part, dtype, fill, prefix, separator, shards, chunk)


def _named(field: Any, refuse: Refuse) -> tuple[str, dict[str, Any]]:
    """The name and the configuration of an extension point."""
    if isinstance(field, str):
        return field, {}
    configuration = field.get("configuration", {}) if isinstance(field, dict) else None
    if not isinstance(configuration, dict) or not isinstance(field.get("name"), str):
        refuse("an extension is given by its name and configuration", None, repr(field))
    return str(field["name"]), configuration


def _layout(
    codecs: Any, chunk: tuple[int, ...], dtype: DType, refuse: Refuse
) -> tuple[ShardIndex | None, tuple[int, ...]]:
    """How a file of the chunk grid is made up: of shards, if it is, and the shape of a chunk as it is stored."""
    named = _codecs(codecs, refuse)
    if [name for name, _ in named] != ["sharding_indexed"]:
        _check_codecs(named, dtype.itemsize, refuse)
        return None, chunk
    configuration = named[0][1]
    inner = as_extents(configuration.get("chunk_shape"), refuse)
    if (
        len(inner) != len(chunk)
        or 0 in inner
        or any(of % part for of, part in zip(chunk, inner, strict=True))
    ):
        refuse("the chunks of a shard must divide it", f"divisors of {chunk}", inner)
    _check_codecs(_codecs(configuration.get("codecs"), refuse), dtype.itemsize, refuse)
    index = _codecs(configuration.get("index_codecs"), refuse)
    has_sum = index[-1][0] == "crc32c"
    _check_codecs(index[:-1] if has_sum else index, 8, refuse)
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        refuse("the index of a shard is at its start or end", "'start' or 'end'", repr(location))
    counts = tuple([of // part for of, part in zip(chunk, inner, strict=True)])
    if prod(counts) > MOST_CHUNKS:
        refuse("there are too many chunks in a shard", f"at most {MOST_CHUNKS}", prod(counts))
    return ShardIndex(counts, prod(inner) * dtype.itemsize, location == "end", has_sum), inner


def _codecs(codecs: Any, refuse: Refuse) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(codecs, list) or not codecs:
        refuse("codecs must be a list", "[{'name': 'bytes', ...}]", repr(codecs))
    return [_named(codec, refuse) for codec in codecs]


def _check_codecs(named: list[tuple[str, dict[str, Any]]], itemsize: int, refuse: Refuse) -> None:
    """Refuse chunks that are not stored as they are."""
    if [name for name, _ in named] != ["bytes"]:
        refuse(
            "only chunks that are stored as they are can be read in place; rewrite the array without these codecs",
            ["bytes"],
            [name for name, _ in named],
        )
    endian = named[0][1].get("endian")
    if itemsize > 1 and endian != "little":
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
