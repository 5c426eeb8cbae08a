"""How operations are cut into blocks: tables and properties of plain arithmetic."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave import CPU, Layout, Tensor, row_major
from strideweave.carriers.tiled_evictable.blocks import Cut, Footprint, cut_operation
from strideweave.carriers.tiled_evictable.regions import (
    IndexSpace,
    covering,
    index_space,
    region_of,
    sliced,
    slices,
    within,
)
from strideweave.carriers.tiled_evictable.windows import part_of

BUDGET = 1 << 20


@pytest.mark.parametrize(
    ("shapes", "result", "expected"),
    [
        pytest.param([(4, 6), (4, 6)], (4, 6), IndexSpace((4, 6), ((0, 1), (0, 1)), (0, 1)), id="alike"),
        pytest.param([(4, 6), None], (4, 6), IndexSpace((4, 6), ((0, 1), None), (0, 1)), id="scalar"),
        pytest.param([(6,), (4, 1)], (4, 6), IndexSpace((4, 6), ((1,), (0, None)), (0, 1)), id="broadcast"),
        pytest.param([(1, 6)], (1, 6), IndexSpace((1, 6), ((0, 1),), (0, 1)), id="extent of one"),
        pytest.param([(1,), (0,)], (0,), IndexSpace((0,), ((None,), (0,)), (0,)), id="empty"),
        pytest.param([(), (3,)], (3,), IndexSpace((3,), ((), (0,)), (0,)), id="no axes"),
    ],
)
def test_elementwise_operations_run_over_the_axes_of_the_result(shapes, result, expected):
    assert index_space("add", shapes, result, {}) == expected


@pytest.mark.parametrize(
    ("options", "result", "kept"),
    [
        ({"axis": (1,), "keepdims": False}, (2, 4), (0, 2)),
        ({"axis": (1,), "keepdims": True}, (2, 1, 4), (0, None, 2)),
        ({"axis": (0, 1, 2), "keepdims": False}, (), ()),
        ({"axis": (), "keepdims": False}, (2, 3, 4), (0, 1, 2)),
    ],
)
def test_a_sum_runs_over_the_axes_of_its_operand(options, result, kept):
    expected = IndexSpace((2, 3, 4), ((0, 1, 2),), kept)
    assert index_space("reduce_sum", [(2, 3, 4)], result, options) == expected


@pytest.mark.parametrize(
    ("x", "y", "result", "expected"),
    [
        ((5,), (5,), (), IndexSpace((5,), ((0,), (0,)), ())),
        ((2, 5), (5,), (2,), IndexSpace((2, 5), ((0, 1), (1,)), (0,))),
        ((5,), (5, 3), (3,), IndexSpace((3, 5), ((1,), (1, 0)), (0,))),
        ((2, 5), (5, 3), (2, 3), IndexSpace((2, 3, 5), ((0, 2), (2, 1)), (0, 1))),
        (
            (7, 1, 2, 5),
            (8, 5, 3),
            (7, 8, 2, 3),
            IndexSpace((7, 8, 2, 3, 5), ((0, None, 2, 4), (1, 4, 3)), (0, 1, 2, 3)),
        ),
        ((5,), (8, 5, 3), (8, 3), IndexSpace((8, 3, 5), ((2,), (0, 2, 1)), (0, 1))),
    ],
)
def test_a_product_runs_over_stack_row_column_and_inner_axis(x, y, result, expected):
    assert index_space("matmul", [x, y], result, {}) == expected


@pytest.mark.parametrize(
    ("region", "tile_shape", "tiles"),
    [
        (((0, 4), (0, 6)), (2, 3), (range(2), range(2))),
        (((1, 2), (5, 7)), (2, 3), (range(1), range(1, 3))),
        (((3, 4),), (1,), (range(3, 4),)),
    ],
)
def test_the_tiles_that_a_region_touches(region, tile_shape, tiles):
    assert covering(region, tile_shape) == tiles


def test_regions_of_repeated_axes_are_their_one_entry():
    assert region_of((None, 1), ((3, 5), (2, 9))) == ((0, 1), (2, 9))
    assert within(((3, 5), (2, 9)), (3, 0)) == ((0, 2), (2, 9))


def test_every_index_comes_once_and_the_parts_of_a_region_in_a_row():
    cut = Cut(extents=(5, 4, 3), lengths=(2, 4, 2), outer=(2, 0), inner=(1,))
    seen = np.zeros(cut.extents, int)
    for step in cut.steps():
        seen[slices(step.block)] += 1
        assert step.first and step.last  # one part only
    assert (seen == 1).all()
    summed = Cut(extents=(2, 5), lengths=(1, 2), outer=(0,), inner=(1,))
    assert summed.parts == 3
    marks = [(step.block[0], step.first, step.last) for step in summed.steps()]
    assert marks == [
        (block, *mark)
        for block in [(0, 1), (1, 2)]
        for mark in [(True, False), (False, False), (False, True)]
    ]


def test_nothing_to_do_is_no_step():
    assert list(Cut((0, 4), (1, 4), (0, 1), ()).steps()) == []
    assert list(Cut((4, 0), (4, 1), (0,), (1,)).steps()) == []


def test_a_thin_factor_is_read_whole_and_a_tiled_one_in_whole_rows():
    tiled = Footprint((0, 2), 4, (16, 1024))
    thin = Footprint((2, 1), 4)
    cut = cut_operation((4096, 8, 1024), Footprint((0, 1), 4), [tiled, thin], BUDGET)
    assert cut.lengths == (256, 8, 1024)
    assert cut.outer == (0, 1), "while the rows stay the same, so does their window"


def test_tiles_larger_than_the_budget_are_taken_one_at_a_time():
    tiled = Footprint((0, 1), 4, (1024, 1024))
    cut = cut_operation((4096, 4096), Footprint((0, 1), 4), [tiled], BUDGET)
    assert tiled.nbytes(cut.lengths) <= 4 << 20
    assert Footprint((0, 1), 4).nbytes(cut.lengths) <= BUDGET, "what is written at once is bounded too"


def test_an_outer_product_of_long_tiles_is_cut_inside_them():
    row, column = Footprint((0, None), 4, (1 << 16, 1)), Footprint((None, 1), 4, (1, 1 << 16))
    target = Footprint((0, 1), 4)
    cut = cut_operation((1 << 16, 1 << 16), target, [row, column], BUDGET)
    assert target.nbytes(cut.lengths) <= BUDGET


def test_two_ways_of_tiling_meet_in_common_tiles_where_these_fit():
    target = Footprint((0, 1), 4)
    small = cut_operation(
        (48, 48), target, [Footprint((0, 1), 4, (4, 48)), Footprint((0, 1), 4, (6, 48))], 4 * 48 * 12
    )
    assert small.lengths[0] % 12 == 0
    rows, columns = Footprint((0, 1), 4, (1, 4096)), Footprint((0, 1), 4, (4096, 1))
    large = cut_operation((4096, 4096), target, [rows, columns], BUDGET)
    assert target.nbytes(large.lengths) <= BUDGET


@st.composite
def operations(draw):
    rank = draw(st.integers(1, 4))
    grids = [(draw(st.integers(1, 5)), draw(st.integers(1, 6))) for _ in range(rank)]
    space = tuple(count * tile for count, tile in grids)

    def footprint():
        axes = tuple(
            None if draw(st.integers(0, 4)) == 0 else axis
            for axis in draw(st.permutations(range(rank)))
            if draw(st.booleans())
        )
        tile = None
        if draw(st.booleans()):
            tile = tuple(1 if axis is None else draw(st.sampled_from([1, grids[axis][1]])) for axis in axes)
        return Footprint(axes, draw(st.sampled_from([1, 4, 8])), tile)

    target = footprint()
    return space, target, [footprint() for _ in range(draw(st.integers(1, 3)))], draw(st.integers(1, 4000))


@given(operations())
def test_blocks_cover_the_space_once_in_whole_tiles_of_the_target_within_the_budget(operation):
    space, target, others, budget = operation
    cut = cut_operation(space, target, others, budget)
    seen = np.zeros(space, int)
    firsts = []
    for step in cut.steps():
        seen[slices(step.block)] += 1
        region = region_of(target.axes, step.block)
        if step.first:
            firsts.append(region)
        assert firsts[-1] == region, "parts of another region in between"
        lengths = [stop - start for start, stop in step.block]
        for item in [target, *others]:
            if not (target.tile_shape and set(item.axes) & set(target.axes) - {None}):
                assert item.nbytes(lengths) <= item.limit(budget)
        for (start, stop), tile in zip(region, target.tile_shape or (), strict=False):
            assert start % tile == 0 and stop % tile == 0
    assert (seen == 1).all()
    assert len(set(firsts)) == len(firsts)


LAYOUTS = [
    row_major(12),
    Layout((12,), (-1,)),
    Layout(((3, 4),), ((4, 1),)),
    Layout(((2, 3, 2),), ((6, 1, 3),)),
    Layout(((3, 4), 2), ((2, 6), 1)),
    Layout((2, (2, 2, 3)), (12, (6, 1, 2))),
    Layout((1, 12), (7, 1)),
    Layout((3, 4), (0, 1)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_part_of_a_tensor_holds_the_elements_of_its_region(layout):
    size = layout.max_index - layout.min_index + 1
    carrier = CPU.from_numpy(np.arange(size, dtype=np.int32))
    tensor = Tensor(carrier, -layout.min_index, layout, requires_grad=False)
    values = tensor.numpy()
    pieces = [[(a, b) for a in range(extent) for b in range(a + 1, extent + 1)] for extent in layout.extents]
    for region in itertools.product(*pieces):
        part = part_of(tensor, region)
        assert np.array_equal(part.numpy(), values[slices(region)])
        offset, cover, _ = sliced(layout, tensor.offset, region)
        assert 0 <= offset + cover.min_index <= offset + cover.max_index < size
        assert cover.size <= math.prod(layout.extents)


def test_a_plain_axis_is_cut_without_a_copy():
    tensor = Tensor(CPU.from_numpy(np.arange(24, dtype=np.int32)), 0, row_major(4, 6), requires_grad=False)
    part = part_of(tensor, ((1, 3), (2, 5)))
    assert part.carrier is tensor.carrier
    assert (part.offset, part.layout) == (8, Layout((2, 3), (6, 1)))
