"""What a memory limit may be, and how much of it may stay warm."""

from __future__ import annotations

from mmap import PAGESIZE

from strideweave.layout.int_tuple import as_integer

__all__ = ["check_memory_limit", "share_beside", "warm_bytes"]

_SHARE_BESIDE = 16  # a limit sets so small a part aside for what reading takes beside tiles


def check_memory_limit(limit: object, tile_bytes: int, resident_bytes: int) -> int | None:
    """Give a memory limit as an integer, or None where there is none.

    Args:
        limit: what the caller wrote.
        tile_bytes: bytes of one tile.
        resident_bytes: bytes of the tiles that start in the primary tier.

    Raises:
        TypeError: it is not an integer.
        ValueError: it holds no tile, or less than what starts in the primary tier.
    """
    if limit is None:
        return None
    nbytes = as_integer(limit, "memory_limit")
    if nbytes < tile_bytes:
        raise ValueError(
            f"memory_limit={nbytes} is less than one tile of {tile_bytes} bytes; nothing could ever be read"
        )
    if resident_bytes > nbytes:
        raise ValueError(
            f"the primary tier comes with {resident_bytes} bytes of tiles, more than memory_limit={nbytes}; "
            "let the tiles start in the secondary tier (tiled(..., resident=False)), or raise the limit"
        )
    return nbytes


def warm_bytes(limit: int, tile_bytes: int) -> int:
    """How much memory may stay warm for the next tiles under a limit: all, where no two tiles share a page.

    Elsewhere a free place may keep more pages than its tile has bytes, so none is kept.
    """
    return 0 if tile_bytes % PAGESIZE else limit


def share_beside(limit: int, tile_bytes: int, most: int) -> int:
    """How much of a limit is set aside for memory that reading takes beside tiles; room for a tile is left.

    Args:
        limit: bytes.
        tile_bytes: bytes of one tile.
        most: what reading can make use of.
    """
    return min(most, limit // _SHARE_BESIDE, limit - tile_bytes)
