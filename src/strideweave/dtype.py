"""What one slot holds: the twelve element types, as singletons.

A ``DType`` names an element type, says how wide it is, which NumPy type carries it and whether a gradient can
flow through it. The three formats that NumPy lacks (bfloat16 and the two 8-bit floats) come from
``ml_dtypes``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, final

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

__all__ = ["DType", "as_numbers", "check_dtype"]


@final
class DType:
    """An element type. Compare with ``is``: there is exactly one object per type.

    The members are class attributes: ``DType.Bool``, ``Int8``, ``UInt8``, ``Int16``, ``Int32``, ``Int64``,
    ``Float16``, ``BFloat16``, ``Float32``, ``Float64``, ``Float8E4M3FN`` and ``Float8E5M2``. Instances
    cannot be made, changed or subclassed; a copied or unpickled DType is the same object.

    Source: the OCP 8-bit floating point formats for the two Float8 types, IEEE 754 for the others.
    """

    __slots__ = ("_is_differentiable", "_name", "_numpy")

    _name: str
    _numpy: np.dtype[Any]
    _is_differentiable: bool

    Bool: ClassVar[DType]
    Int8: ClassVar[DType]
    UInt8: ClassVar[DType]
    Int16: ClassVar[DType]
    Int32: ClassVar[DType]
    Int64: ClassVar[DType]
    Float16: ClassVar[DType]
    BFloat16: ClassVar[DType]
    Float32: ClassVar[DType]
    Float64: ClassVar[DType]
    Float8E4M3FN: ClassVar[DType]
    Float8E5M2: ClassVar[DType]

    def __init__(self) -> None:
        raise TypeError(
            "DType objects are not made; use a member such as DType.Float32 or DType.from_numpy(dtype)"
        )

    def __init_subclass__(cls) -> None:
        raise TypeError("DType is final and cannot be subclassed")

    @property
    def name(self) -> str:
        """The member's name, such as ``"Float32"``."""
        return self._name

    @property
    def bits(self) -> int:
        """Width of one element in bits; Bool occupies 8."""
        return self._numpy.itemsize * 8

    @property
    def itemsize(self) -> int:
        """Width of one element in bytes."""
        return self._numpy.itemsize

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype (native byte order) that carries this type."""
        return self._numpy

    @property
    def is_differentiable(self) -> bool:
        """Whether this is a floating type, so that a gradient may flow through it."""
        return self._is_differentiable

    @classmethod
    def members(cls) -> tuple[DType, ...]:
        """All twelve types, integers before floats, narrow before wide."""
        return tuple(getattr(cls, name) for name in _TABLE)

    @classmethod
    def from_numpy(cls, dtype: DTypeLike) -> DType:
        """Give the DType that a NumPy dtype, or anything ``numpy.dtype`` accepts, stands for.

        Raises:
            ValueError: the dtype has a foreign byte order.
            TypeError: no DType stands for it.
        """
        asked = np.dtype(dtype)
        if not asked.isnative:
            raise ValueError(
                f"dtype {asked!r} has a foreign byte order; "
                "convert with array.astype(array.dtype.newbyteorder('='))"
            )
        member = _BY_NUMPY.get(asked)
        if member is None:
            raise TypeError(f"no DType stands for NumPy dtype {asked!r}; supported are {', '.join(_TABLE)}")
        return member

    def convert(self, value: object) -> NDArray[Any]:
        """Convert one number to this type, by NumPy's rules, as a fresh array of shape ``()``.

        A NumPy scalar or zero-dimensional array of the same type keeps every bit, NaN payloads included.
        Floats become integers by truncation; a float too large for a narrower float becomes infinite
        (Float8E4M3FN: NaN).

        Raises:
            TypeError: ``value`` is not a real number.
            OverflowError: an integer does not fit.
            ValueError: NaN was asked to become an integer.
        """
        if isinstance(value, np.generic | np.ndarray):
            array = np.asarray(value)
            if array.ndim == 0 and array.dtype == self._numpy:
                return array.copy()
        converted = np.empty((), self._numpy)
        converted[()] = _python_number(value)
        return converted

    def to_python(self, value: Any) -> bool | int | float:
        """Give the Python scalar for one stored element: bool, int or float by the kind of this type."""
        if self._is_differentiable:
            return float(value)
        return bool(value) if self is DType.Bool else int(value)

    def __repr__(self) -> str:
        return f"DType.{self._name}"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"DType objects cannot be changed (attribute {name!r})")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"DType objects cannot be changed (attribute {name!r})")

    def __reduce__(self) -> tuple[Any, ...]:
        return _member, (self._name,)

    def __copy__(self) -> DType:
        return self

    def __deepcopy__(self, memo: object) -> DType:
        return self


def check_dtype(dtype: object) -> DType:
    """Check that an argument is a DType, and give it back.

    Raises:
        TypeError: it is something else, such as a NumPy dtype.
    """
    if not isinstance(dtype, DType):
        raise TypeError(
            f"dtype must be a DType, found {type(dtype).__name__}; DType.from_numpy(dtype) makes one"
        )
    return dtype


def as_numbers(values: ArrayLike, dtype: DType | None) -> tuple[NDArray[Any], DType]:
    """The array that numbers are, and the type that its elements are to have; they are converted by whoever copies it.

    Args:
        values: anything that NumPy makes an array of, in any byte order.
        dtype: the type that is asked for; None is that of the array.

    Raises:
        TypeError: the values are no real numbers, no DType stands for their type and none is asked for, or ``dtype``
            is no DType.
        ValueError: nested sequences are ragged.
        OverflowError: a Python integer does not fit.
    """
    chosen = None if dtype is None else check_dtype(dtype)
    found = np.asarray(values)
    native = found.dtype if found.dtype.isnative else found.dtype.newbyteorder("=")
    if chosen is None or not _is_real(native):  # NumPy would convert texts, dates and complex numbers, too
        source = DType.from_numpy(native)
        chosen = chosen or source
    if chosen._numpy == native or _is_array(values):
        return found, chosen
    # Python numbers are converted from the originals, so that NumPy can see which do not fit.
    return np.asarray(values, chosen._numpy), chosen


def _is_real(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is of real numbers, those of ``ml_dtypes`` among them, and of any width."""
    if dtype.kind in "biuf":
        return True
    return dtype.type.__module__ == "ml_dtypes" and "complex" not in dtype.name


