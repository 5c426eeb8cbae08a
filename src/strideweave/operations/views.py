"""Operations that change how a tensor is read and not what is stored: another Layout over the same slots.

The arithmetic is on Layouts alone; ``reshape`` is the only one that cannot always do without a copy.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from strideweave.layout import Layout, row_major
from strideweave.layout.digits import merge_digits
from strideweave.layout.int_tuple import as_integer
from strideweave.operations.definition import Inferred, OperationDefinition, Signature, apply
from strideweave.operations.shapes import normal_axes, normal_axis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strideweave.tensor import Tensor

__all__ = ["DEFINITIONS", "broadcast_to", "permute", "reshape", "squeeze", "unsqueeze", "viewed_layout"]


def permute(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Reorder the axes: axis ``i`` of the result is axis ``axes[i]`` of ``x``. Never copies.

    Args:
        x: a Tensor.
        axes: every axis once; negative ones count from the end.

    Raises:
        TypeError: ``x`` is no Tensor, or an axis no integer.
        ValueError: ``axes`` does not name every axis exactly once.
        ReleasedError: the carrier was released.
    """
    return apply("permute", x, axes=axes)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Give the elements, in C order, another shape, as ``numpy.reshape`` does.

    The result is a view where a Layout can express it, which is more often than strides can: axes may be
    merged across any strides, and the merged axis is a hierarchical mode. Where an extent would cut a
    stride in two, the result is a copy on fresh storage of the same carrier class.

    Args:
        x: a Tensor.
        shape: the new extents; one of them may be -1 and is then found out.

    Raises:
        TypeError: ``x`` is no Tensor, or an extent no integer.
        ValueError: the number of elements differs.
        ReleasedError: the carrier was released.
    """
    return apply("reshape", x, shape=shape)


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat axes of extent 1, and new axes in front, as ``numpy.broadcast_to`` does. Never copies.

    Raises:
        TypeError: ``x`` is no Tensor, or an extent no integer.
        ValueError: ``x`` does not broadcast to the shape.
        ReleasedError: the carrier was released.
    """
    return apply("broadcast_to", x, shape=shape)


