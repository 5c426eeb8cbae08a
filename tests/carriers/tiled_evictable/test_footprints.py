"""Spec: *Tensor Layout compatibility preserves exact carrier tile footprints*, at every way in, before any change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, FileBacked, Tensor, TiledEvictable, asarray
from strideweave.carriers.tiled_evictable import AwaitProjection
from strideweave.layout import Layout

GRID, TILE, SHAPE = (2, 3), (2, 2), (4, 6)
# Tile (x, y) has the four slots from 4 * (x + 2 * y).
COMPATIBLE = {
    "rows": (Layout(((2, 2), (2, 3)), ((2, 4), (1, 8))), 0),
    "columns": (Layout(((2, 2), (2, 3)), ((1, 4), (2, 8))), 0),
    "backwards": (Layout(((2, 2), (2, 3)), ((-1, 4), (-2, 8))), 3),
}
SPANNING = {
    "plain rows": (Layout((4, 6), (6, 1)), 0),
    "shifted by one": (Layout(((2, 2), (2, 2)), ((2, 4), (1, 8))), 1),
    "across tiles": (Layout(((2, 2), (2, 3)), ((4, 2), (1, 8))), 0),
}
ALIASING = {
    "a repeated slot": (Layout(((2, 2), (2, 3)), ((1, 4), (1, 8))), 0),
    "one slot for all": (Layout(((2, 2), (2, 3)), ((0, 4), (0, 8))), 0),
    "a column left out": (Layout((2, (2, 3)), (4, (1, 8))), 0),
    "a grid that is not all there": (Layout(((2, 2), (2, 2)), ((2, 4), (1, 8))), 0),
}
REMAPPED = {
    "tiles backwards": (Layout(((2, 2), (2, 3)), ((2, -4), (1, 8))), 4),
    "columns of tiles backwards": (Layout(((2, 2), (2, 3)), ((2, 4), (1, -8))), 16),
    "the next tile": (Layout(((2, 2), (2, 2)), ((2, 4), (1, 8))), 8),
}


def compact_for(tensor: Tensor) -> Tensor:
    return asarray(np.ones((2, 4), np.float32))


WAYS_IN: dict[str, Callable[[Tensor], object]] = {
    "project": lambda tensor: tensor.carrier.project(tensor, chosen(tensor)),
    "scatter": lambda tensor: tensor.carrier.scatter(compact_for(tensor), tensor, chosen(tensor)),
    "scatter onto values": lambda tensor: tensor.carrier.scatter(
        compact_for(tensor), tensor, chosen(tensor), "add"
    ),
    "assign": lambda tensor: tensor.carrier.assign(compact_for(tensor), tensor, chosen(tensor)),
    "an operation": sw.relu,
    "an operation with two": lambda tensor: sw.add(tensor, tensor),
    "a reduction": sw.reduce_sum,
    "a gradient": lambda tensor: setattr(good(tensor.carrier), "grad", tensor),
    "a cotangent": lambda tensor: good(tensor.carrier).backward(tensor),
}


def chosen(tensor: Tensor) -> sw.TileSelection:
    return tensor.carrier.select({0: [1], 1: [2, 0]})


def good(carrier: TiledEvictable, **options: bool) -> Tensor:
    return Tensor(carrier, 0, COMPATIBLE["rows"][0], **options)


def carrier_of_values() -> TiledEvictable:
    secondary = FileBacked().new_like(np.arange(24.0))
    return TiledEvictable(CPU(0), secondary, GRID, TILE)


def refused(layout: Layout, offset: int, way_in: Callable[[Tensor], object]) -> None:
    carrier = carrier_of_values()
    carrier.promote(sw.TileSet([(1, 1)]))
    tensor = Tensor(carrier, offset, layout)
    before = (carrier.statistics(), carrier.primary_tiles, carrier.version)
    with pytest.raises(ValueError, match=r"tile|slot|shape"):
        way_in(tensor)
    assert (carrier.statistics(), carrier.primary_tiles, carrier.version) == before
    assert not carrier.is_owned()
    assert tensor.grad is None


@pytest.mark.parametrize("way_in", WAYS_IN.values(), ids=WAYS_IN)
class TestRefusals:
    @pytest.mark.parametrize("case", SPANNING)
    def test_a_tile_that_reaches_into_another(self, way_in: Callable[[Tensor], object], case: str) -> None:
        """*Reject one logical tile spanning physical tiles*."""
        refused(*SPANNING[case], way_in)

    @pytest.mark.parametrize("case", ALIASING)
    def test_a_slot_twice_or_never(self, way_in: Callable[[Tensor], object], case: str) -> None:
        """*Reject aliasing or incomplete tile coverage*."""
        refused(*ALIASING[case], way_in)

    @pytest.mark.parametrize("case", REMAPPED)
    def test_the_slots_of_another_tile(self, way_in: Callable[[Tensor], object], case: str) -> None:
        """*Reject tile-coordinate remapping*."""
        refused(*REMAPPED[case], way_in)


@pytest.mark.parametrize("way_in", WAYS_IN.values(), ids=WAYS_IN)
@pytest.mark.parametrize("case", COMPATIBLE)
def test_any_order_inside_a_tile_gets_in(way_in: Callable[[Tensor], object], case: str) -> None:
    """*Accept a within-tile permutation*."""
    layout, offset = COMPATIBLE[case]
    found = way_in(Tensor(carrier_of_values(), offset, layout))
    if isinstance(found, sw.AwaitResult):
        found = found.wait(10)
    assert not isinstance(found, AwaitProjection)
