"""What a BlockDevice gives: extents, zeros, slots; and its carriers."""

from __future__ import annotations

import errno
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from strideweave import BlockDevice, BlockDeviceCarrier, DType
from strideweave.errors import ImmutableError, OwnershipError, ReleasedError
from strideweave.io.devices import HeldDevice
from strideweave.testing import bit_patterns, values_of

MIB = 1 << 20


# Allocation


def test_extents_are_aligned_disjoint_and_lowest_first(device):
    sizes = [1, 1023, 1025, 4096, 5000]
    carriers = [device.allocate(size) for size in sizes]
    places = [(carrier.statistics().offset, carrier.statistics().occupied_bytes) for carrier in carriers]
    assert places == [(0, 4096), (4096, 4096), (8192, 8192), (16384, 16384), (32768, 20480)]
    record = device.statistics()
    assert (record.extents, record.free_bytes) == (5, 16 * MIB - 53248)
    carriers[2].release()
    assert device.allocate(3000).statistics().offset == 53248  # too long for the gap
    assert device.allocate(2048).statistics().offset == 8192
    for carrier in carriers:
        carrier.release()


@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
def test_neighbours_of_odd_sizes_keep_every_bit_of_every_dtype(device, dtype):
    values = [bit_patterns(dtype, count, seed=count) for count in (8, 1001, 4096, 33_333)]
    empty = device.allocate(0, dtype=dtype)
    carriers = [empty.new_like(part) for part in values]
    for carrier, part in zip(carriers, values, strict=True):
        assert values_of(carrier).tobytes() == part.tobytes()
        assert carrier.dtype() is dtype
        assert repr(carrier[7]) == repr(dtype.to_python(part[7]))
    carriers[1][1000] = values[0][3]
    assert values_of(carriers[1])[1000:].tobytes() == values[0][3:4].tobytes()
    assert values_of(carriers[2]).tobytes() == values[2].tobytes()
    for carrier in carriers:
        carrier.release()


def test_slots_read_zero_unless_made_empty_whatever_lay_there(device):
    ones = device.allocate(0, dtype=DType.UInt8).new_like(np.full(MIB, 255, np.uint8))
    offset = ones.statistics().offset
    ones.release()
    zeros = device.allocate(MIB - 5, dtype=DType.UInt8)
    assert zeros.statistics().offset == offset
    assert not values_of(zeros).any()
    zeros.release()


@pytest.mark.parametrize("kind", ["file", "loop"])
def test_zeros_are_written_where_the_system_does_not_make_them(request, disk, monkeypatch, kind):
    monkeypatch.setattr(HeldDevice, "_tell", lambda *_: False)
    monkeypatch.setattr("strideweave.io.descriptors._FALLOCATE", None)
    monkeypatch.setattr("strideweave.io.devices._ZERO_BYTES", 3 * MIB)
    disk.write_bytes(b"\xff" * (8 * MIB))
    device = BlockDevice(disk if kind == "file" else request.getfixturevalue("loop_device"))
    dirty = device.allocate(0, dtype=DType.UInt8).new_like(np.full(5 * MIB, 255, np.uint8))
    dirty.release()
    zeros = device.allocate(4 * MIB + 10, dtype=DType.UInt8)
    assert not values_of(zeros).any()
    beyond = device.allocate(8, dtype=DType.UInt8, empty=True)
    assert beyond[0] == 255  # the block behind it was left alone
    zeros.release()
    beyond.release()
    device.close()


def test_zeros_that_cannot_be_written_leave_no_extent(small_device, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(HeldDevice, "_write_zeroes", refuse)
    monkeypatch.setattr("strideweave.io.descriptors._FALLOCATE", None)
    with pytest.raises(OSError, match="4096 bytes at offset 0 were to be zeroed") as caught:
        small_device.allocate(8)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, small_device.path)
    assert small_device.statistics().extents == 0
    small_device.allocate(8, empty=True).release()


def test_a_full_device_says_what_it_has_and_is_as_it_was(device):
    quarter = device.capacity // 4
    carriers = [device.allocate(quarter, dtype=DType.UInt8) for _ in range(4)]
    before = device.statistics()
    with pytest.raises(MemoryError, match=r"4096 bytes .* largest free one has 0"):
        device.allocate(1)
    carriers[0].release()
    carriers[2].release()
    for call in (
        lambda: device.allocate(quarter + 1, dtype=DType.UInt8),
        lambda: carriers[1].allocate_like(quarter + 1),
        lambda: carriers[1].new_like(np.zeros(quarter + 1, np.uint8)),
        lambda: device.allocate(0, dtype=DType.UInt8)._allocate_in_place(quarter + 1),
    ):
        with pytest.raises(
            MemoryError, match=rf"has {quarter} \({2 * quarter} of {4 * quarter} bytes are free"
        ):
            call()
    record = device.statistics()
    assert (record.extents, record.free_bytes, before.extents) == (2, 2 * quarter, 4)
    for carrier in carriers:
        carrier.release()


