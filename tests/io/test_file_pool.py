"""Files known by their identity, of which a bounded number is open."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import anyio
import pytest

from strideweave.io.file_pool import ChangedFile, FilePool, KnownFile, open_known
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.task_scope import TaskScope


@pytest.fixture
def files(tmp_path):
    def make(count):
        known = []
        for number in range(count):
            path = tmp_path / f"{number}.bin"
            path.write_bytes(bytes([number % 256]) * 16)
            known.append(KnownFile.of(str(path), path.stat()))
        return known

    return make


@pytest.fixture
def few_descriptors():
    """How many files the pool may have open under a small limit of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    yield 32
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def in_loop(work, *args):
    """Run a coroutine function in the runtime's loop, as a carrier's request is."""
    scope = TaskScope("a test of the pool")
    try:
        return scope.start(AwaitResult(), work, *args).wait(60)
    finally:
        scope.close()


def test_what_is_held_is_open_and_stays_open_afterwards(files):
    pool, known = FilePool(), files(3)

    async def work():
        async with pool.hold(known) as held:
            assert [os.pread(held[file].fd, 1, 0)[0] for file in known] == [0, 1, 2]
            assert (pool.statistics().open, pool.statistics().in_use) == (3, 3)
        async with pool.hold(known[:1]):
            pass

    in_loop(work)
    found = pool.statistics()
    assert (found.open, found.in_use, found.opened) == (3, 0, 3)
    pool.close()
    assert pool.statistics().open == 0


def test_files_used_longest_ago_are_closed_for_others(files, few_descriptors):
    pool, known = FilePool(), files(few_descriptors + 2)
    assert pool.capacity == few_descriptors

    async def work():
        async with pool.hold(known[:few_descriptors]):
            pass
        async with pool.hold(known[:1]):  # used again
            pass
        async with pool.hold(known[few_descriptors:]):
            pass
        opened = pool.statistics().opened
        async with pool.hold([known[0], known[-1]]):
            assert pool.statistics().opened == opened  # both are open still
        async with pool.hold([known[1]]):
            assert pool.statistics().opened == opened + 1

    in_loop(work)
    assert pool.statistics().open <= few_descriptors
    pool.close()


def test_who_needs_more_than_there_is_room_for_waits(files, few_descriptors):
    pool, known = FilePool(), files(2 * few_descriptors)
    order = []

    async def hold(name, wanted, entered, leave):
        async with pool.hold(wanted):
            order.append(name)
            entered.set()
            await leave.wait()

    async def work():
        first, second, leave, go = anyio.Event(), anyio.Event(), anyio.Event(), anyio.Event()
        go.set()
        async with anyio.create_task_group() as group:
            group.start_soon(hold, "first", known[:few_descriptors], first, leave)
            await first.wait()
            group.start_soon(hold, "second", known[few_descriptors:], second, go)
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            assert order == ["first"]
            assert pool.statistics().in_use == few_descriptors
            leave.set()
        assert order == ["first", "second"]

    in_loop(work)
    assert pool.statistics().in_use == 0
    assert pool.statistics().open <= few_descriptors
    pool.close()


def test_a_file_that_cannot_be_opened_leaves_nothing_in_use(files):
    pool, known = FilePool(), files(3)
    Path(known[1].path).unlink()

    async def work():
        with pytest.raises(ChangedFile, match="disappeared"):
            async with pool.hold(known):
                pass

    in_loop(work)
    assert pool.statistics().in_use == 0
    pool.close()


def test_what_is_forgotten_is_closed(files):
    pool, known = FilePool(), files(2)

    async def work():
        async with pool.hold(known) as held:
            pool.forget(known[:1])
            assert os.pread(held[known[0]].fd, 1, 0) == b"\0"  # until the last user has done

    in_loop(work)
    assert pool.statistics().open == 1
    pool.close()


def shrink(path):
    os.truncate(path, 4)


def rewrite(path):
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(1, 1))


def replace(path):
    fresh = path.with_suffix(".new")
    fresh.write_bytes(bytes(16))
    fresh.replace(path)


def become_a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shrink, "another size"),
        (rewrite, "written to"),
        (replace, "another file"),
        (become_a_folder, "another file"),
        (Path.unlink, "disappeared"),
    ],
)
def test_another_file_is_not_opened(files, change, message):
    (known,) = files(1)
    open_known(known).close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    change(Path(known.path))
    with pytest.raises(ChangedFile, match=message):
        open_known(known)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
