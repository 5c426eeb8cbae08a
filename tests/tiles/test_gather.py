"""Tiles to compact arrays and back, against NumPy indexing of the whole logical array."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.io.buffers import address_of
from strideweave.io.scattered import ScatteredMemory
from strideweave.layout import Layout, row_major
from strideweave.tiles import gather
from strideweave.tiles.compact import array_runs, groups, joint_digits, parts
from strideweave.tiles.gather import CompactGeometry
from strideweave.tiles.grid import TileGrid
from strideweave.tiles.selection import TileSelection

UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)


class Case:
    """A grid, a compatible placement, storage with distinct-looking bits, and a selection."""

    def __init__(self, grid, layout, offset, per_axis, dtype=np.uint32):
        self.grid = grid
        self.selection = TileSelection(per_axis)
        self.geometry = CompactGeometry.of(grid, grid.place(layout, offset), self.selection)
        bits = np.random.default_rng(7).integers(0, 2**63, grid.slot_count, np.uint64, endpoint=True)
        self.slab = bits.astype(dtype).reshape(grid.tile_count, grid.tile_size)
        storage = self.slab.reshape(-1)
        self.logical = np.empty(grid.logical_shape, dtype)
        for coordinate in np.ndindex(*grid.logical_shape):
            self.logical[coordinate] = storage[offset + layout(coordinate)]
        self.ordinals = self.selection.bind(grid)
        self.positions = list(range(len(self.ordinals)))

    @property
    def tiles(self):
        return [self.slab[ordinal] for ordinal in self.ordinals]

    def pieces(self, positions):
        """The tiles at some positions, as pieces of memory."""
        addresses = address_of(self.slab) + self.ordinals[positions] * self.slab.strides[0]
        return ScatteredMemory.of(addresses, self.slab.strides[0], self.slab.dtype, self.slab)

    def compact(self, extra=0):
        return np.zeros(self.geometry.size + extra, self.slab.dtype)

    def expected(self):
        """NumPy's indexing of the logical array: the oracle."""
        extents = self.grid.tile_shape
        expanded = [
            [tile * extent + entry for tile in axis for entry in range(extent)]
            for axis, extent in zip(self.selection.per_axis, extents, strict=True)
        ]
        return self.logical[np.ix_(*expanded)]

    def read(self, compact):
        """The compact Tensor that the geometry's Layout makes of an array."""
        return np.array(
            [compact[self.geometry.layout(coordinate)] for coordinate in np.ndindex(*self.geometry.shape)],
            compact.dtype,
        ).reshape(self.geometry.shape)


def factors(draw, extent):
    """A random ordered factorisation of ``extent`` without ones."""
    found = []
    while extent > 1:
        found.append(draw(st.sampled_from([d for d in range(2, extent + 1) if extent % d == 0])))
        extent //= found[-1]
    return found


@st.composite
def cases(draw):
    """Any compatible placement: permuted, hierarchical and negative digits; any selection; any item size."""
    rank = draw(st.integers(1, 3))
    tile_shape = [draw(st.sampled_from([1, 2, 3, 4, 6])) for _ in range(rank)]
    grid_shape = [draw(st.integers(1, 3)) for _ in range(rank)]
    grid = TileGrid(tuple(grid_shape), tuple(tile_shape))
    plain = draw(st.booleans())
    digits = [[extent] if plain else factors(draw, extent) for extent in tile_shape]
    strides = [[0] * len(axis) for axis in digits]
    stride, origin = 1, 0
    places = [(axis, place) for axis, entries in enumerate(digits) for place in range(len(entries))]
    for axis, place in draw(st.permutations(places)):
        extent = digits[axis][place]
        sign = 1 if plain else draw(st.sampled_from([1, -1]))
        strides[axis][place] = sign * stride
        origin += stride * (extent - 1) if sign < 0 else 0
        stride *= extent
    shape_modes, stride_modes = [], []
    for axis in range(rank):
        shape_modes.append((*digits[axis], grid_shape[axis]))
        stride_modes.append((*strides[axis], stride))
        stride *= grid_shape[axis]
    per_axis = [
        draw(st.lists(st.integers(0, extent - 1), min_size=1, max_size=extent, unique=True))
        for extent in grid_shape
    ]
    layout = Layout(tuple(shape_modes), tuple(stride_modes))
    return Case(grid, layout, origin, per_axis, draw(st.sampled_from(UNSIGNED)))


