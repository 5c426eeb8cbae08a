"""gather against numpy.take, scatter_add against numpy.add.at."""

import numpy as np
import pytest

import strideweave as sw
from strideweave.dtype import DType


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("indices", [[0], [2, 0, 2, -1], [[0, 1], [1, 2]], 1, np.zeros((0,), np.int64)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_gather_is_numpy_take(make, axis, indices, order):
    x = np.arange(27).reshape(3, 3, 3).astype(np.float32)
    result = sw.gather(make(x).permute(order), make(np.asarray(indices)), axis=axis)
    expected = np.take(x.transpose(order), np.asarray(indices), axis=axis)
    assert result.shape == expected.shape
    assert result.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [DType.Int8, DType.UInt8, DType.Int16, DType.Int32, DType.Int64])
def test_any_integer_dtype_indexes(make, dtype):
    assert sw.gather(make([1.5, 2.5, 3.5]), make([2, 1], dtype)).tolist() == [3.5, 2.5]


@pytest.mark.parametrize("indices", [[3], [-4], [0, 99]])
def test_an_index_outside_the_axis_is_an_index_error(make, indices):
    for view in (make(np.zeros((3, 3))), make(np.zeros((3, 3))).T):
        with pytest.raises(IndexError):
            sw.gather(view, make(indices))


@pytest.mark.parametrize("dtype", [DType.Bool, DType.Float32, DType.BFloat16])
def test_other_indices_are_type_errors(make, dtype):
    with pytest.raises(TypeError, match="integers"):
        sw.gather(make([1.0, 2.0]), make([0, 1], dtype))


@pytest.mark.parametrize(("shape", "axis"), [((), 0), ((3,), 1), ((3,), -2)])
def test_the_axis_has_to_be_there(make, shape, axis):
    with pytest.raises(ValueError, match="gather: axis"):
        sw.gather(make(np.zeros(shape)), make([0]), axis=axis)


@pytest.mark.parametrize("dtype", [DType.Float8E4M3FN, DType.Float8E5M2])
def test_every_bit_is_gathered(make, dtype):
    patterns = np.arange(256, dtype=np.uint8)
    result = sw.gather(make(patterns.view(dtype.numpy)), make(np.arange(255, -1, -1)))
    assert result.numpy().view(np.uint8).tolist() == patterns[::-1].tolist()


def added(x, indices, values, axis):
    """What numpy.add.at makes of a copy."""
    result = x.copy()
    np.add.at(result, (slice(None),) * (axis % x.ndim) + (np.asarray(indices),), values)
    return result


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("indices", [[0], [2, 0, 2, -1], [[0, 1], [1, 2]], 1, np.zeros((0,), np.int64)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_scatter_add_is_numpy_add_at_on_a_copy(make, axis, indices, order):
    x = np.arange(27.0).reshape(3, 3, 3)
    indices = np.asarray(indices)
    picked = np.take(x, indices, axis=axis)
    values = np.arange(picked.size, dtype=float).reshape(picked.shape)
    source = make(x).permute(order)
    result = sw.scatter_add(source, make(indices), make(values), axis=axis)
    assert result.tolist() == added(x.transpose(order), indices, values, axis).tolist()
    assert (source.tolist(), source.version) == (x.transpose(order).tolist(), 0)
    assert result.carrier is not source.carrier


def test_scatter_add_broadcasts_its_values(make):
    x, indices = np.zeros((2, 4)), np.array([1, 1, -1])
    for values in (np.array(1.0), np.array([1.0, 2.0, 3.0]), np.array([[1.0], [2.0]])):
        result = sw.scatter_add(make(x), make(indices), make(values), axis=1)
        assert result.tolist() == added(x, indices, values, 1).tolist()


def test_scatter_add_is_the_adjoint_of_gather(make, rng):
    x, y, indices = rng.normal(size=(4, 5)), rng.normal(size=(4, 2, 3)), rng.integers(-5, 5, (2, 3))
    picked = sw.gather(make(x), make(indices), axis=1).numpy()
    returned = sw.scatter_add(make(np.zeros((4, 5))), make(indices), make(y), axis=1).numpy()
    assert np.isclose((picked * y).sum(), (x * returned).sum())


@pytest.mark.parametrize("dtype", DType.members())
def test_scatter_add_adds_in_every_dtype(make, dtype):
    result = sw.scatter_add(make([1, 0, 0], dtype), make([1, 1, -1]), make([1, 1, 1], dtype))
    assert result.dtype is dtype
    assert result.tolist() == ([1, 1, 1] if dtype is DType.Bool else [1, 2, 1])


def test_small_floats_are_added_in_float32_and_rounded_once(make):
    ones = make(np.ones(600), DType.BFloat16)
    result = sw.scatter_add(make([0.0], DType.BFloat16), make(np.zeros(600, np.int64)), ones)
    assert result.item() == float(np.float32(600).astype(DType.BFloat16.numpy))


def test_scatter_add_promotes(make):
    result = sw.scatter_add(make([1, 2], DType.Int8), make([0]), make([0.5], DType.Float16))
    assert (result.dtype, result.tolist()) == (DType.Float16, [1.5, 2.0])


@pytest.mark.parametrize("indices", [[3], [-4], [0, 99]])
def test_scatter_add_refuses_an_index_outside_the_axis(make, indices):
    with pytest.raises(IndexError, match="out of bounds for axis 1 with size 3"):
        sw.scatter_add(make(np.zeros((2, 3))), make(indices), make(1.0), axis=1)


@pytest.mark.parametrize("shape", [(2,), (2, 3, 1), (3, 3), (1, 2, 3)])
def test_scatter_add_refuses_values_that_do_not_fit(make, shape):
    with pytest.raises(ValueError, match=r"^scatter_add: "):
        sw.scatter_add(make(np.zeros((2, 3))), make([0, 1, 2]), make(np.zeros(shape)), axis=1)


def test_scatter_add_wants_integers_and_an_axis_that_is_there(make):
    x, one = make(np.zeros(3)), make(np.ones(1))
    with pytest.raises(TypeError, match="scatter_add: indices must be integers"):
        sw.scatter_add(x, make([0.0]), one)
    with pytest.raises(ValueError, match="scatter_add: axis 1"):
        sw.scatter_add(x, make([0]), one, axis=1)
    with pytest.raises(TypeError, match="scatter_add"):
        sw.scatter_add(x, [0], one)
