"""Fixtures of the operations' tests: every operation is tried on both carriers that compute."""

import numpy as np
import pytest

from strideweave import CPU, Generic, Tensor, row_major
from strideweave.dtype import DType


@pytest.fixture(params=[CPU, Generic], ids=lambda kind: kind.__name__)
def make(request):
    """Make a row-major tensor with the values and dtype of an array."""

    def make(values, dtype=None, **options):
        array = np.asarray(values) if dtype is None else np.asarray(values).astype(dtype.numpy)
        like = CPU(0) if request.param is CPU else Generic([])
        carrier = like.new_like(array.reshape(-1), dtype=DType.from_numpy(array.dtype))
        return Tensor(carrier, 0, row_major(array.shape), **options)

    return make


@pytest.fixture
def rng():
    return np.random.default_rng(20)
