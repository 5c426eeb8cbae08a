"""What Generic computes with: one function per operation, element by element in plain Python.

These kernels share nothing with ``numpy_kernels`` and are written to be read beside the definition of an
operation, so that other carriers can be held against them. A kernel gets the operands as ``Values`` and the
bound operation, whose shapes and dtypes have been checked. It returns the elements of the result in C order:
Python numbers, which are rounded to the dtype once, or stored elements, which keep their bits. Python floats
have 64 bits, and sums are exact, so a result of Float32 or less is the correctly rounded one wherever
Python's ``math`` is.
"""

from __future__ import annotations

import math
import operator
from functools import partial, reduce
from itertools import product
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from strideweave.carriers import generic_math as ieee
from strideweave.carriers.generic_values import fibers, spread
from strideweave.operations.definition import Signature
from strideweave.operations.promotion import promote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from strideweave.carriers.generic_values import Values
    from strideweave.operations.definition import BoundOperation

    Kernel: TypeAlias = Callable[..., Sequence[Any]]

__all__ = ["GENERIC_KERNELS"]


def _each(function: Callable[..., Any], bound: BoundOperation, *operands: Values) -> list[Any]:
    """Compute each element from the operands' elements at its coordinate."""
    result = bound.result
    columns = [spread(item.numbers(result.dtype), item.shape, result.shape) for item in operands]
    return [function(*numbers) for numbers in zip(*columns, strict=True)]


def _pow(bound: BoundOperation, x: Values, y: Values) -> list[Any]:
    if bound.result.dtype.is_differentiable:
        return _each(ieee.power, bound, x, y)
    if any(number < 0 for number in y.numbers(bound.result.dtype)):
        raise ValueError("pow: integers cannot be raised to negative powers; make one of them a float")
    # Modulo 2 ** 64 the numbers stay small, and every integer dtype wraps within it.
    return _each(lambda number, power: pow(number, power, 1 << 64), bound, x, y)


def _compare(function: Callable[..., bool], bound: BoundOperation, x: Values, y: Values) -> list[bool]:
    common = promote(Signature(x.shape, x.dtype), Signature(y.shape, y.dtype))
    left, right = (spread(item.numbers(common), item.shape, bound.result.shape) for item in (x, y))
    return [function(*pair) for pair in zip(left, right, strict=True)]


def _select(bound: BoundOperation, condition: Values, x: Values, y: Values) -> list[Any]:
    shape, dtype = bound.result.shape, bound.result.dtype
    chosen = spread(condition.numbers(condition.dtype), condition.shape, shape)
    left, right = (spread(item.moved(dtype), item.shape, shape) for item in (x, y))
    return [a if number != 0 else b for number, a, b in zip(chosen, left, right, strict=True)]


def _clamp(bound: BoundOperation, x: Values) -> list[Any]:
    dtype = bound.result.dtype
    numbers = x.numbers(dtype)
    for function, name in ((ieee.larger, "min"), (ieee.smaller, "max")):
        if bound.options[name] is not None:
            limit = dtype.to_python(dtype.convert(bound.options[name]))
            numbers = [function(number, limit) for number in numbers]
    return numbers


def _gelu(bound: BoundOperation, x: Values) -> list[Any]:
    return _each(ieee.tanh_gelu if bound.options["approximate"] else ieee.gelu, bound, x)


def _softmax(bound: BoundOperation, x: Values) -> list[Any]:
    numbers = x.numbers(bound.result.dtype)
    for fiber in fibers(x.shape, (bound.options["axis"],)):
        highest = reduce(ieee.larger, (numbers[place] for place in fiber), -math.inf)
        weights = [ieee.exp(numbers[place] - highest) for place in fiber]
        whole = ieee.total(weights)
        for place, weight in zip(fiber, weights, strict=True):
            numbers[place] = ieee.divide(weight, whole)
    return numbers


def _collapse(function: Callable[[list[Any]], Any], bound: BoundOperation, x: Values) -> list[Any]:
    """Compute each element from all those that its axes run over."""
    numbers = x.numbers(bound.result.dtype)
    return [function([numbers[place] for place in fiber]) for fiber in fibers(x.shape, bound.options["axis"])]


def _mean(numbers: list[Any]) -> float:
    return ieee.divide(ieee.total(numbers), len(numbers))


def _place(better: Callable[[Any, Any], Any], bound: BoundOperation, x: Values) -> list[int]:
    """Say where the first element is that beats or equals all others."""
    axis = bound.options["axis"]
    numbers = x.numbers(x.dtype)
    found = []
    for fiber in fibers(x.shape, range(len(x.shape)) if axis is None else (axis,)):
        candidates = [numbers[place] for place in fiber]
        best = reduce(better, candidates)
        found.append(next(i for i, number in enumerate(candidates) if number == best or math.isnan(number)))
    return found


