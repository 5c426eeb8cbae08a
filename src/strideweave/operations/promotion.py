"""Dtype rules: promotion as NumPy does it, with the rules of ml_dtypes for the small floats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strideweave.dtype import DType
from strideweave.operations.definition import Signature

if TYPE_CHECKING:
    from strideweave.operations.definition import Scalar

__all__ = ["as_float", "promote", "summed"]


def promote(*operands: Signature | Scalar) -> DType:
    """Give the common dtype, as ``numpy.result_type`` does for arrays and (weak) Python scalars."""
    return DType.from_numpy(
        np.result_type(*(item.dtype.numpy if isinstance(item, Signature) else item for item in operands))
    )


def as_float(dtype: DType) -> DType:
    """Give the result dtype of NumPy's floating functions: floats stay, narrow integers stay narrow."""
    if dtype.is_differentiable:
        return dtype
    if dtype in (DType.Bool, DType.Int8, DType.UInt8):
        return DType.Float16
    return DType.Float32 if dtype is DType.Int16 else DType.Float64


def summed(dtype: DType) -> DType:
    """Give the dtype of a sum: floats stay, everything else becomes Int64."""
    return dtype if dtype.is_differentiable else DType.Int64
