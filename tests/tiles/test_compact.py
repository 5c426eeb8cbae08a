"""The arithmetic of compact order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strideweave.layout import Layout
from strideweave.tiles.compact import row_major_strides, strided_runs
from strideweave.tiles.gather import CompactGeometry
from strideweave.tiles.grid import TileGrid
from strideweave.tiles.selection import TileSelection


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), max_size=12))
def test_runs_cover_every_entry_once_and_go_on_by_their_steps(pairs):
    first, second = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    covered = []
    for start, count, steps in strided_runs(first, second):
        assert count >= 1
        for entry in range(count):
            assert first[start + entry] == first[start] + entry * steps[0]
            assert second[start + entry] == second[start] + entry * steps[1]
        covered += range(start, start + count)
    assert covered == list(range(len(pairs)))


def test_equal_steps_make_one_run():
    assert list(strided_runs(np.arange(5) * 3, np.arange(5)[::-1])) == [(0, 5, (3, -1))]
    assert list(strided_runs(np.zeros(4, np.int64))) == [(0, 4, (0,))]
    assert list(strided_runs(np.array([0, 1, 2, 9, 8, 7]))) == [(0, 3, (1,)), (3, 3, (-1,))]


def test_row_major_strides():
    assert row_major_strides((4, 3, 2)) == (6, 2, 1)
    assert row_major_strides(()) == ()


@given(st.data())
def test_views_reach_the_elements_that_a_loop_reaches(data):
    """Spec: *Gather preserves public TileSelection ordering*: for a compact array in any order, in any blocks."""
    rank = data.draw(st.integers(1, 3))
    extents = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
    grid = TileGrid(tuple(data.draw(extents)), tuple(data.draw(extents)))
    strides, slots = [], grid.tile_count * grid.tile_size
    order = data.draw(st.permutations(range(rank)))
    inside = dict.fromkeys(range(rank), 0)
    step = 1
    for axis in order:
        inside[axis] = step
        step *= grid.tile_shape[axis]
    outside = step
    for axis in range(rank):
        strides.append((inside[axis], outside))
        outside *= grid.grid_shape[axis]
    shape = tuple(zip(grid.tile_shape, grid.grid_shape, strict=True))
    layout = Layout(shape, tuple(strides))
    placement = grid.place(layout, 0)
    selection = TileSelection(
        [
            data.draw(st.permutations(range(extent)))[: data.draw(st.integers(1, extent))]
            for extent in grid.grid_shape
        ]
    )
    ordinals = selection.bind(grid)
    compact_shape = tuple(
        count * extent for count, extent in zip(selection.compact_grid_shape, grid.tile_shape, strict=True)
    )
    flips = data.draw(st.lists(st.booleans(), min_size=rank, max_size=rank))
    dense = row_major_strides(compact_shape)
    signed = [-stride if flip else stride for stride, flip in zip(dense, flips, strict=True)]
    first = sum(
        stride * (extent - 1)
        for stride, extent, flip in zip(dense, compact_shape, flips, strict=True)
        if flip
    )
    size = int(np.prod(compact_shape))
    compact = np.arange(size, dtype=np.uint32)
    target = np.full(slots, size, np.uint32)
    chosen = np.array(data.draw(st.permutations(range(len(ordinals)))), np.int64)

    geometry = CompactGeometry.over(grid, placement, selection, signed, first)
    for tiles, source in geometry.views(chosen, compact, (target, ordinals[chosen] * grid.tile_size)):
        tiles[...] = source

    values = np.ndarray(compact_shape, np.uint32, compact, 4 * first, [4 * stride for stride in signed])
    wanted = np.full(grid.logical_shape, size, np.uint32)
    for index in np.ndindex(*compact_shape):
        at = tuple(
            selection.per_axis[axis][entry // extent] * extent + entry % extent
            for axis, (entry, extent) in enumerate(zip(index, grid.tile_shape, strict=True))
        )
        wanted[at] = values[index]
    found = [target[layout(index)] for index in np.ndindex(*grid.logical_shape)]
    assert np.array_equal(np.reshape(found, grid.logical_shape), wanted)