def tile_major(grid_shape, tile_shape, *, order="row"):
    """The Layout of tiles one after the other, each in row-major or column-major order inside."""
    axes = range(len(tile_shape))
    inner, stride = [0] * len(tile_shape), 1
    for axis in reversed(axes) if order == "row" else axes:
        inner[axis] = stride
        stride *= tile_shape[axis]
    outer = []
    for extent in grid_shape:
        outer.append(stride)
        stride *= extent
    return Layout(tuple(zip(tile_shape, grid_shape, strict=True)), tuple(zip(inner, outer, strict=True)))


# --- values --------------------------------------------------------------------------------------------


@given(cases(), st.randoms())
def test_compact_equals_indexing_the_logical_array(case, random):
    """Spec, *Gather preserves public TileSelection ordering*: any placement, any selection."""
    random.shuffle(case.positions)
    tiles = [case.tiles[position] for position in case.positions]
    compact = case.compact(extra=3)
    case.geometry.copy_in(tiles, case.positions, compact)
    np.testing.assert_array_equal(case.read(compact), case.expected())
    assert not compact[case.geometry.size :].any()


@given(cases(), st.randoms())
def test_copy_out_takes_back_what_copy_in_brought(case, random):
    random.shuffle(case.positions)
    compact = case.compact()
    case.geometry.copy_in(case.tiles, range(len(case.tiles)), compact)
    back = [np.zeros(case.grid.tile_size, compact.dtype) for _ in case.positions]
    case.geometry.copy_out(back, case.positions, compact)
    for position, tile in zip(case.positions, back, strict=True):
        np.testing.assert_array_equal(tile, case.tiles[position])


@given(cases(), st.randoms(), st.sampled_from([1, 48, 256 * 1024]))
def test_rows_of_a_slab_are_copied_like_tiles(case, random, stage):
    random.shuffle(case.positions)
    positions = np.array(case.positions)
    compact = case.compact()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_STAGE_BYTES", stage)  # a small one makes several rounds of it
        case.geometry.copy_pieces(case.pieces(positions), positions, compact)
    np.testing.assert_array_equal(case.read(compact), case.expected())


@given(cases(), st.randoms(), st.integers(0, 7), st.sampled_from(["tiles", "rows"]))
def test_a_part_of_the_tiles_touches_only_its_own_places(case, random, count, form):
    """Tiles are gathered as they arrive: the rest of the compact array stays as it is."""
    random.shuffle(case.positions)
    now, later = case.positions[:count], case.positions[count:]
    whole, compact = case.compact(), case.compact()
    case.geometry.copy_in([case.tiles[position] for position in case.positions], case.positions, whole)
    compact[:] = ~whole
    if form == "tiles" or not now:
        case.geometry.copy_in([case.tiles[position] for position in now], now, compact)
    else:
        positions = np.array(now, np.intp)
        case.geometry.copy_pieces(case.pieces(positions), positions, compact)
    assert (compact == whole).sum() == len(now) * case.grid.tile_size
    case.geometry.copy_in([case.tiles[position] for position in later], later, compact)
    np.testing.assert_array_equal(compact, whole)


def test_rows_at_unequal_distances_find_their_places():
    """Three tiles of a 3 x 2 selection whose ends are as far apart as three neighbours on the other axis."""
    grid = TileGrid((3, 2), (2, 3))
    case = Case(grid, tile_major((3, 2), (2, 3)), 0, [range(3), range(2)])
    whole, compact = case.compact(), case.compact()
    case.geometry.copy_in(case.tiles, case.positions, whole)
    positions = np.array([0, 3, 2])  # compact coordinates (0, 0), (0, 1) and (2, 0)
    compact[:] = ~whole
    case.geometry.copy_pieces(case.pieces(positions), positions, compact)
    assert (compact == whole).sum() == 3 * grid.tile_size


