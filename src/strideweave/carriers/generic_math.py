"""Real functions of Python numbers with IEEE 754's answers where Python raises an exception.

A pole gives an infinity, a number outside the domain NaN, and what is too large an infinity. No function
warns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "cos",
    "divide",
    "exp",
    "gelu",
    "larger",
    "log",
    "power",
    "relu",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "smaller",
    "softplus",
    "sqrt",
    "tanh_gelu",
    "total",
]


def divide(x: float, y: float) -> float:
    """Divide; a nonzero number over zero is an infinity."""
    if y != 0:
        return x / y
    if x == 0 or math.isnan(x):
        return math.nan
    return math.copysign(math.inf, x) * math.copysign(1.0, y)


def power(x: float, y: float) -> float:
    """Raise to a power, as C's ``pow`` does."""
    odd = math.isfinite(y) and y % 2 == 1
    try:
        return math.pow(x, y)
    except OverflowError:
        return -math.inf if x < 0 and odd else math.inf
    except ValueError:
        if x != 0:
            return math.nan  # a root of a negative number
        return math.copysign(math.inf, x) if odd else math.inf


def exp(x: float) -> float:
    """Exponential."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def log(x: float) -> float:
    """Natural logarithm."""
    if x == 0:
        return -math.inf
    return math.nan if x < 0 else math.log(x)


def sqrt(x: float) -> float:
    """Square root."""
    return math.nan if x < 0 else math.sqrt(x)


def rsqrt(x: float) -> float:
    """One over the square root."""
    return divide(1.0, sqrt(x))


def sin(x: float) -> float:
    """Sine; NaN at the infinities."""
    return math.nan if math.isinf(x) else math.sin(x)


def cos(x: float) -> float:
    """Cosine; NaN at the infinities."""
    return math.nan if math.isinf(x) else math.cos(x)


def sigmoid(x: float) -> float:
    """Logistic function."""
    decay = math.exp(-abs(x))
    return 1 / (1 + decay) if x >= 0 else decay / (1 + decay)


def silu(x: float) -> float:
    """Number times its logistic function."""
    return x * sigmoid(x)


def softplus(x: float) -> float:
    """Logarithm of one plus the exponential."""
    positive: float = relu(x)
    return positive + math.log1p(math.exp(-abs(x)))


def gelu(x: float) -> float:
    """Gaussian error linear unit; the complementary function keeps its digits far below zero."""
    return 0.5 * x * math.erfc(-x * math.sqrt(0.5))


def tanh_gelu(x: float) -> float:
    """Gaussian error linear unit with the hyperbolic tangent in place of the error function."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def larger(x: Any, y: Any) -> Any:
    """Give the larger of two numbers; a NaN wins."""
    return x if math.isnan(x) or x >= y else y


def smaller(x: Any, y: Any) -> Any:
    """Give the smaller of two numbers; a NaN wins."""
    return x if math.isnan(x) or x <= y else y


def relu(x: Any) -> Any:
    """Give the larger of a number and 0; NaN stays."""
    return larger(x, 0)


def sign(x: Any) -> Any:
    """Give -1, 0 or 1; NaN stays."""
    return x if math.isnan(x) else (x > 0) - (x < 0)


def total(numbers: Sequence[Any]) -> Any:
    """Sum without an error on the way, rounded once; integers exactly."""
    if any(isinstance(number, float) for number in numbers) and all(map(math.isfinite, numbers)):
        try:
            return math.fsum(numbers)
        except OverflowError:  # beyond the largest float on the way or at the end
            return sum(numbers)
    return sum(numbers)
