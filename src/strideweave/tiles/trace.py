"""`Trace`: which tiles the requests of a run required, and the text file that keeps it.

A trace file is JSON Lines in UTF-8. The first line is the header, each further line one request, in the order
in which a policy was asked::

    {"format": "strideweave-trace", "version": 1, "grid_shape": [64, 1], "tile_shape": [16, 384], "tile_bytes": 24576}
    {"purpose": "projection", "tiles": [[0, 23], 40, 42]}

``tiles`` counts tiles along the grid with the first axis fastest, ascending: a number is one tile, a pair is
the run from its first number to its last, both included.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from strideweave.layout.int_tuple import as_integer
from strideweave.tiles.grid import TileGrid
from strideweave.tiles.selection import TileSet

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Trace", "TraceRequest"]

_AT_ONCE = (
    os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
)  # a FIFO is opened without its writer, who may never come
_FORMAT, _VERSION = "strideweave-trace", 1
_HEADER = ("format", "version", "grid_shape", "tile_shape", "tile_bytes")
_REQUEST = ("purpose", "tiles")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One question to a policy.

    Attributes:
        purpose: what the request was for, such as ``"projection"``; see `ResidencyPolicy.plan`.
        tiles: the tiles that it required.

    Raises:
        TypeError: ``purpose`` is no text, or ``tiles`` no TileSet.
        ValueError: ``purpose`` is empty.
    """

    purpose: str
    tiles: TileSet

    def __post_init__(self) -> None:
        for name, kind in (("purpose", str), ("tiles", TileSet)):
            if not isinstance(getattr(self, name), kind):
                found = type(getattr(self, name)).__name__
                raise TypeError(f"{name} of a TraceRequest must be a {kind.__name__}, found {found}")
        if not self.purpose:
            raise ValueError("purpose of a TraceRequest must not be empty")


