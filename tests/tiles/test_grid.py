"""The grid numbers tiles and slots, and the footprint check says what visiting every slot would say."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.layout import Layout, column_major, row_major
from strideweave.tiles.grid import TileGrid, TilePlacement

grids = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=3).map(
    lambda axes: TileGrid([g for g, _ in axes], [t for _, t in axes])
)


@given(grids)
def test_ordinals_count_with_the_first_axis_fastest(grid):
    coordinates = [c[::-1] for c in product(*[range(extent) for extent in reversed(grid.grid_shape)])]
    assert [grid.coordinate(k) for k in range(grid.tile_count)] == coordinates
    assert [grid.ordinal(c) for c in coordinates] == list(range(grid.tile_count))
    assert grid.coordinates(range(grid.tile_count)) == tuple(coordinates)
    assert grid.coordinates(np.arange(grid.tile_count)[::-1]) == tuple(coordinates[::-1])
    assert grid.coordinates([]) == ()


@given(grids)
def test_tiles_are_runs_of_slots(grid):
    owners = [k for k in range(grid.tile_count) for _ in range(grid.tile_size)]
    assert [grid.tile_of(slot) for slot in range(grid.slot_count)] == owners
    assert grid.slot_count == prod(grid.logical_shape) == len(owners)
    assert grid.logical_shape == tuple(np.multiply(grid.grid_shape, grid.tile_shape).tolist())
    assert grid.rank == len(grid.grid_shape)


def test_shapes_become_plain_tuples_and_grids_compare_by_them():
    grid = TileGrid(np.array([3, 1]), [np.int32(2), 4])
    assert grid == TileGrid((3, 1), (2, 4))
    assert hash(grid) == hash(TileGrid((3, 1), (2, 4)))
    assert grid != TileGrid((1, 3), (2, 4))
    assert [type(extent) for extent in grid.grid_shape + grid.tile_shape] == [int] * 4
    assert type(grid.coordinates(np.array([2]))[0][0]) is int


@pytest.mark.parametrize("bad", [(2, 0), (2, -1), (), (2,), (2, 2, 2)])
@pytest.mark.parametrize("which", [0, 1])
def test_extents_below_one_no_axes_and_two_ranks_are_refused(bad, which):
    shapes = [(2, 2), (2, 2)]
    shapes[which] = bad
    with pytest.raises(ValueError, match=r"grid_shape|tile_shape"):
        TileGrid(*shapes)


@pytest.mark.parametrize("bad", [(2, 2.0), (2, True), (2, "2"), (2, None), 4, None, "22", ((2, 2), 2)])
@pytest.mark.parametrize("which", [0, 1])
def test_extents_that_are_no_integers_are_refused(bad, which):
    shapes = [(2, 2), (2, 2)]
    shapes[which] = bad
    with pytest.raises(TypeError, match=["grid_shape", "tile_shape"][which]):
        TileGrid(*shapes)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda grid: grid.ordinal((3, 0)), ValueError),
        (lambda grid: grid.ordinal((0, -1)), ValueError),
        (lambda grid: grid.ordinal((0,)), ValueError),
        (lambda grid: grid.ordinal((0, 0, 0)), ValueError),
        (lambda grid: grid.ordinal((0, 1.0)), TypeError),
        (lambda grid: grid.ordinal(0), TypeError),
        (lambda grid: grid.coordinate(6), IndexError),
        (lambda grid: grid.coordinate(-1), IndexError),
        (lambda grid: grid.coordinate(1.0), TypeError),
        (lambda grid: grid.coordinates([0, 6]), IndexError),
        (lambda grid: grid.coordinates([-1, 0]), IndexError),
        (lambda grid: grid.tile_of(24), IndexError),
        (lambda grid: grid.tile_of(-1), IndexError),
        (lambda grid: grid.tile_of(True), TypeError),
    ],
)
def test_what_is_not_in_the_grid_is_refused(call, error):
    with pytest.raises(error):
        call(TileGrid((3, 2), (2, 2)))


# --- the footprint check against the definition -----------------------------------------------------------


def axis_values(digits):
    values = [0]
    for extent, stride in digits:
        values = [value + entry * stride for entry in range(extent) for value in values]
    return values


def footprints_match(grid, modes, offset):
    """The requirement, word for word: every tile maps injectively onto its own slots."""
    per_axis = [axis_values(digits) for digits in modes]
    for ordinal, tile in enumerate(product(*[range(extent) for extent in reversed(grid.grid_shape)])):
        slots = [offset]
        for values, place, extent in zip(per_axis, reversed(tile), grid.tile_shape, strict=True):
            inside = values[place * extent : (place + 1) * extent]
            slots = [slot + value for slot in slots for value in inside]
        if sorted(slots) != list(range(ordinal * grid.tile_size, (ordinal + 1) * grid.tile_size)):
            return False
    return True


def layout_of(modes):
    return Layout([[e for e, _ in digits] for digits in modes], [[s for _, s in digits] for digits in modes])


def accepted(grid, modes, offset):
    try:
        return grid.place(layout_of(modes), offset)
    except ValueError:
        return None


def factors(source, number):
    found = []
    while number > 1:
        found.append(source.choice([d for d in range(2, number + 1) if number % d == 0]))
        number //= found[-1]
    return found


def compatible(source):
    """A grid and a Tensor that fits it: a shuffled mixed radix inside tiles, plain steps between them."""
    while True:
        rank = source.randint(1, 3)
        tile = [source.choice([1, 2, 3, 4, 6]) for _ in range(rank)]
        grid = [source.choice([1, 2, 3, 4]) for _ in range(rank)]
        if prod(tile) * prod(grid) <= 200:
            break
    modes = [[(extent, 0) for extent in factors(source, extent)] for extent in tile]
    places = [(axis, digit) for axis, digits in enumerate(modes) for digit in range(len(digits))]
    weight, offset = 1, 0
    for axis, digit in source.sample(places, len(places)):
        extent = modes[axis][digit][0]
        backwards = source.random() < 0.25
        modes[axis][digit] = (extent, -weight if backwards else weight)
        offset += weight * (extent - 1) if backwards else 0
        weight *= extent
    for digits, tiles in zip(modes, grid, strict=True):
        step = weight
        for extent in factors(source, tiles):
            digits.append((extent, step))
            step *= extent
        if source.random() < 0.2:
            digits.insert(source.randint(0, len(digits)), (1, source.randint(-9, 9)))
        weight *= tiles
    return TileGrid(grid, tile), modes, offset


def near_miss(source):
    """A fitting Tensor with one thing changed; now and then it fits still."""
    grid, modes, offset = compatible(source)
    digits = source.choice(modes)
    change = source.randrange(7)
    if change == 0 or not digits:
        return grid, modes, offset + source.choice([-1, 1, grid.tile_size, -grid.tile_size])
    place = source.randrange(len(digits))
    extent, stride = digits[place]
    if change <= 3:
        changed = [stride + source.choice([-2, -1, 1, 2]), -stride, stride * source.choice([0, 2, 3])]
        digits[place] = (extent, changed[change - 1])
    elif change == 4:
        source.shuffle(digits)
    elif change == 5:
        other = source.randrange(len(digits))
        digits[place], digits[other] = (extent, digits[other][1]), (digits[other][0], stride)
    else:
        tile = [source.choice([d for d in range(1, n + 1) if n % d == 0]) for n in grid.logical_shape]
        grid = TileGrid([n // t for n, t in zip(grid.logical_shape, tile, strict=True)], tile)
    return grid, modes, offset


def anything(source):
    while True:
        rank = source.randint(1, 3)
        tile = [source.randint(1, 4) for _ in range(rank)]
        grid = [source.randint(1, 3) for _ in range(rank)]
        if prod(tile) * prod(grid) <= 48:
            break
    extents = [tiles * extent for tiles, extent in zip(grid, tile, strict=True)]
    modes = [[(e, source.randint(-8, 12)) for e in factors(source, extent)] for extent in extents]
    return TileGrid(grid, tile), modes, source.randint(0, 6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [compatible, near_miss, anything])
def test_the_footprint_check_agrees_with_visiting_every_slot(make, seed):
    """Requirement: Tensor Layout compatibility preserves exact carrier tile footprints."""
    source = random.Random(seed)  # thousands of cases, the same in every run
    found = {True: 0, False: 0}
    for _ in range(2500):
        grid, modes, offset = make(source)
        fits = footprints_match(grid, modes, offset)
        assert (accepted(grid, modes, offset) is not None) == fits, (grid, modes, offset)
        found[fits] += 1
    if make is compatible:
        assert found[False] == 0
    else:
        assert found[False] > 100
        assert found[True] > 0


@pytest.mark.parametrize("extents", [(2, 2), (2, 3), (3, 2), (4, 3), (2, 2, 2)])
def test_every_stride_of_one_axis(extents):
    """Requirement: Tensor Layout compatibility; all small Layouts of one axis, cuts in a digit too."""
    size = prod(extents)
    found = {True: 0, False: 0}
    for strides in product(range(-size, size + 1) if len(extents) < 3 else range(-4, 5), repeat=len(extents)):
        modes = [list(zip(extents, strides, strict=True))]
        lowest = sum(min(0, stride * (extent - 1)) for extent, stride in modes[0])
        for tile in [t for t in range(1, size + 1) if size % t == 0]:
            grid = TileGrid((size // tile,), (tile,))
            fits = footprints_match(grid, modes, -lowest)
            assert (accepted(grid, modes, -lowest) is not None) == fits, (grid, modes)
            found[fits] += 1
    assert found[True]
    assert found[False]


@pytest.mark.parametrize("seed", range(2))
def test_the_placement_locates_every_element(seed):
    source = random.Random(100 + seed)
    for _ in range(150):
        grid, modes, offset = compatible(source)
        placement = accepted(grid, modes, offset)
        whole = [axis_values(digits) for digits in modes]
        inside = [axis_values(digits) for digits in placement.axes]
        for coordinate in product(*[range(extent) for extent in grid.logical_shape]):
            slot = offset + sum(values[x] for values, x in zip(whole, coordinate, strict=True))
            tile, within = zip(*map(divmod, coordinate, grid.tile_shape), strict=True)
            start = grid.ordinal(tile) * grid.tile_size
            at = placement.origin + sum(values[x] for values, x in zip(inside, within, strict=True))
            assert slot == start + at


@pytest.mark.parametrize("seed", range(2))
def test_a_mode_order_is_named_exactly_when_the_tile_is_a_permuted_dense_array(seed):
    source = random.Random(200 + seed)
    for _ in range(300):
        grid, modes, offset = compatible(source)
        placement = accepted(grid, modes, offset)
        orders = [axis for axis, extent in enumerate(grid.tile_shape) if extent > 1]
        slots = [axis_values(digits) for digits in placement.axes]

        def dense(order, slots=slots, grid=grid):
            weight = 1
            for axis in order:
                if slots[axis] != list(range(0, weight * grid.tile_shape[axis], weight)):
                    return False
                weight *= grid.tile_shape[axis]
            return True

        if placement.mode_order is None:
            assert not dense(sorted(orders, key=lambda axis: (slots[axis][1], axis)))
        else:
            assert sorted(placement.mode_order) == orders
            assert dense(placement.mode_order)


def test_row_major_experts_need_no_nesting():
    """Scenario: whole experts (E, O, I) with tiles (1, O, I) in C order."""
    placement = TileGrid((8, 1, 1), (1, 3, 4)).place(row_major(8, 3, 4), 0)
    assert placement == TilePlacement(axes=((), ((3, 4),), ((4, 1),)), origin=0, mode_order=(2, 1))


@pytest.mark.parametrize(
    "stride",
    [((1, 4), (2, 8)), ((2, 4), (1, 8)), ((-1, 4), (2, 8)), ((-2, 4), (-1, 8))],
)
def test_accept_a_within_tile_permutation(stride):
    """Scenario: Accept a within-tile permutation."""
    layout = Layout(((2, 2), (2, 3)), stride)
    origin = -sum(s for mode in stride for s in mode if s < 0)
    placement = TileGrid((2, 3), (2, 2)).place(layout, origin)
    assert placement.origin == origin
    assert placement.axes == (((2, stride[0][0]),), ((2, stride[1][0]),))


PLAIN = TileGrid((2, 2), (2, 2))
NESTED = ((2, 2), (2, 2))


OVER_ONE_AXIS = TileGrid((4,), (2,))


@pytest.mark.parametrize(
    ("grid", "layout", "offset", "message"),
    [
        # Scenario: Reject one logical tile spanning physical tiles.
        (PLAIN, row_major(4, 4), 0, "leaves out slots of its own: .* axis 0 steps by 4, .* fill 2"),
        (PLAIN, column_major(4, 4), 0, "leaves out slots of its own: .* axis 1 steps by 4"),
        (PLAIN, Layout(NESTED, ((1, 4), (2, 8))), 1, r"tile \(0, 0\) reaches .* \[1, 5\) .* the offset 0"),
        (PLAIN, Layout(NESTED, ((-1, 4), (2, 8))), 0, r"tile \(0, 0\) reaches .* \[-1, 3\) .* the offset 1"),
        # Scenario: Reject aliasing or incomplete tile coverage.
        (PLAIN, Layout(NESTED, ((1, 4), (1, 8))), 0, "repeats slots: .* axis 1 steps by 1, .* fill 2"),
        (PLAIN, Layout(NESTED, ((0, 4), (1, 8))), 0, "repeats slots: .* axis 0 steps by 0"),
        (PLAIN, Layout(NESTED, ((2, 8), (4, 16))), 0, "leaves out slots of its own: .* axis 0 steps by 2"),
        # Scenario: Reject tile-coordinate remapping.
        (PLAIN, Layout(NESTED, ((1, 8), (2, 4))), 0, r"tile \(1, 0\) .* lies 8 slots .* instead of 4"),
        (PLAIN, Layout(NESTED, ((1, -4), (2, 8))), 4, r"tile \(1, 0\) .* lies -4 slots .* instead of 4"),
        (
            OVER_ONE_AXIS,
            Layout(((2, 2, 2),), ((1, 2, 8),)),
            0,
            r"tile \(2,\) .* lies 8 slots .* instead of 4",
        ),
        # A digit of three cannot end at a tile of two.
        (TileGrid((3,), (2,)), Layout(((3, 2),), ((1, 4),)), 0, r"along axis 0 .* the tile extent 2"),
        # Another shape.
        (PLAIN, row_major(4, 2), 0, r"has the extents \(4, 4\), got \(4, 2\)"),
        (PLAIN, row_major(16), 0, r"has the extents \(4, 4\), got \(16,\)"),
        (PLAIN, row_major(4, 4).broadcast_to(2, 4, 4), 0, r"got \(2, 4, 4\)"),
        (PLAIN, row_major(4, 0), 0, r"got \(4, 0\)"),
    ],
)
def test_refusals_say_which_rule_broke_and_where(grid, layout, offset, message):
    """Requirement: a Tensor that breaks the rule SHALL fail with ValueError."""
    with pytest.raises(ValueError, match=message):
        grid.place(layout, offset)


def test_a_billion_slots_are_checked_from_their_modes():
    # Visiting tiles or slots would need minutes here.
    grid = TileGrid((1000, 10, 10), (1, 100, 100))
    layout = Layout((1000, (100, 10), (100, 10)), (10**4, (100, 10**7), (1, 10**8)))
    assert grid.slot_count == layout.size == 10**9
    assert grid.place(layout, 0).mode_order == (2, 1)
    with pytest.raises(ValueError, match="leaves out slots"):
        grid.place(row_major(1000, 1000, 1000), 0)
