"""TileSelection and TileSet: values that name tiles and know no grid until they are bound."""

from __future__ import annotations

import copy
import enum
import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.creation import asarray
from strideweave.tiles.grid import TileGrid
from strideweave.tiles.selection import TileSelection, TileSet


class Tile(enum.IntEnum):
    SECOND = 2


class OnlyIndex:
    """An integer for `operator.index` and nothing else."""

    def __index__(self):
        return 3


def ordinal(coordinate, extents):
    """The definition, written the slow way: the first axis varies fastest."""
    result, stride = 0, 1
    for entry, extent in zip(coordinate, extents, strict=True):
        result += entry * stride
        stride *= extent
    return result


@st.composite
def grids(draw, most=5):
    """A small grid of one to four axes."""
    extents = tuple(draw(st.lists(st.integers(1, most), min_size=1, max_size=4)))
    return TileGrid(extents, (2,) * len(extents))


@st.composite
def selections(draw, grid):
    """A random selection of ``grid``, each axis in random order."""
    return [
        draw(st.lists(st.integers(0, extent - 1), min_size=1, max_size=extent, unique=True))
        for extent in grid.grid_shape
    ]


@st.composite
def bound_selections(draw):
    grid = draw(grids())
    return grid, draw(selections(grid))


@st.composite
def bound_sets(draw):
    grid = draw(grids())
    coordinates = list(itertools.product(*map(range, grid.grid_shape)))
    return grid, draw(st.lists(st.sampled_from(coordinates), unique=True))


# --- TileSelection -------------------------------------------------------------------------------------


def test_selection_keeps_the_callers_order_on_every_axis():
    """Spec, *TileSelection is an ordered Cartesian product*: select three experts in router order."""
    selection = TileSelection([[2, 7, 19], range(1)])
    assert selection.per_axis == ((2, 7, 19), (0,))
    assert selection.coordinates == ((2, 0), (7, 0), (19, 0))


def test_selection_includes_every_recombined_corner():
    """Spec, same requirement: two axes of [0, 1] hold all four pairs."""
    assert set(TileSelection([[0, 1], [0, 1]]).coordinates) == {(0, 0), (1, 0), (0, 1), (1, 1)}


def test_selection_enumerates_with_the_first_axis_fastest():
    """Spec, same requirement: *Enumerate a multi-axis selection first-mode-fastest*."""
    selection = TileSelection([[7, 2], [4, 9]])
    assert selection.coordinates == ((7, 4), (2, 4), (7, 9), (2, 9))
    assert (selection.rank, selection.compact_grid_shape, len(selection)) == (2, (2, 2), 4)


@pytest.mark.parametrize(
    ("per_axis", "expected"),
    [
        pytest.param(((3, 1), (0,)), ((3, 1), (0,)), id="tuples"),
        pytest.param(iter([iter([3, 1]), iter([0])]), ((3, 1), (0,)), id="iterators"),
        pytest.param([range(4, 0, -2)], ((4, 2),), id="descending-range"),
        pytest.param(np.array([[3, 1], [0, 2]], np.uint8), ((3, 1), (0, 2)), id="integer-matrix"),
        pytest.param([np.array([3, 1])], ((3, 1),), id="integer-vector"),
        pytest.param([np.array([2**63], np.uint64)], ((2**63,),), id="unsigned-vector"),
        pytest.param([np.ma.array([3, 1])], ((3, 1),), id="vector-without-a-masked-entry"),
        pytest.param([[np.int32(3), np.uint64(1)]], ((3, 1),), id="numpy-scalars"),
        pytest.param([[Tile.SECOND, OnlyIndex()]], ((2, 3),), id="index-protocol"),
        pytest.param([{3: "c", 1: "a"}], ((3, 1),), id="dict-in-its-order"),
        pytest.param([b"\x03\x01"], ((3, 1),), id="bytes-are-integers"),
        pytest.param([[2**70]], ((2**70,),), id="integers-beyond-int64"),
    ],
)
def test_selection_takes_any_finite_iterables_of_integers(per_axis, expected):
    selection = TileSelection(per_axis)
    assert selection.per_axis == expected
    assert {type(entry) for axis in selection.per_axis for entry in axis} == {int}


