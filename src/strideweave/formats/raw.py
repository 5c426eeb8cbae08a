"""Raw little-endian elements: no header, so the caller says what they are."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from strideweave.formats.description import StoredArray, check_byte_order, single_part
from strideweave.formats.headers import HeaderFile

if TYPE_CHECKING:
    from strideweave.dtype import DType

__all__ = ["read_raw"]


def read_raw(path: str, dtype: DType, shape: tuple[int, ...], offset: int) -> StoredArray:
    """Check that a file has the bytes of a row-major array at an offset; what follows them is left alone.

    Raises:
        FormatError: it is too short, or no regular file.
        OSError: the file could not be looked at.
    """
    with HeaderFile(path) as file:
        wanted = prod(shape) * dtype.itemsize
        if offset + wanted > file.size:
            found = f"{max(0, file.size - offset)} bytes"
            file.refuse("the file is too short", offset, f"{wanted} bytes for {dtype.name} {shape}", found)
        check_byte_order(dtype, path, path)
        return single_part(path, dtype, shape, file.known, offset)
