"""The contract of carriers, run against Metal and against composites whose primary tier it is."""

import pytest

from strideweave import DType, Evictable, FileBacked, Metal, TiledEvictable
from strideweave.testing import CarrierContract

pytest.importorskip("mlx.core", reason="the extra strideweave[metal] is not installed")


def on_metal(values, *, mutable=True):
    return Metal(0, dtype=DType.from_numpy(values.dtype)).new_like(values, mutable=mutable)


class TestMetal(CarrierContract):
    @pytest.fixture
    def make_carrier(self):
        return on_metal


class TestEvictableOfMetal(CarrierContract):
    can_be_empty = False  # the specification asks for at least one element

    @pytest.fixture
    def make_carrier(self):
        def make(values, *, mutable=True):
            primary = on_metal(values, mutable=mutable)
            return Evictable(primary, FileBacked(dtype=primary.dtype()))

        return make


class TestEvictableOntoMetal(CarrierContract):
    can_be_empty = False

    @pytest.fixture
    def make_carrier(self):
        def make(values, *, mutable=True):
            primary = on_metal(values, mutable=mutable)
            carrier = Evictable(primary, Metal(0, dtype=primary.dtype()))
            carrier.evict()
            carrier.promote()
            return carrier

        return make


class TestTiledEvictableOfMetal(CarrierContract):
    can_be_empty = any_size = False  # one geometry

    @pytest.fixture
    def make_carrier(self):
        def make(values, *, mutable=True):
            primary = on_metal(values, mutable=mutable)
            return TiledEvictable(primary, FileBacked(dtype=primary.dtype()), (len(values),), (1,))

        return make