def _is_array(values: object) -> bool:
    """Whether NumPy has made an array of something that is one already, and not of Python's numbers."""
    if any(hasattr(values, name) for name in ("__array__", "__array_interface__", "__array_struct__")):
        return True
    try:
        memoryview(values).release()  # type: ignore[arg-type]  # what is no buffer says so
    except TypeError:
        return False
    return True


def _python_number(value: object) -> bool | int | float:
    """Reduce a real number of any library to a Python scalar; strings and complex numbers are refused."""
    if isinstance(value, bool | int | float) and not isinstance(value, np.generic):
        return value
    if isinstance(value, np.generic | np.ndarray):
        array = np.asarray(value)
        if array.ndim == 0 and array.dtype.kind not in "cSUOMm":
            found: Any = array.item()
            if isinstance(found, bool | int | float):
                return found
    elif hasattr(type(value), "__index__"):
        return operator.index(value)  # type: ignore[arg-type]
    elif hasattr(type(value), "__float__"):
        return float(value)  # type: ignore[arg-type]
    raise TypeError(f"a real number is needed, found {type(value).__name__}: {value!r}")


_TABLE: Mapping[str, Any] = MappingProxyType(
    {
        "Bool": np.bool_,
        "Int8": np.int8,
        "UInt8": np.uint8,
        "Int16": np.int16,
        "Int32": np.int32,
        "Int64": np.int64,
        "Float8E4M3FN": ml_dtypes.float8_e4m3fn,
        "Float8E5M2": ml_dtypes.float8_e5m2,
        "Float16": np.float16,
        "BFloat16": ml_dtypes.bfloat16,
        "Float32": np.float32,
        "Float64": np.float64,
    }
)


def _member(name: str) -> DType:
    """Find a member by name; what pickle calls."""
    member: DType = getattr(DType, name)
    return member


def _install() -> None:
    """Make the members, past the constructor and the write protection that keep everybody else out."""
    for name, scalar in _TABLE.items():
        member = object.__new__(DType)
        object.__setattr__(member, "_name", name)
        object.__setattr__(member, "_numpy", np.dtype(scalar))
        object.__setattr__(member, "_is_differentiable", name.startswith(("Float", "BFloat")))
        setattr(DType, name, member)


_install()

_BY_NUMPY: Mapping[np.dtype[Any], DType] = MappingProxyType(
    {member.numpy: member for member in DType.members()}
)
