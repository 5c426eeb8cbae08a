"""BlockDeviceCarrier as a source, a destination and a tier, on every engine."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from pathlib import Path

import numpy as np
import pytest

from strideweave import (
    CPU,
    LRU,
    BlockDeviceCarrier,
    DType,
    Evictable,
    FileBacked,
    Generic,
    Metal,
    Tensor,
    TiledEvictable,
    move,
    row_major,
    tiled,
)
from strideweave.carriers.move import Transfer, dispatch_move
from strideweave.carriers.move.operations import run_transfers
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.task_scope import TaskScope
from strideweave.testing import bit_patterns, failing_transfers, held_transfers, values_of

MIB = 1 << 20
CLASSES = (Generic, CPU, Metal, FileBacked, BlockDeviceCarrier, Evictable)


def run(function, *arguments):
    """Run a function in the runtime's loop."""
    scope = TaskScope("a test")
    try:
        return scope.start(AwaitResult(), function, *arguments).wait(60)
    finally:
        scope.close()


def transfer(*transfers):
    run(
        run_transfers,
        dispatch_move(type(transfers[0].source), type(transfers[0].destination)),
        list(transfers),
    )


def on_device(device, values, mutable=True):
    return device.allocate(0, dtype=DType.from_numpy(values.dtype)).new_like(values, mutable=mutable)


# Moves


def test_every_ordered_pair_with_the_shipped_carriers_has_a_move():
    for pair in itertools.product(CLASSES, CLASSES):
        assert dispatch_move(*pair)


def makers(device):
    made = {
        "Generic": lambda dtype: Generic([], dtype=dtype),
        "CPU": lambda dtype: CPU(0, dtype=dtype),
        "FileBacked": lambda dtype: FileBacked(dtype=dtype),
        "BlockDeviceCarrier": lambda dtype: device.allocate(0, dtype=dtype),
        "Metal": lambda dtype: Metal(0, dtype=dtype),
    }
    try:
        made["Metal"](DType.Float32)
    except RuntimeError:
        del made["Metal"]
    return made


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("kind", ["Generic", "CPU", "FileBacked", "BlockDeviceCarrier", "Metal"])
def test_a_move_keeps_every_bit_and_gives_the_source_back(roomy_device, every_engine, kind, there):
    make = makers(roomy_device)
    if kind not in make:
        pytest.skip("needs MLX")
    values = bit_patterns(DType.Float32, 30_001)
    outside, inside = make[kind](DType.Float32), roomy_device.allocate(0)
    source, destination = (outside, inside) if there else (inside, outside)
    source = source.new_like(values)
    moved = move(Tensor(source, 0, row_major(30_001)), destination)
    assert moved.carrier is destination
    assert values_of(destination).tobytes() == values.tobytes()
    assert source.is_released()
    assert destination.version == 1
    assert every_engine.statistics().batches
    destination.release()
    assert roomy_device.statistics().extents == 0