@given(cases(), st.randoms(), st.sampled_from([1, 5, 16, 64, 10**6]), st.sampled_from(["tiles", "rows"]))
def test_jobs_in_any_order_do_the_whole_copy(case, random, piece_bytes, form):
    whole, compact = case.compact(), case.compact()
    case.geometry.copy_in(case.tiles, case.positions, whole)
    if form == "tiles":
        jobs = case.geometry.jobs(case.tiles, case.positions, compact, piece_bytes)
    else:
        positions = np.array(case.positions)
        jobs = case.geometry.piece_jobs(case.pieces(positions), positions, compact, piece_bytes)
    assert not compact.any()
    random.shuffle(jobs)
    for job in jobs:
        job()
    np.testing.assert_array_equal(compact, whole)


@given(cases())
def test_read_only_tiles_can_be_copied(case):
    tiles = case.tiles
    for tile in tiles:
        tile.setflags(write=False)
    compact = case.compact()
    case.geometry.copy_in(tiles, case.positions, compact)
    np.testing.assert_array_equal(case.read(compact), case.expected())


@pytest.mark.parametrize("order", ["row", "column"])
def test_large_tiles_are_copied_like_small_ones(order):
    """Above 64 KiB other paths are taken; a reordered tile goes through its own view."""
    grid_shape, tile_shape = (2, 3), (96, 128)
    case = Case(
        TileGrid(grid_shape, tile_shape),
        tile_major(grid_shape, tile_shape, order=order),
        0,
        [[1, 0], [2, 0]],
        np.uint64,
    )
    assert case.grid.tile_size * 8 >= 64 * 1024
    by_tiles, by_rows, by_jobs = case.compact(), case.compact(), case.compact()
    positions = np.array(case.positions)
    case.geometry.copy_in(case.tiles, case.positions, by_tiles)
    case.geometry.copy_pieces(case.pieces(positions), positions, by_rows)
    for job in case.geometry.piece_jobs(case.pieces(positions), positions, by_jobs, 4096):
        job()
    np.testing.assert_array_equal(case.read(by_tiles), case.expected())
    np.testing.assert_array_equal(by_rows, by_tiles)
    np.testing.assert_array_equal(by_jobs, by_tiles)


@pytest.mark.parametrize(
    "bits", [0x80000000, 0x7FC12345, 0xFFC00001, 0x7F800001], ids=["-0.0", "payload", "sign", "signaling"]
)
def test_bits_survive_the_copy(bits):
    grid = TileGrid((2,), (2,))
    case = Case(grid, Layout(((2, 2),), ((1, 2),)), 0, [[1, 0]])
    compact = case.compact()
    case.geometry.copy_in([np.full(2, bits, np.uint32)] * 2, [0, 1], compact)
    assert compact.tolist() == [bits] * 4


# --- the compact Layout --------------------------------------------------------------------------------


@given(cases())
def test_compact_layout_is_dense_and_flat(case):
    """Spec, *Project eagerly returns a completion handle*: the result has dense Layout."""
    layout = case.geometry.layout
    selected = zip(case.selection.compact_grid_shape, case.grid.tile_shape, strict=True)
    assert layout.extents == case.geometry.shape == tuple(count * extent for count, extent in selected)
    assert layout.shape == case.geometry.shape
    assert layout.is_injective
    assert layout.min_index == 0
    assert layout.cosize == layout.size == case.geometry.size == math.prod(case.geometry.shape)


@given(cases())
def test_contiguous_means_that_every_tile_is_one_run_in_slot_order(case):
    size, positions = case.grid.tile_size, case.positions
    compact = case.compact()
    case.geometry.copy_in(case.tiles, positions, compact)
    starts = [case.geometry.start(position) for position in positions]
    if case.geometry.contiguous:
        for start, tile in zip(starts, case.tiles, strict=True):
            np.testing.assert_array_equal(compact[start : start + size], tile)
    else:
        # Slot numbers instead of values: a difference cannot be a coincidence of equal values.
        slots = np.arange(size, dtype=np.uint16)
        numbered = np.zeros(case.geometry.size, np.uint16)
        case.geometry.copy_in([slots] * len(positions), positions, numbered)
        assert any(not np.array_equal(numbered[start : start + size], slots) for start in starts)


