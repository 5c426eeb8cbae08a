"""The least that a carrier class of a user's own can be."""

from __future__ import annotations

import numpy as np

from strideweave.carriers import Carrier
from strideweave.dtype import DType

__all__ = ["Boxed"]


class Boxed(Carrier):
    """A user's carrier: neither memory nor file, one NumPy scalar a slot, and only the required hooks."""

    def __init__(self, values, *, mutable=True, dtype=DType.Float32):
        values = list(values)
        super().__init__(len(values), dtype=dtype, mutable=mutable)
        self.boxes = [self._convert(value) for value in values]

    def _load_slot(self, i):
        return self.dtype().to_python(self.boxes[i])

    def _store_slot(self, i, value):
        self.boxes[i] = value

    def _free_storage(self):
        self.boxes = []

    def new_like(self, values, *, mutable=True, dtype=None):
        return type(self)(values, mutable=mutable, dtype=self.dtype() if dtype is None else dtype)

    def allocate_like(self, size, *, mutable=True, dtype=None, empty=False):
        np.empty(size)  # refuses what is no size
        if isinstance(size, bool):
            raise TypeError("a bool is no size")
        return type(self)([0] * size, mutable=mutable, dtype=self.dtype() if dtype is None else dtype)