@pytest.mark.parametrize(
    ("per_axis", "said"),
    [
        pytest.param(3, "per_axis must be a finite iterable", id="integer"),
        pytest.param(None, "per_axis must be a finite iterable", id="none"),
        pytest.param(
            [0, 1], r"axis 0 of the selection must be a finite iterable.*; \[0\] is", id="axis-is-an-integer"
        ),
        pytest.param(
            [np.int8(3)], r"axis 0 .* finite iterable.*; \[3\] is one", id="axis-is-an-integer-of-numpy"
        ),
        pytest.param(
            [asarray(2)], r"axis 0 .* finite iterable, not Tensor Tensor\(.*\)$", id="axis-is-a-number"
        ),
        pytest.param([True], r"axis 0 .* finite iterable, not bool True$", id="axis-is-a-flag"),
        pytest.param(
            [slice(0, 3)], r"axis 0 .* finite iterable.*range\(start, stop\) is", id="axis-is-a-slice"
        ),
        pytest.param([asarray([1, 2])], r"axis 0 .* finite iterable.*tolist\(\) is", id="axis-is-a-tensor"),
        pytest.param([[0], None], "axis 1 of the selection must be a finite iterable", id="axis-is-none"),
        pytest.param([itertools.count()], "axis 0 of the selection must be finite", id="endless-axis"),
        pytest.param(itertools.cycle([[0]]), "per_axis must be finite", id="endless-per-axis"),
        pytest.param(itertools.repeat([0]), "per_axis must be finite", id="endless-repetition"),
        pytest.param(np.array(3), "per_axis must be a finite iterable", id="array-without-axes"),
        pytest.param(
            [np.array(3)], "axis 0 of the selection must be a finite iterable", id="axis-without-axes"
        ),
        pytest.param([[0.0]], "an entry of axis 0 of the selection must be an integer, got 0.0", id="float"),
        pytest.param([[True]], "must be an integer, got the bool True", id="bool"),
        pytest.param([[np.True_]], "must be an integer, got np.True_", id="numpy-bool"),
        pytest.param([np.array([True])], "must be an integer, got the bool True", id="bool-vector"),
        pytest.param([np.array([1.0])], "must be an integer, got 1.0", id="float-vector"),
        pytest.param([np.ma.array([1, 2], mask=[0, 1])], "must be an integer, got None", id="masked-vector"),
        pytest.param([[0, "1"]], "must be an integer, got '1'", id="text-coordinate"),
        pytest.param(["12"], "must be an integer, got '1'", id="text-axis"),
        pytest.param("12", "must be an integer, got '1'", id="text"),
        pytest.param([[None]], "must be an integer, got None", id="none-coordinate"),
        pytest.param([[[0]]], "must be an integer, got .0. of type list", id="nested"),
        pytest.param([[np.array([1])]], "must be an integer, got array", id="array-coordinate"),
        pytest.param([[OnlyIndex]], "must be an integer, got <class", id="class-coordinate"),
    ],
)
def test_selection_refuses_other_types(per_axis, said):
    with pytest.raises(TypeError, match=said):
        TileSelection(per_axis)


@pytest.mark.parametrize(
    ("per_axis", "said"),
    [
        pytest.param([], "at least one axis", id="no-axes"),
        pytest.param([[0], []], "axis 1 of the selection selects no tile", id="empty-axis"),
        pytest.param([range(0)], "axis 0 of the selection selects no tile", id="empty-range"),
        pytest.param(
            [[0], [4, 1, 4]],
            "axis 1 of the selection selects tile 4 more than once.*np.unique",
            id="duplicate",
        ),
        pytest.param([range(10**30)], "more tiles than a grid can have", id="endless-range"),
        pytest.param([range(10**30, 0, -1)], "more tiles than a grid can have", id="endless-range-down"),
        pytest.param([range(2**63)], "more tiles than a grid can have", id="a-tile-too-many"),
        pytest.param([[0], [4, 4]], "axis 1 of the selection selects tile 4 more than once", id="pair"),
        pytest.param([[0, -2]], "negative tile coordinate -2", id="negative"),
        pytest.param([[-3, 0, 1]], "negative tile coordinate -3", id="negative-ascending"),
        pytest.param([range(2, -2, -1)], "negative tile coordinate -1", id="negative-range"),
    ],
)
def test_selection_refuses_empty_axes_duplicates_and_negatives(per_axis, said):
    with pytest.raises(ValueError, match=said):
        TileSelection(per_axis)


def test_selection_passes_the_error_of_an_iterable_on():
    def failing():
        yield 0
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        TileSelection([failing()])


def test_selection_does_not_see_later_changes_of_its_inputs():
    """Spec, *Project eagerly returns*: mutating the original inputs does not change the selection."""
    axis, array = [2, 7], np.array([1, 0])
    per_axis = [axis, array]
    selection = TileSelection(per_axis)
    axis.append(9)
    array[:] = 5
    per_axis.clear()
    assert selection.per_axis == ((2, 7), (1, 0))


