"""Spec: *A direct tiled operand means the full logical Tensor*: the way back of direct operations."""

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
    Tensor,
    TiledEvictable,
    row_major,
    tiled,
)
from strideweave.operations.definition import apply
from strideweave.tiles.grid import TileGrid
from strideweave.tiling import tile_major_layout
from tiled_tensors import assert_at_rest, residency, small_budget, whole

RNG = np.random.default_rng(11)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def make(values, tile_shape, *, compute=CPU, resident=False, policy=None):
    """A full tiled Tensor on tiers of any class, row-major inside its tiles."""
    grid = TileGrid(
        tuple(extent // tile for extent, tile in zip(values.shape, tile_shape, strict=True)), tile_shape
    )
    slots = tiled(values, tile_shape).carrier.primary.numpy()
    dtype = DType.from_numpy(values.dtype)
    primary = (CPU(0, dtype=dtype) if compute is CPU else Generic([], dtype=dtype)).new_like(
        slots if resident else slots[:0]
    )
    secondary = FileBacked(dtype=dtype)
    if not resident:
        secondary = secondary.new_like(slots)
    carrier = TiledEvictable(primary, secondary, grid.grid_shape, tile_shape, residency_policy=policy)
    return Tensor(carrier, 0, tile_major_layout(grid))


def lay(values, compute=CPU):
    tensor = sw.asarray(values)
    if compute is CPU:
        return tensor
    return Tensor(Generic(values.ravel(), dtype=tensor.dtype), 0, row_major(values.shape))


def check(name, pairs, tolerance=1e-5, **options):
    """Gradients of a direct operation are those of the dense one; those of tiled operands are tiled.

    Args:
        name: the operation.
        pairs: for each operand the one to use, and the dense one.
        tolerance: relative and absolute.
        options: of the operation.
    """
    found = apply(name, *[operand for operand, _ in pairs], **options)
    expected = apply(name, *[dense for _, dense in pairs], **options)
    assert found.grad_fn.name == name
    assert found.grad_fn.inputs == tuple(operand for operand, _ in pairs if isinstance(operand, Tensor))
    assert all(tensor.grad_fn is None for tensor in found.grad_fn.inputs), "one visible node"
    cotangent = normal(*found.shape).astype(found.dtype.numpy)
    compute = type(found.carrier)
    before = [
        residency(operand)
        for operand, _ in pairs
        if isinstance(getattr(operand, "carrier", 0), TiledEvictable)
    ]
    found.backward(lay(cotangent, compute))
    expected.backward(lay(cotangent, compute))
    for operand, dense in pairs:
        if not isinstance(operand, Tensor) or not dense.requires_grad:
            continue
        gradient = operand.grad
        assert gradient.shape == operand.shape
        assert gradient.dtype is operand.dtype
        assert type(gradient.carrier) is type(operand.carrier)
        values = gradient.numpy()
        if isinstance(operand.carrier, TiledEvictable):
            assert gradient.carrier is not operand.carrier
            assert gradient.layout == operand.layout
            assert gradient.carrier.tile_shape == operand.carrier.tile_shape
            assert gradient.carrier.residency_policy is None
            values = whole(gradient)
            assert_at_rest(operand, gradient)
        np.testing.assert_allclose(
            values.astype(np.float64), dense.grad.numpy().astype(np.float64), tolerance, tolerance
        )
    after = [
        residency(operand)
        for operand, _ in pairs
        if isinstance(getattr(operand, "carrier", 0), TiledEvictable)
    ]
    assert before == after


@st.composite
def tile_of(draw, shape):
    return tuple(
        draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0])) for extent in shape
    )


computing = pytest.mark.parametrize("compute", [CPU, Generic])
budgets = pytest.mark.parametrize("budget", [32, 1 << 20])


@computing
@budgets
@given(data=st.data())
@settings(max_examples=15)
def test_gradients_of_elementwise_operations(compute, budget, data):
    with pytest.MonkeyPatch.context() as patch:
        small_budget(patch, budget)
        shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3)))
        values = normal(*shape)
        tensor = make(values, data.draw(tile_of(shape)), compute=compute, resident=data.draw(st.booleans()))
        x = tensor, lay(values, compute)
        name = data.draw(st.sampled_from(["relu", "add", "mul", "elementwise_mul"]))
        if name == "relu":
            check("relu", [x])
            return
        kind = data.draw(st.sampled_from(["tiled", "dense", "scalar"]))
        if kind == "scalar" and name != "elementwise_mul":
            pairs = [x, (1.5, 1.5)]
        elif kind == "tiled":
            others = normal(*shape, dtype=data.draw(st.sampled_from([np.float32, np.float64])))
            pairs = [x, (make(others, data.draw(tile_of(shape)), compute=compute), lay(others, compute))]
        else:
            ahead = data.draw(st.sampled_from([(), (3,)]))
            others = normal(*ahead, *[data.draw(st.sampled_from([1, extent])) for extent in shape])
            pairs = [x, (lay(others, compute), lay(others, compute))]
        check(name, pairs[:: data.draw(st.sampled_from([1, -1]))])


