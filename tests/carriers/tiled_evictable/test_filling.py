"""Whole tiles get new values: from compact Tensors of any Layout, all of them or none.

Spec: *Scatter is the asynchronous projection counterpart*.
"""

from __future__ import annotations

import numpy as np
import pytest

from strideweave import CPU, FileBacked, Generic, Tensor, TiledEvictable, TileSelection, asarray
from strideweave.carriers.tiled_evictable import tile_values
from strideweave.carriers.tiled_evictable.filling import start_filling
from strideweave.carriers.tiled_evictable.gradient import copy_gradient, gradient_like, sum_gradients
from strideweave.dtype import DType
from strideweave.errors import InvalidTileError, TileConflictError
from strideweave.layout import Layout, column_major, row_major

DTYPES = [dtype for dtype in vars(DType).values() if isinstance(dtype, DType)]

GRID, TILE = (3, 2), (2, 4)
SHAPE = (6, 8)

# The full Layouts of one geometry: row-major and column-major inside a tile, backwards, and an axis in two digits.
INSIDE = {
    "rows": (((2, 3), (4, 2)), ((4, 8), (1, 24)), 0),
    "columns": (((2, 3), (4, 2)), ((1, 8), (2, 24)), 0),
    "backwards": (((2, 3), (4, 2)), ((4, 8), (-1, 24)), 3),
    "digits": (((2, 3), (2, 2, 2)), ((2, 8), (4, 1, 24)), 0),
}


def full(order: str = "rows", dtype: DType = DType.Float32) -> Tensor:
    """A tensor whose tiles have no value yet."""
    carrier = TiledEvictable(CPU(0, dtype=dtype), FileBacked(dtype=dtype), GRID, TILE)
    shape, stride, offset = INSIDE[order]
    return Tensor(carrier, offset, Layout(shape, stride), requires_grad=False)


def fill(tensor: Tensor, selection: TileSelection, compact: Tensor, reduction: str = "replace"):
    return start_filling(tensor.carrier, tensor, selection, compact, reduction=reduction, kind="test")


def dense(selection: TileSelection, compact: np.ndarray) -> np.ndarray:
    """The full array, zero where nothing is selected, by a loop over tiles."""
    result = np.zeros(SHAPE, compact.dtype)
    for i, row in enumerate(selection.per_axis[0]):
        for j, column in enumerate(selection.per_axis[1]):
            part = compact[2 * i : 2 * i + 2, 4 * j : 4 * j + 4]
            result[2 * row : 2 * row + 2, 4 * column : 4 * column + 4] = part
    return result


SELECTION = TileSelection([[2, 0], [1, 0]])
COMPACT = np.arange(32, dtype=np.float32).reshape(4, 8) - 7

LAYOUTS = {
    "dense": lambda: asarray(COMPACT),
    "transposed": lambda: asarray(np.ascontiguousarray(COMPACT.T)).T,
    "backwards": lambda: Tensor(
        CPU.from_numpy(np.ascontiguousarray(COMPACT[::-1, ::-1])), 31, Layout((4, 8), (-8, -1))
    ),
    "a window": lambda: Tensor(
        CPU.from_numpy(np.pad(COMPACT, ((1, 2), (3, 1)))), 12 + 3, Layout((4, 8), (12, 1))
    ),
    "an axis of two digits": lambda: Tensor(
        CPU.from_numpy(COMPACT.reshape(4, 2, 4).transpose(1, 0, 2).copy()),
        0,
        Layout((4, (4, 2)), (4, (1, 16))),
    ),
    "read-only memory": lambda: Tensor(_read_only(COMPACT), 0, row_major(4, 8)),
}


def _read_only(array: np.ndarray) -> CPU:
    array = array.copy()
    array.flags.writeable = False
    return CPU.from_numpy(array)