@given(bound_selections())
def test_selection_binds_to_the_ordinals_of_its_coordinates(case):
    grid, per_axis = case
    selection = TileSelection(per_axis)
    counts = selection.compact_grid_shape
    for compact in itertools.product(*map(range, counts)):  # the definition in the specification
        source = tuple(axis[entry] for axis, entry in zip(per_axis, compact, strict=True))
        assert selection.coordinates[ordinal(compact, counts)] == source
    expected = [ordinal(coordinate, grid.grid_shape) for coordinate in selection.coordinates]
    assert selection.bind(grid).tolist() == expected
    assert selection.bind(grid).dtype == np.int64


@given(bound_selections(), st.booleans())
def test_selection_tile_set_has_the_same_tiles_in_grid_order(case, bound_before):
    grid, per_axis = case
    selection = TileSelection(per_axis)
    if bound_before:
        selection.bind(grid)
    tiles = selection.tile_set
    assert tiles == TileSet(selection.coordinates)
    assert tiles.coordinates == TileSet(selection.coordinates).coordinates
    assert tiles.bind(grid).tolist() == sorted(selection.bind(grid).tolist())


def test_selection_of_many_tiles_binds_like_one_of_few():
    grid = TileGrid((40, 3, 50), (1, 1, 1))
    selection = TileSelection([range(39, -1, -3), [2, 0], range(50)])
    expected = [ordinal(coordinate, grid.grid_shape) for coordinate in selection.coordinates]
    assert selection.bind(grid).tolist() == expected
    assert selection.tile_set.bind(grid).tolist() == sorted(expected)


def test_the_set_of_a_large_selection_costs_what_its_axes_cost():
    """Not what its tiles do, whether or not it is bound."""
    grid = TileGrid((1000, 1000), (1, 1))
    selection = TileSelection([range(999, -1, -1), range(1000)])
    selection.bind(grid)
    tracemalloc.start()
    tiles = selection.tile_set
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tiles) == 1_000_000
    assert peak < 100_000


@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_a_set_of_a_bound_selection_can_be_bound_to_another_grid(count):
    """Its ordinals are those of the first one."""
    wide, tall = TileGrid((400, 2), (1, 1)), TileGrid((500, 3), (1, 1))
    rows = np.random.default_rng(count).permutation(400)[:count].tolist()
    selection = TileSelection([rows, [1]])
    selection.bind(wide)
    assert selection.tile_set.bind(tall).tolist() == sorted(500 + row for row in rows)
    assert selection.bind(tall).tolist() == [500 + row for row in rows]


@pytest.mark.parametrize(
    ("per_axis", "said"),
    [
        pytest.param([[0]], "rank 1; the grid .4, 2. has rank 2", id="rank"),
        pytest.param([[0], [0], [0]], "rank 3", id="too-many-axes"),
        pytest.param([[0, 4], [0]], "tile 4 on axis 0 of the grid", id="range"),
        pytest.param([[0], range(3)], "tile 2 on axis 1 of the grid", id="range-of-a-range"),
        pytest.param([[0], range(2, -1, -1)], "tile 2 on axis 1", id="descending-range"),
        pytest.param([[2**70], [0]], f"tile {2**70} on axis 0", id="beyond-int64"),
    ],
)
def test_binding_refuses_another_rank_and_tiles_outside_the_grid(per_axis, said):
    """Spec: binding fails with ValueError for rank mismatch or an out-of-range coordinate."""
    grid = TileGrid((4, 2), (1, 1))
    selection = TileSelection(per_axis)
    for tiles in (selection, selection.tile_set):
        with pytest.raises(ValueError, match=said):
            tiles.bind(grid)


def test_binding_again_gives_the_same_read_only_array():
    selection = TileSelection([[3, 1]])
    first = selection.bind(TileGrid((4,), (2,)))
    assert selection.bind(TileGrid((4,), (2,))) is first
    assert selection.bind(TileGrid((5,), (2,))).tolist() == first.tolist()
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0


def test_selections_are_equal_when_their_axes_are():
    selection = TileSelection([range(3), [1, 0]])
    same = TileSelection([(0, 1, 2), [1, 0]])
    assert selection == same
    assert hash(selection) == hash(same)
    assert selection != TileSelection([range(3), [0, 1]])
    assert selection != TileSelection([range(2), [1, 0]])
    assert selection != selection.tile_set
    assert selection != ((0, 1, 2), (1, 0))


