"""Comparisons, and choices made by one, against NumPy."""

import numpy as np
import pytest

import strideweave as sw
from strideweave.dtype import DType

MEMBERS = DType.members()
FLOATS = tuple(member for member in MEMBERS if member.is_differentiable)
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
CHOICES = {"maximum": np.maximum, "minimum": np.minimum}


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("left", MEMBERS)
@pytest.mark.parametrize("right", MEMBERS)
def test_comparisons_are_numpys_for_any_two_dtypes(make, name, left, right):
    x, y = np.array([[0, 1, 2]]).astype(left.numpy), np.array([[1], [0]]).astype(right.numpy)
    result = getattr(sw, name)(make(x), make(y))
    assert (result.shape, result.dtype) == ((2, 3), DType.Bool)
    assert result.tolist() == COMPARISONS[name](x.astype(float), y.astype(float)).tolist()


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_equals_nothing_and_zeros_are_equal(make, name, dtype):
    x, y = np.array([np.nan, np.nan, 1, -0.0, 2]), np.array([np.nan, 1, np.nan, 0.0, 2])
    result = getattr(sw, name)(make(x, dtype), make(y, dtype))
    assert result.tolist() == COMPARISONS[name](x, y).tolist()


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("dtype", [member for member in MEMBERS if not member.is_differentiable])
@pytest.mark.parametrize("scalar", [True, 0, 1, 1.5, -1, 200, -300, 2**40, -(2**63)])
def test_a_scalar_need_not_fit_the_dtype_it_is_compared_with(make, name, dtype, scalar):
    """As in NumPy: comparing with a number outside the range has an answer, and no error."""
    x = np.array([0, 1, 1]).astype(dtype.numpy)
    assert getattr(sw, name)(make(x), scalar).tolist() == COMPARISONS[name](x, scalar).tolist()
    assert getattr(sw, name)(scalar, make(x)).tolist() == COMPARISONS[name](scalar, x).tolist()


def test_large_integers_are_compared_exactly(make):
    x = make([2**53, 2**53 + 1, 2**63 - 1], DType.Int64)
    assert sw.eq(x, 2**53 + 1).tolist() == [False, True, False]
    assert sw.lt(x, 2**63 - 1).tolist() == [True, True, False]
    with pytest.raises(OverflowError):
        sw.eq(x, 2**70)


def test_a_comparison_has_no_gradient(make):
    assert not sw.lt(make([1.0]), 2.0).requires_grad


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", MEMBERS)
def test_the_larger_and_the_smaller_are_numpys(make, name, dtype):
    x, y = np.array([[0, 1, 3]]).astype(dtype.numpy), np.array([[1], [0]]).astype(dtype.numpy)
    result = getattr(sw, name)(make(x), make(y))
    assert result.dtype is dtype
    assert result.tolist() == CHOICES[name](x.astype(float), y.astype(float)).tolist()


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_is_chosen_from_either_side(make, name, dtype):
    function = getattr(sw, name)
    found = function(make([np.nan, 1, np.nan], dtype), make([1, np.nan, np.nan], dtype)).numpy()
    assert np.isnan(found.astype(float)).all()


@pytest.mark.parametrize("name", CHOICES)
def test_choices_take_weak_scalars_on_either_side(make, name):
    function = getattr(sw, name)
    x = np.array([1, 5], np.int8)
    for result, expected in (
        (function(make(x), 3), CHOICES[name](x, 3)),
        (function(3, make(x)), CHOICES[name](3, x)),
    ):
        assert result.dtype is DType.Int8
        assert result.tolist() == expected.tolist()
    assert function(make(x), 2.5).dtype is DType.Float64
    with pytest.raises(OverflowError):
        function(make(x), 300)


@pytest.mark.parametrize("dtype", MEMBERS)
def test_select_takes_any_nonzero_condition_for_true(make, dtype):
    condition = np.array([[0, 1], [2, 0]]).astype(dtype.numpy)
    x, y = np.array([1.5, 2.5]), np.array([[-1.0], [-2.0]])
    result = sw.select(make(condition), make(x), make(y))
    assert result.tolist() == np.where(condition.astype(bool), x, y).tolist()


