"""The contract of carriers, run against every carrier that is shipped and against one of a user's own."""

from __future__ import annotations

import numpy as np
import pytest

from boxed import Boxed
from strideweave import CPU, DType, Evictable, FileBacked, Generic, TiledEvictable
from strideweave.carriers.move import ElementwiseMoveOperation, registered_move_operation
from strideweave.testing import CarrierContract


def on_cpu(values, *, mutable=True):
    return CPU(0, dtype=DType.from_numpy(values.dtype)).new_like(values, mutable=mutable)


def on_generic(values, *, mutable=True):
    return Generic(values, mutable=mutable, dtype=DType.from_numpy(values.dtype))


def in_file(values, *, mutable=True):
    return FileBacked(dtype=DType.from_numpy(values.dtype)).new_like(values, mutable=mutable)


class TestGeneric(CarrierContract):
    @pytest.fixture
    def make_carrier(self):
        return on_generic


class TestCPU(CarrierContract):
    @pytest.fixture
    def make_carrier(self):
        return on_cpu


class TestCPUOverAnArray(CarrierContract):
    @pytest.fixture
    def make_carrier(self):
        return lambda values, mutable=True: CPU.from_numpy(values.copy(), mutable=mutable)


class TestFileBacked(CarrierContract):
    @pytest.fixture
    def make_carrier(self):
        return in_file


class TestFileBackedOverAFile(CarrierContract):
    owner_writes = False  # mutable=False opens the file for reading

    @pytest.fixture
    def make_carrier(self, tmp_path):
        def make(values, *, mutable=True):
            path = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
            path.write_bytes(bytes(3) + values.tobytes())
            return FileBacked.open(path, dtype=DType.from_numpy(values.dtype), offset=3, mutable=mutable)

        return make


class EvictableContract(CarrierContract):
    can_be_empty = False  # the specification asks for at least one element


def evictable(make_primary, make_secondary):
    def make(values, *, mutable=True):
        primary = make_primary(values, mutable=mutable)
        return Evictable(primary, make_secondary(primary.dtype()))

    return make


class TestEvictable(EvictableContract):
    @pytest.fixture
    def make_carrier(self):
        return evictable(on_cpu, lambda dtype: FileBacked(dtype=dtype))


class TestEvictableOfGeneric(EvictableContract):
    @pytest.fixture
    def make_carrier(self):
        return evictable(on_generic, lambda dtype: CPU(300, dtype=dtype))


class TestEvictableOverAFile(EvictableContract):
    @pytest.fixture
    def make_carrier(self):
        return evictable(in_file, lambda dtype: CPU(0, dtype=dtype))


class TestEvictableInsideAnother(EvictableContract):
    @pytest.fixture
    def make_carrier(self):
        inner = evictable(on_cpu, lambda dtype: Generic([], dtype=dtype))
        return evictable(inner, lambda dtype: FileBacked(dtype=dtype))


class TestEvictableOntoAnother(EvictableContract):
    @pytest.fixture
    def make_carrier(self):
        return evictable(on_cpu, lambda dtype: Evictable(CPU(1, dtype=dtype), FileBacked(dtype=dtype)))


class TestEvictableAfterARoundTrip(EvictableContract):
    """What eviction and promotion must not change."""

    @pytest.fixture
    def make_carrier(self):
        fresh = evictable(on_cpu, lambda dtype: FileBacked(dtype=dtype))

        def make(values, *, mutable=True):
            carrier = fresh(values, mutable=mutable)
            carrier.evict()
            carrier.promote()
            return carrier

        return make


class TiledContract(CarrierContract):
    can_be_empty = any_size = False  # one geometry


class TestTiledEvictable(TiledContract):
    @pytest.fixture
    def make_carrier(self):
        def make(values, *, mutable=True):
            primary = on_cpu(values, mutable=mutable)
            secondary = FileBacked(dtype=primary.dtype())
            return TiledEvictable(primary, secondary, (len(values),), (1,))

        return make


class TestTiledEvictableOfOneTile(TiledContract):
    @pytest.fixture
    def make_carrier(self):
        def make(values, *, mutable=True):
            primary = on_generic(values, mutable=mutable)
            return TiledEvictable(primary, CPU(0, dtype=primary.dtype()), (1,), (len(values),))

        return make


class TestAUsersOwn(CarrierContract):
    keeps_bits = False  # slots pass as Python numbers

    @pytest.fixture
    def make_carrier(self):
        with (
            registered_move_operation(Boxed, CPU, ElementwiseMoveOperation),
            registered_move_operation(CPU, Boxed, ElementwiseMoveOperation),
        ):
            yield lambda values, mutable=True: Boxed(
                values, mutable=mutable, dtype=DType.from_numpy(values.dtype)
            )


class TestAnEvictableOfAUsersOwn(EvictableContract):
    keeps_bits = False

    @pytest.fixture
    def make_carrier(self):
        def make(values, *, mutable=True):
            dtype = DType.from_numpy(values.dtype)
            return Evictable(Boxed(values, mutable=mutable, dtype=dtype), CPU(0, dtype=dtype))

        with (
            registered_move_operation(Boxed, CPU, ElementwiseMoveOperation),
            registered_move_operation(CPU, Boxed, ElementwiseMoveOperation),
        ):
            yield make


def test_a_hierarchy_and_its_tiers_end_with_one_statement():
    with (
        FileBacked().new_like([1.0, 2.0, 3.0, 4.0]) as slow,
        TiledEvictable(CPU(0), slow, (2,), (2,)) as carrier,
    ):
        carrier[0] = 5
        assert slow.is_owned()
    assert carrier.is_released()
    assert slow.is_released()


def test_the_contract_finds_a_carrier_that_breaks_it():
    """A suite that cannot fail proves nothing."""

    class Forgetful(Boxed):
        def _store_slot(self, i, value):
            """Loses every write."""

    carrier = Forgetful(np.arange(1, 5, dtype=np.float32), dtype=DType.Float32)
    with pytest.raises(AssertionError):
        CarrierContract().test_a_write_advances_the_version_by_one(carrier)
