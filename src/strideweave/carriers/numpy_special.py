"""The error function, which NumPy does not have, and activations in their stable forms.

All run in chunks that stay in the second-level cache: a whole-array pass per arithmetic step would be
bound by memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Function = Callable[[NDArray[Any], NDArray[Any]], None]

__all__ = ["erf", "gelu", "sigmoid", "silu", "softplus"]

CHUNK = 32 * 1024
"""Elements: four temporaries of float32 then take 512 KiB."""

# W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969) 631-637:
# coefficients of the program CALERF, highest power first. erf(x) / x below 0.46875 in powers of x * x, and
# erfc(y) * exp(y * y) above in powers of y, which is stated up to 4 and holds to 3e-12 up to 6.5.
_NEAR_NUMERATOR = (
    1.85777706184603153e-1,
    3.16112374387056560e0,
    1.13864154151050156e2,
    3.77485237685302021e2,
    3.20937758913846947e3,
)
_NEAR_DENOMINATOR = (
    1.0,
    2.36012909523441209e1,
    2.44024637934444173e2,
    1.28261652607737228e3,
    2.84423683343917062e3,
)
_FAR_NUMERATOR = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e0,
    6.61191906371416295e1,
    2.98635138197400131e2,
    8.81952221241769090e2,
    1.71204761263407058e3,
    2.05107837782607147e3,
    1.23033935479799725e3,
)
_FAR_DENOMINATOR = (
    1.0,
    1.57449261107098347e1,
    1.17693950891312499e2,
    5.37181101862009858e2,
    1.62138957456669019e3,
    3.29079923573345963e3,
    4.36261909014324716e3,
    3.43936767414372164e3,
    1.23033935480374942e3,
)
_NEAR = 0.46875
_FLAT = 6.0  # from here on erf is 1 in float64

# Own fit for float32: x * P(x * x) / Q(x * x) by Lawson's reweighted least squares on [0, 3.9], where it
# deviates by 1.5e-8 at most; rounding brings that to 3.6e-7. Above 3.9 erf differs from 1 by less than 4e-8.
_SINGLE_NUMERATOR = (
    2.05034767e-06,
    2.87439363e-04,
    3.83645628e-03,
    5.29656211e-02,
    1.91932395e-01,
    1.12837903e00,
)
_SINGLE_DENOMINATOR = (
    3.82293846e-05,
    1.18161626e-03,
    1.51083802e-02,
    1.14754494e-01,
    5.03427439e-01,
    1.0,
)
_SINGLE_FLAT = 3.90625  # the quotient is exactly 1 here in float32, so erf ends flat


def erf(x: NDArray[Any]) -> NDArray[Any]:
    """Error function of every element, as a fresh C-ordered array.

    Args:
        x: float32 or float64 values. The error is below 4e-7 absolute, or 4e-16 relative.
    """
    return _in_chunks(x, _erf_single if x.dtype == np.float32 else _erf_double)


def gelu(x: NDArray[Any], *, approximate: bool) -> NDArray[Any]:
    """Gaussian error linear unit of every element, as a fresh C-ordered array of float32 or float64.

    Args:
        x: the elements.
        approximate: use the hyperbolic tangent in place of the error function.
    """
    exact = _erf_part_single if x.dtype == np.float32 else _erf_part_double
    sigmoid: Function = _tanh_part if approximate else exact

    def chunk(values: NDArray[Any], out: NDArray[Any]) -> None:
        sigmoid(values, out)
        out += 1
        out *= values
        out *= 0.5

    with np.errstate(invalid="ignore"):  # -inf times 0 is NaN, as the formula has it
        return _in_chunks(x, chunk)


def sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    """Logistic function of every element, as a fresh C-ordered array of float32 or float64."""
    return _in_chunks(x, _sigmoid)


def silu(x: NDArray[Any]) -> NDArray[Any]:
    """Every element times its logistic function, as a fresh C-ordered array of float32 or float64."""

    def chunk(values: NDArray[Any], out: NDArray[Any]) -> None:
        _sigmoid(values, out)
        out *= values

    with np.errstate(invalid="ignore"):  # -inf times 0 is NaN, as the formula has it
        return _in_chunks(x, chunk)


def softplus(x: NDArray[Any]) -> NDArray[Any]:
    """Logarithm of one plus the exponential, as a fresh C-ordered array of float32 or float64."""

    def chunk(values: NDArray[Any], out: NDArray[Any]) -> None:
        _decay(values, out)
        np.log1p(out, out=out)
        out += np.maximum(values, 0)

    return _in_chunks(x, chunk)


def _in_chunks(x: NDArray[Any], function: Function) -> NDArray[Any]:
    flat = np.ascontiguousarray(x).reshape(-1)
    result = np.empty(x.shape, x.dtype)
    out = result.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        function(flat[start : start + CHUNK], out[start : start + CHUNK])
    return result


def _decay(x: NDArray[Any], out: NDArray[Any]) -> None:
    """exp(-abs(x)), which is at most 1 and so never overflows."""
    np.abs(x, out=out)
    np.negative(out, out=out)
    np.exp(out, out=out)


def _sigmoid(x: NDArray[Any], out: NDArray[Any]) -> None:
    _decay(x, out)
    total = out + 1
    # e / (1 + e) on the left, 1 / (1 + e) on the right: neither subtracts nearly equal numbers.
    np.copyto(out, 1, where=x >= 0)
    out /= total


def _erf_single(x: NDArray[Any], out: NDArray[Any]) -> None:
    bounded = np.clip(x, -_SINGLE_FLAT, _SINGLE_FLAT)
    square = bounded * bounded
    numerator = _polynomial(_SINGLE_NUMERATOR, square)
    numerator *= bounded
    np.divide(numerator, _polynomial(_SINGLE_DENOMINATOR, square), out=out)
    np.clip(out, -1, 1, out=out)


def _erf_double(x: NDArray[Any], out: NDArray[Any]) -> None:
    magnitude = np.minimum(np.abs(x), _FLAT)
    near = magnitude < _NEAR
    small = magnitude[near]
    square = small * small
    out[near] = small * _polynomial(_NEAR_NUMERATOR, square) / _polynomial(_NEAR_DENOMINATOR, square)
    far = ~near  # NaN goes this way and stays NaN
    large = magnitude[far]
    tail = _polynomial(_FAR_NUMERATOR, large) / _polynomial(_FAR_DENOMINATOR, large)
    out[far] = 1 - np.exp(-large * large) * tail
    np.copysign(out, x, out=out)


def _erf_part_single(x: NDArray[Any], out: NDArray[Any]) -> None:
    _erf_single(x * np.float32(0.5**0.5), out)


def _erf_part_double(x: NDArray[Any], out: NDArray[Any]) -> None:
    _erf_double(x * 0.5**0.5, out)


def _tanh_part(x: NDArray[Any], out: NDArray[Any]) -> None:
    np.multiply(x, x, out=out)
    out *= 0.044715
    out += 1
    out *= x
    out *= (2 / np.pi) ** 0.5
    np.tanh(out, out=out)


def _polynomial(coefficients: Sequence[float], x: NDArray[Any]) -> NDArray[Any]:
    """Horner's rule, highest power first, in place."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= x
    value += coefficients[-1]
    return value
