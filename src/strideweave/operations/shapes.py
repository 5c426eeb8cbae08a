"""Shape rules that several operations share: broadcasting and axes, as NumPy has them."""

from __future__ import annotations

import numpy as np

from strideweave.layout.int_tuple import as_integer

__all__ = ["broadcast_shapes", "normal_axes", "normal_axis"]


def broadcast_shapes(name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Give the shape that the shapes broadcast to.

    Raises:
        ValueError: they do not broadcast; the message names the operation and the shapes.
    """
    if shapes.count(shapes[0]) == len(shapes):
        return shapes[0]  # the usual case, which needs no array of that shape
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = " and ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name}: shapes {listed} do not broadcast") from None


def normal_axis(name: str, axis: object, ndim: int) -> int:
    """Give an axis counted from the front.

    Raises:
        TypeError: it is not an integer.
        ValueError: there is no such axis.
    """
    number = as_integer(axis, f"{name}: axis")
    if not -ndim <= number < ndim:
        raise ValueError(f"{name}: axis {number} is outside a tensor of {ndim} axes")
    return number % ndim


def normal_axes(name: str, axis: object, ndim: int) -> tuple[int, ...]:
    """Give the axes that ``axis`` names, counted from the front: None is all of them, a tuple several.

    Raises:
        TypeError: an axis is not an integer.
        ValueError: there is no such axis, or one is named twice.
    """
    if axis is None:
        return tuple(range(ndim))
    named = axis if isinstance(axis, tuple | list) else (axis,)
    axes = tuple(normal_axis(name, number, ndim) for number in named)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: axes {named} name an axis twice")
    return axes
