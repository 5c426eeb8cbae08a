"""The runtime's short lock is for a few plain statements: nothing waits under it, and no finalizer takes it."""

import threading

import numpy as np
import pytest

from strideweave import CPU, Evictable, FileBacked, Generic, Tensor, TiledEvictable, row_major
from strideweave.io.spill import SpillDirectory
from strideweave.runtime.locks import short_lock

VALUES = np.arange(24, dtype=np.float32)


def in_another_thread(function, seconds=10):
    """Whether the call ends in time in a thread that holds nothing."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@pytest.mark.parametrize("kind", ["evictable", "tiled"])
def test_a_composite_dies_while_another_thread_holds_the_lock(kind):
    """A finalizer runs in any thread, such as one that the holder of the lock is waiting for."""
    primary, secondary = CPU(0).new_like(VALUES), FileBacked()
    holder = [
        Evictable(primary, secondary)
        if kind == "evictable"
        else TiledEvictable(primary, secondary, (4,), (6,))
    ]
    with short_lock:
        assert in_another_thread(holder.clear)
    assert not primary.is_owned()
    assert not secondary.is_owned()


@pytest.fixture
def expect_free_lock(monkeypatch):
    """Fail where storage is made while anybody holds the short lock."""
    made = []

    def guard(owner, name, bind=lambda function: function):
        real = getattr(owner, name)

        def guarded(*arguments, **options):
            def take():
                with short_lock:
                    made.append(name)

            assert in_another_thread(take), f"{name} was called under the short lock"
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, bind(guarded))

    guard(SpillDirectory, "create")
    for kind in (CPU, Generic):
        guard(kind, "_make_slots", staticmethod)
    return made


@pytest.mark.parametrize("primary", [CPU(0), Generic([])], ids=["CPU", "Generic"])
@pytest.mark.parametrize(
    "secondary", [CPU(0), Generic([]), FileBacked()], ids=["CPU", "Generic", "FileBacked"]
)
@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("resident", [True, False])
def test_storage_is_made_outside_the_lock(expect_free_lock, primary, secondary, writable, resident):
    """Making it may start the runtime, take other locks or run code of others."""
    if resident:
        fast, slow = primary.new_like(VALUES), secondary.allocate_like(0)
    else:
        fast, slow = primary.allocate_like(0), secondary.new_like(VALUES, mutable=writable)
    carrier = TiledEvictable(fast, slow, (4,), (6,))
    tensor = Tensor(carrier, 0, row_major(24))
    del expect_free_lock[:]
    carrier.promote(carrier.select({}))
    carrier[0] = 5.0
    carrier.evict(carrier.select({}))
    carrier.promote(carrier.select({}))
    for destination in (None, primary.allocate_like(0)):
        assert carrier.project(tensor, carrier.select({}), destination).wait().tolist()[:2] == [5.0, 1.0]
    assert expect_free_lock
    carrier.release()


def test_an_empty_file_carrier_makes_one_file_however_many_threads_ask():
    carrier = FileBacked()
    go = threading.Barrier(8)
    files = []

    def ask():
        go.wait()
        files.append(carrier._file()[0])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, files))) == 1
    assert not files[0].is_closed()
    carrier.release()
    assert files[0].is_closed()
