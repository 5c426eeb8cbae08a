"""The error function against the C library's."""

import math

import numpy as np
import pytest

from strideweave.carriers.numpy_special import CHUNK, erf, gelu


def exact(values):
    return np.array([math.erf(value) for value in values.tolist()])


def test_single_precision_is_within_its_bound():
    x = np.concatenate([np.linspace(-6, 6, 200_001), np.geomspace(1e-30, 1, 2000)]).astype(np.float32)
    found, expected = erf(x), exact(x)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 4e-7
    assert np.abs(found).max() <= 1
    small = np.abs(x) > 0
    assert np.abs(found[small] / expected[small] - 1).max() < 5e-7


def test_double_precision_is_relative():
    x = np.concatenate([np.linspace(-7, 7, 100_001), np.geomspace(1e-300, 1, 2000), [0.46875, 6.0]])
    x = x[x != 0]
    assert np.abs(erf(x) / exact(x) - 1).max() < 5e-16


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(dtype):
    found = erf(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 100], dtype))
    assert found[[0, 1, 2, 3, 5]].tolist() == [0, 0, 1, -1, 1]
    assert np.signbit(found[:2]).tolist() == [False, True]
    assert np.isnan(found[4])


@pytest.mark.parametrize(
    "function", [erf, lambda x: gelu(x, approximate=False), lambda x: gelu(x, approximate=True)]
)
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_chunks_make_no_difference_and_strides_neither(function, size):
    x = np.linspace(-3, 3, 2 * size).astype(np.float32)
    strided = function(x[::2])
    assert strided.flags.c_contiguous
    assert strided.tolist() == function(x)[::2].tolist()
    assert function(np.array(0.5)).shape == ()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_passes_large_values_and_stops_large_negative_ones(dtype):
    found = gelu(np.array([50, -50, np.inf, np.nan], dtype), approximate=False)
    assert found[:3].tolist() == [50, 0, np.inf]
    assert np.isnan(found[3])
