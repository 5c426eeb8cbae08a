"""A disk that is full, or fails, in the middle of a write."""

import errno
import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

from strideweave import AwaitResult, TileSet, asarray, save_tiled, tiled
from strideweave.store import open_store, tile_files, verify_tiles

COUNT, SLOTS = 16, 16384  # tiles of 64 KiB

LIMITED = """
import os, resource, sys
import numpy as np
from strideweave import TileSet, asarray, save_tiled, tiled
from strideweave.store import open_store
path, limit = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
if sys.argv[3] == "save":
    try:
        save_tiled(tiled(np.ones((16, 16384), np.float32), (1, 16384)), path)
    except OSError as error:
        print(error.errno, os.path.basename(error.filename))
else:
    tensor = open_store(path, "r+")
    carrier = tensor.carrier
    carrier.assign(asarray(np.full((16, 16384), 2, np.float32)), tensor, carrier.select({})).wait()
    try:
        carrier.evict(TileSet([(tile, 0) for tile in range(16)]))
    except OSError as error:
        print(error.errno, os.path.basename(error.filename))
    found = carrier.statistics()
    assert len(carrier.dirty_tiles) == len(carrier.primary_tiles) == 16
    assert found.pinned_tiles == found.pending_requests == found.in_flight_bytes == 0
    assert (tensor.numpy() == 2).all()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
"""


def run_limited(path, limit, what):
    # -B: a module that it compiled would be cut off by the limit too, and stay so.
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", LIMITED, str(path), str(limit), what],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def run_persist(carrier):
    carrier._scope.start(AwaitResult(), carrier._persist).wait()


def save(path, version=1):
    save_tiled(tiled(np.full((COUNT, SLOTS), version, np.float32), (1, SLOTS)), path)


def versions(path, writable=False):
    files = tile_files.TileFiles(str(path), writable=writable)
    rows = [files.read_blocking(tile).view(np.float32) for tile in range(COUNT)]
    files.close()
    assert all((row == row[0]).all() for row in rows)
    return [int(row[0]) for row in rows]


@pytest.mark.parametrize("limit", [0, 100, 65536, 500_000])
def test_a_limit_on_files_fails_a_save_and_leaves_nothing(tmp_path, limit):
    assert run_limited(tmp_path / "store", limit, "save")[0] == str(errno.EFBIG)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [4096, 70_000, 700_000])
def test_a_limit_on_files_fails_a_write_and_leaves_the_store_whole(tmp_path, limit):
    save(tmp_path / "store")
    assert run_limited(tmp_path / "store", limit, "write") == [str(errno.EFBIG), "journal.bin"]
    assert (tmp_path / "store" / "journal.bin").stat().st_size == 0
    assert versions(tmp_path / "store") == [1] * COUNT
    assert versions(tmp_path / "store", writable=True) == [1] * COUNT


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB, where this machine lets the test mount one."""
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs mount and root")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no small file system: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_fails_a_save_and_leaves_nothing(small_disk):
    (small_disk / "filler").write_bytes(bytes(5 << 19))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        save(small_disk / "store")
    assert caught.value.errno == errno.ENOSPC
    assert [entry.name for entry in small_disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("free", [100 << 10, 1 << 20, 3 << 19])
def test_a_full_disk_fails_a_write_and_what_is_dirty_can_be_written_later(small_disk, free):
    """There is room for less than the journal needs, or for the journal and not for holes to be filled."""
    path = small_disk / "store"
    save(path, version=0)
    with (path / "tiles.bin").open(
        "r+b"
    ) as file:  # zeros that occupy nothing, whose places have yet to be found
        file.truncate(0)
        file.truncate(COUNT * SLOTS * 4)
    room = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(room.f_bavail * room.f_bsize - free))
    tensor = open_store(path, "r+")
    carrier = tensor.carrier
    everything = TileSet([(tile, 0) for tile in range(COUNT)])
    carrier.assign(asarray(np.full((COUNT, SLOTS), 2, np.float32)), tensor, carrier.select({})).wait()
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            carrier.evict(everything)
        assert len(carrier.dirty_tiles) == COUNT
        assert set(versions(path)) <= {0, 2}
        assert (tensor.numpy() == 2).all()
    (small_disk / "filler").unlink()
    carrier.evict(everything)
    assert versions(path) == [2] * COUNT
    carrier.release()
    assert versions(path, writable=True) == [2] * COUNT


def test_a_disk_that_is_full_for_holes_leaves_the_new_tiles_in_the_journal(tmp_path, monkeypatch):
    """The journal took the tiles and their places did not: they are new, wherever they are read."""
    save(tmp_path / "store")
    path = tmp_path / "store"
    tensor = open_store(path, "r+")
    carrier = tensor.carrier
    everything = TileSet([(tile, 0) for tile in range(COUNT)])
    plain = tile_files.default_engine()

    class FullInPlace:
        def __init__(self, most):
            self.most = most

        async def read(self, spans):
            await plain.read(spans)

        async def persist(self, file):
            await plain.persist(file)

        async def write(self, spans):
            for file, offset, buffer in spans:
                if file.path.endswith("journal.bin"):
                    await plain.write([tile_files.FileSpan(file, offset, buffer)])
                    continue
                part = buffer[: max(0, self.most)]
                await plain.write([tile_files.FileSpan(file, offset, part)])
                self.most -= len(buffer)
                if self.most < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.path)

    for version, most in enumerate([0, 1000, 65536, 100_000, COUNT * SLOTS * 4, COUNT * SLOTS * 4 + 20], 2):
        carrier.assign(
            asarray(np.full((COUNT, SLOTS), version, np.float32)), tensor, carrier.select({})
        ).wait()
        with monkeypatch.context() as patch:
            patch.setattr(tile_files, "default_engine", lambda most=most: FullInPlace(most))
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                carrier.evict(everything)
        assert len(carrier.dirty_tiles) == COUNT
        assert set(versions(path)) <= {version - 1, version}, "a reader finds them in the journal"
        assert not any(step.damaged for step in verify_tiles(path))
        for slot in (0, SLOTS - 1, SLOTS, COUNT * SLOTS - 1):
            assert carrier.secondary[slot] in (version - 1, version)
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(path, tmp_path / "copy")
        assert set(versions(tmp_path / "copy", writable=True)) <= {version - 1, version}
        if version % 2:
            run_persist(carrier.secondary)
            assert set(versions(path)) <= {version - 1, version}
            assert (path / "journal.bin").stat().st_size == 0
        carrier.evict(everything)
        assert versions(path) == [version] * COUNT
    carrier.release()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096
