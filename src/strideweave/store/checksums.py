"""Checksums of tiles: xxh3 with 64 bits, from the optional library ``xxhash``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.runtime.workers import INLINE_BYTES, run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Rows = Sequence[npt.NDArray[np.uint8]]
    Sums = npt.NDArray[np.uint64]

__all__ = ["ALGORITHM", "checksum_function", "digits", "row_sums", "sums_of"]

ALGORITHM = "xxh3_64"
"""The name in the manifest: XXH3 with 64 bits and seed 0, as of xxHash 0.8."""

_JOB_BYTES = 4 << 20  # what a worker takes at once


def checksum_function() -> Callable[[Any], int]:
    """Give the function from contiguous bytes to their checksum; it lets other threads run meanwhile.

    Raises:
        ImportError: the library is not installed; the message names the extra.
    """
    try:
        import xxhash  # noqa: PLC0415  optional
    except ImportError as error:
        raise ImportError(
            "a tile store has a checksum for every tile, from the library xxhash, which is not installed; "
            "pip install 'strideweave[store]'",
            name="xxhash",
        ) from error
    return xxhash.xxh3_64_intdigest


def digits(checksum: int) -> str:
    """A checksum as it is written in messages and in the manifest."""
    return f"{checksum:016x}"


def row_sums(rows: Rows) -> Sums:
    """The checksum of every row; blocks."""
    function = checksum_function()
    return np.array([function(row) for row in rows], np.uint64)


async def sums_of(rows: Rows) -> Sums:
    """The checksum of every row: at once where they are small together, else in worker threads."""
    sums = np.zeros(len(rows), np.uint64)

    def fill(first: int, last: int) -> None:
        sums[first:last] = row_sums(rows[first:last])

    total = sum([row.nbytes for row in rows])
    if total <= INLINE_BYTES:
        fill(0, len(rows))
        return sums
    step = max(1, _JOB_BYTES * len(rows) // total)
    await run_jobs([partial(fill, first, first + step) for first in range(0, len(rows), step)])
    return sums