@pytest.mark.usefixtures("every_engine")
def test_transfers_of_any_alignment_hit_their_bytes_only(roomy_device):
    """Aligned ones go past the page cache, the others through it, in one file."""
    rng = np.random.default_rng(5)
    size = 300_000
    model = rng.integers(0, 256, size, dtype=np.uint8)
    carrier = on_device(roomy_device, model)
    other = on_device(roomy_device, np.zeros(size, np.uint8))
    memory = CPU(size, dtype=DType.UInt8)
    for _ in range(60):
        count = int(rng.integers(1, 20_000)) if rng.random() < 0.5 else 4096 * int(rng.integers(1, 8))
        step = 4096 if rng.random() < 0.5 else 1
        at, start = (int(rng.integers(0, (size - count) // step)) * step for _ in range(2))
        memory.numpy(writable=True)[start : start + count] = rng.integers(0, 256, count, dtype=np.uint8)
        transfer(Transfer(memory, start, carrier, at, count))
        model[at : at + count] = memory.numpy()[start : start + count]
        transfer(Transfer(carrier, at, memory, start, count))
        assert (memory.numpy()[start : start + count] == model[at : at + count]).all()
    assert (values_of(carrier) == model).all()
    transfer(Transfer(carrier, 17, other, 4096, size - 4096 - 17))
    assert (values_of(other)[4096 : size - 17] == model[17 : size - 4096]).all()
    assert not values_of(other)[:4096].any()
    carrier.release()
    other.release()


def cached_pages(path, nbytes):
    """Which pages of a file are in the page cache, without bringing any there."""
    with Path(path).open("rb") as file:
        pages = mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ)
    view = np.frombuffer(pages, np.uint8)
    found = np.zeros(nbytes // mmap.PAGESIZE, np.uint8)
    call = ctypes.CDLL(None, use_errno=True).mincore
    assert call(*map(ctypes.c_void_p, (view.ctypes.data, nbytes, found.ctypes.data))) == 0
    return (found & 1).astype(bool)


@pytest.mark.usefixtures("every_engine")
def test_aligned_spans_go_past_the_page_cache(roomy_device):
    if obstacle := roomy_device.statistics().direct_obstacle:
        pytest.skip(obstacle)
    values = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
    memory, back = CPU(MIB, dtype=DType.UInt8), CPU(MIB, dtype=DType.UInt8)
    memory.numpy(writable=True)[:] = values
    carrier = roomy_device.allocate(MIB, dtype=DType.UInt8)
    transfer(Transfer(memory, 0, carrier, 0, MIB))
    transfer(Transfer(carrier, 0, back, 0, MIB))
    assert values_of(back).tobytes() == values.tobytes()
    assert not cached_pages(roomy_device.path, MIB).any()
    assert carrier[5000] == values[5000]  # a single slot goes through it
    assert cached_pages(roomy_device.path, MIB)[5000 // mmap.PAGESIZE]
    carrier.release()


# Tiers


def test_an_evictable_goes_to_the_device_and_comes_back(roomy_device):
    carrier = Evictable(CPU(0).new_like(np.arange(10_000.0)), roomy_device.allocate(0))
    for _ in range(3):
        carrier.evict()
        assert isinstance(carrier.secondary, BlockDeviceCarrier)
        assert roomy_device.statistics().extents == 1
        carrier.promote()
        assert roomy_device.statistics().extents == 0
        assert carrier[9_999] == 9_999
    carrier.evict()
    carrier.release()
    assert roomy_device.statistics().extents == 0


def test_an_eviction_that_finds_no_room_leaves_everything_as_it_was(roomy_device):
    carrier = Evictable(CPU(0).new_like(np.arange(1000.0)), roomy_device.allocate(0))
    filler = roomy_device.allocate(roomy_device.capacity, dtype=DType.UInt8, empty=True)
    with pytest.raises(MemoryError, match="largest free one has 0"):
        carrier.evict()
    assert not carrier.is_evicted()
    assert carrier[999] == 999
    filler.release()
    carrier.evict()
    carrier.release()


def test_an_eviction_that_fails_gives_its_extent_back(roomy_device):
    carrier = Evictable(CPU(0).new_like(np.arange(1000.0)), roomy_device.allocate(0))
    with failing_transfers(CPU, BlockDeviceCarrier), pytest.raises(OSError, match="disk"):
        carrier.evict()
    assert roomy_device.statistics().extents == 0
    carrier.evict()
    assert roomy_device.statistics().extents == 1
    carrier.release()


def test_a_hierarchy_on_a_device_alone(roomy_device):
    """Both tiers are extents; what is evicted stays on the device, at another place."""
    carrier = Evictable(roomy_device.allocate(0).new_like(np.arange(100.0)), roomy_device.allocate(0))
    carrier.evict()
    carrier.promote()
    assert carrier[99] == 99
    carrier.release()
    assert roomy_device.statistics().extents == 0


@pytest.mark.usefixtures("every_engine")
@pytest.mark.parametrize("tile", [(1, 32, 32), (1, 5, 7), (2, 64, 8)], ids=str)
def test_a_tiled_tensor_lives_on_the_device(roomy_device, tile):
    values = np.arange(np.prod([4 * extent for extent in tile]), dtype=np.float32)
    values = values.reshape([4 * extent for extent in tile])
    tensor = tiled(values, tile, secondary=roomy_device.allocate(0), resident=False)
    carrier = tensor.carrier
    assert roomy_device.statistics().extents == 1
    chosen = carrier.select({0: [2, 0]})
    order = [2 * tile[0] + k for k in range(tile[0])] + list(range(tile[0]))
    compact = carrier.project(tensor, chosen).wait()
    assert (compact.numpy() == values[order]).all()
    carrier[3] = -1.0  # of the first tile, which is row-major inside
    values[np.unravel_index(3, tile)] = -1.0
    carrier.evict_async(carrier.valid_tiles).wait()
    assert len(carrier.primary_tiles) == 0
    assert carrier[3] == -1.0
    assert (carrier.project(tensor, chosen).wait().numpy() == values[order]).all()
    carrier.release()
    assert roomy_device.statistics().extents == 0


def test_a_tiled_tensor_that_started_in_memory_is_evicted_to_the_device(roomy_device):
    values = np.arange(64 * 1024, dtype=np.int32).reshape(64, 1024)
    tensor = tiled(
        values,
        (1, 1024),
        secondary=roomy_device.allocate(0, dtype=DType.Int32),
        residency_policy=LRU(max_tiles=4),
    )
    carrier = tensor.carrier
    carrier.evict_async(carrier.valid_tiles).wait()
    assert roomy_device.statistics().free_bytes == roomy_device.capacity - values.nbytes
    for first in range(0, 64, 8):
        compact = carrier.project(tensor, carrier.select({0: range(first, first + 8)})).wait()
        assert (compact.numpy() == values[first : first + 8]).all()
    assert carrier.statistics().failed_evictions == 0
    carrier.release()


def test_tiles_that_the_device_has_no_room_for_stay_in_memory(roomy_device):
    filler = roomy_device.allocate(roomy_device.capacity - 8192, dtype=DType.UInt8, empty=True)
    values = np.arange(64 * 1024, dtype=np.int32).reshape(64, 1024)
    tensor = tiled(values, (1, 1024), secondary=roomy_device.allocate(0, dtype=DType.Int32))
    carrier = tensor.carrier
    with pytest.raises(MemoryError, match="largest free one has 8192"):
        carrier.evict_async(carrier.valid_tiles).wait()
    assert len(carrier.primary_tiles) == 64
    filler.release()
    carrier.evict_async(carrier.valid_tiles).wait()
    assert (carrier.project(tensor, carrier.select({0: [63]})).wait().numpy() == values[63:]).all()
    carrier.release()


def test_values_on_a_device_are_adopted_as_a_read_only_tier(roomy_device):
    values = np.arange(8 * 1024, dtype=np.float32)
    secondary = on_device(roomy_device, values, mutable=False)
    carrier = TiledEvictable(CPU(0), secondary, (8,), (1024,))
    tensor = Tensor(carrier, 0, row_major(8 * 1024), requires_grad=False)
    compact = carrier.project(tensor, carrier.select({0: [5]})).wait()
    assert (compact.numpy() == values[5 * 1024 : 6 * 1024]).all()
    carrier[0] = 9.0
    carrier.evict_async(carrier.valid_tiles).wait()
    assert roomy_device.statistics().extents == 2  # the write-back went to a spill on the same device
    assert carrier[0] == 9.0
    assert secondary[0] == 0.0
    carrier.release()
    assert roomy_device.statistics().extents == 0


def test_the_device_cannot_be_closed_under_a_request(roomy_device):
    carrier = Evictable(CPU(1000), roomy_device.allocate(0))
    with held_transfers(CPU, BlockDeviceCarrier) as hold:
        handle = carrier.evict_async()
        hold.entered.wait(60)
        with pytest.raises(RuntimeError, match="in use: 1;"):
            roomy_device.close()
        hold.open()
        handle.wait(60)
    carrier.release()
