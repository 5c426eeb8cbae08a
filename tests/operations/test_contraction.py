"""The matrix product against NumPy."""

import numpy as np
import pytest

import strideweave as sw
from strideweave.dtype import DType

SHAPES = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((6, 5, 2, 3), (3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((5, 1, 2, 3), (6, 3, 4)),
    ((2, 3), (5, 3, 4)),
    ((3,), (5, 3, 4)),
    ((0, 3), (3, 4)),
    ((2, 0), (0, 4)),
    ((5, 0, 0), (0, 4)),
    ((2, 0, 3), (3, 4)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_matmul_has_numpys_shapes_and_values(make, rng, left, right):
    x, y = rng.integers(-5, 5, left).astype(np.float32), rng.integers(-5, 5, right).astype(np.float32)
    result = sw.matmul(make(x), make(y))
    expected = np.matmul(x, y)
    assert (result.shape, result.dtype) == (expected.shape, DType.Float32)
    assert result.tolist() == expected.tolist()


def test_views_are_multiplied_as_they_read(make, rng):
    x, y = rng.integers(-5, 5, (4, 6)).astype(np.float64), rng.integers(-5, 5, (5, 6)).astype(np.float64)
    assert (make(x) @ make(y).T).tolist() == (x @ y.T).tolist()
    assert (make(x).T @ make(x)).tolist() == (x.T @ x).tolist()
    heads = rng.integers(-5, 5, (2, 4, 3, 5)).astype(np.float64)
    swapped = make(heads).permute(0, 2, 1, 3)
    expected = heads.transpose(0, 2, 1, 3) @ heads.transpose(0, 2, 3, 1)
    assert (swapped @ swapped.permute(0, 1, 3, 2)).tolist() == expected.tolist()
    merged = swapped.reshape(6, -1)
    assert (merged @ merged.T).tolist() == (merged.numpy() @ merged.numpy().T).tolist()


def test_a_transposed_operand_reaches_blas_without_a_copy(monkeypatch, rng):
    """``matmul(x, w.T)`` is one product of arrays that share memory with the operands."""
    x, w = (
        sw.asarray(rng.normal(size=(5, 4, 6)).astype("f4")),
        sw.asarray(rng.normal(size=(3, 6)).astype("f4")),
    )
    seen, matmul = [], np.matmul

    def spy(left, right):
        seen.append((left, right))
        return matmul(left, right)

    monkeypatch.setattr(np, "matmul", spy)
    sw.matmul(x, w.T)
    ((left, right),) = seen
    assert (left.shape, right.shape, right.flags.f_contiguous) == ((20, 6), (6, 3), True)
    assert np.shares_memory(left, x.carrier.numpy())
    assert np.shares_memory(right, w.carrier.numpy())


@pytest.mark.parametrize("dtype", [DType.Float16, DType.BFloat16, DType.Float8E4M3FN, DType.Float8E5M2])
def test_small_floats_are_multiplied_in_float32_and_rounded_once(make, rng, dtype):
    x, y = rng.uniform(0, 1, (4, 50)).astype(dtype.numpy), rng.uniform(0, 1, (50, 3)).astype(dtype.numpy)
    result = sw.matmul(make(x), make(y))
    expected = (x.astype(np.float32) @ y.astype(np.float32)).astype(dtype.numpy)
    assert result.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [DType.Bool, DType.Int8, DType.Int64])
def test_integers_and_booleans_multiply_as_in_numpy(make, dtype):
    x = np.array([[1, 0], [1, 1]]).astype(dtype.numpy)
    result = sw.matmul(make(x), make(x))
    assert (result.dtype, result.tolist()) == (dtype, (x @ x).tolist())


def test_mixed_dtypes_promote(make):
    assert sw.matmul(make([[1, 2]], DType.Int8), make([[1], [2]], DType.Float32)).dtype is DType.Float32
    assert sw.matmul(make([[1, 2]], DType.Float32), make([[1], [2]], DType.Float64)).tolist() == [[5.0]]


@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 3), (2, 3)), ((3,), (4,)), ((), (3,)), ((3,), ()), ((2, 2, 3), (3, 3, 4))],
)
def test_shapes_that_do_not_fit_are_named(make, left, right):
    with pytest.raises(ValueError, match=r"^matmul: shapes \("):
        sw.matmul(make(np.zeros(left)), make(np.zeros(right)))
