"""Making names durable: files that are, and directories that say so."""

from __future__ import annotations

import os
from pathlib import Path

from strideweave.store.manifest import MANIFEST

__all__ = ["sync_directory", "sync_names"]


def sync_names(directory: str) -> None:
    """Make a store's manifest, the names of its files and its own name durable; blocks.

    Raises:
        OSError: the system failed, with the path.
    """
    place = Path(directory).absolute()
    for path in (place / MANIFEST, place, place.parent):
        sync_directory(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, or a file; blocks.

    Raises:
        OSError: the system failed, with the path.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; it was to be made durable", str(path)) from error
    finally:
        os.close(number)
