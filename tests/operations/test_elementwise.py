"""Elementwise operations against NumPy."""

import math

import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, Generic
from strideweave.dtype import DType

MEMBERS = DType.members()
SMALL = (DType.Float16, DType.BFloat16, DType.Float8E4M3FN, DType.Float8E5M2)
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "elementwise_mul": np.multiply,
    "div": np.true_divide,
}
UNARY = {"sqrt": np.sqrt, "exp": np.exp, "tanh": np.tanh, "neg": np.negative}

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(
    ("left", "right"),
    [((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 1), (1, 4)), ((), (2, 2)), ((0, 3), (1, 3)), ((), ())],
)
def test_binary_operations_broadcast_as_numpy(make, rng, name, left, right):
    x, y = rng.uniform(1, 2, left).astype(np.float32), rng.uniform(1, 2, right).astype(np.float32)
    result = getattr(sw, name)(make(x), make(y))
    expected = BINARY[name](x, y)
    assert (result.shape, result.dtype.numpy) == (expected.shape, expected.dtype)
    assert result.numpy().tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("right", MEMBERS)
@pytest.mark.parametrize("left", MEMBERS)
def test_mixed_dtypes_promote_as_numpy(make, left, right):
    result = sw.add(make([1, 2], left), make([1, 0], right))
    assert result.dtype.numpy == np.result_type(left.numpy, right.numpy)
    expected = np.array([1, 2]).astype(left.numpy) + np.array([1, 0]).astype(right.numpy)
    assert result.numpy().tobytes() == expected.astype(result.dtype.numpy).tobytes()


@pytest.mark.parametrize("scalar", [True, 2, 2.5, np.float64(2.5), np.int8(2)])
@pytest.mark.parametrize("dtype", MEMBERS)
def test_scalars_are_weak_on_either_side(make, dtype, scalar):
    """Contract section 7: Python scalars are weak operands."""
    plain = scalar.item() if isinstance(scalar, np.generic) else scalar
    x = np.array([1, 1]).astype(dtype.numpy)
    for result, expected in ((make(x) * scalar, x * plain), (scalar + make(x), plain + x)):
        assert result.dtype.numpy == expected.dtype
        assert result.tolist() == expected.astype(float).tolist()


def test_a_scalar_has_to_fit_the_dtype(make):
    tensor = make([1, 2], DType.Int8)
    for call in (lambda: tensor + 300, lambda: 300 * tensor, lambda: tensor - (-129)):
        with pytest.raises(OverflowError):
            call()


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("name", BINARY)
def test_small_floats_are_computed_in_float32_and_rounded_once(make, name, dtype):
    """Contract section 7: BFloat16 and Float16 compute in float32 and round once."""
    x = np.linspace(0.1, 3, 50).astype(dtype.numpy)
    y = x[::-1].copy()
    expected = BINARY[name](x.astype(np.float32), y.astype(np.float32)).astype(dtype.numpy)
    result = getattr(sw, name)(make(x), make(y))
    assert result.dtype is dtype
    assert result.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", MEMBERS)
def test_unary_operations_have_numpys_dtype_and_values(make, agree, name, dtype):
    if name == "neg" and dtype is DType.Bool:
        with pytest.raises(TypeError, match="Bool"):
            sw.neg(make([True]))
        return
    x = np.array([[0, 1], [2, 3]]).astype(dtype.numpy)
    result = getattr(sw, name)(make(x).T)
    expected = UNARY[name](x.T)
    assert result.dtype.numpy == expected.dtype
    wide = x.T.astype(np.float32) if dtype in SMALL else x.T
    agree(result, np.ascontiguousarray(UNARY[name](wide).astype(expected.dtype)))


def test_rsqrt_is_one_over_the_root(make):
    x = np.array([0.25, 1, 4, 9], np.float32)
    assert sw.rsqrt(make(x)).tolist() == (1 / np.sqrt(x)).tolist()
    assert sw.rsqrt(make([4], DType.Int16)).dtype is DType.Float32
    assert sw.rsqrt(make([4, 16], DType.BFloat16)).tolist() == [0.5, 0.25]


