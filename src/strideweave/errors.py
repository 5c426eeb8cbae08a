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
    ValueError
    └── FormatError          a file is not what its format says, or not what was asked for
        ├── FileChangedError it shrank, changed or disappeared after it was opened
        └── DamagedTileError a stored tile is not what its checksum says

Catching the built-in is enough for code that does not care which rule was broken; the attributes carry the
values for code that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strideweave.runtime.await_result import AwaitResult
    from strideweave.tiles.selection import TileSet

__all__ = [
    "DamagedTileError",
    "EvictedError",
    "FileChangedError",
    "FormatError",
    "ImmutableError",
    "InvalidTileError",
    "OwnershipError",
    "PendingWorkError",
    "ReleasedError",
    "StaleGraphError",
    "TileConflictError",
]


E = TypeVar("E", bound=BaseException)


def _remade(kind: type[E], args: tuple[Any, ...]) -> E:
    """Make an error that is copied or unpickled; its attributes come after, and its constructor is not called."""
    return kind.__new__(kind, *args)


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

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args), self.__dict__


class TileConflictError(RuntimeError):
    """A request met unfinished work on a common tile; nothing was changed and nothing waits.

    Attributes:
        tiles: the tiles on which the two collide.
        holder: the kind of the unfinished request and its age, such as ``"evict_async, 0.012 s old"``.
        free: a handle that ends, with ``None``, when those tiles are free. That of a copy, as another process may
            get it, has failed with a RuntimeError.
    """

    def __init__(self, message: str, *, tiles: TileSet, holder: str, free: AwaitResult[None]) -> None:
        super().__init__(message)
        self.tiles = tiles
        self.holder = holder
        self.free = free

    def __reduce__(self) -> tuple[Any, ...]:
        others = {name: value for name, value in self.__dict__.items() if name != "free"}
        return _remade_conflict, (type(self), self.args, type(self.free)), others


def _remade_conflict(
    kind: type[TileConflictError], args: tuple[Any, ...], handle: type[AwaitResult[None]]
) -> TileConflictError:
    error = _remade(kind, args)
    error.free = handle.failed(
        RuntimeError("this error is a copy: only the one that was raised knows when the tiles are free")
    )
    return error


_MOST_SHOWN = 600  # characters of one value in a message; what a file holds may be of any length


def _shown(value: object) -> str:
    """Something of a file as a message can have it: of bounded length, and nothing that a terminal obeys."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # an integer of very many digits, or lists in lists
        text = f"what is too long to show, of type {type(value).__name__}"
    if len(text) > _MOST_SHOWN:
        text = f"{text[: _MOST_SHOWN * 3 // 4]} ... {text[-_MOST_SHOWN // 4 :]}"
    return printable(text)


def printable(text: str) -> str:
    """Text that any terminal can show and none obeys: what is no character to print is escaped."""
    return (
        text
        if text.isprintable()
        else "".join([one if one.isprintable() else repr(one)[1:-1] for one in text])
    )


class FormatError(ValueError):
    """A file is not what its format says it is, or does not hold what was asked for.

    Attributes:
        path: the file.
        tensor: the tensor's name in it; None where the error concerns none.
        tile: the coordinate of the tile; None likewise.
        offset: the byte of the file at which it is wrong; None likewise.
        wanted: what should have been there.
        found: what was there.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str,
        tensor: str | None = None,
        tile: Iterable[int] | None = None,
        offset: int | None = None,
        wanted: object = None,
        found: object = None,
    ) -> None:
        self.path = path
        self.tensor = tensor
        self.tile = None if tile is None else tuple(tile)
        self.offset = offset
        self.wanted = wanted
        self.found = found
        place = [repr(path)]
        place += [] if tensor is None else [f"tensor {_shown(repr(tensor))}"]
        place += [] if self.tile is None else [f"tile {self.tile}"]
        place += [] if offset is None else [f"offset {offset}"]
        known = (("wanted", wanted), ("found", found))
        differs = ", ".join([f"{what} {_shown(value)}" for what, value in known if value is not None])
        super().__init__(", ".join(place) + f": {_shown(message)}" + (f" ({differs})" if differs else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args), self.__dict__


class FileChangedError(FormatError):
    """A file that was opened in place shrank, changed, was replaced or disappeared; nothing of it was given out."""


class DamagedTileError(FormatError):
    """A stored tile is not what its checksum says; its bytes were not given out, and other tiles can be read.

    Attributes:
        ordinal: the tile's number in the file, ``tile`` being its coordinate in the grid.
        wanted: the checksum in the table, as 16 hexadecimal digits.
        found: the checksum of what is there, or a sentence where nothing is.
    """

    def __init__(
        self, *, path: str, tile: Iterable[int], ordinal: int, offset: int, wanted: str, found: str
    ) -> None:
        super().__init__(
            "the tile is damaged; restore it from a copy, or give it new values",
            path=path,
            tile=tile,
            offset=offset,
            wanted=f"checksum {wanted}",
            found=found,
        )
        self.ordinal = ordinal
        self.wanted, self.found = wanted, found