@computing
@budgets
@given(data=st.data())
@settings(max_examples=10)
def test_gradients_of_sums(compute, budget, data):
    with pytest.MonkeyPatch.context() as patch:
        small_budget(patch, budget)
        shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3)))
        values = normal(*shape)
        axes = data.draw(st.none() | st.lists(st.sampled_from(range(len(shape))), unique=True).map(tuple))
        x = make(values, data.draw(tile_of(shape)), compute=compute)
        check("reduce_sum", [(x, lay(values, compute))], axis=axes, keepdims=data.draw(st.booleans()))


@computing
@budgets
@given(data=st.data())
@settings(max_examples=15)
def test_gradients_of_matrix_products(compute, budget, data):
    with pytest.MonkeyPatch.context() as patch:
        small_budget(patch, budget)
        n, k, m = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(3))
        stack = data.draw(st.sampled_from([(), (2,), (1,), (3, 2)]))
        shapes = [
            data.draw(st.sampled_from([(k,), (n, k), (*stack, n, k)])),
            data.draw(st.sampled_from([(k,), (k, m), (*stack[-1:], k, m)])),
        ]
        kinds = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
        pairs = []
        for shape, is_tiled in zip(shapes, kinds, strict=True):
            values = normal(*shape)
            operand = (
                make(values, data.draw(tile_of(shape)), compute=compute) if is_tiled else lay(values, compute)
            )
            pairs.append((operand, lay(values, compute)))
        check("matmul", pairs, 1e-4)


@pytest.mark.parametrize("dtype", [DType.Float16, DType.BFloat16, DType.Float64])
def test_gradients_of_other_dtypes(monkeypatch, dtype):
    small_budget(monkeypatch, 64)
    values, others = (normal(8, 16).astype(dtype.numpy) for _ in range(2))
    x, y = make(values, (2, 4)), sw.asarray(others)
    check("mul", [(x, sw.asarray(values)), (y, sw.asarray(others))], 1e-2)
    x = make(values, (2, 4))
    check(
        "matmul", [(x, sw.asarray(values)), (sw.asarray(others.T.copy()), sw.asarray(others.T.copy()))], 5e-2
    )


def test_a_share_of_a_narrow_float_is_rounded_once(monkeypatch):
    """The share of a row that stands for many is a sum of many blocks."""
    small_budget(monkeypatch, 64)
    dtype = DType.BFloat16
    row = make(np.ones((1, 4), dtype.numpy), (1, 2))
    others = np.full((512, 4), 1.0)
    others[0] = 256.0
    result = sw.mul(row, sw.asarray(others.astype(dtype.numpy)))
    result.backward(sw.asarray(np.ones((512, 4), dtype.numpy)))
    assert (whole(row.grad) == np.float32(256 + 511).astype(dtype.numpy)).all()


def test_the_same_tensor_twice_and_two_ways_through_it(monkeypatch):
    small_budget(monkeypatch, 64)
    values = normal(8, 8)
    x, dense = make(values, (2, 4)), sw.asarray(values)
    for tensor in (x, dense):
        total = sw.reduce_sum(sw.mul(tensor, tensor) + sw.matmul(tensor, tensor)) + sw.reduce_sum(tensor * 3)
        total.backward()
    np.testing.assert_allclose(whole(x.grad), dense.grad.numpy(), 1e-4, 1e-4)
    assert_at_rest(x, x.grad)
    first = x.grad
    sw.reduce_sum(x * 2).backward()
    np.testing.assert_allclose(whole(x.grad), dense.grad.numpy() + 2, 1e-4, 1e-4)
    np.testing.assert_allclose(whole(first), dense.grad.numpy(), 1e-4, 1e-4)


def test_direct_operations_and_projections_add_to_one_gradient():
    values = normal(4, 3, 5)
    x = make(values, (1, 3, 5))
    compact = x.carrier.project(x, x.carrier.select({0: [2, 0]})).wait()
    (sw.reduce_sum(x * 2) + sw.reduce_sum(compact * 3)).backward()
    expected = np.full_like(values, 2)
    expected[[2, 0]] += 3
    assert np.array_equal(whole(x.grad), expected)


def test_a_graph_of_dense_and_direct_operations(monkeypatch):
    """Two layers whose weights are tiled, against the same in memory."""
    small_budget(monkeypatch, 512)
    inputs, first, second, bias = normal(5, 8), normal(8, 16), normal(16, 4), normal(16)
    weights = make(first, (4, 8)), make(second, (16, 2)), make(bias, (4,))
    dense = sw.asarray(first), sw.asarray(second), sw.asarray(bias)
    sources = []
    for up, down, shift in (weights, dense):
        x = sw.asarray(inputs)
        hidden = sw.gelu(x @ up + shift)
        sw.reduce_sum(sw.softmax(hidden @ down, axis=-1) * sw.asarray(inputs[:, :4])).backward()
        sources.append(x)
    np.testing.assert_allclose(sources[0].grad.numpy(), sources[1].grad.numpy(), 1e-4, 1e-5)
    for found, expected in zip(weights, dense, strict=True):
        np.testing.assert_allclose(whole(found.grad), expected.grad.numpy(), 1e-4, 1e-5)
