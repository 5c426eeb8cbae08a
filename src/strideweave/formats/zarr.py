"""One zarr 3 array in a directory, its chunks uncompressed. Source: the zarr core specification, version 3."""

from __future__ import annotations

import itertools
import os
import stat
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from strideweave.errors import FormatError
from strideweave.formats.description import StoredArray, check_byte_order, nearest_divisor
from strideweave.formats.headers import MOST_HEADER_BYTES, HeaderFile, parse_json
from strideweave.formats.zarr_metadata import MOST_CHUNKS, Metadata, parse_metadata
from strideweave.formats.zarr_shards import ShardIndex, read_shard
from strideweave.io.file_pool import KnownFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    from numpy.typing import NDArray

    _Places: TypeAlias = tuple[tuple[KnownFile, ...], NDArray[np.int32], NDArray[np.int64]]

__all__ = ["METADATA", "read_zarr"]

METADATA = "zarr.json"


def read_zarr(path: str) -> StoredArray:
    """Read and check the metadata of a zarr 3 array and look at its chunks; of the values not a byte.

    A chunk that is not there has the fill value, as zarr has it: for as long as the array is open.

    Args:
        path: the array's directory.

    Raises:
        FormatError: the metadata are damaged, or those of a group, of another version, or of an array whose chunks
            are compressed, transposed or big-endian; a chunk has another size than its shape, or the index of a shard
            is damaged.
        OSError: a file could not be looked at.
    """
    file = f"{path}/{METADATA}"
    with HeaderFile(file) as header:
        if header.size > MOST_HEADER_BYTES:
            header.refuse("it is too long", 0, f"at most {MOST_HEADER_BYTES} bytes", f"{header.size} bytes")
        found = parse_metadata(
            header, parse_json(header.read(0, header.size, "metadata"), file, "the metadata")
        )
    check_byte_order(found.dtype, file, path)
    in_files = prod(_counts(found.shape, found.file_shape)) * prod(
        found.shards.counts if found.shards else ()
    )
    if in_files > MOST_CHUNKS:
        raise FormatError(
            "there are too many chunks to look at each",
            path=file,
            wanted=f"at most {MOST_CHUNKS}",
            found=in_files,
        )
    tile = tuple(
        [nearest_divisor(extent, part) for extent, part in zip(found.shape, found.chunk, strict=True)]
    )
    index = found.shards
    places = _look_at_chunks(path, found) if index is None else _look_at_shards(path, found, index)
    files, file_of, offset_of = places
    return StoredArray(
        path, found.dtype, found.shape, found.chunk, "C", files, file_of, offset_of, tile, found.fill
    )


def _counts(shape: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([-(-extent // along) for extent, along in zip(shape, part, strict=True)])


def _look_at_chunks(path: str, found: Metadata) -> _Places:
    """Each chunk is a file of its own."""
    counts = _counts(found.shape, found.chunk)
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
    return tuple(files), file_of, np.zeros(len(file_of), np.int64)


def _look_at_shards(path: str, found: Metadata, index: ShardIndex) -> _Places:
    """Each file is a shard of many chunks; those beyond the array's end are left out."""
    shards = _counts(found.shape, found.file_shape)
    padded = tuple([count * along for count, along in zip(shards, index.counts, strict=True)])
    file_of, offset_of = np.full(padded, -1, np.int32), np.zeros(padded, np.int64)
    files: list[KnownFile] = []
    for place, key in zip(np.ndindex(*shards), _keys(found, shards), strict=True):
        try:
            known, offsets = read_shard(f"{path}/{key}", path, index)
        except (FileNotFoundError, NotADirectoryError):
            continue
        mine = tuple(
            [slice(at * along, (at + 1) * along) for at, along in zip(place, index.counts, strict=True)]
        )
        file_of[mine] = np.where(offsets < 0, -1, len(files))
        offset_of[mine] = offsets
        files.append(known)
    within = tuple([slice(count) for count in _counts(found.shape, found.chunk)])
    return tuple(files), file_of[within].reshape(-1), offset_of[within].reshape(-1)


def _keys(found: Metadata, counts: tuple[int, ...]) -> Iterator[str]:
    """The file of each chunk, row-major."""
    names = [[str(index) for index in range(count)] for count in counts]
    return (found.prefix + found.separator.join(index) for index in itertools.product(*names))
