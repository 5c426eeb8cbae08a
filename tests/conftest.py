"""Fixtures that every room's tests share."""

import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Before tests import them, so that their assertions explain themselves.
pytest.register_assert_rewrite("processes", "tiled_tensors", "waiting")

# A busy machine must not fail a test: only what a property says decides.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Leave the thousands of collected tests, which live to the end, out of every later search for garbage.

    Each test that waits for the collector would wait half a second while it walks all of them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The caller's event loop; the runtime's own is always asyncio."""
    return request.param


@pytest.fixture
def no_collector() -> Iterator[None]:
    """No cycle collector, so that what goes does so with the last reference to it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """A fresh directory on a file system that is not in memory: those take any misalignment."""
    if not is_in_memory(tmp_path):
        yield tmp_path
        return
    if is_in_memory(Path("/var/tmp")):
        pytest.skip("every temporary directory here is in memory")
    directory = Path("/var/tmp") / f"strideweave-{os.getpid()}-{tmp_path.name}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def is_in_memory(path: Path) -> bool:
    """Whether the file system of a directory is a tmpfs, where the system tells."""
    table = Path("/proc/self/mountinfo")
    if not table.exists() or not path.exists():
        return False
    number = path.stat().st_dev
    mounts = (line.split() for line in table.read_text("utf-8").splitlines())
    mark = f"{os.major(number)}:{os.minor(number)}"
    return any(mount[2] == mark and mount[mount.index("-") + 1] == "tmpfs" for mount in mounts)


@pytest.fixture
def loop_device(disk_path: Path) -> Iterator[str]:
    """A block-special node of 16 MiB, where this machine lets the test make one."""
    losetup = shutil.which("losetup")
    if losetup is None or os.geteuid() != 0:
        pytest.skip("making a loop device needs losetup and root")
    image = disk_path / "disk.img"
    image.touch()
    os.truncate(image, 16 << 20)
    made = subprocess.run(
        [losetup, "--find", "--show", str(image)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    node = made.stdout.strip()
    yield node
    subprocess.run([losetup, "--detach", node], check=True)
