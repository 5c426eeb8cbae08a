"""Block devices and engines for the tests of carriers."""

from __future__ import annotations

import gc

import pytest

from strideweave import BlockDevice
from strideweave.carriers import file_slots
from strideweave.carriers.move import operations
from strideweave.io.engine import ENGINES, make_engine
from strideweave.io.uring import why_unavailable
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.task_scope import TaskScope

MIB = 1 << 20


@pytest.fixture
def disk(disk_path):
    return disk_path / "disk.bin"


def end(device):
    """Close a device; carriers that only the collector would find are looked for where there are any."""
    try:
        device.close()
    except RuntimeError:  # not at every end: in a large heap the collector takes a third of a second
        gc.collect()
        device.close()


@pytest.fixture(params=["file", "file through the cache", "loop device"])
def device(request, disk):
    """A device of 16 MiB, of each kind."""
    if request.param == "loop device":
        opened = BlockDevice(request.getfixturevalue("loop_device"))
    else:
        opened = BlockDevice(disk, size=16 * MIB, direct=request.param == "file")
    yield opened
    end(opened)


@pytest.fixture
def small_device(disk):
    """A device of 1 MiB in a file."""
    opened = BlockDevice(disk, size=MIB)
    yield opened
    end(opened)


@pytest.fixture
def roomy_device(disk_path):
    """A device of 64 MiB in a file."""
    opened = BlockDevice(disk_path / "disk.bin", size=64 * MIB)
    yield opened
    end(opened)


@pytest.fixture(params=sorted(ENGINES))
def every_engine(request, monkeypatch):
    """Every engine in turn, in place of the one that the runtime has chosen."""
    if request.param == "uring" and (obstacle := why_unavailable()):
        pytest.skip(obstacle)
    engine, scope = make_engine(request.param), TaskScope("the end of an engine")

    async def close():
        engine.close()

    for module in (file_slots, operations):
        monkeypatch.setattr(module, "default_engine", lambda: engine)
    yield engine
    scope.start(AwaitResult(), close).wait(60)
    scope.close()


@pytest.fixture
def end_device():
    """Give the function that closes a device."""
    return end