@pytest.mark.parametrize("tiles", [TileSelection([[7, 2], range(3)]), TileSet([(1, 0), (0, 1)]), TileSet()])
def test_tiles_survive_pickling_and_copying(tiles):
    for twin in (pickle.loads(pickle.dumps(tiles)), copy.copy(tiles), copy.deepcopy(tiles)):
        assert twin == tiles
        assert hash(twin) == hash(tiles)
        assert twin.coordinates == tiles.coordinates


@pytest.mark.parametrize("tiles", [TileSelection([[0]]), TileSet([(0,)])])
def test_tiles_are_immutable(tiles):
    before = tiles.coordinates
    for name in ("coordinates", "per_axis", "tag", "_coordinates"):
        with pytest.raises(AttributeError, match="is immutable"):
            setattr(tiles, name, ())
    with pytest.raises(AttributeError, match="is immutable"):
        del tiles._coordinates
    assert tiles.coordinates == before


@pytest.mark.parametrize(
    "tiles",
    [
        TileSelection([[7, 2]]),
        TileSelection([[7, 2], range(3)]),
        TileSet(),
        TileSet([(1,)]),
        TileSet([(1, 0), (0, 1)]),
    ],
)
def test_repr_of_few_tiles_can_be_evaluated(tiles):
    assert eval(repr(tiles), {"TileSelection": TileSelection, "TileSet": TileSet}) == tiles


def test_repr_of_many_tiles_is_short():
    assert repr(TileSelection([range(10**6)])) == (
        "TileSelection(((0, 1, 2, 3, 4, 5, 6, 7, ... 999991 more ..., 999999),))"
    )
    assert len(repr(TileSet((tile,) for tile in range(1000)))) < 100


# --- TileSet -------------------------------------------------------------------------------------------


def test_tile_set_need_not_be_a_product():
    """Spec: *Residency requests use arbitrary immutable tile sets*; *Represent a non-product cache set*."""
    tiles = TileSet([(0, 0), (0, 1), (1, 0)])
    assert len(tiles) == 3
    assert (1, 1) not in tiles
    assert (0, 1) in tiles


def test_tile_set_sorts_by_the_reversed_coordinate():
    """Spec, same requirement: the first coordinate axis varies fastest."""
    assert TileSet([(1, 1), (0, 2), (5, 0), (0, 1)]).coordinates == ((5, 0), (0, 1), (1, 1), (0, 2))


@pytest.mark.parametrize(
    ("coordinates", "expected"),
    [
        pytest.param(iter([[1, 0], iter([0, 0])]), ((0, 0), (1, 0)), id="iterators"),
        pytest.param({(1,), (0,)}, ((0,), (1,)), id="set"),
        pytest.param(np.array([[1, 0], [0, 0]], np.int16), ((0, 0), (1, 0)), id="matrix"),
        pytest.param([np.array([1, 0])], ((1, 0),), id="vector"),
        pytest.param([(np.int8(1), Tile.SECOND)], ((1, 2),), id="numpy-and-enum"),
        pytest.param(TileSet([(1,), (0,)]), ((0,), (1,)), id="tile-set"),
        pytest.param([], (), id="empty"),
    ],
)
def test_tile_set_takes_any_finite_iterables_of_integers(coordinates, expected):
    tiles = TileSet(coordinates)
    assert tiles.coordinates == tuple(tiles) == expected
    assert {type(entry) for coordinate in tiles for entry in coordinate} <= {int}


@pytest.mark.parametrize(
    ("coordinates", "said"),
    [
        pytest.param(7, "coordinates must be a finite iterable", id="integer"),
        pytest.param(itertools.count(), "coordinates must be finite", id="endless"),
        pytest.param([0, 1], "a tile coordinate must be a finite iterable", id="flat"),
        pytest.param([(0,), None], "a tile coordinate must be a finite iterable", id="none"),
        pytest.param([(0.5,)], "an entry of a tile coordinate must be an integer, got 0.5", id="float"),
        pytest.param([(False,)], "must be an integer, got the bool False", id="bool"),
        pytest.param(["0"], "must be an integer, got '0'", id="text"),
        pytest.param(np.zeros((2, 1)), "must be an integer, got 0.0", id="float-matrix"),
    ],
)
def test_tile_set_refuses_other_types(coordinates, said):
    with pytest.raises(TypeError, match=said):
        TileSet(coordinates)


