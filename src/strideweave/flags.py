"""True or False, as a caller writes them."""

from __future__ import annotations

import numpy as np

__all__ = ["as_flag", "as_optional_flag"]


def as_flag(value: object, name: str) -> bool:
    """Return ``value`` as a plain ``bool``.

    Anything else is refused, also what Python would take for true or false: ``durable="no"`` would be true.

    Args:
        value: a bool, or NumPy's.
        name: what the message calls it, such as ``"durable"``.

    Raises:
        TypeError: it is neither.
    """
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be a bool, found {value!r} of type {type(value).__name__}")


def as_optional_flag(value: object, name: str) -> bool | None:
    """Return ``value`` as ``as_flag`` does, or None where it is None: nobody has decided.

    Raises:
        TypeError: it is something else.
    """
    if value is None:
        return None
    try:
        return as_flag(value, name)
    except TypeError:
        raise TypeError(
            f"{name} must be a bool or None, found {value!r} of type {type(value).__name__}"
        ) from None