@pytest.mark.parametrize(
    ("size", "options", "error"),
    [
        (-1, {}, ValueError),
        (2.5, {}, TypeError),
        (True, {}, TypeError),
        (4, {"dtype": np.float32}, TypeError),
        (4, {"dtype": None}, TypeError),
    ],
)
def test_what_is_no_size_or_dtype_takes_nothing(small_device, size, options, error):
    with pytest.raises(error):
        small_device.allocate(size, **options)
    assert small_device.statistics().extents == 0


@pytest.mark.parametrize("seed", range(2))
def test_hundreds_of_carriers_come_and_go_and_keep_their_values(device, seed):
    source, kept = random.Random(seed), {}
    empty = device.allocate(0, dtype=DType.Int32)
    for step in range(300):
        if kept and source.random() < 0.45:
            carrier = source.choice(list(kept))
            assert values_of(carrier).tobytes() == kept.pop(carrier).tobytes()
            carrier.release()
            continue
        values = np.arange(step, step + source.randrange(1, 40_000), dtype=np.int32)
        try:
            kept[empty.new_like(values)] = values
        except MemoryError:
            assert device.statistics().largest_free < values.nbytes
        places = sorted((one.statistics().offset, one.statistics().occupied_bytes) for one in kept)
        assert all(start + length <= after for (start, length), (after, _) in pairwise(places))
    for carrier, values in kept.items():
        assert values_of(carrier).tobytes() == values.tobytes()
        carrier.release()
    record = device.statistics()
    assert (record.extents, record.free_bytes, record.largest_free) == (0, device.capacity, device.capacity)


def test_threads_that_allocate_at_once_get_disjoint_extents(device):
    barrier = threading.Barrier(8)

    def work(number):
        barrier.wait()
        mine = []
        for step in range(25):
            carrier = device.allocate(0, dtype=DType.Int64).new_like([number * 1000 + step] * 700)
            mine.append(carrier)
            if step % 3 == 2:
                mine.pop(0).release()
        return [(carrier, set(values_of(carrier).tolist())) for carrier in mine]

    with ThreadPoolExecutor(8) as pool:
        results = [pair for part in pool.map(work, range(8)) for pair in part]
    assert device.statistics().extents == len(results) == 8 * 17
    assert len({carrier.statistics().offset for carrier, _ in results}) == len(results)
    assert all(len(values) == 1 for _, values in results)
    for carrier, values in results:
        assert set(values_of(carrier).tolist()) == values
        carrier.release()
    assert device.statistics().largest_free == device.capacity


# Carriers


def test_an_empty_carrier_is_given_storage_once(small_device):
    carrier = small_device.allocate(0, dtype=DType.Int64)
    assert (carrier.size(), carrier.statistics().offset, small_device.statistics().extents) == (0, None, 0)
    assert values_of(carrier).tolist() == []
    carrier._allocate_in_place(0)
    assert carrier._can_allocate()
    carrier._allocate_in_place(10)
    assert (carrier.size(), carrier.statistics().offset) == (10, 0)
    assert not carrier._can_allocate()
    with pytest.raises(ValueError, match="cannot be given storage"):
        carrier._allocate_in_place(4)
    carrier.release()


def test_a_carrier_is_made_of_a_device_and_the_class_is_final(small_device):
    carrier = BlockDeviceCarrier(small_device, mutable=False, dtype=DType.Bool)
    assert (carrier.dtype(), carrier.is_mutable(), carrier.device) == (DType.Bool, False, small_device)
    with pytest.raises(TypeError, match="BlockDevice"):
        BlockDeviceCarrier("disk.bin")
    with pytest.raises(TypeError, match="final"):
        type("Mine", (BlockDeviceCarrier,), {})


def test_it_computes_nothing_and_has_no_memory(small_device):
    carrier = small_device.allocate(3)
    with pytest.raises(NotImplementedError):
        carrier._bytes()
    with pytest.raises(NotImplementedError):
        carrier.dispatch_op("add")
    carrier.release()


def test_an_immutable_or_owned_carrier_refuses_public_writes(small_device):
    carrier, owner = small_device.allocate(2, mutable=False), object()
    with pytest.raises(ImmutableError):
        carrier[0] = 2.0
    carrier._claim(owner)
    with pytest.raises(OwnershipError):
        carrier.release()
    carrier._set_as(owner, 1, 4.0)
    assert values_of(carrier).tolist() == [0.0, 4.0]
    carrier._release_as(owner)
    assert small_device.statistics().extents == 0


def test_a_slot_read_while_another_thread_released_the_carrier_is_no_value(small_device, monkeypatch):
    carrier = small_device.allocate(0).new_like([1.0])
    from_file = carrier._device._held.file.descriptor

    def descriptor():
        if not carrier.is_released():
            carrier.release()
        return from_file()

    monkeypatch.setattr(carrier._device._held.file, "descriptor", descriptor)
    with pytest.raises(ReleasedError):
        carrier.get_value(0)
