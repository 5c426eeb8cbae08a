"""Checks of plain arguments that tensors, operations and carriers share."""

from __future__ import annotations

import operator

import numpy as np

__all__ = ["as_integer"]


def as_integer(value: object, what: str) -> int:
    """Give ``value`` as an int where it is an integer of any library, but not a bool.

    Args:
        value: what the caller passed.
        what: its name in the error message, such as ``"a slot index"``.

    Raises:
        TypeError: ``value`` is a bool or no integer.
    """
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"{what} must be an integer, found {type(value).__name__}: {value!r}")
