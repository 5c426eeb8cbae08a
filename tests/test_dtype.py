"""DType: what one slot holds."""

import copy
import pickle
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from strideweave.dtype import DType

MEMBERS = DType.members()
INTEGERS = (DType.Int8, DType.UInt8, DType.Int16, DType.Int32, DType.Int64)
FLOATS = tuple(member for member in MEMBERS if member.is_differentiable)


@pytest.mark.parametrize(
    ("name", "bits", "scalar", "differentiable"),
    [
        ("Bool", 8, np.bool_, False),
        ("Int8", 8, np.int8, False),
        ("UInt8", 8, np.uint8, False),
        ("Int16", 16, np.int16, False),
        ("Int32", 32, np.int32, False),
        ("Int64", 64, np.int64, False),
        ("Float8E4M3FN", 8, ml_dtypes.float8_e4m3fn, True),
        ("Float8E5M2", 8, ml_dtypes.float8_e5m2, True),
        ("Float16", 16, np.float16, True),
        ("BFloat16", 16, ml_dtypes.bfloat16, True),
        ("Float32", 32, np.float32, True),
        ("Float64", 64, np.float64, True),
    ],
)
def test_each_member_says_what_it_is(name, bits, scalar, differentiable):
    member = getattr(DType, name)
    assert (member.name, member.bits, member.itemsize) == (name, bits, bits // 8)
    assert member.numpy == np.dtype(scalar)
    assert member.is_differentiable is differentiable
    assert repr(member) == f"DType.{name}"


def test_there_are_twelve_members_without_duplicates():
    assert len(MEMBERS) == len(set(MEMBERS)) == 12


@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_is_one_object_however_it_is_reached(member):
    assert DType.from_numpy(member.numpy) is member
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.copy(member) is member
    assert copy.deepcopy([member])[0] is member


@pytest.mark.parametrize("asked", ["float32", np.float32, np.dtype("float32")])
def test_from_numpy_takes_what_numpy_takes(asked):
    assert DType.from_numpy(asked) is DType.Float32


@pytest.mark.parametrize("asked", ["complex64", "uint32", "datetime64[s]", "U3", object])
def test_from_numpy_refuses_other_types(asked):
    with pytest.raises(TypeError, match="no DType stands for"):
        DType.from_numpy(asked)


def test_from_numpy_refuses_a_foreign_byte_order_and_says_what_to_do():
    foreign = np.dtype("float32").newbyteorder()
    with pytest.raises(ValueError, match="newbyteorder"):
        DType.from_numpy(foreign)


def test_a_dtype_cannot_be_made_changed_or_subclassed():
    with pytest.raises(TypeError, match="not made"):
        DType()
    with pytest.raises(AttributeError):
        DType.Int8.bits = 4
    with pytest.raises(AttributeError):
        del DType.Int8._name
    with pytest.raises(TypeError, match="final"):
        type("Mine", (DType,), {})


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize(
    "value", [1, True, 1.0, np.float64(1), np.int8(1), np.True_, np.array(1), Fraction(1)]
)
def test_convert_takes_real_numbers_of_any_library(member, value):
    converted = member.convert(value)
    assert (converted.shape, converted.dtype) == ((), member.numpy)
    assert member.to_python(converted) == 1


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize(
    "value", [None, "1", b"1", 1j, np.complex64(1), [1], np.array([1]), np.datetime64(1, "s"), object()]
)
def test_convert_refuses_everything_else(member, value):
    with pytest.raises(TypeError, match="real number"):
        member.convert(value)


@pytest.mark.parametrize("member", INTEGERS)
def test_an_integer_that_does_not_fit_is_an_overflow(member):
    info = np.iinfo(member.numpy)
    assert member.to_python(member.convert(int(info.max))) == info.max
    assert member.to_python(member.convert(int(info.min))) == info.min
    for value in (int(info.max) + 1, int(info.min) - 1, 10**30, np.inf):
        with pytest.raises(OverflowError):
            member.convert(value)
    with pytest.raises(ValueError, match="NaN"):
        member.convert(float("nan"))


def test_a_numpy_integer_is_checked_too_and_does_not_wrap():
    with pytest.raises(OverflowError):
        DType.Int8.convert(np.int64(300))


def test_a_float_becomes_an_integer_by_truncation():
    assert [int(DType.Int8.convert(value)) for value in (1.9, -1.9)] == [1, -1]


@pytest.mark.parametrize("member", FLOATS)
def test_conversion_of_a_float_is_what_numpy_does(member):
    for value in (0.1, -0.0, 1 / 3, float("inf"), float("nan"), 2**-9):
        expected = np.array(value).astype(member.numpy)
        assert member.convert(value).tobytes() == expected.tobytes()


@pytest.mark.parametrize("member", [member for member in FLOATS if member.itemsize == 1])
def test_every_pattern_of_the_small_floats_survives(member):
    patterns = np.arange(256, dtype=np.uint8).view(member.numpy)
    kept = b"".join(member.convert(pattern).tobytes() for pattern in patterns)
    assert kept == bytes(range(256))


@pytest.mark.parametrize(
    ("member", "kind"), [(DType.Bool, bool), (DType.UInt8, int), (DType.BFloat16, float)]
)
def test_to_python_gives_plain_python_scalars(member, kind):
    assert type(member.to_python(np.ones(1, member.numpy)[0])) is kind
