"""A claim of a file: let go of once, whoever does it, and never in the name of another file."""

import os
import threading

import pytest

from strideweave.io import file_lock
from strideweave.io.file_lock import Claim


def claimed(path):
    claim = Claim(os.open(path, os.O_RDWR | os.O_CREAT))
    return claim if claim.take(str(path)) else None


def test_a_second_claim_waits_for_the_end_of_the_first(tmp_path):
    claim = claimed(tmp_path / "file")
    assert claimed(tmp_path / "file") is None
    claim.close()
    claim.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(claim.number)
    claimed(tmp_path / "file").close()


def test_a_claim_that_nobody_has_any_more_is_let_go_of(tmp_path):
    claim = claimed(tmp_path / "file")
    del claim
    claimed(tmp_path / "file").close()


def test_of_two_threads_that_close_neither_touches_the_file_that_has_the_number_next(tmp_path, monkeypatch):
    claim, unlock, unlocked = claimed(tmp_path / "file"), file_lock._unlock, []

    def unlock_while_another_closes(number, process):
        if not unlocked:
            other.start()
            other.join(0.05)  # which has to wait, or would have closed the file by now
        unlocked.append(os.fstat(number).st_ino)
        unlock(number, process)

    monkeypatch.setattr(file_lock, "_unlock", unlock_while_another_closes)
    other = threading.Thread(target=claim.close)
    inode = os.fstat(claim.number).st_ino
    claim.close()
    other.join()
    assert set(unlocked) == {inode}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(claim.number)