def _cumsum(bound: BoundOperation, x: Values) -> list[Any]:
    axis = bound.options["axis"]
    numbers = x.numbers(bound.result.dtype)
    for fiber in fibers(x.shape, range(len(x.shape)) if axis is None else (axis,)):
        running: Any = 0
        for place in fiber:
            running += numbers[place]
            numbers[place] = running
    return numbers


def _matmul(bound: BoundOperation, x: Values, y: Values) -> list[Any]:
    dtype = bound.result.dtype
    left, right = x.numbers(dtype), y.numbers(dtype)
    rows, inner = x.shape[-2] if len(x.shape) > 1 else 1, x.shape[-1]
    columns = y.shape[-1] if len(y.shape) > 1 else 1
    stack = bound.result.shape[: len(bound.result.shape) - min(len(x.shape), 2) - min(len(y.shape), 2) + 2]
    # Which matrix of either operand each matrix of the result is made from.
    lefts = spread(range(prod(x.shape[:-2])), x.shape[:-2], stack)
    rights = spread(range(prod(y.shape[:-2])), y.shape[:-2], stack)
    result = []
    for a, b in zip(lefts, rights, strict=True):
        for row, column in product(range(rows), range(columns)):
            first, second = (a * rows + row) * inner, b * inner * columns + column
            terms = [left[first + step] * right[second + step * columns] for step in range(inner)]
            result.append(ieee.total(terms))
    return result


def _picked(bound: BoundOperation, x: Values, indices: Values) -> list[int]:
    """List the places in ``x`` that the indices name along the axis."""
    axis = bound.options["axis"]
    rows, extent, width = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    numbers = indices.numbers(indices.dtype)
    for number in numbers:
        if not -extent <= number < extent:
            raise IndexError(f"index {number} is out of bounds for axis {axis} with size {extent}")
    return [
        (row * extent + number % extent) * width + column
        for row, number, column in product(range(rows), numbers, range(width))
    ]


def _gather(bound: BoundOperation, x: Values, indices: Values) -> list[Any]:
    return [x.items[place] for place in _picked(bound, x, indices)]


def _scatter_add(bound: BoundOperation, x: Values, indices: Values, values: Values) -> list[Any]:
    axis, dtype = bound.options["axis"], bound.result.dtype
    terms = [[number] for number in x.numbers(dtype)]
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    added: Iterable[Any] = spread(values.numbers(dtype), values.shape, shape)
    for place, number in zip(_picked(bound, x, indices), added, strict=True):
        terms[place].append(number)
    return [ieee.total(numbers) for numbers in terms]


GENERIC_KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "add": partial(_each, operator.add),
        "sub": partial(_each, operator.sub),
        "mul": partial(_each, operator.mul),
        "elementwise_mul": partial(_each, operator.mul),
        "div": partial(_each, ieee.divide),
        "pow": _pow,
        "maximum": partial(_each, ieee.larger),
        "minimum": partial(_each, ieee.smaller),
        "eq": partial(_compare, operator.eq),
        "ne": partial(_compare, operator.ne),
        "lt": partial(_compare, operator.lt),
        "le": partial(_compare, operator.le),
        "select": _select,
        "clamp": _clamp,
        "neg": partial(_each, operator.neg),
        "abs": partial(_each, operator.abs),
        "sign": partial(_each, ieee.sign),
        "recip": partial(_each, partial(ieee.divide, 1.0)),
        "sqrt": partial(_each, ieee.sqrt),
        "rsqrt": partial(_each, ieee.rsqrt),
        "exp": partial(_each, ieee.exp),
        "log": partial(_each, ieee.log),
        "sin": partial(_each, ieee.sin),
        "cos": partial(_each, ieee.cos),
        "erf": partial(_each, math.erf),
        "tanh": partial(_each, math.tanh),
        "relu": partial(_each, ieee.relu),
        "sigmoid": partial(_each, ieee.sigmoid),
        "silu": partial(_each, ieee.silu),
        "softplus": partial(_each, ieee.softplus),
        "gelu": _gelu,
        "softmax": _softmax,
        "reduce_sum": partial(_collapse, ieee.total),
        "reduce_mean": partial(_collapse, _mean),
        "reduce_max": partial(_collapse, partial(reduce, ieee.larger)),
        "reduce_min": partial(_collapse, partial(reduce, ieee.smaller)),
        "argmax": partial(_place, ieee.larger),
        "argmin": partial(_place, ieee.smaller),
        "cumsum": _cumsum,
        "matmul": _matmul,
        "gather": _gather,
        "scatter_add": _scatter_add,
    }
)
"""The kernel of every operation that computes, by name."""
