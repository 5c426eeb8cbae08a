"""The contract of carriers, run against BlockDeviceCarrier: on every engine, past the page cache and through it."""

from __future__ import annotations

import pytest

from strideweave import CPU, BlockDevice, DType, Evictable, TiledEvictable
from strideweave.testing import CarrierContract

MIB = 1 << 20


def on_device(device, values, mutable=True):
    return device.allocate(0, dtype=DType.from_numpy(values.dtype)).new_like(values, mutable=mutable)


@pytest.mark.usefixtures("every_engine")
class TestOnEveryEngine(CarrierContract):
    @pytest.fixture
    def make_carrier(self, roomy_device):
        return lambda values, mutable=True: on_device(roomy_device, values, mutable)


class TestThroughThePageCache(CarrierContract):
    @pytest.fixture
    def make_carrier(self, disk_path, end_device):
        device = BlockDevice(disk_path / "disk.bin", size=MIB, direct=False)
        yield lambda values, mutable=True: on_device(device, values, mutable)
        end_device(device)


class TestOnALoopDevice(CarrierContract):
    @pytest.fixture
    def make_carrier(self, loop_device, end_device):
        device = BlockDevice(loop_device)
        yield lambda values, mutable=True: on_device(device, values, mutable)
        end_device(device)


class TestUnderAnEvictable(CarrierContract):
    can_be_empty = False

    @pytest.fixture
    def make_carrier(self, roomy_device):
        def make(values, *, mutable=True):
            primary = CPU(0, dtype=DType.from_numpy(values.dtype)).new_like(values, mutable=mutable)
            carrier = Evictable(primary, roomy_device.allocate(0, dtype=primary.dtype()))
            carrier.evict()
            carrier.promote()
            return carrier

        return make


class TestUnderATiledEvictable(CarrierContract):
    can_be_empty = any_size = moves = False

    @pytest.fixture
    def make_carrier(self, roomy_device):
        def make(values, *, mutable=True):
            primary = CPU(0, dtype=DType.from_numpy(values.dtype)).new_like(values, mutable=mutable)
            secondary = roomy_device.allocate(0, dtype=primary.dtype())
            return TiledEvictable(primary, secondary, (len(values),), (1,))

        return make
