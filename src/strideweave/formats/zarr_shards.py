"""Shards of a zarr 3 array: files of many chunks, each with an index of where these are.

Source: the zarr codec ``sharding_indexed``, version 1.0.
"""

from __future__ import annotations

from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from strideweave.formats.headers import HeaderFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from strideweave.io.file_pool import KnownFile

__all__ = ["ShardIndex", "crc32c", "read_shard"]

_ABSENT = (1 << 64) - 1
_SUM_BYTES = 4


class ShardIndex(NamedTuple):
    """What every shard of an array is like.

    Attributes:
        counts: chunks in a shard along each axis.
        chunk_bytes: bytes of a chunk.
        at_end: whether the index follows the chunks; else it comes before them.
        has_sum: whether a checksum follows the index.
    """

    counts: tuple[int, ...]
    chunk_bytes: int
    at_end: bool
    has_sum: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the index."""
        return 16 * prod(self.counts) + (_SUM_BYTES if self.has_sum else 0)


def read_shard(path: str, array: str, index: ShardIndex) -> tuple[KnownFile, NDArray[np.int64]]:
    """Read the index of one shard and check it against the file.

    Args:
        path: the shard.
        array: what errors call the array.
        index: what its index is like.

    Returns:
        The file, and for each chunk its first byte there, or -1 where the shard has none; shaped ``index.counts``.

    Raises:
        FormatError: the shard is too short for its index, the index does not have its checksum, or a chunk lies
            outside the file, overlaps another or has another size than its shape.
        FileNotFoundError: there is no such shard.
        OSError: it could not be read.
    """
    with HeaderFile(path) as file:

        def refuse(message: str, offset: int, wanted: object, found: object) -> NoReturn:
            file.refuse(message, offset, wanted, found, tensor=array)

        if file.size < index.nbytes:
            refuse("the shard is too short for its index", 0, f"{index.nbytes} bytes", f"{file.size} bytes")
        start = file.size - index.nbytes if index.at_end else 0
        text = file.read(start, index.nbytes, "index")
        if index.has_sum:
            text, stored = text[:-_SUM_BYTES], int.from_bytes(text[-_SUM_BYTES:], "little")
            found = crc32c(text)
            if found != stored:
                refuse("the index of the shard is damaged", start, f"checksum {stored:08x}", f"{found:08x}")
        entries = np.frombuffer(text, "<u8").reshape(-1, 2)
        present = np.flatnonzero((entries != _ABSENT).any(axis=1))
        offsets, sizes = entries[present].T
        for wrong in np.flatnonzero(sizes != index.chunk_bytes)[:1].tolist():
            refuse(
                "a chunk does not match its shape",
                int(offsets[wrong]),
                f"{index.chunk_bytes} bytes",
                int(sizes[wrong]),
            )
        for wrong in np.flatnonzero(offsets > max(0, file.size - index.chunk_bytes))[:1].tolist():
            refuse(
                "a chunk lies outside the shard",
                int(offsets[wrong]),
                f"within {file.size} bytes",
                "beyond them",
            )
        order = np.sort(offsets)
        for wrong in np.flatnonzero(np.diff(order) < index.chunk_bytes)[:1].tolist():
            refuse(
                "chunks overlap",
                int(order[wrong + 1]),
                f"{index.chunk_bytes} bytes each",
                f"one at {order[wrong]}",
            )
        places = np.full(len(entries), -1, np.int64)
        places[present] = offsets.astype(np.int64)
        return file.known, places.reshape(index.counts)


def crc32c(data: bytes) -> int:
    """The checksum CRC-32C (Castagnoli) of bytes. Source: RFC 3720, appendix B.4."""
    value = 0xFFFFFFFF
    table = _TABLE
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE: Mapping[int, int] = MappingProxyType({byte: _entry(byte) for byte in range(256)})