@given(cases())
def test_start_is_the_place_of_the_first_coordinate_of_each_tile(case):
    counts = case.selection.compact_grid_shape
    for position, compact in enumerate(case.selection.coordinates):
        entries = [axis.index(tile) for axis, tile in zip(case.selection.per_axis, compact, strict=True)]
        first = tuple(entry * extent for entry, extent in zip(entries, case.grid.tile_shape, strict=True))
        assert case.geometry.start(position) == case.geometry.layout(first)
    for beyond in (math.prod(counts), -1):
        with pytest.raises(IndexError, match=f"position {beyond} of a selection of"):
            case.geometry.start(beyond)


def test_experts_in_c_order_project_to_a_contiguous_c_order_array():
    """The common case: whole experts, row-major, any of them in any order."""
    grid = TileGrid((5, 1, 1), (1, 3, 4))
    case = Case(grid, row_major(5, 3, 4), 0, [[4, 0, 2], [0], [0]])
    assert case.geometry.contiguous
    assert case.geometry.layout == row_major(3, 3, 4)
    compact = case.compact()
    case.geometry.copy_in(case.tiles, case.positions, compact)
    np.testing.assert_array_equal(compact.reshape(3, 3, 4), case.logical[[4, 0, 2]])


@pytest.mark.parametrize(
    ("grid_shape", "tile_shape", "order", "per_axis", "strides", "contiguous"),
    [
        # Row blocks of a C-order matrix: the blocks follow each other.
        pytest.param((4, 1), (2, 3), "row", [[3, 1], [0]], (3, 1), True, id="row-blocks"),
        # Column blocks: a row of the compact matrix crosses both tiles.
        pytest.param((1, 4), (2, 3), "row", [[0], [3, 1]], (6, 1), False, id="column-blocks"),
        pytest.param((1, 4), (2, 3), "column", [[0], [3, 1]], (1, 2), True, id="column-blocks-column-major"),
        pytest.param((4, 4), (2, 3), "row", [[1, 0], [3, 1]], (6, 1), False, id="two-cut-axes"),
        pytest.param((4, 4), (2, 3), "row", [[1], [3]], (3, 1), True, id="one-tile"),
        # Extents of 1 come last, the first axis fastest among them.
        pytest.param((2, 3, 2), (1, 1, 4), "row", [[1, 0], [2, 0], [0]], (4, 8, 1), True, id="ones-last"),
        pytest.param((2, 3), (1, 1), "row", [[1, 0], [2, 0, 1]], (1, 2), True, id="single-slots"),
    ],
)
def test_compact_layout_follows_the_order_inside_a_tile(
    grid_shape, tile_shape, order, per_axis, strides, contiguous
):
    grid = TileGrid(grid_shape, tile_shape)
    case = Case(grid, tile_major(grid_shape, tile_shape, order=order), 0, per_axis)
    assert case.geometry.layout == Layout(case.geometry.shape, strides)
    assert case.geometry.contiguous is contiguous


def test_source_without_a_plain_order_projects_column_major():
    grid = TileGrid((2, 2), (4, 2))
    # Axis 0 is (2, 2) inside a tile with axis 1 between its halves.
    layout = Layout(((2, 2, 2), (2, 2)), ((1, 4, 8), (2, 16)))
    case = Case(grid, layout, 0, [[1], [0, 1]])
    assert grid.place(layout, 0).mode_order is None
    assert case.geometry.layout == Layout((4, 4), (1, 4))
    assert not case.geometry.contiguous


def test_reversed_tiles_are_not_contiguous():
    case = Case(TileGrid((3,), (4,)), Layout(((4, 3),), ((-1, 4),)), 3, [[2, 0]])
    assert not case.geometry.contiguous
    compact = case.compact()
    case.geometry.copy_in(case.tiles, case.positions, compact)
    np.testing.assert_array_equal(compact, case.logical[[8, 9, 10, 11, 0, 1, 2, 3]])


# --- refusals ------------------------------------------------------------------------------------------


