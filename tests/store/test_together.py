"""Several openers of one store: one writer, any number of readers, forks, and callers in event loops."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from interruptions import interrupted_everywhere
from processes import in_a_forked_child
from strideweave import TileSet, save_tiled, tiled
from strideweave.store import open_store, tile_files, verify_tiles
from strideweave.store.lock import WriterLock

HOLDER = """
import sys
from strideweave.store import open_store
tensor = open_store(sys.argv[1], "r+")
print("open", flush=True)
sys.stdin.readline()
"""

WRITER = """
import sys
import numpy as np
from strideweave import TileSet, asarray
from strideweave.store import open_store
tensor = open_store(sys.argv[1], "r+")
carrier = tensor.carrier
count, slots = carrier.grid_shape[0], carrier.tile_shape[1]
for version in range(2, 2 + int(sys.argv[2])):
    carrier.assign(asarray(np.full((count, slots), version, np.float32)), tensor, carrier.select({})).wait()
    carrier.evict(TileSet([(tile, 0) for tile in range(count)]))
    if version % 4 == 0:
        carrier.flush(durable=True)
"""


def test_a_second_writer_is_refused_and_told_who_has_it(store, opened):
    opened(store, "r+")
    with pytest.raises(OSError, match="this process has this store open for writing") as caught:
        open_store(store, "r+")
    assert caught.value.filename == str(store / "writer.lock")
    opened(store)
    opened(store)


def test_a_writer_of_another_process_is_named_until_it_is_killed(store, opened):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(OSError, match=f"process {holder.pid} has this store open for writing"):
            open_store(store, "r+")
        opened(store)
        holder.send_signal(signal.SIGKILL)
    opened(store, "r+")


def test_a_writer_lets_go_when_it_is_released_or_forgotten(store):
    for _ in range(3):
        open_store(store, "r+").carrier.release()
    for _ in range(3):
        open_store(store, "r+")
    with pytest.raises(ValueError, match="limit"):
        open_store(store, "r+", memory_limit=1)
    open_store(store, "r+").carrier.release()


def test_a_lock_file_without_a_lock_means_nothing(store):
    (store / "writer.lock").write_text("1\n")
    open_store(store, "r+").carrier.release()
    (store / "writer.lock").unlink()
    open_store(store, "r+").carrier.release()


def test_readers_beside_a_writer_see_whole_tiles_that_never_grow_older(tmp_path):
    path, count, slots = tmp_path / "store", 4, 8192
    save_tiled(tiled(np.full((count, slots), 1, np.float32), (1, slots)), path)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), "20"])
    tensor = open_store(path)
    files = tile_files.TileFiles(str(path), writable=False)
    newest = np.ones(count)
    found = []

    def read_tiles():
        while writer.poll() is None:
            for tile in range(count):
                row = files.read_blocking(tile).view(np.float32)
                found.append((row == row[0]).all() and row[0] >= newest[tile])
                newest[tile] = row[0]

    reading = threading.Thread(target=read_tiles)
    reading.start()
    projected = []
    while writer.poll() is None:
        rows = tensor.carrier.project(tensor, tensor.carrier.select({})).wait().numpy()
        projected.append((rows == rows[:, :1]).all())
        tensor.carrier.evict(TileSet([(tile, 0) for tile in range(count)]))
    reading.join()
    assert writer.wait() == 0
    assert all(found)
    assert all(projected)
    assert (tensor.numpy() == 21).all()
    assert not any(step.damaged for step in verify_tiles(path))
    files.close()
    tensor.carrier.release()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_reads_and_cannot_write(store, values, opened, write_back, tile_of):
    tensor = opened(store, "r+")
    carrier = tensor.carrier
    carrier.promote(TileSet([(0, 0)]))
    tensor[0, 0] = 50.0
    before = {file.name: file.read_bytes() for file in store.iterdir()}

    def child():
        if not np.array_equal(tile_of(tensor, (1, 1)), values[2:4, 4:8]):
            return False
        try:
            carrier.evict(TileSet([(0, 0)]))
        except PermissionError:
            return True
        return False

    assert in_a_forked_child(child)
    assert {file.name: file.read_bytes() for file in store.iterdir()} == before
    with pytest.raises(OSError, match="this process"):
        open_store(store, "r+")
    carrier.evict(TileSet([(0, 0)]))
    assert opened(store)[0, 0] == 50.0


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_is_not_told_that_the_store_is_durable(store, opened):
    """There is nothing to write, but what the parent has written is not the child's to vouch for."""
    carrier = opened(store, "r+").carrier
    assert not carrier.dirty_tiles

    def child():
        try:
            carrier.flush(durable=True)
        except PermissionError:
            return True
        return False

    assert in_a_forked_child(child)
    carrier.flush(durable=True)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_does_not_hold_the_lock_of_its_parent(store):
    tensor = open_store(store, "r+")
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(OSError, match="this process"):
        open_store(store, "r+")
    tensor.carrier.release()
    open_store(store, "r+").carrier.release()  # while the child lives
    os.write(go[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    for end in (*ready, *go):
        os.close(end)


FORKER = """
import os, sys
from strideweave.store import open_store
tensor = open_store(sys.argv[1], "r+")
child = os.fork()
if child == 0:
    print("open", flush=True)
    os.close(1)
    sys.stdin.read()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_the_lock_ends_with_a_killed_process_whose_child_lives_on(store, opened):
    forker = subprocess.Popen(
        [sys.executable, "-c", FORKER, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with forker:
        assert forker.stdout is not None
        assert forker.stdout.readline() == "open\n"
        with pytest.raises(OSError, match=f"process {forker.pid} "):
            open_store(store, "r+")
        forker.send_signal(signal.SIGKILL)
        forker.wait()
        opened(store, "r+")  # the child still waits for the end of its input


@pytest.mark.anyio
async def test_a_store_serves_callers_in_any_loop(store, values, opened):
    tensor = opened(store, "r+")
    carrier = tensor.carrier
    first = await carrier.project(tensor, carrier.select({0: [1], 1: [0]}))
    assert np.array_equal(first.numpy(), values[2:4, 0:4])
    await carrier.assign(first, tensor, carrier.select({0: [2], 1: [0]}))
    await carrier.evict_async(TileSet([(2, 0), (1, 0)]))
    values[4:6, 0:4] = values[2:4, 0:4]
    assert np.array_equal(opened(store).numpy(), values)


def test_a_store_whose_opening_was_interrupted_can_be_opened_again(store, no_collector):
    made = []

    def begin():
        made.clear()
        return lambda: made.append(open_store(store, "r+"))

    for _ in interrupted_everywhere(begin, every=41):
        for tensor in made:
            tensor.carrier.release()
        made.clear()
        open_store(store, "r+").carrier.release()
    made[0].carrier.release()


def test_wherever_taking_or_leaving_the_right_to_write_is_interrupted_it_can_be_taken_again(
    tmp_path, no_collector
):
    path = str(tmp_path / "lock")

    def begin():
        return lambda: WriterLock(path).close()

    for _ in interrupted_everywhere(begin):
        WriterLock(path).close()


def test_a_store_whose_release_was_interrupted_can_be_opened_again(store, no_collector):
    opened = []

    def begin():
        opened.append(open_store(store, "r+").carrier)
        return opened[-1].release

    for place in interrupted_everywhere(begin):
        opened[-1].release()
        assert opened[-1].secondary.is_released(), place
        open_store(store, "r+").carrier.release()
