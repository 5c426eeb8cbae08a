"""Tensors larger than memory, served tile by tile from inside an asynchronous program."""

from strideweave.autograd import is_grad_enabled, no_grad, set_grad_enabled
from strideweave.carriers import CPU, Carrier, Generic
from strideweave.creation import arange, asarray, from_numpy, full, ones, zeros
from strideweave.dtype import DType
from strideweave.errors import (
    EvictedError,
    ImmutableError,
    InvalidTileError,
    OwnershipError,
    PendingWorkError,
    ReleasedError,
    StaleGraphError,
    TileConflictError,
)
from strideweave.layout import Layout, Shape, Stride, column_major, row_major
from strideweave.operations.contraction import matmul
from strideweave.operations.elementwise import (
    add,
    div,
    elementwise_mul,
    exp,
    gelu,
    mul,
    neg,
    rsqrt,
    softmax,
    sqrt,
    sub,
    tanh,
)
from strideweave.operations.indexing import gather
from strideweave.operations.reduction import argmax, reduce_max, reduce_mean, reduce_sum
from strideweave.operations.views import broadcast_to, permute, reshape, squeeze, unsqueeze
from strideweave.runtime.await_result import AwaitResult
from strideweave.tensor import Tensor

__all__ = [
    "CPU",
    "AwaitResult",
    "Carrier",
    "DType",
    "EvictedError",
    "Generic",
    "ImmutableError",
    "InvalidTileError",
    "Layout",
    "OwnershipError",
    "PendingWorkError",
    "ReleasedError",
    "Shape",
    "StaleGraphError",
    "Stride",
    "Tensor",
    "TileConflictError",
    "add",
    "arange",
    "argmax",
    "asarray",
    "broadcast_to",
    "column_major",
    "div",
    "elementwise_mul",
    "exp",
    "from_numpy",
    "full",
    "gather",
    "gelu",
    "is_grad_enabled",
    "matmul",
    "mul",
    "neg",
    "no_grad",
    "ones",
    "permute",
    "reduce_max",
    "reduce_mean",
    "reduce_sum",
    "reshape",
    "row_major",
    "rsqrt",
    "set_grad_enabled",
    "softmax",
    "sqrt",
    "squeeze",
    "sub",
    "tanh",
    "unsqueeze",
    "zeros",
]
