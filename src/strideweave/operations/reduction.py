"""Operations that run along axes: sums, means, extremes and where they are, and running sums."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING

from strideweave.dtype import DType
from strideweave.flags import as_flag
from strideweave.operations.definition import Inferred, OperationDefinition, Signature, apply
from strideweave.operations.promotion import summed
from strideweave.operations.rules import UNARY
from strideweave.operations.shapes import normal_axes, normal_axis

if TYPE_CHECKING:
    from strideweave.tensor import Tensor

__all__ = [
    "DEFINITIONS",
    "argmax",
    "argmin",
    "cumsum",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
]


def reduce_sum(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Sum over axes, accumulated as ``numpy.sum`` does.

    Args:
        x: a Tensor. Integers and booleans sum to Int64; floats keep their dtype, and those below 32 bits are
            accumulated in Float32.
        axis: one axis, a tuple of axes, or None for all; negative axes count from the end.
        keepdims: keep the collapsed axes with extent 1.

    Raises:
        TypeError: ``x`` is no Tensor, ``axis`` no integer, or ``keepdims`` no bool.
        ValueError: there is no such axis, or one is named twice.
        ReleasedError: the carrier was released.
    """
    return apply("reduce_sum", x, axis=axis, keepdims=keepdims)


def reduce_mean(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Average over axes; as ``reduce_sum``, but integers and booleans give Float64.

    Where there is nothing to average the result is NaN; CPU adds NumPy's RuntimeWarning.
    """
    return apply("reduce_mean", x, axis=axis, keepdims=keepdims)


def reduce_max(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Largest element over axes, in the dtype of ``x``; a NaN wins. Arguments as for ``reduce_sum``.

    Raises:
        ValueError: also where there is nothing to compare.
    """
    return apply("reduce_max", x, axis=axis, keepdims=keepdims)


def reduce_min(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Smallest element over axes; everything else as for ``reduce_max``."""
    return apply("reduce_min", x, axis=axis, keepdims=keepdims)


def argmax(x: Tensor, axis: int | None = None) -> Tensor:
    """Index of the first largest element along an axis, or in C order over all of them, as Int64.

    Args:
        x: a Tensor; a NaN counts as largest.
        axis: the axis to search, which the result lacks; None searches the flattened tensor.

    Raises:
        TypeError: ``x`` is no Tensor, or ``axis`` no integer.
        ValueError: there is no such axis, or nothing to compare.
    """
    return apply("argmax", x, axis=axis)


def argmin(x: Tensor, axis: int | None = None) -> Tensor:
    """Index of the first smallest element; a NaN counts as smallest, the rest is as for ``argmax``."""
    return apply("argmin", x, axis=axis)


def cumsum(x: Tensor, axis: int | None = None) -> Tensor:
    """Running sum along an axis, or in C order over all elements, as ``numpy.cumsum`` adds.

    Args:
        x: a Tensor. Integers and booleans sum to Int64; floats keep their dtype, and those below 32 bits are
            accumulated in Float32 and rounded once each.
        axis: the axis to sum along, counted from the end when negative; None flattens the tensor.

    Returns:
        A Tensor of the shape of ``x``, or of one axis when ``axis`` is None.

    Raises:
        TypeError: ``x`` is no Tensor, or ``axis`` no integer.
        ValueError: there is no such axis.
        ReleasedError: the carrier was released.
    """
    return apply("cumsum", x, axis=axis)


def _collapsed(
    name: str, x: Signature, dtype: DType, axis: object, keepdims: object, *, needs_elements: bool
) -> Inferred:
    keepdims = as_flag(keepdims, f"{name}: keepdims")
    axes = normal_axes(name, axis, len(x.shape))
    shape = tuple(
        1 if place in axes else extent
        for place, extent in enumerate(x.shape)
        if keepdims or place not in axes
    )
    if needs_elements and 0 in x.shape and 0 not in shape:
        raise ValueError(f"{name}: axes {axes} of shape {x.shape} hold no elements")
    return Inferred(Signature(shape, dtype), {"axis": axes, "keepdims": keepdims})


def _infer_sum(x: Signature, *, axis: object = None, keepdims: object = False) -> Inferred:
    return _collapsed("reduce_sum", x, summed(x.dtype), axis, keepdims, needs_elements=False)


def _infer_mean(x: Signature, *, axis: object = None, keepdims: object = False) -> Inferred:
    dtype = x.dtype if x.dtype.is_differentiable else DType.Float64
    return _collapsed("reduce_mean", x, dtype, axis, keepdims, needs_elements=False)


def _infer_extreme(name: str, x: Signature, *, axis: object = None, keepdims: object = False) -> Inferred:
    return _collapsed(name, x, x.dtype, axis, keepdims, needs_elements=True)


def _infer_place(name: str, x: Signature, *, axis: object = None) -> Inferred:
    place = None if axis is None else normal_axis(name, axis, len(x.shape))
    whole = _collapsed(name, x, DType.Int64, place, False, needs_elements=True)
    return Inferred(whole.result, {"axis": place})


def _infer_cumsum(x: Signature, *, axis: object = None) -> Inferred:
    place = None if axis is None else normal_axis("cumsum", axis, len(x.shape))
    shape = (prod(x.shape),) if place is None else x.shape
    return Inferred(Signature(shape, summed(x.dtype)), {"axis": place})


DEFINITIONS = (
    OperationDefinition("reduce_sum", UNARY, _infer_sum),
    OperationDefinition("reduce_mean", UNARY, _infer_mean),
    OperationDefinition("reduce_max", UNARY, partial(_infer_extreme, "reduce_max")),
    OperationDefinition("reduce_min", UNARY, partial(_infer_extreme, "reduce_min")),
    OperationDefinition("argmax", UNARY, partial(_infer_place, "argmax")),
    OperationDefinition("argmin", UNARY, partial(_infer_place, "argmin")),
    OperationDefinition("cumsum", UNARY, _infer_cumsum),
)
