"""NumPy arrays over the slots of a layout: a view where NumPy can express it, a copy otherwise.

One NumPy axis has one stride. A mode with several digits therefore has no view of its own shape, but it does
have one with an axis per digit, and merging those axes is a single copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strideweave.layout import Layout

__all__ = ["gathered", "scattered", "strided_view"]


def strided_view(slots: NDArray[Any], layout: Layout, offset: int) -> NDArray[Any] | None:
    """View the slots of a layout in a contiguous 1-D array, shaped ``layout.extents``.

    None where a mode has more than one digit, because one NumPy axis has one stride. The buffer check of
    ``numpy.ndarray`` guards both ends, negative strides included.
    """
    if layout.size == 0:
        return slots[:0].reshape(layout.extents)
    digits = layout.digits()
    if any(len(mode) > 1 for mode in digits):
        return None
    width = slots.dtype.itemsize
    strides = tuple(mode[0][1] * width if mode else 0 for mode in digits)
    return np.ndarray(layout.extents, slots.dtype, slots, offset * width, strides)


def gathered(slots: NDArray[Any], layout: Layout, offset: int) -> NDArray[Any]:
    """Copy the slots of any layout in a contiguous 1-D array to a C array, shaped ``layout.extents``."""
    if layout.size == 0:
        return np.empty(layout.extents, slots.dtype)
    return np.array(_digit_view(slots, layout, offset), order="C").reshape(layout.extents)


def scattered(slots: NDArray[Any], layout: Layout, offset: int, values: NDArray[Any]) -> None:
    """Write an array, shaped ``layout.extents``, to the slots of an injective layout in a 1-D array.

    NumPy copies first where the two share memory.
    """
    if layout.size:
        view = _digit_view(slots, layout, offset)
        view[...] = values.reshape(view.shape)


def _digit_view(slots: NDArray[Any], layout: Layout, offset: int) -> NDArray[Any]:
    """View the slots of a layout with one axis per digit, the slowest digit of a mode first.

    Then C-order merging of a mode's axes makes the fastest digit run fastest, as the layout has it.
    """
    leaves = [digit for mode in layout.digits() for digit in reversed(mode)]
    width = slots.dtype.itemsize
    extents, strides = tuple(leaf[0] for leaf in leaves), tuple(leaf[1] * width for leaf in leaves)
    return np.ndarray(extents, slots.dtype, slots, offset * width, strides)
