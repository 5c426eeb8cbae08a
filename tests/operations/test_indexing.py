"""gather against numpy.take."""

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
