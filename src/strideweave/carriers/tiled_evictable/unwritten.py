"""The warning that new values of tiles are lost, where the file below them stays without them."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strideweave.carriers.base import Carrier
    from strideweave.tiles.residency import ResidencyTable

__all__ = ["unwritten_tiles", "warn_unwritten"]


def unwritten_tiles(table: ResidencyTable, secondary: Carrier, process: int) -> int:
    """How many tiles have a value that the secondary tier has not got and could have kept.

    Takes no lock, for finalizers call it.

    Args:
        table: knows which tiles are dirty.
        secondary: the secondary tier.
        process: the number of the process that made the carrier; a forked child loses nothing that its parent has.
    """
    return len(table.dirty()) if secondary._outlasts_release() and process == os.getpid() else 0


def warn_unwritten(tiles: int, what: str) -> None:
    """Warn that the new values of some tiles are lost; nothing where there are none.

    Args:
        tiles: what ``unwritten_tiles`` gave.
        what: what happened to the carrier, such as ``"released"``.
    """
    if tiles:
        warnings.warn(
            f"a TiledEvictable was {what} with {tiles} dirty tile{'s' * (tiles > 1)}, whose new values are lost; "
            "flush() writes them to the file, evict() too",
            RuntimeWarning,
            stacklevel=_callers_level(),
        )


def _callers_level() -> int:
    """The stack level, seen from ``warn_unwritten``, of the nearest frame outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("strideweave."):
        frame, level = frame.f_back, level + 1
    return level
