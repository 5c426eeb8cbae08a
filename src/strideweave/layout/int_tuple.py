"""Integers and nested tuples of integers: the one data structure under shapes, strides and coordinates.

The name and the rules (flattening, congruence, prefix products over the leaves) follow the ``IntTuple`` of
*CuTe* in NVIDIA's CUTLASS documentation ("CuTe layouts"). Everything here is plain Python integers.
"""

from __future__ import annotations

from operator import index
from typing import TypeAlias

__all__ = ["IntTuple", "as_int_tuple", "as_integer", "congruent", "flatten", "product", "running_products"]

IntTuple: TypeAlias = "int | tuple[IntTuple, ...]"
"""An integer, or a tuple of ``IntTuple`` of any depth."""


def as_integer(value: object, what: str) -> int:
    """Return ``value`` as a plain ``int``.

    Args:
        value: anything with ``__index__`` (NumPy integers too) except a bool.
        what: how the message calls the value, such as ``"extent"``.

    Raises:
        TypeError: for a bool, a float, or anything else that is not an integer.
    """
    if type(value) is int:
        return value
    # A bool among extents is nearly always a mask or a flag in the wrong place, so it is no integer here.
    if isinstance(value, bool):
        raise TypeError(f"{what} must be an integer, got the bool {value}; write 0 or 1")
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        shown = f"{value!r:.200}"  # it may be a list of millions
        raise TypeError(f"{what} must be an integer, got {shown} of type {type(value).__name__}") from None


def as_int_tuple(value: object, what: str) -> IntTuple:
    """Return ``value`` as plain integers in plain tuples; lists are taken for tuples.

    Raises:
        TypeError: when a leaf is not an integer.
    """
    if type(value) is int:
        return value
    if isinstance(value, (tuple, list)):
        return tuple([as_int_tuple(item, what) for item in value])
    return as_integer(value, what)


def flatten(value: IntTuple) -> tuple[int, ...]:
    """Return the leaves of ``value`` from left to right."""
    if isinstance(value, int):
        return (value,)
    leaves: list[int] = []
    for item in value:
        if isinstance(item, int):
            leaves.append(item)
        else:
            leaves.extend(flatten(item))
    return tuple(leaves)


def product(value: IntTuple) -> int:
    """Return the product of all leaves; 1 for an empty tuple."""
    if isinstance(value, int):
        return value
    result = 1
    for item in value:
        result *= item if isinstance(item, int) else product(item)
    return result


def congruent(a: IntTuple, b: IntTuple) -> bool:
    """Whether the two have the same tree of tuples (CuTe's *congruent*)."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int)
    return len(a) == len(b) and all(map(congruent, a, b))


def running_products(value: IntTuple, start: int = 1) -> tuple[IntTuple, int]:
    """Replace every leaf by the product of the leaves to its left.

    These are the strides of the compact first-mode-fastest layout of a shape. A zero counts as one: an empty
    shape has no elements to place, and the other strides keep their meaning.

    Args:
        value: extents.
        start: the value of the first leaf.

    Returns:
        The products, congruent with ``value``, and the product over all leaves times ``start``.
    """
    if isinstance(value, int):
        return start, start * (value or 1)
    items: list[IntTuple] = []
    for item in value:
        replaced, start = running_products(item, start)
        items.append(replaced)
    return tuple(items), start
