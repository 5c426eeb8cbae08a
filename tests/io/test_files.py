"""OpenFile: kinds, sizes, holes, closing, removing, counting."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import in_a_forked_child
from strideweave.io import descriptors
from strideweave.io.files import FileStatistics, OpenFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.bin"
    path.write_bytes(bytes(range(100)))
    return path


def open_descriptors() -> int:
    gc.collect()  # what earlier tests dropped must not close in the middle of this one
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("kind", [str, Path])
def test_an_existing_file_opens_read_only_and_stays(path: Path, kind: type) -> None:
    file = OpenFile.open(kind(path))
    assert (file.path, file.writable, file.size()) == (str(path), False, 100)
    assert os.pread(file.fd, 3, 5) == bytes([5, 6, 7])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(file.fd, b"x", 0)
    file.close()
    assert path.read_bytes() == bytes(range(100))


def test_a_file_opened_for_writing_is_written_in_place(path: Path) -> None:
    file = OpenFile.open(path, writable=True)
    os.pwrite(file.fd, b"x", 1)
    assert path.read_bytes()[:3] == b"\x00x\x02"


@pytest.mark.parametrize("bad", [b"bytes", 3, None])
def test_a_path_of_another_type_is_refused(bad: object) -> None:
    with pytest.raises(TypeError):
        OpenFile.open(bad)  # type: ignore[arg-type]


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        OpenFile.open(tmp_path / "absent")
    assert caught.value.filename == str(tmp_path / "absent")


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    before = open_descriptors()
    for path, kind in (
        (tmp_path, "a directory"),
        (fifo, "a FIFO"),
        (Path("/dev/full"), "a character device"),
    ):
        for writable in (False, True):
            with pytest.raises(ValueError, match=f"{path}.*{kind}"):
                OpenFile.open(path, writable=writable)
    assert open_descriptors() == before


def test_a_device_opens_when_any_kind_is_asked_for() -> None:
    file = OpenFile.open("/dev/full", writable=True, any_kind=True)
    with pytest.raises(OSError, match="No space left"):
        os.pwrite(file.fd, b"x", 0)


def test_a_new_file_is_sparse_and_reads_zero(tmp_path: Path) -> None:
    size = (1 << 32) + 5
    file = OpenFile.create(tmp_path / "new", size=size)
    assert (file.size(), file.writable) == (size, True)
    assert file.occupied() < 1 << 20
    assert os.pread(file.fd, 16, size - 8) == bytes(8)
    file.remove()


def test_creating_over_an_existing_file_is_refused(path: Path) -> None:
    with pytest.raises(FileExistsError):
        OpenFile.create(path)
    assert path.read_bytes() == bytes(range(100))


def test_a_size_that_the_system_refuses_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(OSError, match=f"{1 << 62} bytes long") as caught:
        OpenFile.create(tmp_path / "huge", size=1 << 62)
    assert caught.value.filename == str(tmp_path / "huge")
    del caught
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_punching_frees_space_and_keeps_the_rest(tmp_path: Path) -> None:
    file = OpenFile.create(tmp_path / "full")
    os.pwrite(file.fd, b"\x01" * (1 << 20), 0)
    os.fsync(file.fd)
    full = file.occupied()
    assert file.punch(1 << 18, 1 << 19)
    assert file.occupied() <= full - (1 << 19)
    assert file.size() == 1 << 20
    data = os.pread(file.fd, 1 << 20, 0)
    assert data == b"\x01" * (1 << 18) + bytes(1 << 19) + b"\x01" * (1 << 18)
    assert file.statistics() == FileStatistics(bytes_punched=1 << 19)


def test_punching_an_odd_range_zeroes_only_that_range(tmp_path: Path) -> None:
    file = OpenFile.create(tmp_path / "odd")
    os.pwrite(file.fd, b"\x01" * 20000, 0)
    assert file.punch(3, 10000)
    assert os.pread(file.fd, 20000, 0) == b"\x01" * 3 + bytes(10000) + b"\x01" * 9997
    assert file.punch(5, 0)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_punching_is_not_supported_nothing_happens_and_it_is_counted(
    path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(descriptors, "_FALLOCATE", refuse)
    file = OpenFile.open(path, writable=True)
    assert not file.punch(0, 50)
    monkeypatch.setattr(descriptors, "_FALLOCATE", None)
    assert not file.punch(50, 50)
    assert file.statistics() == FileStatistics(punches_refused=2)
    assert path.read_bytes() == bytes(range(100))


def test_punching_resumes_after_a_signal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = descriptors._FALLOCATE, []

    def interrupted(*arguments: int) -> int:
        calls.append(arguments)
        if len(calls) == 1:
            ctypes.set_errno(errno.EINTR)
            return -1
        assert real is not None
        return real(*arguments)

    monkeypatch.setattr(descriptors, "_FALLOCATE", interrupted)
    assert OpenFile.open(path, writable=True).punch(0, 50)
    assert len(calls) == 2


def test_a_failing_punch_or_truncation_of_a_read_only_file_is_an_error_with_the_path(path: Path) -> None:
    file = OpenFile.open(path)
    with pytest.raises(OSError, match=r"10 bytes at offset 5") as caught:
        file.punch(5, 10)
    assert (caught.value.errno, caught.value.filename) == (errno.EBADF, str(path))
    with pytest.raises(PermissionError, match="reading only"):
        file.truncate(0)
    assert path.read_bytes() == bytes(range(100))


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1)])
def test_a_negative_range_cannot_be_punched(path: Path, offset: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} bytes at offset {offset}"):
        OpenFile.open(path, writable=True).punch(offset, length)


def test_closing_is_idempotent_and_later_use_says_so(path: Path) -> None:
    file = OpenFile.open(path, writable=True)
    number = file.fd
    file.close()
    file.close()
    assert file.is_closed()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    for use in (lambda: file.fd, file.size, lambda: file.truncate(0), lambda: file.punch(0, 1)):
        with pytest.raises(ValueError, match="is closed"):
            use()


def test_a_descriptor_in_use_stays_open_until_its_user_lets_go(path: Path) -> None:
    file = OpenFile.open(path)
    held = file.descriptor()
    file.close()
    assert os.pread(held.number, 2, 1) == b"\x01\x02"
    number = held.number
    del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_dropped_file_closes_quietly(path: Path) -> None:
    before = open_descriptors()
    for _ in range(10):
        OpenFile.open(path)
    assert open_descriptors() == before


def test_removing_deletes_once_and_tolerates_a_vanished_file(tmp_path: Path) -> None:
    file = OpenFile.create(tmp_path / "spill")
    file.remove()
    assert list(tmp_path.iterdir()) == []
    OpenFile.create(tmp_path / "spill").close()
    file.remove()
    assert (tmp_path / "spill").exists(), "a second remove must not delete a namesake"
    other = OpenFile.create(tmp_path / "other")
    (tmp_path / "other").unlink()
    other.remove()


def raises(error: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except error:
        return True
    return False


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_reads_what_its_parent_created_and_cannot_change_it(tmp_path: Path) -> None:
    file = OpenFile.create(tmp_path / "private")
    os.pwrite(file.fd, bytes(range(100)), 0)

    def child() -> bool:
        good = os.pread(file.fd, 3, 5) == bytes([5, 6, 7])
        good &= raises(PermissionError, file.require_writable)
        good &= raises(PermissionError, lambda: file.truncate(0))
        good &= not file.punch(0, 100)
        file.remove()
        return good and file.is_closed()

    assert in_a_forked_child(child)
    assert (tmp_path / "private").read_bytes() == bytes(range(100))
    file.require_writable()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_may_write_to_a_file_that_existed_before(path: Path) -> None:
    file = OpenFile.open(path, writable=True)
    assert in_a_forked_child(lambda: file.require_writable() is None and os.pwrite(file.fd, b"x", 0) == 1)
    assert path.read_bytes()[:2] == b"x\x01"


def test_counters_lose_nothing_between_threads(path: Path) -> None:
    file = OpenFile.open(path)

    def work() -> None:
        for _ in range(500):
            file.count(bytes_read=3, reads=1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.count(bytes_written=7, writes=1)
    assert file.statistics() == FileStatistics(6000, 7, 2000, 1, 0, 0)


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_is_open_for_calls_that_wait(path: Path, direct: bool) -> None:
    """With O_NONBLOCK some kernels answer a read by io_uring with EAGAIN for ever."""
    held = OpenFile.open(path, direct=direct).descriptor()
    assert all(os.get_blocking(number) for number in (held.number, held.direct) if number >= 0)


def test_durable_writes_go_past_the_cache_while_they_last(tmp_path):
    path = tmp_path / "full.bin"
    path.write_bytes(bytes(64 << 10))
    file = OpenFile.open(path, writable=True)
    held = file.descriptor()
    with file.writing_durably():
        if held.direct < 0:
            pytest.skip("this file system has no O_DIRECT")
        assert file.direct_number(held, writing=True) == held.direct
        assert file.direct_number(held, writing=False) == -1  # what is read may be in the cache
        with file.writing_durably():
            pass
        assert file.direct_number(held, writing=True) == held.direct
    assert file.direct_number(held, writing=True) == -1
    assert not file.is_direct


def test_a_file_with_holes_is_written_through_the_cache(tmp_path):
    file = OpenFile.create(tmp_path / "sparse.bin", size=1 << 20)
    with file.writing_durably():
        assert file.direct_number(file.descriptor(), writing=True) == -1


def test_where_a_file_cannot_be_opened_directly_the_cache_does(tmp_path, monkeypatch):
    path = tmp_path / "full.bin"
    path.write_bytes(bytes(64 << 10))
    file, asked = OpenFile.open(path, writable=True), []

    def refuse(flags):
        asked.append(flags)
        return "a test refuses"

    monkeypatch.setattr(file, "_open_direct", refuse)
    for _ in range(2):
        with file.writing_durably():
            assert file.direct_number(file.descriptor(), writing=True) == -1
    assert len(asked) == 1