def test_integer_quotients_are_float64_and_booleans_cannot_be_subtracted(make):
    assert sw.div(make([1, 2], DType.Int8), 2).dtype is DType.Float64
    assert sw.div(make([1, 2], DType.Int8), make([2, 4], DType.Int8)).tolist() == [0.5, 0.5]
    with pytest.raises(TypeError, match="Bool"):
        sw.sub(make([True]), make([False]))


def test_the_sign_of_zero_survives(make):
    result = sw.mul(make([-0.0, 0.0]), 1.0).numpy()
    assert np.signbit(result).tolist() == [True, False]


@pytest.mark.parametrize("name", BINARY)
def test_shapes_that_do_not_broadcast_are_named(make, name):
    with pytest.raises(ValueError, match=rf"^{name}: shapes \(2,\) and \(3,\)"):
        getattr(sw, name)(make([1.0, 2.0]), make([1.0, 2.0, 3.0]))


def test_numpys_warnings_stay_on_cpu_and_generic_never_warns(make_on):
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        assert sw.div(make_on(CPU)([1.0]), 0).tolist() == [np.inf]
    assert sw.div(make_on(Generic)([1.0]), 0).tolist() == [np.inf]


@pytest.mark.parametrize("dtype", [DType.Float32, DType.Float64])
def test_gelu_is_the_gaussian_error_unit(make, dtype):
    x = np.linspace(-8, 8, 4001).astype(dtype.numpy)
    exact = np.array([v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x.tolist()])
    error = np.abs(sw.gelu(make(x)).numpy() - exact) / np.maximum(np.abs(x), 1)
    assert error.max() < (4e-7 if dtype is DType.Float32 else 3e-16)


def test_gelu_approximate_uses_the_tangent(make):
    x = np.linspace(-5, 5, 101)
    expected = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert np.allclose(sw.gelu(make(x), approximate=True).numpy(), expected, atol=1e-15)
    with pytest.raises(TypeError, match="bool"):
        sw.gelu(make(x), approximate=1)


@pytest.mark.parametrize("dtype", [*SMALL, DType.Int8])
def test_gelu_of_other_dtypes_rounds_once(make, dtype):
    x = np.array([-2, -1, 0, 1, 2, 3]).astype(dtype.numpy)
    result = sw.gelu(make(x))
    exact = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x.astype(float).tolist()]
    assert result.numpy().tobytes() == np.array(exact, np.float32).astype(result.dtype.numpy).tobytes()


@pytest.mark.parametrize("axis", [-1, 0, 1, 2, -3])
def test_softmax_sums_to_one_along_its_axis(make, rng, axis):
    x = rng.normal(size=(3, 4, 5)) * 10
    result = sw.softmax(make(x), axis=axis).numpy()
    shifted = np.exp(x - x.max(axis=axis, keepdims=True))
    assert np.allclose(result, shifted / shifted.sum(axis=axis, keepdims=True), rtol=1e-14)
    assert np.allclose(result.sum(axis=axis), 1)


def test_softmax_does_not_overflow_and_takes_minus_infinity_for_never(make):
    assert sw.softmax(make([1e30, 1e30])).tolist() == [0.5, 0.5]
    assert sw.softmax(make([0.0, -np.inf, 0.0])).tolist() == [0.5, 0.0, 0.5]
    assert sw.softmax(make(np.zeros((2, 0)))).shape == (2, 0)
    assert sw.softmax(make([0, 0], DType.BFloat16)).dtype is DType.BFloat16


@pytest.mark.parametrize(
    ("shape", "axis", "error"), [((), -1, ValueError), ((2,), 1, ValueError), ((2,), 0.0, TypeError)]
)
def test_softmax_needs_an_axis_that_is_there(make, shape, axis, error):
    with pytest.raises(error, match="softmax"):
        sw.softmax(make(np.zeros(shape)), axis=axis)
