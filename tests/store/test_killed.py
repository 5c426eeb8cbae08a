"""Whoever is killed while writing or saving leaves every tile whole, and every store too."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strideweave import save_tiled, tiled
from strideweave.store import tile_files

HERE = Path(__file__).parent


def run_killing(kind: str, directory: Path, step: int) -> int:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "killing.py"), kind, str(directory), str(step)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A fresh directory in memory where the system has such: what a process has written outlives it there too."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "least"), [("write", 60), ("recover", 100), ("save", 20), ("replace", 20)])
def test_a_kill_before_any_system_call_leaves_whole_tiles(kind: str, least: int, quick_path: Path):
    """Thousands of synchronisations, for which a busy disk takes minutes and memory no time."""
    assert run_killing(kind, quick_path, 1) >= least


@pytest.mark.parametrize(("kind", "step"), [("write", 13), ("recover", 13), ("save", 23), ("replace", 23)])
def test_a_kill_before_some_system_calls_leaves_whole_tiles(kind: str, step: int, tmp_path: Path):
    assert run_killing(kind, tmp_path, step) >= 2


WRITER = """
import sys
import numpy as np
from strideweave import TileSet, asarray
from strideweave.store import open_store

tensor = open_store(sys.argv[1], "r+")
carrier = tensor.carrier
count, slots = carrier.grid_shape[0], carrier.tile_shape[1]
version = 1
while True:
    version += 1
    new = np.full((count, slots), version, np.float32)
    carrier.assign(asarray(new), tensor, carrier.select({})).wait()
    carrier.evict(TileSet([(tile, 0) for tile in range(count)]))
    print(version, flush=True)
"""


@pytest.mark.parametrize(("rounds", "engine"), [(1, "default"), (5, "default"), (3, "threads")])
def test_a_writer_that_is_killed_while_it_writes_leaves_whole_tiles(rounds: int, engine: str, tmp_path: Path):
    path, count, slots = tmp_path / "store", 32, 16384
    save_tiled(tiled(np.full((count, slots), 1, np.float32), (1, slots)), path)
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **({} if engine == "default" else {"STRIDEWEAVE_IO": engine})},
    )
    ended = 1
    with child:
        assert child.stdout is not None
        for _ in range(rounds):
            ended = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        ended = max([ended, *(int(line) for line in child.stdout.read().split("\n")[:-1])])
    for writable in (False, True):
        files = tile_files.TileFiles(str(path), writable=writable)
        for tile in range(count):
            row = files.read_blocking(tile).view(np.float32)
            assert row[0] in (ended, ended + 1)
            assert (row == row[0]).all()
        files.close()
