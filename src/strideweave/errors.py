"""Every public exception, each a subclass of the built-in that the specification names.

The tree::

    RuntimeError
    ├── ReleasedError        the carrier has been released
    ├── EvictedError         the values are in the secondary tier; promote first
    ├── OwnershipError       another object owns the carrier
    ├── ImmutableError       the carrier is not publicly mutable
    ├── TileConflictError    unfinished work needs or moves the tile
    ├── PendingWorkError     unfinished work keeps the carrier alive
    ├── InvalidTileError     the tile has no value yet
    └── StaleGraphError      a saved input changed before backward

Catching the built-in is enough for code that does not care which rule was broken; the attributes carry the
values for code that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strideweave.runtime.await_result import AwaitResult
    from strideweave.tiles.selection import TileSet

__all__ = [
    "EvictedError",
    "ImmutableError",
    "InvalidTileError",
    "OwnershipError",
    "PendingWorkError",
    "ReleasedError",
    "StaleGraphError",
    "TileConflictError",
]


class ReleasedError(RuntimeError):
    """The carrier was released: its storage is gone, only ``dtype()`` and the factories still work."""


class EvictedError(RuntimeError):
    """The values are in the secondary tier; call ``promote()`` before reading, writing or computing."""


class OwnershipError(RuntimeError):
    """The carrier belongs to a composite or to an unfinished request: aliases may read it and nothing else."""


class ImmutableError(RuntimeError):
    """A write was asked of a carrier that is not publicly mutable."""


class InvalidTileError(RuntimeError):
    """A tile was read, promoted or evicted before anything gave it a value."""


class StaleGraphError(RuntimeError):
    """A value saved for backward changed between the operation and the backward pass."""


class PendingWorkError(RuntimeError):
    """``release()`` was asked while requests are unfinished; wait for their handles first.

    Attributes:
        pending: how many requests were unfinished when the call was refused.
    """

    def __init__(self, message: str, *, pending: int = 0) -> None:
        super().__init__(message)
        self.pending = pending


class TileConflictError(RuntimeError):
    """A request met unfinished work on a common tile; nothing was changed and nothing waits.

    Attributes:
        tiles: the tiles on which the two collide.
        holder: the kind of the unfinished request and its age, such as ``"evict_async, 0.012 s old"``.
        free: a handle that ends, with ``None``, when those tiles are free.
    """

    def __init__(self, message: str, *, tiles: TileSet, holder: str, free: AwaitResult[None]) -> None:
        super().__init__(message)
        self.tiles = tiles
        self.holder = holder
        self.free = free
