"""The contract of carriers, run against Metal by itself and as a tier."""

import pytest

from strideweave import DType, Evictable, FileBacked, Metal
from strideweave.testing import CarrierContract

pytest.importorskip("mlx.core", reason="the extra strideweave[metal] is not installed")


def on_metal(values, *, mutable=True):
    return Metal(0, dtype=DType.from_numpy(values.dtype)).new_like(values, mutable=mutable)


class TestMetal(CarrierContract):
    @pytest.fixture
    def make_carrier(self):
        return on_metal


class TestEvictableOverMetal(CarrierContract):
    can_be_empty = False

    @pytest.fixture
    def make_carrier(self):
        def make(values, *, mutable=True):
            primary = on_metal(values, mutable=mutable)
            return Evictable(primary, FileBacked(dtype=primary.dtype()))

        return make
