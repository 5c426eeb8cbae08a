"""Reads of what is in the page cache, by worker threads, before a batch goes to a ring.

A ring would copy such bytes inside the system call that hands the batch over, in the loop's thread, or in threads of
the kernel that take longer to wake than the copy does. Plain calls that refuse to wait copy at the speed of memory and
leave the loop to others; what they refuse is left.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from strideweave.io.piecework import cut_in_pieces
from strideweave.io.positioned import INLINE_CACHED_BYTES, INLINE_SPANS, FileSpan, files_of, preadv_cached
from strideweave.runtime.workers import run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strideweave.io.positioned import SpanBatch, SpanBlock, SystemCall
    from strideweave.io.statistics import EngineTally
    from strideweave.runtime.workers import WorkerPool

    ReadCached = Callable[[Sequence[FileSpan]], int]

__all__ = ["may_be_cached", "read_at_once", "read_what_is_cached"]

MOST_MISSES = 8
"""Spans that are not in the page cache, after which the rest of a batch is not tried any more."""


def may_be_cached(spans: Sequence[FileSpan]) -> bool:
    """Tell whether no file of a batch is read past the page cache."""
    return not any(file.is_direct for file in files_of(spans))


def read_at_once(batch: SpanBatch, tally: EngineTally, preadv: SystemCall = preadv_cached) -> bool:
    """Fill the memory of a small batch in the calling thread, if none of it needs waiting for a device.

    Args:
        batch: what to read.
        tally: where to count it, if all of it was read.
        preadv: the system call, replaced in tests; as for ``read_cached_spans``.

    Returns:
        Whether all of it is filled. Where something is wrong with the batch it is not, and who reads it in the
        usual way finds out.
    """
    total = batch.total
    if len(batch) > INLINE_SPANS or not 0 < total <= INLINE_CACHED_BYTES:
        return False
    for block in batch.blocks:
        if not _read_block(block, preadv):
            return False
    tally.read_at_once(total, len(batch))
    return True


def _read_block(block: SpanBlock, preadv: SystemCall) -> bool:
    """Fill the spans of a block, without an object for each; False at the first that one call does not fill."""
    file = block.file
    if file.is_direct:  # even the attempt would read ahead into the page cache
        return False
    calls = moved = 0
    try:
        held = file.descriptor()  # keeps the number ours until the last call is over
        number, memory = held.number, block.memory.data  # a part of which costs less than a part of an array
        for offset, start, nbytes in _joined(block):
            if preadv(number, [memory[start : start + nbytes]], offset) != nbytes:
                return False
            calls, moved = calls + 1, moved + nbytes
    except (OSError, ValueError):
        return False
    finally:
        file.count(reads=calls, bytes_read=moved)
    return True


def _joined(block: SpanBlock) -> list[tuple[int, int, int]]:
    """Offset, start and bytes of the spans of a block, as one where they follow each other in file and memory."""
    found: list[tuple[int, int, int]] = []
    first = place = end = behind = -1
    for offset, start in zip(block.offsets.tolist(), block.starts.tolist(), strict=True):
        if offset == end and start == behind:
            found[-1] = (first, place, offset + block.nbytes - first)
        else:
            found.append((offset, start, block.nbytes))
            first, place = offset, start
        end, behind = offset + block.nbytes, start + block.nbytes
    return found


async def read_what_is_cached(
    spans: Sequence[FileSpan], total: int, pool: WorkerPool, read_cached: ReadCached
) -> Sequence[FileSpan]:
    """Fill the buffers of those spans that need no waiting for a device.

    Returns when no worker touches the buffers any more, cancelled or not.

    Args:
        spans: what to read, of files with page cache.
        total: their bytes.
        pool: the workers.
        read_cached: fills spans in order up to one that would have to wait, and tells how many it has filled.

    Returns:
        The spans, or parts of them, that are left to be read.

    Raises:
        ShortFileError: a file ended early.
        ValueError: a file is closed.
    """
    left: list[FileSpan] = []
    refused = 0

    def read(piece: Sequence[FileSpan]) -> None:
        nonlocal refused
        while piece:
            # One after the other may be missing; a batch of which nothing is there is not to be tried in whole.
            filled = read_cached(piece) if refused < MOST_MISSES else 0
            if filled == len(piece):
                return
            refused += 1
            if refused >= MOST_MISSES:
                left.extend(piece[filled:])
                return
            left.append(piece[filled])
            piece = piece[filled + 1 :]

    pieces = cut_in_pieces(list(spans), total, pool.size)
    await run_jobs([partial(read, piece) for piece in pieces], pool)
    if sum([span.buffer.nbytes for span in left]) == total:
        return spans  # as they were: a batch in blocks takes less work
    return left
