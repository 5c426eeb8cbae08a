"""Timing projections of one array beside the plain ways of reading the same bytes."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from strideweave.carriers.cpu import CPU
from strideweave.carriers.tiled_evictable import KeepResident, Streaming
from strideweave.cli.byte_map import (
    OpenFiles,
    cached_share,
    drop_cache,
    map_pieces,
    page_aligned,
    read_pieces,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from strideweave.carriers.tiled_evictable import ResidencyPolicy, TiledEvictable
    from strideweave.cli.byte_map import ByteMap, Piece
    from strideweave.tensor import Tensor
    from strideweave.tiles.selection import TileSelection

__all__ = ["Case", "Measurement", "WrongBytesError"]


class WrongBytesError(ValueError):
    """Two ways of reading the same tiles gave different bytes."""


class Figures(NamedTuple):
    """Seconds of one request over the turns.

    Attributes:
        low: lower quartile.
        median: median.
        high: upper quartile.
    """

    low: float
    median: float
    high: float


@dataclass(slots=True)
class Case:
    """One state of the caches, and what each contender took.

    Attributes:
        name: ``hot``, ``warm`` or ``cold``.
        samples: seconds of each turn, by contender.
        cached: shares of the bytes that were in the page cache before the requests, where the system tells.
        skipped: why it was not measured.
    """

    name: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    cached: list[float] = field(default_factory=list)
    skipped: str | None = None

    def figures(self) -> dict[str, Figures]:
        """Median and quartiles of each contender."""
        found = {}
        for name, seconds in self.samples.items():
            low, _, high = (
                statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
            )
            found[name] = Figures(low, statistics.median(seconds), high)
        return found


class Request(NamedTuple):
    """What one turn asks for.

    Attributes:
        along: the tile coordinates along the axis that varies.
        selection: of a carrier.
        pieces: the same tiles in files.
    """

    along: Sequence[int]
    at: Sequence[int]
    pieces: Sequence[Piece]


def _nothing(_: Request) -> None:
    """What comes before most requests."""


class Measurement:
    """The contenders over one array; a context manager that releases everything.

    Every turn asks each contender for the same tiles, each turn for others and beginning with another contender. One
    turn before does not count; in it, the bytes of all are compared.

    Args:
        opener: gives a fresh tensor over the array with a policy.
        byte_map: where its bytes are.
        tiles: tiles of a request; fewer where the longest axis of the grid has fewer, or they exceed the payload.
        turns: how often.
        payload: bytes of a request, at the most (or one tile).
        hot_bytes: bytes of tiles that are held in memory for the hot case, at the most (or one request).
    """

    def __init__(
        self,
        opener: Callable[[ResidencyPolicy], Tensor],
        byte_map: ByteMap,
        *,
        tiles: int,
        turns: int,
        payload: int,
        hot_bytes: int,
    ) -> None:
        self._open = opener
        self._map = byte_map
        self._turns = turns
        grid = byte_map.grid
        self.axis = int(np.argmax(grid.grid_shape))
        self.tiles = max(1, min(tiles, grid.grid_shape[self.axis], payload // byte_map.tile_bytes))
        self._pool = min(grid.grid_shape[self.axis], max(self.tiles, hot_bytes // byte_map.tile_bytes))
        self._stack = ExitStack()

    def __enter__(self) -> Measurement:
        self._files = self._stack.enter_context(OpenFiles(self._map.files))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def payload(self) -> int:
        """Bytes of a request."""
        return self.tiles * self._map.tile_bytes

    def run(self, advance: Callable[[str, float], None]) -> list[Case]:
        """Measure every case."""
        return [self._hot(advance), self._warm(advance), self._cold(advance)]

    def _hot(self, advance: Callable[[str, float], None]) -> Case:
        """Tiles in memory, beside an array of the same tiles in memory."""
        tensor = self._opened(KeepResident())
        carrier = cast("TiledEvictable", tensor.carrier)
        at = [0] * self._map.grid.rank
        pool = list(range(self._pool))
        carrier.promote(self._selection(carrier, pool, at))
        rows = np.empty((self._pool, self._map.tile_bytes), np.uint8)
        self._map.clear(rows.reshape(-1))
        read_pieces(self._files, self._map.pieces(self._ordinals(pool, at)), rows.reshape(-1))
        given = self._destination().reshape(self.tiles, -1)
        contenders = {
            "project, given destination": self._projecting(tensor, given=True),
            "project, fresh tensor": self._projecting(tensor, given=False),
            "rows[idx] in NumPy": lambda request: rows[request.along],
            "np.take(rows, idx, out=)": lambda request: np.take(
                rows, request.along, 0, out=given, mode="clip"
            ),
        }
        return self._measure("hot", contenders, advance, fixed=at)

    def _warm(self, advance: Callable[[str, float], None]) -> Case:
        other = self._destination()  # no contender finds its own memory in the processor's caches

        def read_once(request: Request) -> None:
            read_pieces(self._files, request.pieces, other)

        return self._measure("warm", self._reading(), advance, before_turn=read_once)

    def _cold(self, advance: Callable[[str, float], None]) -> Case:
        if not hasattr(os, "posix_fadvise"):
            return Case("cold", skipped="this system has no posix_fadvise, which empties the page cache")
        return self._measure("cold", self._reading(), advance, before_each=self._drop)

    def _reading(self) -> dict[str, Callable[[Request], Any]]:
        tensor = self._opened(Streaming())
        to_read, to_map, files = self._destination(), self._destination(), self._map.files

        def read(request: Request) -> NDArray[np.uint8]:
            read_pieces(self._files, request.pieces, to_read)
            return to_read

        def map_(request: Request) -> NDArray[np.uint8]:
            map_pieces(files, request.pieces, to_map)
            return to_map

        return {
            "project, given destination": self._projecting(tensor, given=True),
            "project, fresh tensor": self._projecting(tensor, given=False),
            "os.preadv, one thread": read,
            "np.memmap, opened and copied": map_,
        }

    def _measure(
        self,
        name: str,
        contenders: Mapping[str, Callable[[Request], Any]],
        advance: Callable[[str, float], None],
        before_turn: Callable[[Request], None] = _nothing,
        before_each: Callable[[Request], None] = _nothing,
        fixed: list[int] | None = None,
    ) -> Case:
        case = Case(name, {contender: [] for contender in contenders})
        names = list(contenders)
        stage = f"measuring {name} projections"
        for turn, request in enumerate(self._requests(fixed)):
            advance(stage, turn / (self._turns + 1))
            before_turn(request)
            for place in range(len(names)):
                contender = names[(place + turn) % len(names)]
                before_each(request)
                share = cached_share(self._files, request.pieces) if fixed is None else None
                case.cached += [] if share is None or not turn else [share]
                started = time.perf_counter()
                found = contenders[contender](request)
                seconds = time.perf_counter() - started
                if turn:
                    case.samples[contender].append(seconds)
                else:
                    self._compare(contender, found, request)
                del found
        advance(stage, 1.0)
        return case

    def _requests(self, fixed: list[int] | None) -> Iterator[Request]:
        grid, random = self._map.grid, np.random.default_rng(0)
        for _ in range(self._turns + 1):
            extent = grid.grid_shape[self.axis] if fixed is None else self._pool
            along = random.permutation(extent)[: self.tiles].tolist()
            at = fixed or [int(random.integers(count)) for count in grid.grid_shape]
            yield Request(along, at, self._map.pieces(self._ordinals(along, at)))

    def _projecting(self, tensor: Tensor, *, given: bool) -> Callable[[Request], Tensor]:
        carrier = cast("TiledEvictable", tensor.carrier)
        size = self.tiles * self._map.grid.tile_size
        into = CPU(size, dtype=tensor.dtype) if given else None
        if into is not None:
            into.numpy(writable=True).view(np.uint8)[...] = 0  # so that no page is missing

        def project(request: Request) -> Tensor:
            return carrier.project(tensor, self._selection(carrier, request.along, request.at), into).wait()

        return project

    def _compare(self, contender: str, found: Any, request: Request) -> None:
        """Compare what came out with the plain bytes.

        Raises:
            WrongBytesError: they differ.
        """
        wanted = np.empty((self.tiles, self._map.tile_bytes), np.uint8)
        self._map.clear(wanted.reshape(-1))
        read_pieces(self._files, request.pieces, wanted.reshape(-1))
        if isinstance(found, np.ndarray):
            same = np.array_equal(found.reshape(wanted.shape), wanted)
        else:
            dense = found.numpy()
            shape = self._map.grid.tile_shape
            order: Any = self._map.order
            tiles = [row.view(dense.dtype).reshape(shape, order=order) for row in wanted]
            whole = np.concatenate(tiles, axis=self.axis)
            same = np.ascontiguousarray(dense).tobytes() == np.ascontiguousarray(whole).tobytes()
        if not same:
            raise WrongBytesError(f"{contender} gave other bytes than os.preadv of the same tiles")

    def _selection(self, carrier: TiledEvictable, along: Sequence[int], at: Sequence[int]) -> TileSelection:
        chosen = {axis: [index] for axis, index in enumerate(at) if axis != self.axis}
        return carrier.select(chosen | {self.axis: list(along)})

    def _ordinals(self, along: Sequence[int], at: Sequence[int]) -> list[int]:
        grid = self._map.grid
        return [
            grid.ordinal([index if axis == self.axis else fixed for axis, fixed in enumerate(at)])
            for index in along
        ]

    def _drop(self, request: Request) -> None:
        drop_cache(self._files, request.pieces)

    def _destination(self) -> NDArray[np.uint8]:
        """Memory for a request that was written to before."""
        memory = page_aligned(self.payload)
        self._map.clear(memory)
        return memory

    def _opened(self, policy: ResidencyPolicy) -> Tensor:
        tensor = self._open(policy)
        self._stack.callback(tensor.carrier.release)
        return tensor
