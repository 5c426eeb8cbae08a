"""Where runs of slots lie in parts, against NumPy arrays that are cut both ways element by element."""

from __future__ import annotations

import numpy as np
import pytest

from strideweave.tiles.grid import TileGrid
from strideweave.tiles.part_map import PartMap

# shape, tile, part
CUTS = [
    ((12,), (12,), (12,)),
    ((12,), (4,), (12,)),
    ((12,), (3,), (4,)),
    ((12,), (6,), (4,)),
    ((12,), (4,), (5,)),  # the last part reaches beyond the array
    ((6, 8), (6, 8), (6, 8)),
    ((6, 8), (2, 8), (6, 8)),
    ((6, 8), (3, 4), (6, 8)),
    ((6, 8), (3, 4), (2, 8)),
    ((6, 8), (1, 1), (4, 3)),
    ((6, 8), (6, 2), (2, 8)),
    ((6, 8), (2, 8), (4, 8)),
    ((4, 6, 5), (1, 6, 5), (1, 6, 5)),
    ((4, 6, 5), (2, 3, 5), (1, 6, 5)),
    ((4, 6, 5), (2, 6, 5), (3, 6, 5)),
    ((4, 6, 5), (1, 2, 5), (1, 6, 5)),
    ((1, 6, 1), (1, 3, 1), (1, 2, 1)),
    ((2, 3, 4, 5), (1, 3, 2, 5), (2, 1, 4, 5)),
]


def expected_places(grid, part_shape, order):
    """For each slot of the tile-major array the part that it is in and the element there."""
    shape = grid.logical_shape
    counts = [-(-extent // part) for extent, part in zip(shape, part_shape, strict=True)]
    index = np.indices(shape)
    along = [index[axis] // part for axis, part in enumerate(part_shape)]
    within = [index[axis] % part for axis, part in enumerate(part_shape)]
    places = np.ravel_multi_index(along, counts), np.ravel_multi_index(within, part_shape, order=order)
    slots = []
    for array in places:
        for last_first in np.ndindex(*grid.grid_shape[::-1]):
            cut = tuple(
                slice(number * tile, (number + 1) * tile)
                for number, tile in zip(last_first[::-1], grid.tile_shape, strict=True)
            )
            slots.append(array[cut].ravel(order=order))
    half = len(slots) // 2
    return np.concatenate(slots[:half]), np.concatenate(slots[half:])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("shape", "tile", "part"), CUTS)
def test_every_slot_is_found_where_it_is(shape, tile, part, order):
    grid = TileGrid(tuple(extent // cut for extent, cut in zip(shape, tile, strict=True)), tile)
    found = PartMap(grid, part, order)
    parts, elements = expected_places(grid, part, order)
    runs = np.arange(grid.slot_count // found.run_size)
    run_parts, run_elements = found.locate(runs)
    within = np.arange(found.run_size)
    assert np.array_equal(np.repeat(run_parts, found.run_size), parts)
    assert np.array_equal(np.add.outer(run_elements, within).ravel(), elements)
    assert found.runs_per_tile * found.run_size == grid.tile_size


def test_numbers_of_runs_may_come_in_any_order_and_shape():
    found = PartMap(TileGrid((3, 2), (2, 4)), (6, 8))
    runs = np.array([[11, 0], [5, 5]])
    parts, elements = found.locate(runs)
    assert parts.shape == elements.shape == (2, 2)
    flat = found.locate(np.arange(12))
    assert np.array_equal(elements, flat[1][runs])


@pytest.mark.parametrize(
    ("shape", "tile", "part", "run"),
    [
        ((64, 32), (8, 32), (64, 32), 256),  # whole rows: a tile is one run
        ((64, 32), (8, 16), (64, 32), 16),
        ((8, 64, 32), (1, 64, 32), (1, 64, 32), 2048),  # an expert is one run
        ((8, 64, 32), (4, 64, 32), (1, 64, 32), 2048),
    ],
)
def test_runs_are_as_long_as_they_can_be(shape, tile, part, run):
    grid = TileGrid(tuple(extent // cut for extent, cut in zip(shape, tile, strict=True)), tile)
    assert PartMap(grid, part).run_size == run
