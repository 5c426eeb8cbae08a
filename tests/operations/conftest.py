"""Fixtures of the operations' tests: every operation is tried on both carriers that compute.

CPU gives NumPy's bits. Generic computes in 64 bits with Python's ``math``, sums exactly and rounds once, so
its floats agree within ``UNITS`` units in the last place of the dtype, relative to the largest number that
was added. Integers and booleans agree exactly.
"""

from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest

from strideweave import CPU, Generic, Tensor, row_major
from strideweave.dtype import DType

# Float64 and Float32 functions of NumPy are themselves off by a few units, and its sums round at every step.
# Narrower floats are rounded from nearly equal numbers, which at worst fall on either side of a midpoint.
UNITS = MappingProxyType(
    {
        DType.Float64: 8,
        DType.Float32: 8,
        DType.Float16: 1,
        DType.BFloat16: 1,
        DType.Float8E4M3FN: 1,
        DType.Float8E5M2: 1,
    }
)


@pytest.fixture(params=[CPU, Generic], ids=lambda kind: kind.__name__)
def make(request):
    """Make a row-major tensor with the values and dtype of an array."""
    return maker(request.param)


@pytest.fixture(scope="session")
def make_on():
    """Give the function that makes tensors on a carrier class."""
    return maker


def maker(kind):
    """Make a function that makes tensors on ``kind``."""

    def make(values, dtype=None, **options):
        array = np.asarray(values) if dtype is None else np.asarray(values).astype(dtype.numpy)
        like = CPU(0) if kind is CPU else Generic([])
        carrier = like.new_like(array.reshape(-1), dtype=DType.from_numpy(array.dtype))
        return Tensor(carrier, 0, row_major(array.shape), **options)

    return make


@pytest.fixture(scope="session")
def agree():
    """Give the check that a tensor holds what an array does: the bits on CPU, the tolerance on Generic."""

    def agree(result, expected, scale=0):
        expected = np.asarray(expected)
        if isinstance(result.carrier, CPU) and not scale:
            assert (result.shape, result.dtype.numpy) == (expected.shape, expected.dtype)
            assert result.numpy().tobytes() == expected.tobytes()
        else:
            is_near(result, expected, scale)

    return agree


@pytest.fixture(scope="session")
def near():
    """Give the check that a tensor holds what an array does, within the tolerance of its dtype."""
    return is_near


def is_near(result, expected, scale=0):
    """Compare within the tolerance; ``scale`` is the magnitude of the largest number that was added."""
    expected = np.asarray(expected)
    assert (result.shape, result.dtype.numpy) == (expected.shape, expected.dtype)
    if result.dtype not in UNITS:
        assert result.tolist() == expected.tolist()
        return
    about = ml_dtypes.finfo(expected.dtype)
    found, wanted = result.numpy().astype(np.float64), expected.astype(np.float64)
    assert np.isnan(found).tolist() == np.isnan(wanted).tolist()
    finite = np.isfinite(wanted)
    assert found[np.isinf(wanted)].tolist() == wanted[np.isinf(wanted)].tolist()
    allowed = UNITS[result.dtype] * np.maximum(
        np.maximum(np.abs(wanted[finite]), scale) * float(about.eps), float(about.smallest_subnormal)
    )
    apart = np.abs(found[finite] - wanted[finite])
    assert (apart <= allowed).all(), f"{(apart / allowed).max():.3g} times what is allowed"


@pytest.fixture
def rng():
    return np.random.default_rng(20)
