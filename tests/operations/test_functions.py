"""Powers, signs, logarithms, sines and activations against NumPy and against their definitions."""

import math

import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, Generic
from strideweave.carriers.generic_kernels import GENERIC_KERNELS
from strideweave.carriers.numpy_kernels import KERNELS
from strideweave.dtype import DType

MEMBERS = DType.members()
FLOATS = tuple(member for member in MEMBERS if member.is_differentiable)
SMALL = (DType.Float16, DType.BFloat16, DType.Float8E4M3FN, DType.Float8E5M2)
KEEPING = {"abs": np.abs, "sign": np.sign, "relu": lambda x: np.maximum(x, x.dtype.type(0))}
FLOATING = {"log": np.log, "sin": np.sin, "cos": np.cos}
ACTIVATIONS = ("erf", "sigmoid", "silu", "softplus")
EXTREMES = [
    -np.inf,
    -1e30,
    -1000,
    -100,
    -30,
    -1,
    -1e-20,
    -0.0,
    0.0,
    1e-20,
    1,
    30,
    100,
    1000,
    1e30,
    np.inf,
    np.nan,
]


def logistic(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else math.exp(x)


DEFINED = {
    "erf": math.erf,
    "sigmoid": logistic,
    "silu": lambda x: x * logistic(x),
    "softplus": lambda x: math.log1p(math.exp(x)) if x < 30 else x + math.exp(-x),
}


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("dtype", MEMBERS)
def test_signs_and_magnitudes_keep_the_dtype(make, agree, name, dtype):
    if dtype is DType.Bool and name != "abs":
        with pytest.raises(TypeError, match=f"{name} is not defined for Bool"):
            getattr(sw, name)(make([True]))
        return
    low = 0 if dtype in (DType.Bool, DType.UInt8) else -3
    x = np.array([[low, 0, 2], [1, low, 3]]).astype(dtype.numpy)
    wide = x.astype(np.float32) if dtype in SMALL else x
    agree(getattr(sw, name)(make(x)), KEEPING[name](wide).astype(dtype.numpy))


def test_the_smallest_integer_is_its_own_magnitude(make):
    x = np.array([-128, 127], np.int8)
    assert sw.abs(make(x)).tolist() == np.abs(x).tolist() == [-128, 127]
    assert sw.neg(make(x)).tolist() == [-128, -127]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_signed_zeros_come_through(make, dtype):
    x = make([np.nan, -0.0, 0.0], dtype)
    for function in (sw.abs, sw.sign, sw.relu):
        found = function(x).numpy().astype(float)
        assert np.isnan(found[0])
        assert found[1:].tolist() == [0, 0]
    assert not np.signbit(sw.abs(x).numpy()[1:]).any()


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("dtype", MEMBERS)
def test_floating_functions_have_numpys_dtype_and_values(make, agree, name, dtype):
    x = np.array([[1, 1], [2, 3]]).astype(dtype.numpy)
    wide = x.T.astype(np.float32) if dtype in SMALL else x.T
    expected = FLOATING[name](wide)
    kept = dtype.numpy if dtype in SMALL else expected.dtype
    agree(getattr(sw, name)(make(x).T), np.ascontiguousarray(expected.astype(kept)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_poles_and_domains_are_ieee(make):
    x = make([0.0, -0.0, -1.0, np.inf, np.nan])
    assert str(sw.log(x).tolist()) == "[-inf, -inf, nan, inf, nan]"
    assert str(sw.recip(x).tolist()) == "[inf, -inf, -1.0, 0.0, nan]"
    assert np.isnan(sw.sin(make([np.inf, -np.inf])).numpy()).all()
    assert np.isnan(sw.cos(make([np.inf, -np.inf])).numpy()).all()


@pytest.mark.parametrize("dtype", MEMBERS)
def test_recip_is_one_over_its_operand(make, agree, dtype):
    """Integers divide in Float64, as in ``div``: an integer reciprocal would be 0 nearly everywhere."""
    x = np.array([1, 1, 1] if dtype is DType.Bool else [1, 3, 4]).astype(dtype.numpy)
    wide = 1 / x.astype(
        np.float32 if dtype in SMALL else float if not dtype.is_differentiable else dtype.numpy
    )
    agree(sw.recip(make(x)), wide.astype(dtype.numpy) if dtype in SMALL else wide)
    assert sw.recip(make(x)).dtype is sw.div(1, make(x)).dtype


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [DType.Float32, DType.Float64])
def test_activations_are_what_they_are_defined_as(make, near, name, dtype):
    x = np.linspace(-20, 20, 801).astype(dtype.numpy)
    expected = np.array([DEFINED[name](v) for v in x.tolist()]).astype(dtype.numpy)
    near(getattr(sw, name)(make(x)), expected, scale=1 if name == "erf" else 0)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [*SMALL, DType.Int8])
def test_activations_of_other_dtypes_are_computed_in_float32_and_rounded_once(make, near, name, dtype):
    x = np.array([-2, -1, 0, 1, 2, 3]).astype(dtype.numpy)
    exact = np.array([DEFINED[name](v) for v in x.astype(float).tolist()], np.float32)
    kept = dtype if dtype in SMALL else DType.Float16
    near(getattr(sw, name)(make(x)), exact.astype(kept.numpy))


@pytest.mark.parametrize("dtype", [DType.Float32, DType.Float64])
def test_activations_stay_right_and_quiet_at_the_extremes(make, dtype):
    """No warning leaves them: pytest makes every warning an error."""
    x = make(np.array(EXTREMES).astype(dtype.numpy))
    ones, far = [1.0] * 3, sw.sigmoid(x).tolist()
    assert far[:3] == [0, 0, 0]
    assert far[-4:-1] == ones
    assert far[4] == pytest.approx(math.exp(-30), rel=1e-6)
    ramp = sw.softplus(x).tolist()
    assert ramp[:3] == [0, 0, 0]
    assert ramp[-5:-1] == x.tolist()[-5:-1]
    assert ramp[4] == pytest.approx(math.exp(-30), rel=1e-6)
    bent = sw.silu(x).tolist()
    assert np.isnan(bent[0])
    assert bent[1:3] == [0, 0]
    assert bent[-5:-1] == x.tolist()[-5:-1]
    assert bent[4] == pytest.approx(-30 * math.exp(-30), rel=1e-6)
    steps = sw.erf(x).tolist()
    assert steps[:5] == [-1] * 5
    assert steps[-6:-1] == [1] * 5
    for found in (far, ramp, bent, steps):
        assert np.isnan(found[-1])


@pytest.mark.parametrize("left", MEMBERS)
@pytest.mark.parametrize("right", MEMBERS)
def test_pow_promotes_as_numpy(make, left, right):
    result = sw.pow(make([1, 2], left), make([1, 0], right))
    both_bool = left is right is DType.Bool
    assert result.dtype.numpy == (np.int8 if both_bool else np.result_type(left.numpy, right.numpy))
    assert result.tolist() == [1, 1]


@pytest.mark.parametrize("shapes", [((3, 4), (4,)), ((3, 1), (1, 4)), ((), (2, 2)), ((0, 3), (1, 3))])
@pytest.mark.parametrize("dtype", [DType.Float32, DType.Float64])
def test_pow_broadcasts_and_has_numpys_values(make, rng, agree, shapes, dtype):
    x, y = (rng.uniform(0.5, 3, shape).astype(dtype.numpy) for shape in shapes)
    agree(sw.pow(make(x), make(y)), np.power(x, y))


def test_pow_takes_weak_scalars_on_either_side(make):
    x = make([1, 2, 3], DType.Int16)
    assert sw.pow(x, 2).tolist() == [1, 4, 9]
    assert sw.pow(2, x).tolist() == [2, 4, 8]
    assert (sw.pow(x, 2).dtype, sw.pow(2, x).dtype) == (DType.Int16, DType.Int16)
    assert sw.pow(x, 0.5).dtype is DType.Float64
    assert sw.pow(make([4.0], DType.BFloat16), 0.5).tolist() == [2.0]
    assert sw.pow(make([4.0], DType.BFloat16), 2).dtype is DType.BFloat16
    with pytest.raises(OverflowError):
        sw.pow(make([1], DType.Int8), 300)


def test_integer_powers_wrap_as_numpys(make):
    x, y = np.array([3, -3, 7, -128, 2], np.int8), np.array([5, 5, 100, 3, 7], np.int8)
    assert sw.pow(make(x), make(y)).tolist() == np.power(x, y).tolist()
    wide = np.array([3, -7], np.int64)
    assert sw.pow(make(wide), 60).tolist() == np.power(wide, 60).tolist()


def test_integers_have_no_negative_powers(make):
    for call in (lambda: sw.pow(make([2]), -1), lambda: sw.pow(make([2, 2]), make([1, -1]))):
        with pytest.raises(ValueError, match="negative"):
            call()
    assert sw.pow(make([2.0]), -1).tolist() == [0.5]
    assert sw.pow(make([2]), -1.0).tolist() == [0.5]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_special_powers_are_those_of_ieee(make):
    special = np.array([-np.inf, -2, -1, -0.5, -0.0, 0, 0.5, 1, 2, np.inf, np.nan, 3, -3, 1e200])
    expected = np.power(special[:, None], special[None, :])
    found = sw.pow(make(special[:, None]), make(special[None, :])).numpy()
    assert np.allclose(found, expected, rtol=1e-15, atol=0, equal_nan=True)
    assert (np.signbit(found) == np.signbit(expected))[~np.isnan(expected)].all()


def test_no_function_takes_anything_but_tensors(make):
    for name in (*KEEPING, *FLOATING, *ACTIVATIONS, "recip"):
        for value in (2.0, [1.0], np.ones(2)):
            with pytest.raises(TypeError, match=name):
                getattr(sw, name)(value)
    x = make([1.0])
    x.carrier.release()
    with pytest.raises(sw.ReleasedError):
        sw.log(x)


def test_generic_and_numpy_share_no_arithmetic(make_on, monkeypatch):
    """Generic computes every operation without one NumPy function of arrays."""
    assert GENERIC_KERNELS.keys() == KERNELS.keys()
    x = make_on(Generic)([1.0, 4.0])
    for name in ("add", "exp", "matmul", "maximum", "sum", "sqrt"):
        monkeypatch.setattr(np, name, None)
    assert sw.add(x, x).tolist() == [2, 8]
    assert sw.sqrt(x).tolist() == [1, 2]
    assert sw.matmul(x, x).item() == 17
    assert type(sw.exp(x).carrier) is not CPU
