"""The values that whole tiles are given, and the arithmetic on tiles.

Where to read and where to write is worked out first, as pairs of NumPy views, which may fail; reading and writing
comes after, and cannot. Copies move bits, so that NaN payloads and negative zeros survive; sums are those of the
operation ``add``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from strideweave.runtime.workers import INLINE_BYTES, run_jobs
from strideweave.tiles.compact import groups, parts, row_major_strides
from strideweave.tiles.gather import CompactGeometry

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.dtype import DType
    from strideweave.tensor import Tensor
    from strideweave.tiles.grid import TileGrid, TilePlacement
    from strideweave.tiles.selection import TileSelection

    Ordinals = npt.NDArray[np.int64]
    Flat = npt.NDArray[np.unsignedinteger]

__all__ = ["CompactValues", "Values", "Views", "add_tiles", "add_to_zero", "apply"]

Views: TypeAlias = "tuple[Flat, ...]"
"""Arrays of one shape: what is written, what is read, and for a sum of two what is read besides."""

Values: TypeAlias = "Callable[[Ordinals, Sequence[Flat]], list[Views]]"
"""Gives for some tiles, and the rows that they lie in, the views to write and to read; changes nothing."""

_PIECE_BYTES = 2 << 20  # what a worker writes at once


@dataclass(frozen=True, slots=True)
class CompactValues:
    """The values of a compact Tensor, tile by tile."""

    geometry: CompactGeometry
    flat: Flat
    order: Ordinals
    ascending: Ordinals

    @classmethod
    async def of(
        cls,
        grid: TileGrid,
        placement: TilePlacement,
        selection: TileSelection,
        compact: Tensor,
        *,
        beside: Carrier | None = None,
    ) -> CompactValues:
        """Find out where each tile's values lie in a compact Tensor in memory, of the right shape.

        Where one stride does not say how an axis goes on, they are copied, which takes as much memory again.

        Args:
            grid: the tile grid.
            placement: how the full Tensor lies in it.
            selection: which tiles.
            compact: the values.
            beside: a carrier that is written to; values that share its memory are copied too.
        """
        ordinals = selection.bind(grid)
        order = np.argsort(ordinals)
        unit = f"u{compact.dtype.itemsize}"
        digits = compact.layout.digits()
        memory = compact.carrier._bytes()
        apart = beside is None or not np.may_share_memory(memory, beside._bytes())
        if apart and all(len(mode) <= 1 for mode in digits):
            strides = tuple([mode[0][1] if mode else 0 for mode in digits])
            first, flat = compact.offset, memory.view(unit)
        else:
            strides, first = row_major_strides(compact.shape), 0
            flat = (await _copied(compact)).reshape(-1).view(unit)
        geometry = CompactGeometry.over(grid, placement, selection, strides, first)
        return cls(geometry, flat, order, ordinals[order])

    def __call__(self, ordinals: Ordinals, rows: Sequence[Flat]) -> list[Views]:
        """The views of these tiles, in rows of the carrier that is written."""
        positions = self.order[np.searchsorted(self.ascending, ordinals)]
        return [*self.geometry.pairs(rows, positions.tolist(), self.flat)]

    def onto(self, ordinals: Ordinals, rows: Sequence[Flat], bases: Sequence[Flat]) -> list[Views]:
        """As a call, with the values to add to, which lie in other rows of the same order."""
        read = self(ordinals, bases)
        return [
            (target, source, base)
            for (target, source), (base, _) in zip(self(ordinals, rows), read, strict=True)
        ]


async def _copied(compact: Tensor) -> npt.NDArray[Any]:
    if compact.nbytes <= INLINE_BYTES:
        return compact.carrier._gather_array(compact)
    copies: list[npt.NDArray[Any]] = []
    await run_jobs([lambda: copies.append(compact.carrier._gather_array(compact))])
    return copies[0]


def add_tiles(
    target: npt.NDArray[Any], source: npt.NDArray[Any], base: npt.NDArray[Any] | None = None
) -> None:
    """Write the sum of ``base``, or of what is there, and ``source``: rounded once, integers wrap, as ``add`` does."""
    np.add(target if base is None else base, source, out=target)


def add_to_zero(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Write the sum of zero and ``source``, which is ``source`` save for a negative zero."""
    np.add(source, np.zeros((), source.dtype), out=target)


async def apply(
    operation: Callable[..., object], views: Sequence[Views], dtype: DType, tile_bytes: int
) -> None:
    """Run an operation on the views of tiles: at once where they are small together, else in worker threads.

    Copies move bits, so that NaN payloads and negative zeros survive; anything else gets numbers.
    """
    if not views:
        return
    as_numbers = None if operation is np.copyto else dtype.numpy
    nbytes = len(views) * tile_bytes
    if nbytes <= INLINE_BYTES:
        _run(operation, views, as_numbers)
        return
    if tile_bytes > _PIECE_BYTES and views[0][0].ndim:
        cuts = list(parts(views[0][0].shape[0], -(-tile_bytes // _PIECE_BYTES)))
        pieces = [[tuple([view[cut] for view in tile])] for tile in views for cut in cuts]
    else:
        pieces = [[*views[part]] for part in groups(len(views), _PIECE_BYTES // tile_bytes)]
    await run_jobs([partial(_run, operation, piece, as_numbers) for piece in pieces])


def _run(operation: Callable[..., object], views: Sequence[Views], as_numbers: np.dtype[Any] | None) -> None:
    # Infinities and NaN are values; a warning from a worker thread would end the request.
    with np.errstate(all="ignore"):
        for tile in views:
            operation(*(tile if as_numbers is None else [view.view(as_numbers) for view in tile]))
