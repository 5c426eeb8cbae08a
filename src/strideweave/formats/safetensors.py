"""The header of one safetensors file: eight bytes of length, JSON, and then the tensors without a gap.

Source: the format's description in the README of the ``safetensors`` project.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from strideweave.dtype import DType
from strideweave.formats.headers import (
    MOST_HEADER_BYTES,
    HeaderFile,
    as_extents,
    check_density,
    parse_json,
    plain_integer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strideweave.io.file_pool import KnownFile

__all__ = ["SafetensorsHeader", "TensorEntry", "read_safetensors_header"]

DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        "BOOL": DType.Bool,
        "I8": DType.Int8,
        "U8": DType.UInt8,
        "I16": DType.Int16,
        "I32": DType.Int32,
        "I64": DType.Int64,
        "F8_E4M3": DType.Float8E4M3FN,
        "F8_E5M2": DType.Float8E5M2,
        "F16": DType.Float16,
        "BF16": DType.BFloat16,
        "F32": DType.Float32,
        "F64": DType.Float64,
    }
)
"""What the format calls the element types that a tensor here can have. It has others, which are only passed over."""

_WIDTHS = MappingProxyType({name: dtype.itemsize for name, dtype in DTYPES.items()})

_FIELDS = ("dtype", "shape", "data_offsets")


class TensorEntry(NamedTuple):
    """One tensor of a file.

    Attributes:
        name: its name.
        dtype: what the format calls its element type, whether or not that is one of ``DTYPES``.
        shape: its extents.
        offset: its first byte in the file.
        nbytes: its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What one file holds.

    Attributes:
        file: the file as it was.
        entries: its tensors by name.
        metadata: the words that whoever wrote it left in it.
    """

    file: KnownFile
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_safetensors_header(path: str) -> SafetensorsHeader:
    """Read and check the header of a safetensors file; of the tensors not a byte.

    Raises:
        FormatError: it is truncated, is not the JSON that it must be, names a tensor twice, has a tensor whose bytes
            lie outside the file, overlap another's or do not match its shape, or has bytes of no tensor.
        OSError: the file could not be read.
    """
    with HeaderFile(path) as file:
        length = int.from_bytes(file.read(0, 8, "header's length"), "little")
        if length > MOST_HEADER_BYTES:
            file.refuse("the header is too long", 0, f"at most {MOST_HEADER_BYTES} bytes", f"{length} bytes")
        text = file.read(8, length, "header")
        if text[:1] != b"{":
            file.refuse("the header does not begin with a brace", 8, b"{", text[:1])
        check_density(file, text, "the header", 8)
        fields = parse_json(text, path, "the header", 8, shorten=_shortened)
        metadata = fields.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(word, str) for word in metadata.values()):
            file.refuse("the metadata must be strings by name", 8)
        data = 8 + length
        entries = {name: _entry(file, name, field, data) for name, field in fields.items()}
        _check_cover(file, entries, data)
        return SafetensorsHeader(file.known, MappingProxyType(entries), MappingProxyType(metadata))


def _shortened(fields: list[tuple[str, Any]]) -> tuple[Any, ...] | None:
    """The dtype, shape and offsets of a description as it is usually written; None for anything else.

    The collector soon passes plain tuples over, and visits objects and lists again and again, while ever more of them
    are read: with those a header of many tensors takes three times as long.
    """
    if len(fields) != len(_FIELDS):
        return None
    (first, dtype), (second, shape), (third, offsets) = fields
    if (first, second, third) != _FIELDS or type(shape) is not list or type(offsets) is not list:
        return None
    return dtype, tuple(shape), tuple(offsets)


def _entry(file: HeaderFile, name: str, field: Any, data: int) -> TensorEntry:
    def refuse(message: str, wanted: object = None, found: object = None) -> NoReturn:
        file.refuse(message, 8, wanted, found, tensor=name)

    if isinstance(field, dict) and field.keys() == set(_FIELDS):
        field = tuple([field[key] for key in _FIELDS])
    if not isinstance(field, tuple):
        keys = sorted(field) if isinstance(field, dict) else type(field).__name__
        refuse("a tensor is described by three fields", sorted(_FIELDS), keys)
    dtype, shape, offsets = field
    if not isinstance(dtype, str):
        refuse("a dtype must be named", "a string", repr(dtype))
    shape = as_extents(shape, refuse)
    if (
        not isinstance(offsets, list | tuple)
        or len(offsets) != 2
        or not (plain_integer(offsets[0]) and plain_integer(offsets[1]))
    ):
        refuse("the offsets must be two integers, none negative", "[begin, end]", repr(offsets))
    begin, end = offsets
    size = file.size - data
    if not begin <= end <= size:
        refuse("the tensor lies outside the file", f"0 <= begin <= end <= {size}", f"[{begin}, {end}]")
    width = _WIDTHS.get(dtype)
    if width is not None and prod(shape) * width != end - begin:
        wanted = f"{prod(shape) * width} bytes for {dtype} {shape}"
        refuse("the offsets do not match the shape", wanted, f"{end - begin} bytes")
    return TensorEntry(name, dtype, shape, data + begin, end - begin)


def _check_cover(file: HeaderFile, entries: Mapping[str, TensorEntry], data: int) -> None:
    """Tensors follow each other from the header to the end of the file."""
    end = data
    for entry in sorted(entries.values(), key=attrgetter("offset", "nbytes")):
        if entry.offset != end:
            fault = (
                "overlaps the one before it" if entry.offset < end else "leaves bytes before it to no tensor"
            )
            file.refuse(f"the tensor {fault}", entry.offset, f"begin at {end}", f"{entry.offset}", entry.name)
        end = entry.offset + entry.nbytes
    if end != file.size:
        file.refuse("the file does not end with its last tensor", end, f"{end} bytes", f"{file.size} bytes")
