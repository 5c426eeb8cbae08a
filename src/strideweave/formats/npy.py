"""The header of one ``.npy`` file. Source: NumPy Enhancement Proposal 1 and ``numpy.lib.format``."""

from __future__ import annotations

import ast
import re
from math import prod
from typing import TYPE_CHECKING, NoReturn

from strideweave.dtype import DType
from strideweave.formats.description import StoredArray, check_byte_order, single_part
from strideweave.formats.headers import HeaderFile, as_extents

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAGIC", "read_npy"]

MAGIC = b"\x93NUMPY"

_MOST_HEADER_BYTES = 64 << 10  # what is longer describes a structured dtype
_LENGTH_BYTES: Mapping[int, int] = {1: 2, 2: 4, 3: 4}
_DESCRIPTION = re.compile(r"([<>|=])([a-zA-Z])([0-9]{1,3})")
_BY_CODE: Mapping[str, DType] = {
    dtype.numpy.kind + str(dtype.itemsize): dtype for dtype in DType.members() if dtype.numpy.kind in "biuf"
}


def read_npy(path: str, dtype: DType | None = None) -> StoredArray:
    """Read and check the header of a ``.npy`` file; of the values not a byte.

    Args:
        path: the file.
        dtype: what to take elements for that the file only knows the width of, as NumPy writes bfloat16 and the
            8-bit floats; else None, or what the file says.

    Raises:
        FormatError: it is truncated or no ``.npy`` file, its elements are Python objects, records, big-endian or of
            another dtype that a tensor here cannot have, or its size does not match its shape.
        OSError: the file could not be read.
    """
    with HeaderFile(path) as file:
        start = file.read(0, 8, "magic string")
        if start[:6] != MAGIC:
            file.refuse("this is no .npy file", 0, MAGIC, start[:6])
        width = _LENGTH_BYTES.get(start[6])
        if width is None or start[7]:
            file.refuse("the version is unknown", 6, "1.0, 2.0 or 3.0", f"{start[6]}.{start[7]}")
        length = int.from_bytes(file.read(8, width, "header's length"), "little")
        if length > _MOST_HEADER_BYTES:
            file.refuse("the header is too long", 8, f"at most {_MOST_HEADER_BYTES} bytes", f"{length} bytes")
        data = 8 + width + length
        fields = _parse(file, file.read(8 + width, length, "header"), "utf-8" if start[6] == 3 else "latin-1")
        found = _dtype(file, fields["descr"], dtype)

        def refuse(message: str) -> NoReturn:
            file.refuse(message, 8 + width, found=fields["shape"])

        shape = as_extents(fields["shape"] if isinstance(fields["shape"], tuple) else None, refuse)
        if not isinstance(fields["fortran_order"], bool):
            file.refuse("fortran_order must be a bool", 8 + width, "True or False", fields["fortran_order"])
        wanted = prod(shape) * found.itemsize
        if file.size - data != wanted:
            file.refuse(
                "the size does not match the shape",
                data,
                f"{wanted} bytes for {found.name} {shape}",
                f"{file.size - data} bytes",
            )
        check_byte_order(found, path, path)
        is_fortran = fields["fortran_order"] and len(shape) > 1
        return single_part(path, found, shape, file.known, data, order="F" if is_fortran else "C")


def _parse(file: HeaderFile, text: bytes, encoding: str) -> dict[str, object]:
    try:
        # Literals only: nothing is called, looked up or imported.
        fields = ast.literal_eval(text.decode(encoding).strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        file.refuse("the header is no Python literal", 8, "a dictionary", repr(text[:60]))
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        found = list(fields) if isinstance(fields, dict) else type(fields).__name__
        file.refuse("the header has three fields", 8, ["descr", "fortran_order", "shape"], found)
    return fields


def _dtype(file: HeaderFile, description: object, asked: DType | None) -> DType:
    match = _DESCRIPTION.fullmatch(description) if isinstance(description, str) else None
    if match is None:
        if isinstance(description, str) and description.endswith("O"):
            file.refuse(
                "the elements are pickled Python objects, which are never loaded", 8, "numbers", description
            )
        file.refuse("the elements are no plain numbers", 8, "a dtype such as '<f4'", description)
    order, kind, width = match.groups()
    if kind == "O":
        file.refuse(
            "the elements are pickled Python objects, which are never loaded", 8, "numbers", description
        )
    if order == ">" and width != "1":
        file.refuse("the elements are big-endian; convert the file first", 8, "little-endian", description)
    if kind == "V":
        if asked is None or asked.itemsize != int(width):
            file.refuse(
                f"the elements are of an unnamed type of {width} bytes; pass dtype= to say which",
                8,
                f"a dtype of {width} bytes",
                None if asked is None else asked.name,
            )
        return asked
    found = _BY_CODE.get(kind + width)
    if found is None:
        file.refuse("a tensor here cannot have this dtype", 8, ", ".join(sorted(_BY_CODE)), description)
    return found