@dataclass(frozen=True)
class Trace:
    """What the requests of one carrier required, in the order in which its policy was asked.

    Args:
        grid_shape: the number of tiles along each axis of the carrier.
        tile_shape: the extent of a tile along each axis.
        tile_bytes: the bytes of one tile.
        requests: the requests.

    Raises:
        TypeError: a shape or ``tile_bytes`` is not made of integers, or ``requests`` not of TraceRequests.
        ValueError: the shapes make no grid, a tile has no bytes, or a request's tiles do not fit the grid.
    """

    grid_shape: tuple[int, ...]
    tile_shape: tuple[int, ...]
    tile_bytes: int
    requests: tuple[TraceRequest, ...] = ()

    def __post_init__(self) -> None:
        grid, tile_bytes = self.grid, as_integer(self.tile_bytes, "tile_bytes")
        if tile_bytes <= 0:
            raise ValueError(f"a tile has at least one byte, got tile_bytes={tile_bytes}")
        for name, plain in (
            ("grid_shape", grid.grid_shape),
            ("tile_shape", grid.tile_shape),
            ("tile_bytes", tile_bytes),
            ("requests", tuple(self.requests)),
        ):
            object.__setattr__(self, name, plain)  # frozen for its users; here they become plain once
        for request in self.requests:
            if not isinstance(request, TraceRequest):
                raise TypeError(f"requests must be TraceRequests, found {type(request).__name__}")
            request.tiles.bind(grid)

    @cached_property
    def grid(self) -> TileGrid:
        """The grid of the carrier's tiles."""
        return TileGrid(self.grid_shape, self.tile_shape)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace file, whole or not at all; a file of that name is replaced.

        Of a link it is the file that the link leads to. What is no regular file, such as a pipe, is written to as
        it is, and stays.

        Raises:
            OSError: it cannot be written.
        """
        target = Path(path).resolve()
        if target.exists() and not target.is_file():
            self._write(target)
            return
        partial = target.with_name(target.name + ".part")
        try:
            self._write(partial)
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace file and check every line of it.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no trace file, not even a regular one, or a line is wrong; the message names the file
                and the line.
        """
        if not stat.S_ISREG(Path(path).stat().st_mode):  # a FIFO would be waited for
            raise ValueError(
                f"{os.fspath(path)!r} is no regular file, as a trace is; save what comes from it first"
            )
        with Path(path).open("rb") as file:
            lines = enumerate(file, start=1)
            header = _Reader(path, 1, next(lines, (1, b""))[1])
            grid, tile_bytes = header.grid()
            requests = tuple([_Reader(path, number, line).request(grid) for number, line in lines])
        return cls(grid.grid_shape, grid.tile_shape, tile_bytes, requests)

    def _write(self, path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for line in self._lines():
                file.write(line + "\n")

    def _lines(self) -> Iterator[str]:
        header = (_FORMAT, _VERSION, self.grid_shape, self.tile_shape, self.tile_bytes)
        yield json.dumps(dict(zip(_HEADER, header, strict=True)))
        for request in self.requests:
            runs = _to_runs(request.tiles.bind(self.grid))
            yield json.dumps({"purpose": request.purpose, "tiles": runs})


def _to_runs(ordinals: NDArray[np.int64]) -> list[int | list[int]]:
    """Write ascending numbers as single ones and as pairs of a run's first and last."""
    cuts = np.flatnonzero(np.diff(ordinals) != 1) + 1
    firsts = ordinals[np.concatenate(([0], cuts))].tolist() if len(ordinals) else []
    lasts = ordinals[np.concatenate((cuts - 1, [-1]))].tolist() if len(ordinals) else []
    return [first if first == last else [first, last] for first, last in zip(firsts, lasts, strict=True)]


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0  # JSON's true is no number


@dataclass(frozen=True, slots=True)
class _Reader:
    """One line of a trace file."""

    path: str | os.PathLike[str]
    number: int
    line: bytes

    def grid(self) -> tuple[TileGrid, int]:
        """Read the header: the grid, and the bytes of a tile."""
        found = self._object(_HEADER, "the header of a trace")
        if found["format"] != _FORMAT or found["version"] != _VERSION:
            raise self._error(
                f"expected format {_FORMAT!r} version {_VERSION}, found {found['format']!r} "
                f"version {found['version']!r}"
            )
        for name in ("grid_shape", "tile_shape"):
            if not isinstance(found[name], list):
                raise self._error(f"{name} must be a list of integers, found {found[name]!r}")
        if not _is_count(found["tile_bytes"]) or not found["tile_bytes"]:
            raise self._error(f"tile_bytes must be a positive integer, found {found['tile_bytes']!r}")
        try:
            return TileGrid(found["grid_shape"], found["tile_shape"]), found["tile_bytes"]
        except (TypeError, ValueError) as error:
            raise self._error(str(error)) from error

    def request(self, grid: TileGrid) -> TraceRequest:
        """Read a request."""
        found = self._object(_REQUEST, "a request")
        if not isinstance(found["purpose"], str) or not found["purpose"]:
            raise self._error(f"purpose must be a text, found {found['purpose']!r}")
        if not isinstance(found["tiles"], list):
            raise self._error(f"tiles must be a list, found {found['tiles']!r}")
        return TraceRequest(
            found["purpose"], TileSet._from_ordinals(grid, self._ordinals(found["tiles"], grid))
        )

    def _ordinals(self, runs: Sequence[Any], grid: TileGrid) -> NDArray[np.int64]:
        pieces = [np.empty(0, np.int64)]
        least = 0
        for run in runs:
            pair = run if isinstance(run, list) else [run, run]
            if len(pair) != 2 or not all(map(_is_count, pair)) or pair[0] > pair[1]:
                raise self._error(f"expected a tile or a pair [first, last], found {run!r}")
            if pair[0] < least:
                raise self._error(f"tiles must ascend, found {run!r} after tile {least - 1}")
            # Before the run is written out: a wrong number must not cost memory.
            if pair[1] >= grid.tile_count:
                raise self._error(f"tile {pair[1]} is outside the grid {grid.grid_shape}")
            least = pair[1] + 1
            pieces.append(np.arange(pair[0], least, dtype=np.int64))
        return np.concatenate(pieces)

    def _object(self, names: Sequence[str], what: str) -> dict[str, Any]:
        try:
            found = json.loads(self.line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # bad UTF-8 and bottomless nesting too
            raise self._error(f"expected {what}, found no JSON ({error})") from error
        if not isinstance(found, dict) or set(found) != set(names):
            raise self._error(f"expected {what}, an object with {', '.join(names)}, found {found!r:.80}")
        return found

    def _error(self, said: str) -> ValueError:
        return ValueError(f"{Path(self.path)}, line {self.number}: {said}")
