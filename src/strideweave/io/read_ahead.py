"""Reading spans that may not be in the page cache: the device is told of those that will be read, and of no others."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

from strideweave.io.positioned import SpanBatch, read_cached_spans, read_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from strideweave.io.positioned import FileSpan

__all__ = ["AHEAD_BYTES", "LARGE_BYTES", "read_no_further", "read_spans_ahead"]

LARGE_BYTES = 1 << 20
"""Bytes of a span from which on what the system would read behind it costs more than finding it read could gain."""

AHEAD_BYTES = 4 << 20
"""Bytes that the device is told of beyond those that are being read."""


def _advise(span: FileSpan) -> None:
    if not hasattr(os, "posix_fadvise") or span.file.is_direct:  # the page cache is of no use to the latter
        return
    with suppress(OSError):  # advice is worth nothing on some files, and an error there is none of the read
        os.posix_fadvise(span.file.fd, span.offset, span.buffer.nbytes, os.POSIX_FADV_WILLNEED)


def read_no_further(spans: Sequence[FileSpan]) -> None:
    """Keep the system from reading on behind spans that are large; see :meth:`OpenFile.read_no_further`.

    Args:
        spans: what is going to be read.
    """
    if isinstance(spans, SpanBatch):
        files = {block.file for block in spans.blocks if block.nbytes >= LARGE_BYTES}
    else:
        files = {span.file for span in spans if span.buffer.nbytes >= LARGE_BYTES}
    for file in files:
        file.read_no_further()


def read_spans_ahead(
    spans: Sequence[FileSpan],
    *,
    read_cached: Callable[[Sequence[FileSpan]], int] = read_cached_spans,
    advise: Callable[[FileSpan], None] = _advise,
) -> None:
    """Fill the buffers of all spans in order, as ``read_spans`` does, faster where they must come from a device.

    One blocking read after the other keeps one request at the device. So the first span that is not in the page
    cache makes all that follow known to the device, some megabytes ahead: it then works on many at once. While
    everything is in the cache this costs nothing.

    Args:
        spans: what to read.
        read_cached: reads without waiting, replaced in tests.
        advise: makes a span known to the device, replaced in tests.

    Raises:
        ShortFileError: a file ended early.
        OSError: the system failed, with the path.
        ValueError: a file is closed.
    """
    left = spans[read_cached(spans) :]
    if not left:
        return
    windows = list(_windows(left))
    for span in windows[0]:
        advise(span)
    for window, following in pairwise([*windows, []]):
        for span in following:
            advise(span)
        read_spans(window)


def _windows(spans: Sequence[FileSpan]) -> Iterator[Sequence[FileSpan]]:
    """Cut spans into windows of about ``AHEAD_BYTES``."""
    start = filled = 0
    for place, span in enumerate(spans):
        filled += span.buffer.nbytes
        if filled >= AHEAD_BYTES:
            yield spans[start : place + 1]
            start, filled = place + 1, 0
    if start < len(spans):
        yield spans[start:]