@pytest.mark.parametrize("order", INSIDE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_land_where_the_layouts_say(order: str, layout: str) -> None:
    """*Accept a within-tile permutation*, and a compact Tensor in any order."""
    target = gradient_like(full(order))
    fill(target, SELECTION, LAYOUTS[layout]()).wait()
    assert np.array_equal(target.numpy(), dense(SELECTION, COMPACT))
    fill(target, SELECTION, LAYOUTS[layout](), "add").wait()
    assert np.array_equal(target.numpy(), 2 * dense(SELECTION, COMPACT))
    assert target.carrier.version == 2


def test_a_repeated_element_is_a_source_like_any_other() -> None:
    target = gradient_like(full())
    fill(target, SELECTION, asarray(np.float32([[3.0]])).broadcast_to(4, 8), "add").wait()
    assert np.array_equal(target.numpy(), dense(SELECTION, np.full((4, 8), 3, np.float32)))


@pytest.mark.parametrize("kind", [Generic, CPU])
def test_every_memory_carrier_is_filled(kind: type) -> None:
    carrier = TiledEvictable(Generic([]) if kind is Generic else CPU(0), FileBacked(), GRID, TILE)
    tensor = Tensor(carrier, 0, Layout(*INSIDE["rows"][:2]))
    compact = Tensor(kind.new_like(carrier.primary, COMPACT.ravel()), 0, row_major(4, 8))
    fill(tensor, SELECTION, compact).wait()
    assert np.array_equal(carrier.project(tensor, SELECTION).wait().numpy(), COMPACT)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_bits_survive_a_replacement_and_sums_are_those_of_add(dtype: DType) -> None:
    rng = np.random.default_rng(3)
    if dtype is DType.Bool:
        bits = rng.integers(0, 2, 32, np.uint8)
    else:
        bits = np.frombuffer(rng.bytes(32 * dtype.itemsize), f"u{dtype.itemsize}")
    compact = asarray(bits.view(dtype.numpy).reshape(4, 8), dtype=dtype)
    target = gradient_like(full(dtype=dtype))
    fill(target, SELECTION, compact).wait()
    found = target.carrier.project(target, SELECTION).wait()
    assert found.numpy().tobytes() == compact.numpy().tobytes()
    fill(target, SELECTION, compact, "add").wait()
    with np.errstate(all="ignore"):
        wanted = (compact.detach() + compact.detach()).numpy()
    found = target.carrier.project(target, SELECTION).wait().numpy()
    as_float = (lambda x: x.astype(np.float64)) if dtype.is_differentiable else (lambda x: x)
    assert np.array_equal(as_float(found), as_float(wanted), equal_nan=dtype.is_differentiable)


@pytest.mark.parametrize("dtype", [DType.Float8E4M3FN, DType.Float8E5M2], ids=lambda dtype: dtype.name)
def test_every_sum_of_two_8_bit_floats_is_that_of_add(dtype: DType) -> None:
    values = np.arange(256, dtype=np.uint8).view(dtype.numpy)
    x, y = np.meshgrid(values, values)
    carrier = TiledEvictable(CPU(0, dtype=dtype), FileBacked(dtype=dtype), (2, 1), (128, 256))
    target = gradient_like(Tensor(carrier, 0, row_major(256, 256)))
    selection = carrier.select({})
    fill(target, selection, asarray(x.copy(), dtype=dtype)).wait()
    fill(target, selection, asarray(y.copy(), dtype=dtype), "add").wait()
    with np.errstate(all="ignore"):
        wanted = (asarray(x.copy(), dtype=dtype) + asarray(y.copy(), dtype=dtype)).numpy()
    found = target.numpy()
    assert np.array_equal(found.astype(np.float32), wanted.astype(np.float32), equal_nan=True)


def test_zero_plus_a_negative_zero_is_zero() -> None:
    target = gradient_like(full())
    fill(target, SELECTION, asarray(np.full((4, 8), -0.0, np.float32)), "add").wait()
    assert not np.signbit(target.numpy()).any()
    fill(target, SELECTION, asarray(np.full((4, 8), -0.0, np.float32))).wait()
    assert np.signbit(target.carrier.project(target, SELECTION).wait().numpy()).all()


def test_implicit_zeros_occupy_nothing_until_something_arrives() -> None:
    """Spec: *Projection is an autograd-visible gather*."""
    target = gradient_like(full())
    before = target.carrier.statistics()
    assert before.resident_bytes == before.bytes_written == 0
    assert target.carrier.secondary.size() == 0
    fill(target, TileSelection([[1], [1]]), asarray(np.ones((2, 4), np.float32)), "add").wait()
    after = target.carrier.statistics()
    assert after.resident_tiles == after.dirty_tiles == 1
    assert target.carrier.tile_state((0, 0)).location == "implicit"
    assert target.carrier.tile_state((1, 1)).location == "primary"


def test_what_was_evicted_is_added_to_all_the_same() -> None:
    target = gradient_like(full())
    fill(target, SELECTION, asarray(COMPACT), "add").wait()
    target.carrier.evict(SELECTION.tile_set)
    fill(target, TileSelection([[0, 1], [0]]), asarray(COMPACT[:, :4].copy()), "add").wait()
    wanted = dense(SELECTION, COMPACT) + dense(TileSelection([[0, 1], [0]]), COMPACT[:, :4])
    assert np.array_equal(target.numpy(), wanted)
    assert target.carrier.dirty_tiles.coordinates == ((0, 0), (1, 0))


def test_a_tile_without_a_value_can_be_replaced_and_not_added_to() -> None:
    """Spec: *Residency state is independent of executable selection shape*."""
    tensor = full()
    with pytest.raises(InvalidTileError, match="test needs 4 tiles"):
        fill(tensor, SELECTION, asarray(COMPACT), "add")
    assert tensor.carrier.version == 0
    fill(tensor, SELECTION, asarray(COMPACT)).wait()
    assert tensor.carrier.valid_tiles == SELECTION.tile_set


def test_a_failure_changes_no_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles in place, tiles that would be new: all keep what they had."""
    target = gradient_like(full())
    fill(target, TileSelection([[2], [0, 1]]), asarray(COMPACT[:2].copy())).wait()
    before = target.numpy(copy=True)
    real, calls = tile_values._run, []

    def run(*args):
        calls.append(args)
        raise MemoryError("no room for a test")

    monkeypatch.setattr(tile_values, "_run", run)
    with pytest.raises(MemoryError, match="no room for a test"):
        fill(target, SELECTION, asarray(COMPACT)).wait()
    monkeypatch.setattr(tile_values, "_run", real)
    assert calls
    assert np.array_equal(target.numpy(), before)
    found = target.carrier.statistics()
    assert (found.resident_tiles, found.pinned_tiles, found.pending_requests) == (2, 0, 0)
    assert target.carrier.version == 1
    assert target.carrier.tile_state((0, 1)).location == "implicit"


def test_tiles_in_use_are_not_filled(control_moves) -> None:
    moves = control_moves(FileBacked, CPU)
    tensor = full()
    fill(tensor, SELECTION, asarray(COMPACT)).wait()
    tensor.carrier.evict(SELECTION.tile_set)
    moves.gate.clear()
    pending = tensor.carrier.project(tensor, SELECTION)
    with pytest.raises(TileConflictError, match="test meets"):
        fill(tensor, TileSelection([[0], [0]]), asarray(COMPACT[:2, :4].copy()))
    fill(tensor, TileSelection([[1], [0]]), asarray(COMPACT[:2, :4].copy())).wait()  # another tile
    moves.open()
    assert np.array_equal(pending.wait().numpy(), COMPACT)


def test_large_tiles_are_written_in_pieces() -> None:
    shape = (4, 1024, 1024)  # tiles of 4 MiB
    values = np.random.default_rng(1).standard_normal((2, 1024, 1024), np.float32)
    carrier = TiledEvictable(CPU(0), FileBacked(), (4, 1, 1), (1, 1024, 1024))
    target = gradient_like(Tensor(carrier, 0, row_major(*shape)))
    selection = carrier.select({0: [3, 1]})
    fill(target, selection, asarray(values.transpose(0, 2, 1).copy()).permute(0, 2, 1), "add").wait()
    fill(target, selection, asarray(values), "add").wait()
    found = target.carrier.project(target, selection).wait().numpy()
    assert np.array_equal(found, values + values)


class TestSumsOfGradients:
    """Spec: *Projection is an autograd-visible gather*: overlaps sum, the rest stays an implicit zero."""

    def test_a_copy_has_the_stored_tiles_only(self) -> None:
        gradient = gradient_like(full("columns"))
        fill(gradient, SELECTION, asarray(COMPACT)).wait()
        gradient.carrier.evict(TileSelection([[0], [0, 1]]).tile_set)
        residency = gradient.carrier.primary_tiles
        copy = copy_gradient(gradient)
        assert copy.carrier is not gradient.carrier
        assert (copy.layout, copy.offset) == (gradient.layout, gradient.offset)
        assert copy.carrier.primary_tiles == SELECTION.tile_set
        assert gradient.carrier.primary_tiles == residency
        assert np.array_equal(copy.numpy(), dense(SELECTION, COMPACT))

    @pytest.mark.parametrize("order", INSIDE)
    def test_layouts_may_differ(self, order: str) -> None:
        x, y = gradient_like(full("columns")), gradient_like(full(order))
        other = TileSelection([[1, 2], [1]])
        fill(x, SELECTION, asarray(COMPACT)).wait()
        fill(y, other, asarray(COMPACT[:, :4].copy())).wait()
        total = sum_gradients(x, y)
        wanted = dense(SELECTION, COMPACT) + dense(other, COMPACT[:, :4])
        assert np.array_equal(total.numpy(), wanted)
        assert total.layout == x.layout
        assert total.carrier.tile_state((1, 0)).location == "implicit"
        assert np.array_equal(x.numpy(), dense(SELECTION, COMPACT))

    def test_two_gradients_of_nothing_are_nothing(self) -> None:
        total = sum_gradients(gradient_like(full()), gradient_like(full()))
        assert total.carrier.statistics().resident_tiles == 0

    def test_a_column_major_tensor_of_one_axis(self) -> None:
        carrier = TiledEvictable(CPU(0), FileBacked(), (3,), (5,))
        gradient = gradient_like(Tensor(carrier, 0, column_major(15)))
        fill(gradient, TileSelection([[1]]), asarray(np.arange(5, dtype=np.float32)), "add").wait()
        assert sum_gradients(gradient, gradient).tolist() == [0] * 5 + [0, 2, 4, 6, 8] + [0] * 5


def test_a_gradient_s_memory_is_recycled_and_evicting_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slabs come from where results come from; pages of evicted tiles go to the system all the same."""
    carrier = TiledEvictable(
        CPU(0), FileBacked(), (4, 1), (1, 1 << 18)
    )  # of 1 MiB, more than a slab keeps warm
    given, taken = [], []
    discard, result = CPU._discard, CPU._allocate_result

    def noted_discard(self: CPU, start: int, slots: int) -> None:
        given.append(slots)
        discard(self, start, slots)

    def noted_result(self: CPU, size: int) -> CPU:
        taken.append(size)
        return result(self, size)

    monkeypatch.setattr(CPU, "_discard", noted_discard)
    monkeypatch.setattr(CPU, "_allocate_result", noted_result)
    monkeypatch.setattr("strideweave.carriers.tiled_evictable.hierarchy.RECYCLE_BYTES", 0)
    target = gradient_like(Tensor(carrier, 0, row_major(4, 1 << 18)))
    fill(target, TileSelection([[1, 2], [0]]), asarray(np.ones((2, 1 << 18), np.float32))).wait()
    assert taken == [1 << 18, 1 << 18]
    target.carrier.evict(target.carrier.primary_tiles)
    assert given == [1 << 18, 1 << 18]
    assert target.carrier.statistics().recycled_bytes == 0
    assert target[2, 5] == 1