@pytest.fixture(params=["contiguous", "strided"])
def small(request):
    """Two tiles of a 2 x 2 grid, side by side or one above the other."""
    per_axis = [[1, 0], [1]] if request.param == "contiguous" else [[0], [1, 0]]
    case = Case(TileGrid((2, 2), (2, 3)), tile_major((2, 2), (2, 3)), 0, per_axis)
    assert case.geometry.contiguous is (request.param == "contiguous")
    return case


def test_geometry_refuses_a_selection_of_another_rank():
    grid = TileGrid((2,), (2,))
    with pytest.raises(ValueError, match="selection has rank 2, the grid has rank 1"):
        CompactGeometry.of(grid, grid.place(Layout(((2, 2),), ((1, 2),)), 0), TileSelection([[0], [0]]))


@pytest.mark.parametrize("method", ["copy_in", "copy_out", "jobs"])
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        pytest.param({"tile": np.zeros(5, np.uint32)}, ValueError, "a tile is 6 slots of uint32", id="size"),
        pytest.param({"tile": np.zeros(6, np.uint16)}, ValueError, "and uint16", id="type"),
        pytest.param({"tile": np.zeros((2, 3), np.uint32)}, ValueError, r"shape \(2, 3\)", id="shape"),
        pytest.param({"positions": [0]}, ValueError, "2 tiles and 1 positions", id="count"),
        pytest.param({"positions": [0, 2]}, IndexError, "position 2 of a selection of 2", id="position"),
        pytest.param({"positions": [0, -1]}, IndexError, "position -1 of a selection of 2", id="negative"),
        pytest.param({"compact": np.zeros(11, np.uint32)}, ValueError, "at least 12 slots", id="compact"),
        pytest.param({"compact": np.zeros((2, 6), np.uint32)}, ValueError, "one axis of at least", id="axes"),
    ],
)
def test_copies_refuse_what_does_not_fit_and_copy_nothing(small, method, change, error, said):
    tiles = [np.full(6, 7, np.uint32), change.get("tile", np.full(6, 7, np.uint32))]
    compact = change.get("compact", np.full(14, 9, np.uint32))
    before = [array.copy() for array in (*tiles, compact)]
    rest = (64,) if method == "jobs" else ()
    with pytest.raises(error, match=said):
        getattr(small.geometry, method)(tiles, change.get("positions", [0, 1]), compact, *rest)
    for array, untouched in zip((*tiles, compact), before, strict=True):
        np.testing.assert_array_equal(array, untouched)


@pytest.mark.parametrize("method", ["copy_pieces", "piece_jobs"])
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        pytest.param({"slab": np.zeros((4, 5), np.uint32)}, ValueError, "pieces of 5 slots of", id="size"),
        pytest.param({"slab": np.zeros((4, 6), np.uint16)}, ValueError, "of uint16", id="type"),
        pytest.param({"rows": [0]}, ValueError, "1 tiles and 2 positions", id="count"),
        pytest.param({"rows": [0], "positions": None}, ValueError, "1 tiles and 2 positions", id="not-all"),
        pytest.param({"positions": [0, 2]}, IndexError, "position .* a selection of 2", id="position"),
        pytest.param({"positions": [-1, 0]}, IndexError, "position .* a selection of 2", id="negative"),
        pytest.param({"compact": np.zeros(11, np.uint32)}, ValueError, "at least 12 slots", id="compact"),
    ],
)
def test_piece_copies_refuse_what_does_not_fit_and_copy_nothing(small, method, change, error, said):
    slab = change.get("slab", np.full((4, 6), 7, np.uint32))
    addresses = address_of(slab) + np.array(change.get("rows", [0, 1])) * slab.strides[0]
    pieces = ScatteredMemory.of(addresses, slab.strides[0], slab.dtype, slab)
    positions = change.get("positions", [0, 1])
    compact = change.get("compact", np.full(14, 9, np.uint32))
    before = compact.copy()
    rest = (64,) if method == "piece_jobs" else ()
    with pytest.raises(error, match=said):
        getattr(small.geometry, method)(
            pieces, None if positions is None else np.array(positions), compact, *rest
        )
    np.testing.assert_array_equal(compact, before)


