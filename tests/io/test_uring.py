"""One io_uring: entries, completions, what happens when the kernel takes nothing or holds completions back."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from strideweave.io import uring
from strideweave.io.uring import COMPLETION, NOP, READ, SUBMISSION, WRITE, Ring, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=f"no io_uring: {why_unavailable()}")


@pytest.fixture
def ring():
    ring = Ring(8)
    yield ring
    ring.close()


def entries(count, first=0, **fields):
    made = np.zeros(count, SUBMISSION)
    made["user_data"] = np.arange(first, first + count)
    for name, value in ({"fd": -1} | fields).items():
        made[name] = value
    return made


def descriptors():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_the_records_have_the_size_that_the_kernel_gives_them():
    assert (SUBMISSION.itemsize, COMPLETION.itemsize) == (64, 16)


def test_a_batch_is_handed_over_and_answered(ring):
    ring.prepare(entries(8))
    assert (ring.queued, ring.in_flight, ring.room) == (8, 8, 0)
    assert ring.enter(8)
    found = ring.reap()
    assert sorted(found["user_data"].tolist()) == list(range(8))
    assert found["result"].tolist() == [0] * 8
    assert (ring.queued, ring.in_flight, ring.room) == (0, 0, 8)
    assert len(ring.reap()) == 0


def test_entries_and_completions_go_round_the_ends_of_their_rings(ring):
    names = []
    for turn in range(8):  # of 5: they lie across the end of both rings more than once
        ring.prepare(entries(5, 5 * turn))
        assert ring.enter(5)
        assert ring.answered == 5
        names += ring.reap()["user_data"].tolist()
        assert ring.answered == 0
    assert sorted(names) == list(range(40))


def test_places_are_used_again_and_nothing_of_the_last_entry_stays(ring, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)))
    fd = os.open(path, os.O_RDONLY)
    buffer = np.zeros(16, np.uint8)
    address = buffer.__array_interface__["data"][0]
    for turn in range(100):
        buffer[:] = 0
        ring.prepare(entries(1, turn, opcode=READ, fd=fd, offset=turn, address=address, length=16))
        ring.prepare(entries(3, 1000))
        assert ring.enter(4)
        found = {record["user_data"]: record["result"] for record in ring.reap()}
        assert found == {turn: 16, 1000: 0, 1001: 0, 1002: 0}
        assert buffer.tolist() == list(range(turn, turn + 16))
    os.close(fd)


def test_errors_come_as_negative_numbers(ring):
    ring.prepare(entries(1, opcode=WRITE, fd=-1, length=1))
    ring.enter(1)
    assert ring.reap()["result"].tolist() == [-errno.EBADF]


def test_more_entries_than_there_is_room_for_are_refused(ring):
    with pytest.raises(ValueError, match="room for 8"):
        ring.prepare(entries(9))
    assert (ring.queued, ring.in_flight) == (0, 0)


def test_no_more_are_in_flight_than_the_completion_ring_holds(ring):
    for turn in range(ring._depth // 8):
        ring.prepare(entries(8, 8 * turn))
        ring.enter()
    assert ring.room == 0
    assert len(ring.reap()) == ring._depth


def test_completions_that_the_kernel_held_back_are_asked_for(ring):
    count = 0
    for turn in range(6):  # past the depth, as if this side had not counted
        ring.in_flight = 0
        ring.prepare(entries(8, 8 * turn))
        ring.enter()
        count += 8
    assert ring.is_overflown
    ring.in_flight = count
    found = []
    while len(some := ring.reap()):
        found += some["user_data"].tolist()
    assert sorted(found) == list(range(count))
    assert ring.in_flight == 0


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.EBUSY])
def test_what_the_kernel_could_not_take_yet_stays_prepared(ring, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    ring.prepare(entries(3))
    with monkeypatch.context() as patch:
        patch.setattr(uring, "system_call", refuse)
        assert not ring.enter()
    assert (ring.queued, ring.in_flight) == (3, 3)
    assert ring.enter(3)
    assert sorted(ring.reap()["user_data"].tolist()) == [0, 1, 2]


def test_what_the_kernel_will_never_take_can_be_withdrawn(ring, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no")

    ring.prepare(entries(3, 5))
    with monkeypatch.context() as patch:
        patch.setattr(uring, "system_call", refuse)
        with pytest.raises(OSError, match="no"):
            ring.enter()
    assert ring.withdraw().tolist() == [5, 6, 7]
    assert (ring.queued, ring.in_flight, ring.room) == (0, 0, 8)
    ring.prepare(entries(1))
    assert ring.enter(1)
    assert ring.reap()["user_data"].tolist() == [0]


def test_the_event_tells_of_completions(ring):
    with pytest.raises(BlockingIOError):
        os.eventfd_read(ring.event_fd)
    ring.prepare(entries(1))
    ring.enter(1)
    ring.clear_event()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(ring.event_fd)
    ring.clear_event()  # nothing to clear is fine


def test_closing_gives_the_descriptors_back():
    before = descriptors()
    rings = [Ring(4) for _ in range(5)]
    assert len(descriptors() - before) >= 10
    rings[0].close()
    rings[0].close()
    del rings
    assert descriptors() == before


@pytest.mark.parametrize("number", [425, 426, 427], ids=["setup", "enter", "register"])
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_a_kernel_that_refuses_one_of_the_calls_is_found_out(monkeypatch, number, code):
    before = descriptors()
    real = uring.system_call

    def call(which, *arguments):
        if which == number:
            raise OSError(code, os.strerror(code))
        return real(which, *arguments)

    monkeypatch.setattr(uring, "system_call", call)
    assert errno.errorcode[code] in why_unavailable()
    assert descriptors() == before


def test_a_kernel_without_the_operations_that_move_bytes_is_found_out(monkeypatch):
    before = descriptors()
    real = uring.system_call

    def call(which, *arguments):
        result = real(which, *arguments)
        if which == 425:
            arguments[1]._obj.features &= 0b111  # those of Linux 5.5
        return result

    monkeypatch.setattr(uring, "system_call", call)
    assert "older than Linux 5.6" in why_unavailable()
    assert descriptors() == before


def test_a_lack_of_descriptors_is_found_out():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(descriptors())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, limit[1]))
        obstacle = why_unavailable()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert obstacle is None or "EMFILE" in obstacle
    assert why_unavailable() is None


@pytest.mark.parametrize(("name", "value"), [("machine", "riscv64"), ("platform", "darwin")])
def test_what_was_never_tried_is_not_used(monkeypatch, name, value):
    if name == "machine":
        monkeypatch.setattr(uring.platform, "machine", lambda: value)
    else:
        monkeypatch.setattr(uring.sys, "platform", value)
    assert value in why_unavailable()


def test_a_forked_child_leaves_the_parents_completions_alone(tmp_path: Path):
    program = """
        import os
        import numpy as np
        from strideweave.io.uring import NOP, SUBMISSION, Ring
        ring = Ring(8)
        entry = np.zeros(1, SUBMISSION)
        entry["fd"] = -1
        ring.prepare(entry)
        ring.enter(1)
        child = os.fork()
        if not child:
            ring.close()
            del ring
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(ring.reap()) == 1
        ring.prepare(entry)
        ring.enter(1)
        assert len(ring.reap()) == 1
        print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_the_operation_codes_are_those_of_the_kernel():
    assert (NOP, READ, WRITE) == (0, 22, 23)
