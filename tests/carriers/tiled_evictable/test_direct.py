"""Spec: *A direct tiled operand means the full logical Tensor*: operations on full tiled Tensors, forward."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strideweave as sw
from strideweave import (
    CPU,
    DType,
    FileBacked,
    Generic,
    Layout,
    Tensor,
    TiledEvictable,
    TileSet,
    no_grad,
    row_major,
    tiled,
)
from strideweave.carriers.tiled_evictable import windows
from strideweave.operations.definition import apply
from strideweave.tiles.grid import TileGrid
from strideweave.tiling import tile_major_layout
from tiled_tensors import assert_at_rest, residency, small_budget

DTYPES = (
    DType.Float32,
    DType.Float64,
    DType.Float16,
    DType.BFloat16,
    DType.Int32,
    DType.Int8,
    DType.Bool,
)


def make(values, tile_shape, *, compute=CPU, resident=True, column_major=False, policy=None):
    """A full tiled Tensor on tiers of any class, row-major or column-major inside its tiles."""
    grid = TileGrid(
        tuple(extent // tile for extent, tile in zip(values.shape, tile_shape, strict=True)), tile_shape
    )
    layout = tile_major_layout(grid)
    if column_major:
        strides = np.cumprod([1, *grid.tile_shape])[:-1]
        outer = np.cumprod([grid.tile_size, *grid.grid_shape])[:-1]
        shape = tuple(
            (int(tile), int(count)) for tile, count in zip(tile_shape, grid.grid_shape, strict=True)
        )
        layout = Layout(shape, tuple((int(a), int(b)) for a, b in zip(strides, outer, strict=True)))
    dtype = DType.from_numpy(values.dtype)
    slots = CPU(values.size, dtype=dtype)
    grid_like = Tensor(slots, 0, layout, requires_grad=False)
    slots.scatter(sw.asarray(values), grid_like, layout)
    primary = (CPU(0, dtype=dtype) if compute is CPU else Generic([], dtype=dtype)).new_like(
        slots.numpy() if resident else slots.numpy()[:0]
    )
    secondary = FileBacked(dtype=dtype)
    if not resident:
        secondary = secondary.new_like(slots.numpy())
    carrier = TiledEvictable(primary, secondary, grid.grid_shape, tile_shape, residency_policy=policy)
    return Tensor(carrier, 0, layout)


def lay(values, compute=CPU):
    tensor = sw.asarray(values)
    return (
        tensor
        if compute is CPU
        else Tensor(Generic(values.ravel(), dtype=tensor.dtype), 0, row_major(values.shape))
    )


# The same as the dense operation


@st.composite
def tiled_arrays(draw, shape=None, compute=CPU):
    """Values, and a full tiled Tensor of them: any geometry, either order inside a tile, some tiles resident."""
    if shape is None:
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3)))
    tile = tuple(
        draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0])) for extent in shape
    )
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    values = rng.integers(-4, 5, shape).astype(dtype.numpy)
    tensor = make(
        values,
        tile,
        compute=compute,
        resident=draw(st.booleans()),
        column_major=draw(st.booleans()),
    )
    carrier = tensor.carrier
    every = list(np.ndindex(*carrier.grid_shape))
    some = TileSet(draw(st.lists(st.sampled_from(every), unique=True, max_size=3)))
    draw(st.sampled_from([carrier.promote, carrier.evict]))(some)
    return values, tensor


def broadcastable(draw, shape):
    ahead = draw(st.integers(-1, len(shape)))  # an axis more, or that many less
    axes = tuple(draw(st.sampled_from([1, extent])) for extent in shape[max(0, ahead) :])
    return (draw(st.sampled_from([1, 3])), *axes) if ahead < 0 else axes


def check(name, tensors, dense, **options):
    """A direct operation gives what the dense one gives, on a fresh row-major carrier of the compute class."""
    before = [residency(tensor) for tensor in tensors if isinstance(tensor.carrier, TiledEvictable)]
    found = apply(name, *tensors, **options)
    expected = apply(name, *dense, **options)
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    assert type(found.carrier) is type(expected.carrier)
    assert found.layout == row_major(found.shape) and found.offset == 0
    assert found.requires_grad is expected.requires_grad
    # Small integers, of which every sum and product is exact in every dtype but the narrowest.
    np.testing.assert_array_equal(found.numpy().astype(np.float64), expected.numpy().astype(np.float64))
    assert before == [residency(tensor) for tensor in tensors if isinstance(tensor.carrier, TiledEvictable)]
    assert_at_rest(*[tensor for tensor in tensors if isinstance(tensor.carrier, TiledEvictable)])


computing = pytest.mark.parametrize("compute", [CPU, Generic])
budgets = pytest.mark.parametrize("budget", [16, 200, 1 << 20])


@computing
@budgets
@given(data=st.data())
@settings(max_examples=15)
def test_elementwise_operations_equal_the_dense_ones(compute, budget, data):
    with pytest.MonkeyPatch.context() as patch:
        small_budget(patch, budget)
        values, x = data.draw(tiled_arrays(compute=compute))
        name = data.draw(st.sampled_from(["add", "mul", "elementwise_mul", "relu"]))
        if name == "relu":
            if values.dtype != np.bool_:
                check("relu", [x], [lay(values, compute)])
            return
        if data.draw(st.booleans()):
            others, y = data.draw(tiled_arrays(values.shape, compute=compute))
        else:
            others = np.random.default_rng(1).integers(-4, 5, broadcastable(data.draw, values.shape))
            others = others.astype(data.draw(st.sampled_from([np.float32, np.int16, np.float64])))
            y = lay(others, compute)
        pairs = [(x, lay(values, compute)), (y, lay(others, compute))]
        if data.draw(st.booleans()):
            pairs.reverse()
        check(name, [pair[0] for pair in pairs], [pair[1] for pair in pairs])


@computing
@budgets
@given(data=st.data())
@settings(max_examples=15)
def test_sums_equal_the_dense_ones(compute, budget, data):
    with pytest.MonkeyPatch.context() as patch:
        small_budget(patch, budget)
        values, x = data.draw(tiled_arrays(compute=compute))
        axes = data.draw(st.none() | st.lists(st.sampled_from(range(values.ndim)), unique=True).map(tuple))
        check("reduce_sum", [x], [lay(values, compute)], axis=axes, keepdims=data.draw(st.booleans()))


@computing
@budgets
@given(data=st.data())
@settings(max_examples=15)
def test_matrix_products_equal_the_dense_ones(compute, budget, data):
    with pytest.MonkeyPatch.context() as patch:
        small_budget(patch, budget)
        n, k, m = (data.draw(st.sampled_from([1, 2, 4, 6])) for _ in range(3))
        stack = data.draw(st.sampled_from([(), (2,), (1,), (3, 2)]))
        left = data.draw(st.sampled_from([(k,), (n, k), (*stack, n, k)]))
        right = data.draw(st.sampled_from([(k,), (k, m), (*stack[-1:], k, m)]))
        values, x = data.draw(tiled_arrays(left, compute=compute))
        kind = data.draw(st.sampled_from(["tiled", "dense", "dense left"]))
        if kind == "tiled":
            others, y = data.draw(tiled_arrays(right, compute=compute))
        else:
            others = np.random.default_rng(1).integers(-4, 5, right).astype(np.float32)
            y = lay(others, compute)
        if kind == "dense left":  # mirrored, so that the tiled operand stands on the right
            flipped, x = data.draw(tiled_arrays((k, n), compute=compute))
            values = np.random.default_rng(2).integers(-4, 5, left).astype(np.float32)
            check("matmul", [lay(values, compute), x], [lay(values, compute), lay(flipped, compute)])
            return
        check("matmul", [x, y], [lay(values, compute), lay(others, compute)])


@pytest.mark.parametrize("scalar", [2, -1.5, True, np.float64(0.25)])
def test_numbers_are_weak_on_either_side(scalar):
    values = np.arange(-12, 12, dtype=np.float32).reshape(4, 6)
    x = tiled(values, (2, 3))
    for found in (sw.mul(x, scalar), sw.mul(scalar, x), x * scalar, scalar * x):
        assert found.dtype is DType.Float32
        assert np.array_equal(found.numpy(), values * np.float32(scalar))
    assert np.array_equal((scalar + x).numpy(), values + np.float32(scalar))
    assert np.array_equal(sw.add(x, scalar).numpy(), values + np.float32(scalar))
    with pytest.raises(TypeError, match="elementwise_mul takes"):
        sw.elementwise_mul(x, scalar)


def test_one_tensor_twice_and_two_tensors_of_one_carrier(monkeypatch):
    small_budget(monkeypatch, 64)
    values = np.arange(36, dtype=np.float32).reshape(6, 6)
    x = make(values, (2, 3))
    assert np.array_equal(sw.mul(x, x).numpy(), values * values)
    assert np.array_equal(sw.matmul(x, x).numpy(), values @ values)
    other = Tensor(x.carrier, 0, Layout(((2, 3), (3, 2)), ((1, 6), (2, 18))))  # column-major inside its tiles
    assert np.array_equal(sw.add(x, other).numpy(), values + sw.asarray(other.numpy()).numpy())
    assert_at_rest(x)


def test_a_dense_operand_of_any_layout(monkeypatch):
    small_budget(monkeypatch, 64)
    values = np.arange(48, dtype=np.float32).reshape(6, 8)
    x = make(values, (3, 4))
    nested = Tensor(CPU.from_numpy(values.reshape(-1).copy()), 0, Layout(((2, 3), (4, 2)), ((4, 16), (1, 8))))
    repeated = sw.asarray(np.arange(8, dtype=np.float32)).broadcast_to(6, 8)
    turned = sw.asarray(np.ascontiguousarray(values.T)).T
    for y in (nested, repeated, turned):
        assert np.array_equal(sw.add(x, y).numpy(), values + y.numpy())
        assert np.allclose(sw.matmul(x, y.T).numpy(), values @ y.numpy().T)


# What was resident does not matter


@pytest.mark.parametrize("tile_shape", [(8, 32), (4, 8), (16, 1), (1, 32), (2, 4)])
@pytest.mark.parametrize("column_major", [False, True])
def test_every_bit_is_the_same_whatever_was_resident(monkeypatch, tile_shape, column_major):
    """Spec, scenario *Execute on a partially resident full Tensor*."""
    small_budget(monkeypatch, 1024)
    rng = np.random.default_rng(3)
    values = rng.standard_normal((16, 32)).astype(np.float32)
    y = sw.asarray(rng.standard_normal((32, 5)).astype(np.float32))
    found = set()
    for resident in (True, False):
        x = make(values, tile_shape, resident=resident, column_major=column_major)
        every = [tuple(map(int, tile)) for tile in np.ndindex(*x.carrier.grid_shape)]
        for tiles in ([], every[::2], every[:1], every):
            x.carrier.evict(TileSet(every))
            x.carrier.promote(TileSet(tiles))
            before = residency(x)
            results = sw.matmul(x, y), sw.reduce_sum(x), sw.reduce_sum(x, axis=0), x * 3 + 0.5
            found.add(tuple(result.numpy().tobytes() for result in results))
            assert residency(x) == before
    assert len(found) == 1
    assert np.allclose(sw.matmul(x, y).numpy(), values @ y.numpy(), atol=1e-4)


def test_narrow_floats_are_rounded_once(monkeypatch):
    """Sums of many blocks, each of which would lose the small ones if it were rounded."""
    small_budget(monkeypatch, 64)
    values = np.ones(4096, np.float32)
    values[0] = 512.0
    x = make(values.astype(DType.BFloat16.numpy), (16,), resident=False)
    exact = np.float32(values.sum()).astype(DType.BFloat16.numpy)
    assert sw.reduce_sum(x).numpy() == exact
    half = sw.asarray(np.ones((4096, 1)).astype(DType.BFloat16.numpy))
    assert sw.matmul(x, half).numpy() == exact


def test_integers_are_exact_and_wrap(monkeypatch):
    small_budget(monkeypatch, 64)
    values = np.full((8, 64), 2**30, np.int32)
    x = make(values, (2, 8))
    assert sw.reduce_sum(x).item() == 8 * 64 * 2**30
    y = sw.asarray(np.full((64, 3), 5, np.int32))
    with np.errstate(all="ignore"):
        assert np.array_equal(sw.matmul(x, y).numpy(), values @ y.numpy())


def test_the_callers_floating_point_errors_are_its_own():
    values = np.array([[np.finfo(np.float32).max, 1.0]], np.float32)
    x = tiled(values, (1, 1))
    with np.errstate(over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isinf((x + x).numpy()[0, 0])
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        x + x
    assert_at_rest(x)


def test_empty_results():
    x = tiled(np.ones((1, 3), np.float32), (1, 1))
    assert sw.add(x, sw.asarray(np.ones((0, 3), np.float32))).shape == (0, 3)
    assert sw.matmul(x, sw.asarray(np.ones((3, 0), np.float32))).shape == (1, 0)


# Memory


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("tile_shape", [(64, 512), (32, 64), (2048, 1), (512, 512)])
def test_staging_is_bounded_by_a_few_windows(tile_shape, resident):
    values = np.random.default_rng(0).standard_normal((2048, 512)).astype(np.float32)
    x = tiled(values, tile_shape, resident=resident)
    with pytest.MonkeyPatch.context() as patch, no_grad():
        small_budget(patch, 256 << 10)
        patch.setattr("strideweave.carriers.tiled_evictable.streaming.STAGING_BYTES", 256 << 10)
        y = sw.asarray(np.ones((512, 4), np.float32))
        assert np.allclose(sw.matmul(x, y).numpy(), values @ y.numpy(), atol=1e-3)
        assert np.array_equal((x + 1).numpy(), values + 1)
        assert np.allclose(sw.reduce_sum(x, axis=0).numpy(), values.sum(0), atol=1e-2)
    window = max(256 << 10, tile_shape[0] * tile_shape[1] * 4)
    assert x.carrier.statistics().peak_staging_bytes <= 3 * window
    assert_at_rest(x)


def test_resident_tiles_that_lie_in_one_piece_are_read_where_they_are():
    values = np.arange(64, dtype=np.float32).reshape(16, 4)
    x = tiled(values, (2, 4))
    assert np.array_equal((x + x).numpy(), 2 * values)
    assert x.carrier.statistics().peak_staging_bytes == 0


def test_tensors_that_are_tiled_across_each_other_are_read_in_parts(monkeypatch):
    """Rows against columns: whole tiles of the second would be all of it for each block."""
    small_budget(monkeypatch, 512)
    values = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    rows, columns = make(values, (1, 32), resident=False), make(values, (32, 1), resident=False)
    parts = []
    real = windows.TiledSource._load_elements

    async def counted(self, region, ordinals):
        parts.append(region)
        return await real(self, region, ordinals)

    monkeypatch.setattr(windows.TiledSource, "_load_elements", counted)
    assert np.array_equal(sw.add(rows, columns).numpy(), 2 * values)
    assert np.array_equal(sw.add(columns, rows).numpy(), 2 * values)
    assert parts
    assert_at_rest(rows, columns)
