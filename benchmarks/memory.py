"""Memory that begins with a page, and how much of it the process holds."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["page_aligned", "peak_growth", "reset_peak"]


def page_aligned(rows: int, tile_bytes: int) -> NDArray[np.float32]:
    """Rows that begin with a page and were written to before.

    NumPy's own large arrays begin 16 bytes after a page, and the system's copies to them take several times as
    long on some CPUs; files that are read past the page cache need the alignment.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, max(1, rows * tile_bytes), private), np.float32)
    memory[...] = 0
    return memory[: rows * tile_bytes // 4].reshape(rows, tile_bytes // 4)


def reset_peak() -> int:
    """Forget the largest resident size so far; returns the present one in bytes.

    Raises:
        OSError: the system has no such thing, or refuses it.
    """
    Path("/proc/self/clear_refs").write_text("5", "ascii")
    return _status("VmRSS:")


def peak_growth(before: int) -> int:
    """Bytes by which the largest resident size since :func:`reset_peak` exceeds ``before``."""
    return _status("VmHWM:") - before


def _status(name: str) -> int:
    fields: Any = Path("/proc/self/status").read_text("ascii").split()
    return int(fields[fields.index(name) + 1]) << 10
