"""Reductions against NumPy."""

from contextlib import nullcontext

import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, Generic
from strideweave.dtype import DType

REDUCTIONS = {"reduce_sum": np.sum, "reduce_mean": np.mean, "reduce_max": np.max, "reduce_min": np.min}
SMALL = (DType.Float16, DType.BFloat16, DType.Float8E4M3FN, DType.Float8E5M2)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, -1, 1, (0, 2), (2, -2), (), (0, 1, 2)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_numpys(make, rng, agree, name, axis, keepdims):
    x = rng.normal(size=(3, 4, 5)).astype(np.float32)
    result = getattr(sw, name)(make(x), axis=axis, keepdims=keepdims)
    expected = np.asarray(REDUCTIONS[name](x, axis=axis, keepdims=keepdims))
    agree(result, expected, scale=0 if isinstance(result.carrier, CPU) else np.abs(x).max())


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_list_of_axes_and_a_view_are_taken_too(make, rng, name):
    x = rng.normal(size=(3, 4, 5))
    result = getattr(sw, name)(make(x).permute(2, 0, 1), axis=[0, 2])
    assert np.allclose(result.numpy(), REDUCTIONS[name](x, axis=(2, 1)), rtol=1e-14)


@pytest.mark.parametrize("dtype", [member for member in DType.members() if not member.is_differentiable])
def test_integers_sum_to_int64_average_to_float64_and_keep_their_maximum(make, dtype):
    x = np.array([[1, 0], [1, 1]]).astype(dtype.numpy)
    assert sw.reduce_sum(make(x)).dtype is DType.Int64
    assert sw.reduce_sum(make(x), axis=0).tolist() == [2, 1]
    assert sw.reduce_mean(make(x)).dtype is DType.Float64
    assert sw.reduce_mean(make(x)).item() == 0.75
    assert sw.reduce_max(make(x), axis=1).dtype is dtype
    assert sw.reduce_max(make(x), axis=1).tolist() == [1, 1]


def test_narrow_sums_do_not_wrap(make):
    assert sw.reduce_sum(make([200] * 100, DType.UInt8)).item() == 20_000


@pytest.mark.parametrize("dtype", SMALL)
def test_small_floats_accumulate_in_float32_and_round_once(make, dtype):
    x = np.full(300, 0.25).astype(dtype.numpy)
    total = sw.reduce_sum(make(x))
    assert total.dtype is dtype
    assert total.item() == float(np.float32(75).astype(dtype.numpy))
    assert sw.reduce_mean(make(x)).item() == 0.25
    assert sw.reduce_max(make(x)).item() == 0.25


def test_float32_is_summed_pairwise_on_cpu_and_exactly_on_generic(make_on):
    x = np.full(1_000_000, 0.1, np.float32)
    assert sw.reduce_sum(make_on(CPU)(x)).item() == float(x.sum())
    few = x[:10_001]
    assert sw.reduce_sum(make_on(Generic)(few)).item() == float(np.float32(few.astype(np.float64).sum()))


def test_a_nan_wins(make):
    for dtype in (DType.Float32, DType.BFloat16):
        x = make([1.0, np.nan, 3.0], dtype)
        assert np.isnan(sw.reduce_max(x).item())
        assert np.isnan(sw.reduce_min(x).item())
        assert sw.argmax(x).item() == sw.argmin(x).item() == 1


def test_nothing_to_reduce(make):
    empty = make(np.zeros((0, 3)))
    assert sw.reduce_sum(empty, axis=0).tolist() == [0, 0, 0]
    assert sw.reduce_max(empty, axis=1).shape == (0,)
    assert sw.argmax(empty, axis=1).shape == (0,)
    with pytest.raises(ValueError, match="no elements"):
        sw.reduce_max(empty)
    with pytest.raises(ValueError, match="no elements"):
        sw.argmax(empty, axis=0)
    for call in (lambda: sw.reduce_min(empty), lambda: sw.argmin(empty, axis=0)):
        with pytest.raises(ValueError, match=r"min: axes .* hold no elements"):
            call()
    with pytest.warns(RuntimeWarning) if isinstance(empty.carrier, CPU) else nullcontext():
        assert np.isnan(sw.reduce_mean(empty, axis=0).numpy()).all()


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", DType.members())
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_the_place_of_an_extreme_is_numpys_and_int64(make, name, dtype, axis):
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype.numpy)
    result = getattr(sw, name)(make(x), axis=axis)
    expected = getattr(np, name)(x.astype(float), axis=axis)
    assert result.dtype is DType.Int64
    assert result.tolist() == np.asarray(expected).tolist()


def test_places_count_in_c_order_whatever_the_layout(make):
    x = np.array([[3, 5], [9, 1], [2, 3]])
    assert sw.argmax(make(x).T).item() == np.argmax(x.T)
    assert sw.argmin(make(x).T).item() == np.argmin(x.T)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"axis": 3}, ValueError),
        ({"axis": -3}, ValueError),
        ({"axis": (0, 0)}, ValueError),
        ({"axis": (0, -2)}, ValueError),
        ({"axis": 0.0}, TypeError),
        ({"axis": True}, TypeError),
        ({"axis": "0"}, TypeError),
        ({"keepdims": 1}, TypeError),
    ],
)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_axes_have_to_be_there(make, name, options, error):
    with pytest.raises(error, match=name):
        getattr(sw, name)(make(np.zeros((2, 3))), **options)


def test_argmax_takes_one_axis(make):
    with pytest.raises(TypeError):
        sw.argmax(make(np.zeros((2, 3))), axis=(0, 1))
    with pytest.raises(ValueError, match="argmax: axis 2"):
        sw.argmax(make(np.zeros((2, 3))), axis=2)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("dtype", DType.members())
def test_running_sums_are_numpys(make, agree, dtype, axis):
    x = np.array([[0, 1, 1], [1, 1, 0]]).astype(dtype.numpy)
    kept = dtype if dtype.is_differentiable else DType.Int64
    expected = np.cumsum(x.astype(np.float32) if dtype in SMALL else x, axis=axis, dtype=None)
    agree(sw.cumsum(make(x), axis=axis), expected.astype(kept.numpy))


def test_running_sums_run_in_c_order_whatever_the_layout(make):
    x = np.arange(6).reshape(2, 3)
    assert sw.cumsum(make(x).T).tolist() == np.cumsum(x.T).tolist()
    assert sw.cumsum(make(x).T, axis=1).tolist() == np.cumsum(x.T, axis=1).tolist()
    assert sw.cumsum(make(np.zeros((2, 0))), axis=1).shape == (2, 0)
    assert sw.cumsum(make(np.zeros((2, 0)))).shape == (0,)
    assert sw.cumsum(make(7.0)).tolist() == [7.0]


def test_running_sums_of_small_floats_are_rounded_once_each(make):
    x = np.full(600, 1, DType.BFloat16.numpy)
    expected = np.arange(1, 601).astype(np.float32).astype(x.dtype)
    assert sw.cumsum(make(x)).tolist() == expected.tolist()
    assert sw.cumsum(make([200] * 3, DType.UInt8)).tolist() == [200, 400, 600]


@pytest.mark.parametrize(
    ("axis", "error"), [(2, ValueError), (-3, ValueError), ((0,), TypeError), (0.0, TypeError)]
)
@pytest.mark.parametrize("name", ["cumsum", "argmin"])
def test_one_axis_that_is_there_is_wanted(make, name, axis, error):
    with pytest.raises(error, match=name):
        getattr(sw, name)(make(np.zeros((2, 3))), axis=axis)