def squeeze(x: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Drop axes of extent 1. Never copies.

    Args:
        x: a Tensor.
        axis: the axes to drop; None drops every axis of extent 1.

    Raises:
        TypeError: ``x`` is no Tensor, or an axis no integer.
        ValueError: there is no such axis, or its extent is not 1.
        ReleasedError: the carrier was released.
    """
    return apply("squeeze", x, axis=axis)


def unsqueeze(x: Tensor, axis: int) -> Tensor:
    """Insert an axis of extent 1, which is axis ``axis`` of the result. Never copies.

    Raises:
        TypeError: ``x`` is no Tensor, or ``axis`` no integer.
        ValueError: ``axis`` is outside the result.
        ReleasedError: the carrier was released.
    """
    return apply("unsqueeze", x, axis=axis)


def viewed_layout(name: str, layout: Layout, options: Mapping[str, Any]) -> Layout | None:
    """Give the Layout of a view, from the options that the definition put in normal form.

    None where only a copy can have the shape, which happens to ``reshape`` alone.
    """
    if name == "permute":
        return layout.permute(options["axes"])
    if name == "broadcast_to":
        return layout.broadcast_to(options["shape"])
    if name == "reshape":
        return _reshaped(layout, options["shape"])
    modes = list(zip(layout.shape, layout.stride, strict=True))
    if name == "squeeze":
        modes = [mode for place, mode in enumerate(modes) if place not in options["axis"]]
    else:
        modes.insert(options["axis"], (1, 0))
    return Layout([extent for extent, _ in modes], [stride for _, stride in modes])


def _reshaped(layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    """Deal the layout's digits out to the new extents, both from the fastest in C order on."""
    if layout.size == 0:
        return row_major(shape)
    digits = list(merge_digits(digit for mode in reversed(layout.digits()) for digit in mode))
    digits.reverse()  # the fastest is now last, where pop takes it
    modes: list[tuple[Any, Any]] = []
    for wanted in reversed(shape):
        taken = _take(digits, wanted)
        if taken is None:
            return None
        modes.append(_mode(taken))
    modes.reverse()
    return Layout([extent for extent, _ in modes], [stride for _, stride in modes])


def _take(digits: list[tuple[int, int]], wanted: int) -> list[tuple[int, int]] | None:
    """Take digits of ``wanted`` elements in all, the last one split; None where that is uneven."""
    taken: list[tuple[int, int]] = []
    while wanted > 1:
        extent, stride = digits.pop()
        if extent <= wanted:
            wanted, rest = divmod(wanted, extent)
            taken.append((extent, stride))
        else:
            outer, rest = divmod(extent, wanted)
            taken.append((wanted, stride))
            digits.append((outer, stride * wanted))
            wanted = 1
        if rest:
            return None
    return taken


def _mode(digits: list[tuple[int, int]]) -> tuple[Any, Any]:
    if not digits:
        return 1, 0
    if len(digits) == 1:
        return digits[0]
    return tuple(extent for extent, _ in digits), tuple(stride for _, stride in digits)


def _integers(name: str, what: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise TypeError(f"{name}: {what} must be a tuple of integers, found {type(values).__name__}")
    return tuple(as_integer(value, f"{name}: an entry of {what}") for value in values)


def _infer_permute(x: Signature, *, axes: object) -> Inferred:
    numbers = _integers("permute", "axes", axes)
    order = tuple(normal_axis("permute", number, len(x.shape)) for number in numbers)
    if sorted(order) != list(range(len(x.shape))):
        raise ValueError(f"permute: axes {numbers} do not name each of the {len(x.shape)} axes exactly once")
    return Inferred(Signature(tuple(x.shape[place] for place in order), x.dtype), {"axes": order})


def _infer_reshape(x: Signature, *, shape: object) -> Inferred:
    asked = _integers("reshape", "shape", shape)
    total, known = prod(x.shape), prod(extent for extent in asked if extent != -1)
    found = asked
    if asked.count(-1) == 1 and known > 0:
        found = tuple(total // known if extent == -1 else extent for extent in asked)
    if min(found, default=0) < 0 or prod(found) != total:
        raise ValueError(f"reshape: {total} elements of shape {x.shape} do not fill the shape {asked}")
    return Inferred(Signature(found, x.dtype), {"shape": found})


def _infer_broadcast_to(x: Signature, *, shape: object) -> Inferred:
    target = _integers("broadcast_to", "shape", shape)
    paired = zip(reversed(x.shape), reversed(target), strict=False)
    fits = len(x.shape) <= len(target) and all(old in (1, new) for old, new in paired)
    if not fits or min(target, default=0) < 0:
        raise ValueError(f"broadcast_to: shape {x.shape} does not broadcast to {target}")
    return Inferred(Signature(target, x.dtype), {"shape": target})


def _infer_squeeze(x: Signature, *, axis: object = None) -> Inferred:
    ones = tuple(place for place, extent in enumerate(x.shape) if extent == 1)
    dropped = ones if axis is None else normal_axes("squeeze", axis, len(x.shape))
    if not set(dropped) <= set(ones):
        raise ValueError(f"squeeze: axes {dropped} of shape {x.shape} are not all of extent 1")
    kept = tuple(extent for place, extent in enumerate(x.shape) if place not in dropped)
    return Inferred(Signature(kept, x.dtype), {"axis": dropped})


def _infer_unsqueeze(x: Signature, *, axis: object) -> Inferred:
    place = normal_axis("unsqueeze", axis, len(x.shape) + 1)
    return Inferred(Signature((*x.shape[:place], 1, *x.shape[place:]), x.dtype), {"axis": place})


_UNARY = (("tensor",),)

DEFINITIONS = (
    OperationDefinition("permute", _UNARY, _infer_permute, "view"),
    OperationDefinition("reshape", _UNARY, _infer_reshape, "view"),
    OperationDefinition("broadcast_to", _UNARY, _infer_broadcast_to, "view"),
    OperationDefinition("squeeze", _UNARY, _infer_squeeze, "view"),
    OperationDefinition("unsqueeze", _UNARY, _infer_unsqueeze, "view"),
)