def test_nan_and_minus_zero_as_conditions(make):
    assert sw.select(make([np.nan, -0.0]), 1, 0).tolist() == [1, 0]
    assert sw.select(make([np.nan, 0.0], DType.Float8E4M3FN), 1, 0).tolist() == [1, 0]


def test_select_promotes_as_numpy_where(make):
    chosen = make([True, False])
    cases = [
        ((make([1, 2], DType.Int8), make([3.0, 4.0], DType.Float32)), DType.Float32),
        ((make([1, 2], DType.Int8), 3), DType.Int8),
        ((3, make([1, 2], DType.BFloat16)), DType.BFloat16),
        ((make([1, 2], DType.Int8), 2.5), DType.Float64),
        ((1, 2), DType.Int64),
        ((1, 2.5), DType.Float64),
        ((True, False), DType.Bool),
    ]
    for (x, y), dtype in cases:
        result = sw.select(chosen, x, y)
        assert result.dtype is dtype
        assert result.tolist()[0] == (x if isinstance(x, int) else x.tolist()[0])


@pytest.mark.parametrize("dtype", [DType.Float8E4M3FN, DType.Float8E5M2])
def test_select_keeps_every_bit(make, dtype):
    patterns = np.arange(256, dtype=np.uint8)
    condition = patterns % 2 == 0
    x, y = make(patterns.view(dtype.numpy)), make(patterns[::-1].copy().view(dtype.numpy))
    found = sw.select(make(condition), x, y).numpy().view(np.uint8)
    assert found.tolist() == np.where(condition, patterns, patterns[::-1]).tolist()


def test_select_refuses_what_does_not_fit(make):
    for call in (
        lambda: sw.select(True, make([1.0]), make([2.0])),
        lambda: sw.select([True], make([1.0]), make([2.0])),
        lambda: sw.select(make([True]), make([1.0]), None),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError, match=r"^select: shapes \(2,\) and \(3,\)"):
        sw.select(make([True, False]), make([1.0] * 3), 0)
    with pytest.raises(OverflowError):
        sw.select(make([True]), make([1], DType.Int8), 300)


@pytest.mark.parametrize("bounds", [(-1, 2), (None, 2), (-1, None), (None, None), (2, -1), (0.5, 1.5)])
@pytest.mark.parametrize("dtype", [member for member in MEMBERS if member is not DType.Bool])
def test_clamp_limits_as_numpy_clip(make, dtype, bounds):
    if dtype is DType.UInt8 and -1 in bounds:
        with pytest.raises(OverflowError):
            sw.clamp(make([1], dtype), *bounds)
        return
    x = np.array([[-4, 0, 1], [2, 3, 100]]).astype(dtype.numpy)
    result = sw.clamp(make(x).T, *bounds)
    low, high = (-np.inf if bounds[0] is None else bounds[0]), (np.inf if bounds[1] is None else bounds[1])
    assert result.dtype.numpy == np.result_type(dtype.numpy, *(b for b in bounds if b is not None))
    assert result.tolist() == np.minimum(np.maximum(x.T.astype(float), low), high).tolist()


def test_clamp_takes_keywords_keeps_nan_and_copies(make):
    x = make([np.nan, -5.0, 5.0])
    assert str(sw.clamp(x, min=0.0).tolist()) == "[nan, 0.0, 5.0]"
    assert str(sw.clamp(x, max=np.float32(1)).tolist()) == "[nan, -5.0, 1.0]"
    assert np.isnan(sw.clamp(x, min=float("nan")).numpy()).all()
    assert sw.clamp(x).carrier is not x.carrier


def test_clamp_wants_scalars(make):
    for bound in (make([1.0]), "1", [1.0], 1j):
        with pytest.raises(TypeError, match=r"clamp: min must be a Python scalar or None"):
            sw.clamp(make([1.0]), bound)
    with pytest.raises(TypeError, match="Bool"):
        sw.clamp(make([True]))
    with pytest.raises(OverflowError):
        sw.clamp(make([1], DType.Int8), 0, 300)


@pytest.mark.parametrize("name", [*COMPARISONS, *CHOICES])
def test_shapes_that_do_not_broadcast_are_named(make, name):
    with pytest.raises(ValueError, match=rf"^{name}: shapes \(2,\) and \(3,\)"):
        getattr(sw, name)(make([1.0, 2.0]), make([1.0, 2.0, 3.0]))