@pytest.mark.parametrize(
    ("coordinates", "said"),
    [
        pytest.param([(0, 0), (0,)], r"one rank, found the ranks \[1, 2\]", id="mixed-ranks"),
        pytest.param([(0, 0), ()], r"one rank, found the ranks \[0, 2\]", id="rank-zero-among-others"),
        pytest.param([(0, 0), (1, -1)], r"tile coordinate \(1, -1\) has a negative", id="negative"),
        pytest.param(
            [(1, 0), (0, 0), [1, 0]], r"tile coordinate \(1, 0\) occurs more than once", id="duplicate"
        ),
    ],
)
def test_tile_set_refuses_mixed_ranks_negatives_and_duplicates(coordinates, said):
    with pytest.raises(ValueError, match=said):
        TileSet(coordinates)


def test_tile_set_does_not_see_later_changes_of_its_inputs():
    entry = [1, 0]
    coordinates = [entry]
    tiles = TileSet(coordinates)
    entry[0] = 9
    coordinates.append([2, 2])
    assert tiles.coordinates == ((1, 0),)


@given(bound_sets())
def test_tile_set_binds_to_ascending_ordinals_in_coordinate_order(case):
    grid, coordinates = case
    tiles = TileSet(coordinates)
    ordinals = tiles.bind(grid).tolist()
    assert ordinals == [ordinal(coordinate, grid.grid_shape) for coordinate in tiles.coordinates]
    assert ordinals == sorted(ordinals)


@given(bound_sets(), st.randoms())
def test_tile_set_of_ordinals_is_the_tile_set_of_their_coordinates(case, random):
    grid, coordinates = case
    tiles = TileSet(coordinates)
    ordinals = tiles.bind(grid).tolist()
    random.shuffle(ordinals)
    for given_as in (list(ordinals), np.array(ordinals, np.int64), iter(list(ordinals))):
        made = TileSet._from_ordinals(grid, given_as)
        assert made.bind(grid).tolist() == sorted(ordinals)
        assert made == tiles
        assert made.coordinates == tiles.coordinates
        assert hash(made) == hash(tiles)
        assert len(made) == len(coordinates)


def test_tile_set_of_ordinals_does_not_see_later_changes_of_the_array():
    grid = TileGrid((8,), (1,))
    ordinals = np.array([1, 5], np.int64)
    tiles = TileSet._from_ordinals(grid, ordinals)
    ordinals[:] = 7
    assert tiles.coordinates == ((1,), (5,))


def test_tile_set_of_one_grid_binds_to_another():
    tiles = TileSet._from_ordinals(TileGrid((4, 4), (1, 1)), [5])
    assert tiles.bind(TileGrid((2, 8), (1, 1))).tolist() == [3]
    assert tiles.coordinates == ((1, 1),)
    with pytest.raises(ValueError, match=r"tile \(1, 1\), which is outside the grid \(1, 2\)"):
        tiles.bind(TileGrid((1, 2), (1, 1)))


def test_tile_set_of_many_tiles_names_the_one_outside():
    grid = TileGrid((100,), (1,))
    with pytest.raises(ValueError, match=r"tile \(100,\), which is outside the grid \(100,\)"):
        TileSet((tile,) for tile in range(101)).bind(grid)
    with pytest.raises(ValueError, match="which is outside"):
        TileSet([*((tile,) for tile in range(50)), (2**70,)]).bind(grid)


def test_tile_set_of_another_rank_does_not_bind():
    with pytest.raises(ValueError, match="rank 2; the grid"):
        TileSet([(0, 0)]).bind(TileGrid((4,), (1,)))


def test_empty_tile_set_has_no_rank_and_fits_every_grid():
    """Spec: an empty rank-agnostic TileSet is valid."""
    for grid in (TileGrid((4,), (1,)), TileGrid((2, 2), (1, 1))):
        assert TileSet().bind(grid).tolist() == []
        assert TileSet._from_ordinals(grid, []) == TileSet()
    assert not TileSet()


def test_tile_sets_of_the_same_tiles_are_equal_however_they_were_made():
    grid = TileGrid((4, 2), (1, 1))
    ways = [
        TileSet([(1, 0), (3, 0)]),
        TileSet([(3, 0), (1, 0)]),
        TileSelection([[3, 1], [0]]).tile_set,
        TileSet._from_ordinals(grid, [3, 1]),
        TileSet._from_ordinals(TileGrid((9, 9), (1, 1)), [3, 1]),
    ]
    for first, second in itertools.product(ways, ways):
        assert first == second
        assert hash(first) == hash(second)
    assert ways[0] != TileSet([(1, 0)])
    assert ways[3] != TileSet._from_ordinals(grid, [3, 2])
    assert ways[0] != {(1, 0), (3, 0)}
