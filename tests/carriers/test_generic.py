"""Generic: the reference carrier."""

import numpy as np
import pytest

from strideweave.carriers import Generic
from strideweave.dtype import DType


def test_values_are_copied_from_any_finite_iterable():
    source = [1, 2, 3]
    for values in (source, tuple(source), iter(source), range(1, 4), np.array(source), (n for n in source)):
        assert list(Generic(values)) == [1.0, 2.0, 3.0]
    array = np.ones(2, np.float32)
    carrier = Generic(array)
    array[0] = 5
    assert carrier[0] == 1.0


def test_the_default_dtype_is_float32():
    assert Generic([1]).dtype() is DType.Float32


@pytest.mark.parametrize(
    ("values", "dtype", "error"),
    [
        (5, DType.Float32, TypeError),
        ([1, "2"], DType.Float32, TypeError),
        ([[1]], DType.Float32, TypeError),
        ([256], DType.UInt8, OverflowError),
        ([float("nan")], DType.Int8, ValueError),
    ],
)
def test_values_that_do_not_fit_are_refused(values, dtype, error):
    with pytest.raises(error):
        Generic(values, dtype=dtype)


@pytest.mark.parametrize("dtype", DType.members())
def test_every_dtype_can_be_stored(dtype):
    carrier = Generic([0, 1], dtype=dtype)
    assert list(carrier) == [0, 1]
    assert carrier._bytes().nbytes == 2 * dtype.itemsize


def test_an_empty_carrier_can_be_given_storage_once():
    carrier = Generic([])
    assert carrier._can_allocate()
    carrier._allocate_in_place(2)
    carrier[1] = 3
    assert list(carrier) == [0.0, 3.0]
    assert not carrier._can_allocate()


def test_bytes_are_writable_slots():
    carrier = Generic([1, 2])
    carrier._bytes().view(np.float32)[1] = 9
    assert list(carrier) == [1.0, 9.0]


def test_discard_is_harmless():
    carrier = Generic([1, 2])
    carrier._discard(0, 2)
    assert list(carrier) == [1.0, 2.0]


def test_generic_is_final():
    with pytest.raises(TypeError, match="final"):
        type("Mine", (Generic,), {})