@given(cases(), st.sampled_from([1, 64, 10**6]))
def test_all_tiles_in_order_need_no_positions(case, piece_bytes):
    whole, at_once, by_jobs = case.compact(), case.compact(), case.compact()
    case.geometry.copy_in(case.tiles, case.positions, whole)
    pieces = case.pieces(np.array(case.positions))
    case.geometry.copy_pieces(pieces, None, at_once)
    for job in case.geometry.piece_jobs(pieces, None, by_jobs, piece_bytes):
        job()
    np.testing.assert_array_equal(at_once, whole)
    np.testing.assert_array_equal(by_jobs, whole)


def test_many_positions_are_checked_too():
    grid = TileGrid((40,), (2,))
    case = Case(grid, Layout(((2, 40),), ((1, 2),)), 0, [range(30)])
    compact = case.compact()
    with pytest.raises(IndexError, match="beyond a selection of 30 tiles"):
        case.geometry.copy_in(case.tiles, [*range(29), 30], compact)
    assert not compact.any()


def test_nothing_to_copy_is_fine(small):
    compact = small.compact()
    small.geometry.copy_in([], [], compact)
    small.geometry.copy_out([], [], compact)
    assert small.geometry.jobs([], [], compact, 64) == []
    assert not compact.any()


# --- splitting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piece_bytes", "jobs", "piece_jobs"),
    [
        pytest.param(24, 4, 4, id="one-tile-each"),
        pytest.param(50, 2, 2, id="two-tiles-each"),
        pytest.param(96, 1, 1, id="all-in-one"),
        pytest.param(12, 8, 4, id="half-tiles"),
        pytest.param(1, 24, 4, id="single-slots"),
    ],
)
def test_jobs_have_about_the_size_of_a_piece(piece_bytes, jobs, piece_jobs):
    case = Case(TileGrid((4,), (6,)), Layout(((6, 4),), ((1, 6),)), 0, [[3, 1, 0, 2]])
    compact, positions = case.compact(), np.array(case.positions)
    pieces = case.pieces(positions)
    assert len(case.geometry.jobs(case.tiles, case.positions, compact, piece_bytes)) == jobs
    assert len(case.geometry.piece_jobs(pieces, positions, compact, piece_bytes)) == piece_jobs


def test_reordered_tiles_are_cut_along_their_slowest_axis():
    """Each piece of a cut tile then writes one stretch of compact memory, as far as there is one."""
    case = Case(TileGrid((1, 2), (8, 2)), tile_major((1, 2), (8, 2)), 0, [[0], [1, 0]])
    assert not case.geometry.contiguous
    jobs = case.geometry.jobs(case.tiles, case.positions, case.compact(), 16)
    assert len(jobs) == 2 * 4  # 64 bytes a tile; cut along the other axis, of 2, it would be 2 * 2


@given(st.lists(st.integers(0, 20), unique=True).map(sorted), st.integers(1, 3), st.integers(0, 9))
def test_runs_cover_ascending_entries_in_steps(multiples, step, first):
    ascending = [first + multiple * step for multiple in multiples]
    found = [ascending[begin:stop] for begin, stop in array_runs(np.array(ascending, np.int64), step)]
    assert list(itertools.chain(*found)) == ascending
    for run in found:
        assert run == list(range(run[0], run[-1] + 1, step))
    for before, after in itertools.pairwise(found):
        assert after[0] - before[-1] != step


@given(st.integers(1, 30), st.integers(1, 40))
def test_parts_and_groups_cover_a_range(extent, number):
    whole = list(range(extent))
    cut = [whole[part] for part in parts(extent, number)]
    assert list(itertools.chain(*cut)) == whole
    assert len(cut) <= number
    grouped = [whole[part] for part in groups(extent, number)]
    assert list(itertools.chain(*grouped)) == whole
    assert all(len(group) <= number for group in grouped)


def test_digits_that_run_alike_on_both_sides_are_one():
    # Two axes of extents 2 and 3, both fastest first and dense in either array.
    assert joint_digits([((2, 1),), ((3, 2),)], (1, 2)) == ((1, 1, 6),)
    assert joint_digits([((2, 3),), ((3, 1),)], (1, 2)) == ((1, 3, 2), (2, 1, 3))
    assert joint_digits([(), ()], (1, 1)) == ()
