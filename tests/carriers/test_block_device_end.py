"""How carriers on a BlockDevice end, and it itself: release, close, files that go or shrink, full disks, forks."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import anyio
import numpy as np
import pytest

from processes import in_a_forked_child
from strideweave import BlockDevice, BlockDeviceCarrier, DType
from strideweave.carriers import file_slots
from strideweave.errors import ReleasedError
from strideweave.io.extents import ExtentMap
from strideweave.io.positioned import ShortFileError
from strideweave.runtime.await_result import AwaitResult
from strideweave.testing import values_of

MIB = 1 << 20
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


# The end of carriers and devices


def test_release_gives_the_extent_back_and_the_factories_go_on(small_device):
    carrier = small_device.allocate(5, dtype=DType.Int16)
    carrier.release()
    carrier.release()
    assert small_device.statistics().extents == 0
    assert carrier.statistics().offset is None
    assert carrier.statistics().occupied_bytes == 0
    for call in (
        lambda: carrier[0],
        lambda: carrier._read_slots(0, 1),
        carrier._file,
        lambda: carrier._discard(0, 1),
        lambda: carrier._allocate_in_place(1),
    ):
        with pytest.raises(ReleasedError):
            call()
    assert not carrier._can_allocate()
    again = carrier.new_like([7, 8])
    assert (again[1], again.dtype(), again.device) == (8, DType.Int16, small_device)
    again.release()


def test_a_forgotten_carrier_gives_its_extent_back(small_device):
    carrier = small_device.allocate(0).new_like(np.arange(100.0))
    gone = weakref.ref(carrier)
    del carrier
    gc.collect()
    assert gone() is None
    assert small_device.statistics().extents == 0


def test_carriers_that_the_collector_finds_during_an_allocation_come_back(small_device, monkeypatch):
    """The collector may run at any statement of the thread that is changing the map."""
    victims = [small_device.allocate(1) for _ in range(6)]
    take, give = ExtentMap.take, ExtentMap.give

    def collected_while(change):
        def changed(extents, *arguments):
            if victims:
                victims.pop(0).release()
            return change(extents, *arguments)

        return changed

    monkeypatch.setattr(ExtentMap, "take", collected_while(take))
    monkeypatch.setattr(ExtentMap, "give", collected_while(give))
    other = small_device.allocate(1)
    other.release()
    assert small_device.statistics().extents == len(victims) == 0
    assert small_device.statistics().largest_free == small_device.capacity


def test_releasing_gives_the_space_of_a_file_back_and_leaves_its_neighbours(small_device, disk):
    low = small_device.allocate(0, dtype=DType.UInt8).new_like(np.ones(5000, np.uint8))
    middle = low.new_like(np.ones(400_000, np.uint8))
    high = low.new_like(np.ones(5000, np.uint8))
    os.sync()
    before = disk.stat().st_blocks * 512
    middle.release()
    record = small_device.statistics()
    if record.file.punches_refused:
        pytest.skip("this file system gives nothing back")
    assert disk.stat().st_blocks * 512 <= before - 396_000
    assert values_of(low).all()
    assert values_of(high).all()
    low.release()
    high.release()


def test_discarded_slots_leave_the_others_as_they_are(device):
    carrier = device.allocate(0, dtype=DType.UInt8).new_like(np.full(100_000, 7, np.uint8))
    next_to_it = carrier.new_like(np.full(10, 9, np.uint8))
    carrier._discard(5001, 50_000)
    carrier._discard(60_001, 10)
    carrier._discard(99_990, 10)
    carrier._discard(0, 0)
    values = values_of(carrier)
    assert (values[:5001] == 7).all()
    assert (values[55_001:60_001] == 7).all()
    assert (values[60_011:99_990] == 7).all()
    assert (values_of(next_to_it) == 9).all()
    record = device.statistics().file
    assert record.bytes_punched >= 45_000 or record.punches_refused
    carrier.release()
    next_to_it.release()


def test_advice_that_the_system_cannot_take_is_no_error(small_device, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "broken")

    carrier = small_device.allocate(10)
    monkeypatch.setattr("strideweave.io.files.OpenFile.punch", refuse)
    carrier._discard(0, 10)
    carrier.release()
    record = small_device.statistics()
    assert (record.extents, record.file.punches_refused) == (0, 2)


def test_close_is_refused_while_extents_live(small_device):
    carriers = [small_device.allocate(1), small_device.allocate(1)]
    with pytest.raises(RuntimeError, match="in use: 2;"):
        small_device.close()
    carriers[0].release()
    with pytest.raises(RuntimeError, match="in use: 1;"):
        small_device.close()
    assert not small_device.is_closed()
    carriers[1][0] = 4
    assert carriers[1][0] == 4
    carriers[1].release()
    small_device.close()
    small_device.close()
    assert small_device.is_closed()


def test_a_closed_device_gives_nothing_any_more(small_device):
    empty, released = small_device.allocate(0), small_device.allocate(3)
    released.release()
    small_device.close()
    for call in (
        lambda: small_device.allocate(1),
        lambda: small_device.allocate(0),
        lambda: BlockDeviceCarrier(small_device),
        lambda: empty._allocate_in_place(1),
        lambda: released.new_like([1.0]),
        lambda: released.allocate_like(0),
    ):
        with pytest.raises(ReleasedError, match="closed"):
            call()
    assert small_device.statistics().is_closed
    empty.release()


def test_closing_closes_every_descriptor(disk):
    listing = Path("/proc/self/fd")
    if not listing.exists():
        pytest.skip("descriptors are listed on Linux only")
    device = BlockDevice(disk, size=MIB)
    device.allocate(4).release()
    assert disk.samefile(listing / str(device._held.file.fd))
    device.close()
    assert not [entry for entry in listing.iterdir() if entry.exists() and disk.samefile(entry)]


def test_an_error_inside_the_block_is_not_hidden_by_the_carriers_it_leaves(disk):
    with pytest.raises(ZeroDivisionError) as caught, BlockDevice(disk, size=MIB) as device:
        carrier = device.allocate(4)
        carrier[0] = 1 / 0
    assert not device.is_closed()
    assert "in use: 1; release their carriers" in caught.value.__notes__[0]
    carrier.release()
    with pytest.raises(RuntimeError, match="in use: 1;"), device:
        carrier = device.allocate(4)
    carrier.release()
    with pytest.raises(ZeroDivisionError), device:
        raise ZeroDivisionError
    assert device.is_closed()
    with pytest.raises(ReleasedError, match="was closed"), device:
        pytest.fail("a closed device began a block")


def test_the_file_may_be_unlinked_while_it_is_open(small_device, disk):
    carrier = small_device.allocate(0).new_like([1.0, 2.0])
    disk.unlink()
    carrier[0] = 5.0
    assert values_of(carrier).tolist() == [5.0, 2.0]
    with BlockDevice(disk, size=MIB) as other:  # another file by now
        assert other.allocate(2)[0] == 0.0
        gc.collect()
    assert values_of(carrier.new_like([3.0])).tolist() == [3.0]
    carrier.release()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_shrank_is_an_error_with_the_path(disk, direct):
    with BlockDevice(disk, size=MIB, direct=direct) as device:
        carrier = device.allocate(0, dtype=DType.UInt8).new_like(np.ones(40_000, np.uint8))
        os.truncate(disk, 8192)
        assert carrier[8191] == 1
        with pytest.raises(ShortFileError) as caught:
            carrier.get_value(8192)
        assert caught.value.path == str(disk)
        with pytest.raises(ShortFileError):
            values_of(carrier)
        assert carrier.statistics().pending == 0
        carrier.release()


def test_a_device_that_shrank_is_an_error_with_the_path(loop_device, disk_path):
    with BlockDevice(loop_device) as device:
        carrier = device.allocate(0, dtype=DType.UInt8).new_like(np.ones(MIB, np.uint8))
        os.sync()
        os.truncate(disk_path / "disk.img", MIB // 2)
        subprocess.run(["losetup", "--set-capacity", loop_device], check=True)
        assert carrier[0] == 1
        with pytest.raises((ShortFileError, OSError)) as caught:
            values_of(carrier)
        assert loop_device in str(caught.value)
        carrier.release()


# Full disks, forks, the end of the process


def test_a_full_disk_under_a_sparse_file_is_an_error_and_changes_nothing(disk):
    program = textwrap.dedent("""
        import resource, sys
        import numpy as np
        from strideweave import BlockDevice
        device = BlockDevice(sys.argv[1], size=1 << 20)
        low, high = device.allocate(10), device.allocate(100_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        low[3] = 1.0
        for call in (lambda: high.set_value(90_000, 1.0), lambda: low.new_like(np.ones(9000))):
            try:
                call()
            except OSError as error:
                print(error.errno, error.filename == sys.argv[1], device.statistics().extents)
        print(low[3], high.version, high[90_000])
        high.release()
        low.release()
        device.close()
    """)
    # -B: a module that it compiled would be cut off by the limit too, and stay so.
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", program, str(disk)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{errno.EFBIG} True 2\n{errno.EFBIG} True 2\n1.0 0 0.0\n"


@FORKS
def test_a_forked_child_reads_and_neither_writes_nor_allocates(device):
    carrier = device.allocate(0, dtype=DType.Int32).new_like(np.arange(50_000))
    empty = device.allocate(0)

    def child():
        good = carrier[49_999] == 49_999
        good &= values_of(carrier).tolist() == list(range(50_000))
        for call in (
            lambda: carrier.set_value(0, 5),
            lambda: device.allocate(1),
            lambda: carrier.new_like([1]),
            lambda: empty._allocate_in_place(1),
        ):
            try:
                call()
                good = False
            except PermissionError:
                pass
        carrier._discard(0, 50_000)
        carrier.release()
        device.close()
        return good

    assert in_a_forked_child(child)
    assert values_of(carrier).tolist() == list(range(50_000))
    with pytest.raises(OSError, match="in use"):
        BlockDevice(device.path)
    carrier[0] = -1
    carrier.release()


@FORKS
def test_the_parent_lets_go_of_a_file_that_a_child_still_has_open(disk):
    device = BlockDevice(disk, size=MIB)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    device.close()
    BlockDevice(disk).close()
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_a_process_that_ends_without_closing_says_nothing_and_lets_go(disk):
    program = textwrap.dedent("""
        import logging, sys
        import numpy as np
        from strideweave import BlockDevice
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # a step that a busy machine made slow is a warning
        device = BlockDevice(sys.argv[1], size=1 << 20)
        carrier = device.allocate(0).new_like(np.ones(1000))
    """)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", program, str(disk)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with BlockDevice(disk) as device:
        assert device.allocate(4, empty=True)[0] == 1.0
        gc.collect()


def test_an_interrupted_write_keeps_its_extent_until_it_has_ended(small_device, monkeypatch):
    """Else another carrier would get the extent, and the write would go on into its values."""
    engine, gate, entered = file_slots.default_engine(), threading.Event(), threading.Event()

    class Held:
        async def write(self, spans):
            entered.set()
            await anyio.to_thread.run_sync(gate.wait)
            await engine.write(spans)

    class Interrupted(AwaitResult):
        def wait(self, timeout=None):
            entered.wait(60)
            ended.append(self)
            raise KeyboardInterrupt

    ended = []
    values = np.arange(5000, dtype=np.float32)
    empty = small_device.allocate(0)
    with monkeypatch.context() as patch:
        patch.setattr(file_slots, "default_engine", Held)
        patch.setattr(file_slots, "AwaitResult", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            empty.new_like(values)
    gc.collect()
    assert small_device.statistics().extents == 1
    other = empty.new_like(values)
    gate.set()
    AwaitResult.wait(ended.pop(), 60)
    assert np.array_equal(values_of(other), values)
    other.release()
    gc.collect()
    assert small_device.statistics().extents == 0
