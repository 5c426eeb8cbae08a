"""Making tensors."""

import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, DType, row_major


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (1, DType.Int64),
        (1.5, DType.Float64),
        (True, DType.Bool),
        ([1, 2], DType.Int64),
        ([[1, 2.5], [3, 4]], DType.Float64),
        ([], DType.Float64),
        (np.float32(3), DType.Float32),
        (np.arange(4, dtype=np.int8), DType.Int8),
        (np.ones((2, 2), DType.BFloat16.numpy), DType.BFloat16),
        (range(3), DType.Int64),
    ],
)
def test_asarray_is_numpy_asarray_in_row_major_order(values, dtype):
    tensor = sw.asarray(values)
    expected = np.asarray(values)
    assert (tensor.dtype, tensor.shape, tensor.offset) == (dtype, expected.shape, 0)
    assert tensor.layout == row_major(*expected.shape)
    assert type(tensor.carrier) is CPU
    assert tensor.numpy().tolist() == expected.tolist()


def test_asarray_copies_any_layout_and_byte_order():
    array = np.arange(12, dtype=np.dtype("i4").newbyteorder()).reshape(3, 4)
    tensor = sw.asarray(array.T)
    assert tensor.tolist() == array.T.tolist()
    array[0, 0] = 99
    assert tensor[0] == 0
    assert sw.asarray(np.arange(6)[::-2]).tolist() == [5, 3, 1]


def test_asarray_gives_a_tensor_back_and_converts_another_dtype():
    tensor = sw.asarray([1.5, 2.5])
    assert sw.asarray(tensor) is tensor
    assert sw.asarray(tensor, dtype=DType.Float64) is tensor
    converted = sw.asarray(tensor, dtype=DType.Float32)
    assert (converted.dtype, converted.tolist()) == (DType.Float32, [1.5, 2.5])


def test_asarray_converts_as_numpy_does():
    assert sw.asarray([1.7, -1.7], dtype=DType.Int8).tolist() == [1, -1]
    assert sw.asarray([1, 2], dtype=DType.Float8E5M2).tolist() == [1.0, 2.0]
    with pytest.raises(OverflowError):
        sw.asarray([300], dtype=DType.Int8)


def test_asarray_keeps_every_bit_of_an_array():
    bits = np.array([0x7FC01234, 0x80000000], np.uint32)
    assert sw.asarray(bits.view(np.float32)).numpy().view(np.uint32).tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", [None, DType.Float32])
@pytest.mark.parametrize("values", ["1", ["1"], [None], [1j], object(), np.array([1, None]), b"1", {"a": 1}])
def test_asarray_refuses_what_is_no_number(values, dtype):
    with pytest.raises(TypeError):
        sw.asarray(values, dtype=dtype)


def test_asarray_refuses_ragged_sequences():
    with pytest.raises(ValueError, match="inhomogeneous"):
        sw.asarray([[1], [1, 2]])


def test_from_numpy_shares_memory():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = sw.from_numpy(array)
    array[1, 2] = 50
    tensor[0, 1] = 10
    assert (tensor[1, 2], array[0, 1], tensor.shape) == (50.0, 10.0, (2, 3))
    assert sw.from_numpy(np.array(3.0)).shape == ()
    with pytest.raises(ValueError, match="ascontiguousarray"):
        sw.from_numpy(array.T)
    with pytest.raises(TypeError, match="NumPy array"):
        sw.from_numpy([1, 2])


@pytest.mark.parametrize("shape", [(), 3, (2, 3), [2, 3], (0, 4), (np.int64(2), 1)])
def test_zeros_ones_and_full_have_the_shape_and_value(shape):
    for made, expected in (
        (sw.zeros(shape), np.zeros(shape)),
        (sw.ones(shape), np.ones(shape)),
        (sw.full(shape, 7), np.full(shape, 7)),
        (sw.full(shape, 2.5), np.full(shape, 2.5)),
        (sw.full(shape, True), np.full(shape, True)),
    ):
        assert (made.shape, made.dtype.numpy) == (expected.shape, expected.dtype)
        assert made.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DType.members())
def test_every_dtype_can_be_filled(dtype):
    assert sw.ones((2,), dtype=dtype).tolist() == [1, 1]
    assert sw.zeros((2,), dtype=dtype).dtype is dtype


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: sw.zeros(-1), ValueError),
        (lambda: sw.zeros(2.0), TypeError),
        (lambda: sw.zeros((True,)), TypeError),
        (lambda: sw.zeros(2, dtype=np.float32), TypeError),
        (lambda: sw.full(2, "1"), TypeError),
        (lambda: sw.full(2, None), TypeError),
        (lambda: sw.full(2, 300, dtype=DType.Int8), OverflowError),
        (lambda: sw.full(2, 1, dtype="int8"), TypeError),
        (lambda: sw.arange(5, dtype=int), TypeError),
        (lambda: sw.arange("5"), TypeError),
        (lambda: sw.arange(0, 5, 0), ZeroDivisionError),
        (lambda: sw.arange(127, 129, dtype=DType.Int8), OverflowError),
        (lambda: sw.arange(-1, 3, dtype=DType.UInt8), OverflowError),
    ],
)
def test_bad_arguments_are_refused(make, error):
    with pytest.raises(error):
        make()


@pytest.mark.parametrize(
    "arguments", [(5,), (2, 9), (2, 9, 3), (9, 2, -2), (5, 2), (0, 1, 0.25), (1.5,), (0,)]
)
def test_arange_is_numpy_arange(arguments):
    made, expected = sw.arange(*arguments), np.arange(*arguments)
    assert (made.dtype.numpy, made.tolist()) == (expected.dtype, expected.tolist())


@pytest.mark.parametrize("number", [None, "5", [5], 5j, sw.asarray(5)])
@pytest.mark.parametrize(("name", "others"), [("start", {}), ("start", {"stop": 9}), ("step", {"start": 9})])
def test_arange_names_what_is_no_number(name, others, number):
    with pytest.raises(
        TypeError, match=f"{name} of arange must be a real number, found {type(number).__name__}"
    ):
        sw.arange(**others, **{name: number})


@pytest.mark.parametrize("wrong", [list(range(10**6)), "x" * 10**6])
def test_an_error_about_an_extent_is_short_whatever_it_is(wrong):
    with pytest.raises(
        TypeError, match=f"an extent must be an integer, got .* of type {type(wrong).__name__}"
    ) as caught:
        sw.zeros([wrong])
    assert len(str(caught.value)) < 300


def test_arange_converts_to_a_dtype():
    assert sw.arange(4, dtype=DType.BFloat16).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert sw.arange(126, 128, dtype=DType.Int8).tolist() == [126, 127]


def test_created_tensors_require_gradients_by_their_dtype_and_can_be_written():
    assert sw.zeros(2).requires_grad
    assert not sw.arange(2).requires_grad
    tensor = sw.full(2, 1.0)
    tensor[0] = 5
    assert tensor.tolist() == [5.0, 1.0]
