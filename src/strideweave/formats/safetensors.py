"""The header of one safetensors file: eight bytes of length, JSON, and then the tensors without a gap.

Source: the format's description in the README of the ``safetensors`` project.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from strideweave.dtype import DType
from strideweave.errors import FormatError
from strideweave.formats.headers import (
    MOST_HEADER_BYTES,
    HeaderFile,
    as_extents,
    check_density,
    parse_json,
    plain_integer,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from strideweave.io.file_pool import KnownFile

__all__ = ["SafetensorsHeader", "TensorEntry", "TensorTable", "read_safetensors_header"]

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

Kind: TypeAlias = tuple[str, tuple[int, ...]]

# A tensor as the format's own library describes it, and what is behind it: without spaces, or anything that is escaped.
_DESCRIPTION = re.compile(
    r'"([^"\\\x00-\x1f]*)":(\{"dtype":"[^"\\\x00-\x1f]*","shape":\[[0-9,]*\]),'
    r'"data_offsets":\[([0-9]{1,18},[0-9]{1,18})\]\}(?:,|\}\Z)'
)
_FRAME = len('"":,"data_offsets":[]},')
_PIECE = 1 << 18  # characters: some milliseconds

_METADATA = "__metadata__"
_ANY, _BEYOND = -1, 1 << 62


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


class TensorTable(Mapping[str, TensorEntry]):
    """The tensors of a file by name, kept as columns: an entry is made for who asks for it.

    Attributes:
        rows: the row of each name.
        kinds: the dtypes and shapes that tensors have, each pair once.
        kind_of: for each row the place of its pair in ``kinds``.
        offsets: for each row the tensor's first byte in the file.
        nbytes: for each row the tensor's bytes.
    """

    __slots__ = ("kind_of", "kinds", "nbytes", "offsets", "rows")

    def __init__(
        self,
        names: Iterable[str],
        kinds: Iterable[Kind],
        kind_of: NDArray[np.int64],
        offsets: NDArray[np.int64],
        nbytes: NDArray[np.int64],
    ) -> None:
        self.rows = {name: row for row, name in enumerate(names)}
        self.kinds = tuple(kinds)
        self.kind_of = kind_of
        self.offsets = offsets
        self.nbytes = nbytes

    @classmethod
    def of(cls, entries: Mapping[str, TensorEntry]) -> TensorTable:
        """The table of entries that are there already."""
        kinds: dict[Kind, int] = {}
        kind_of = [kinds.setdefault((entry.dtype, entry.shape), len(kinds)) for entry in entries.values()]
        offsets = [entry.offset for entry in entries.values()]
        nbytes = [entry.nbytes for entry in entries.values()]
        return cls(entries, kinds, *(np.array(column, np.int64) for column in (kind_of, offsets, nbytes)))

    def __getitem__(self, name: str) -> TensorEntry:
        row = self.rows[name]
        dtype, shape = self.kinds[self.kind_of[row]]
        return TensorEntry(name, dtype, shape, int(self.offsets[row]), int(self.nbytes[row]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What one file holds.

    Attributes:
        file: the file as it was.
        entries: its tensors by name.
        metadata: the words that whoever wrote it left in it.
    """

    file: KnownFile
    entries: TensorTable
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
        entries, metadata = _read_usual(file, text) or _read_any(file, text)
        return SafetensorsHeader(file.known, entries, MappingProxyType(metadata))


def _read_usual(file: HeaderFile, text: bytes) -> tuple[TensorTable, Mapping[str, str]] | None:
    """Read a header as the format's own library writes it, many tensors at once.

    Returns:
        Its tensors and metadata, or None where anything is unusual or wrong: what it is, ``_read_any`` finds out.
    """
    names: list[str] = []
    number: dict[str, int] = {}  # of each dtype and shape, in the words of the header
    kind_of, ranges = [], []
    try:
        words = text.decode("utf-8").rstrip(" \t\n\r")
        start, metadata = _usual_metadata(file, words)
        for found in _described(words, start):
            some, described, places = zip(*found, strict=True)
            names += some
            kind_of.append(np.array([number.setdefault(kind, len(number)) for kind in described]))
            ranges.append(np.array(json.loads("[" + ",".join(places) + "]")))
        kinds = [
            (kind["dtype"], as_extents(kind["shape"], _give_up))
            for kind in json.loads("[" + "},".join(number) + "}]")
        ]
    except (ValueError, FormatError):
        return None
    data = 8 + len(text)
    rows = np.concatenate(kind_of)
    begins, ends = np.concatenate(ranges).reshape(-1, 2).T
    nbytes = ends - begins
    wanted = np.array([_bytes_of(*kind) for kind in kinds])[rows]
    order = np.lexsort((nbytes, begins))
    table = TensorTable(names, kinds, rows, begins + data, nbytes)
    is_sound = (
        len(table) == len(names)
        and _METADATA not in table
        and ((wanted == nbytes) | (wanted == _ANY) & (nbytes >= 0)).all()
        and begins[order[0]] == 0
        and (begins[order[1:]] == ends[order[:-1]]).all()
        and ends[order[-1]] == file.size - data
    )
    return (table, metadata) if is_sound else None


def _usual_metadata(file: HeaderFile, words: str) -> tuple[int, Mapping[str, str]]:
    """The metadata at the beginning of a header, and the place of the first tensor behind them.

    Raises:
        ValueError, FormatError: anything else is there.
    """
    if _DESCRIPTION.match(words, 1):
        return 1, {}
    first = _DESCRIPTION.search(words) if words.startswith(f'{{"{_METADATA}":') else None
    if first is None:
        _give_up()
    start = first.start()
    # An object that ends where the tensors begin, so that all of it is one.
    before = parse_json((words[: start - 1] + "}").encode(), file.path, "the header")
    metadata = before.pop(_METADATA, None)
    if words[start - 1] != "," or before or not _is_metadata(metadata):
        _give_up()
    return start, metadata


def _described(words: str, start: int) -> Iterator[list[tuple[str, str, str]]]:
    """Name, dtype with shape, and offsets of all the tensors from a place to the end of a header, piece by piece.

    Raises:
        ValueError: something else is there, or between them.
    """
    if not words.endswith("}}"):
        _give_up()
    while start < len(words):
        end = len(words)
        if end - start > _PIECE:  # other threads may want the interpreter, which a search keeps
            end = words.rfind('},"', start, start + _PIECE) + 2
        found = _DESCRIPTION.findall(words, start, end)
        if not found or sum(map(len, chain(*found))) + len(found) * _FRAME != end - start:
            _give_up()
        yield found
        start = end


def _bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, those beyond any file as so many; ``_ANY`` where its dtype is only passed over."""
    width = _WIDTHS.get(dtype)
    return _ANY if width is None else min(prod(shape) * width, _BEYOND)


def _give_up(message: str = "not the usual form") -> NoReturn:
    raise ValueError(message)


def _read_any(file: HeaderFile, text: bytes) -> tuple[TensorTable, Mapping[str, str]]:
    """Read a header in any form, one tensor after the other, or say what is wrong with it.

    Raises:
        FormatError: as ``read_safetensors_header``.
    """
    fields = parse_json(text, file.path, "the header", 8, shorten=_shortened)
    metadata = fields.pop(_METADATA, {})
    if not _is_metadata(metadata):
        file.refuse("the metadata must be strings by name", 8)
    data = 8 + len(text)
    entries = {name: _entry(file, name, field, data) for name, field in fields.items()}
    _check_cover(file, entries, data)
    return TensorTable.of(entries), metadata


def _is_metadata(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(word, str) for word in found.values())


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
