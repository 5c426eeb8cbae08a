"""BlockDevice: what it may be opened on, what it says of itself, and that one alone holds it."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
import weakref

import pytest

from interruptions import interrupted_everywhere
from strideweave import BlockDevice, BlockDeviceStatistics, DType
from strideweave.io.files import OpenFile

MIB = 1 << 20


# Opening


def test_a_file_is_made_sparse_with_the_given_size_and_stays(disk):
    with BlockDevice(disk, size=64 * MIB) as device:
        assert (disk.stat().st_size, device.capacity) == (64 * MIB, 64 * MIB)
        assert disk.stat().st_blocks * 512 < MIB
        assert disk.stat().st_mode & 0o777 == 0o600
        assert device.path == str(disk)
    assert disk.stat().st_size == 64 * MIB
    with BlockDevice(str(disk)) as again:
        assert again.capacity == 64 * MIB
    with BlockDevice(disk, size=64 * MIB) as again:
        assert again.capacity == 64 * MIB


def test_another_size_than_that_of_the_file_is_refused_and_nothing_changes(disk):
    disk.write_bytes(bytes(range(256)) * 32)
    with pytest.raises(ValueError, match="has 8192 bytes, and size says 4096"):
        BlockDevice(disk, size=4096)
    assert disk.read_bytes() == bytes(range(256)) * 32
    BlockDevice(disk).close()


def test_without_a_size_something_has_to_be_there(disk):
    with pytest.raises(FileNotFoundError, match="pass size") as caught:
        BlockDevice(disk)
    assert caught.value.filename == str(disk)
    assert not disk.exists()


def test_a_file_of_an_odd_size_is_used_up_to_its_last_whole_block(disk):
    with BlockDevice(disk, size=3 * 4096 + 100) as device:
        assert (device.capacity, disk.stat().st_size) == (3 * 4096, 3 * 4096 + 100)
        with pytest.raises(MemoryError):
            device.allocate(3 * 4096 + 1, dtype=DType.UInt8)
        device.allocate(3 * 4096, dtype=DType.UInt8).release()


@pytest.mark.parametrize("size", [1, 4095])
def test_less_than_a_block_is_refused_and_no_file_is_left(disk, size):
    with pytest.raises(ValueError, match=f"has {size} bytes, which is less than one block"):
        BlockDevice(disk, size=size)
    assert not disk.exists()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"size": 0}, ValueError),
        ({"size": -4096}, ValueError),
        ({"size": 4096.0}, TypeError),
        ({"size": True}, TypeError),
        ({"queue_depth": 0}, ValueError),
        ({"queue_depth": "8"}, TypeError),
    ],
)
def test_options_that_make_no_sense_are_refused_and_no_file_is_left(disk, options, error):
    with pytest.raises(error):
        BlockDevice(disk, **({"size": MIB} | options))
    assert not disk.exists()


@pytest.mark.parametrize("path", [b"disk", 3, None])
def test_a_path_is_text(path):
    with pytest.raises(TypeError):
        BlockDevice(path, size=MIB)


def test_what_is_neither_a_device_nor_a_file_is_refused(disk_path):
    os.mkfifo(disk_path / "fifo")
    for path in (disk_path, disk_path / "fifo", "/dev/null"):
        with pytest.raises(ValueError, match="neither a block device nor a regular file"):
            BlockDevice(path)


@pytest.mark.parametrize("size", [1 << 62, 1 << 63, 1 << 70])
def test_a_size_that_the_system_refuses_leaves_no_file(disk, size):
    with pytest.raises(OSError, match="bytes long") as caught:
        BlockDevice(disk, size=size)
    assert caught.value.filename == str(disk)
    assert not disk.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to everything")
def test_a_file_that_may_not_be_written_is_refused(disk):
    disk.write_bytes(bytes(8192))
    disk.chmod(0o400)
    with pytest.raises(PermissionError):
        BlockDevice(disk)


def test_a_link_that_leads_nowhere_is_refused(disk):
    disk.symlink_to(disk.with_name("gone"))
    for options in ({}, {"size": MIB}):
        with pytest.raises(FileNotFoundError, match="leads nowhere"):
            BlockDevice(disk, **options)
    assert not disk.exists()


def test_a_read_only_device_is_refused(loop_device):
    subprocess.run(["blockdev", "--setro", loop_device], check=True)
    try:
        with pytest.raises(OSError, match="must be writable") as caught:
            BlockDevice(loop_device)
    finally:
        subprocess.run(["blockdev", "--setrw", loop_device], check=True)
    assert (caught.value.errno, caught.value.filename) == (errno.EROFS, loop_device)


def test_the_geometry_is_the_devices_own(loop_device):
    with BlockDevice(loop_device) as device:
        record = device.statistics()
    assert isinstance(record, BlockDeviceStatistics)
    assert record.is_block_special
    assert (record.capacity, record.path) == (16 * MIB, loop_device)
    for field, question in (("logical_block", "--getss"), ("physical_block", "--getpbsz")):
        answer = subprocess.run(
            ["blockdev", question, loop_device], capture_output=True, text=True, check=True
        )
        assert getattr(record, field) == int(answer.stdout)
    assert record.alignment == 4096


def test_larger_blocks_make_larger_extents(disk, monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result((4096, 16384, *[0] * 8)))
    with BlockDevice(disk, size=MIB) as device:
        carriers = [device.allocate(1) for _ in range(3)]
        assert [carrier.statistics().offset for carrier in carriers] == [0, 16384, 32768]
        assert device.statistics().physical_block == 16384
        for carrier in carriers:
            carrier.release()


def test_statistics_say_whether_it_goes_past_the_page_cache(disk):
    with BlockDevice(disk, size=MIB, direct=False, queue_depth=4) as device:
        record = device.statistics()
        assert (record.is_direct, record.direct_obstacle, record.queue_depth) == (False, None, 4)
        assert not record.is_block_special
        assert "1048576 of 1048576 bytes free" in repr(device)
    with BlockDevice(disk) as device:
        record = device.statistics()
        assert record.is_direct is (record.direct_obstacle is None)
    assert "closed" in repr(device)


# One holder


def test_a_second_one_on_the_same_file_is_refused_until_the_first_is_closed(disk):
    with BlockDevice(disk, size=MIB):
        (disk.parent / "link").symlink_to(disk)
        for path in (disk, disk.parent / "link"):
            for options in ({}, {"size": MIB}, {"size": 2 * MIB}):
                with pytest.raises(OSError, match="in use") as caught:
                    BlockDevice(path, **options)
                assert (caught.value.errno, caught.value.filename) == (errno.EBUSY, str(path))
    BlockDevice(disk).close()


def test_a_second_one_on_the_same_device_is_refused_until_the_first_is_closed(loop_device):
    with BlockDevice(loop_device), pytest.raises(OSError, match="in use") as caught:
        BlockDevice(loop_device)
    assert (caught.value.errno, caught.value.filename) == (errno.EBUSY, loop_device)
    BlockDevice(loop_device).close()


def test_another_process_is_refused_too(disk):
    program = "import sys; from strideweave import BlockDevice; BlockDevice(sys.argv[1])"
    with BlockDevice(disk, size=MIB):
        done = subprocess.run(
            [sys.executable, "-c", program, str(disk)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 1
        assert "in use" in done.stderr
    subprocess.run([sys.executable, "-W", "error", "-c", program, str(disk)], check=True, timeout=60)


def test_a_mounted_device_is_refused(loop_device, tmp_path):
    mkfs, mount = shutil.which("mkfs.ext4"), shutil.which("mount")
    if mkfs is None or mount is None:
        pytest.skip("needs mkfs.ext4 and mount")
    subprocess.run([mkfs, "-q", loop_device], check=True)
    place = tmp_path / "mounted"
    place.mkdir()
    if subprocess.run([mount, loop_device, str(place)], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed")
    try:
        with pytest.raises(OSError, match="mounted"):
            BlockDevice(loop_device)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_one_that_nobody_holds_any_more_lets_go(disk):
    device = BlockDevice(disk, size=MIB)
    carrier, gone = device.allocate(4), weakref.ref(device)
    del device
    gc.collect()
    assert gone() is carrier.device  # its carriers keep it
    with pytest.raises(OSError, match="in use"):
        BlockDevice(disk)
    del carrier
    gc.collect()
    assert gone() is None
    BlockDevice(disk).close()


def test_a_path_that_leads_elsewhere_by_the_second_look_is_refused(disk, monkeypatch):
    other = disk.parent / "other.bin"
    other.write_bytes(bytes(MIB))
    open_file = OpenFile.open

    def swap(path, **options):
        disk.unlink()
        other.rename(disk)
        return open_file(path, **options)

    monkeypatch.setattr(OpenFile, "open", swap)
    disk.write_bytes(bytes(MIB))
    with pytest.raises(OSError, match="put in its place") as caught:
        BlockDevice(disk)
    assert caught.value.filename == str(disk)
    monkeypatch.undo()
    BlockDevice(disk).close()


def test_a_file_system_without_locks_is_an_error_with_the_path(disk, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("strideweave.io.file_lock.fcntl.flock", refuse)
    with pytest.raises(OSError, match="to be locked") as caught:
        BlockDevice(disk, size=MIB)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOLCK, str(disk))
    assert not disk.exists()


@pytest.mark.parametrize("exists", [False, True])
def test_a_device_whose_opening_was_interrupted_can_be_opened_again(disk, no_collector, exists):
    made = []

    def begin():
        made.clear()
        disk.unlink(missing_ok=True)
        if exists:
            BlockDevice(disk, size=MIB).close()
        return lambda: made.append(BlockDevice(disk, size=None if exists else MIB))

    for place in interrupted_everywhere(begin):
        for device in made:
            device.close()
        made.clear()
        if exists or (disk.exists() and disk.stat().st_size):
            BlockDevice(disk).close()
        else:
            disk.unlink(missing_ok=True)  # one that was just made, and nothing more, may stay
            BlockDevice(disk, size=MIB).close()
        assert disk.stat().st_size == MIB, place
    made[0].close()


def test_a_device_whose_close_was_interrupted_can_be_opened_again(disk, no_collector):
    devices = []

    def begin():
        devices.append(BlockDevice(disk, size=MIB))
        return devices[-1].close

    for _ in interrupted_everywhere(begin):
        devices[-1].close()
        BlockDevice(disk).close()


@pytest.mark.parametrize("empty", [False, True])
def test_what_interrupts_an_allocation_or_a_release_loses_no_extent(disk, no_collector, empty):
    device, made = BlockDevice(disk, size=MIB), []

    def begin():
        made.clear()

        def allocate_and_release():
            made.append(device.allocate(1024, empty=empty))
            made[0].release()

        return allocate_and_release

    for place in interrupted_everywhere(begin):
        for carrier in made:
            carrier.release()
        made.clear()
        assert device.statistics().extents == 0, place
    destination = device.allocate(0)
    for place in interrupted_everywhere(lambda: lambda: destination._allocate_in_place(1024)):
        if destination.size():
            break  # it was at its end
        assert destination.statistics().slots == 0, place
    assert device.statistics().extents == 1
    destination.release()
    assert device.statistics().extents == 0
    device.close()


def test_a_release_that_is_interrupted_while_the_device_clears_gives_the_extent_back(disk, monkeypatch):
    device = BlockDevice(disk, size=MIB)
    carrier = device.allocate(1024)
    cleared, discard = [], device._held.discard

    def interrupted(*extent):
        cleared.append(extent)
        if len(cleared) == 1:
            raise KeyboardInterrupt
        discard(*extent)

    monkeypatch.setattr(device._held, "discard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carrier.release()
    assert cleared == [(0, 4096)] * 2
    assert carrier.is_released()
    assert device.statistics().extents == 0
    device.close()
