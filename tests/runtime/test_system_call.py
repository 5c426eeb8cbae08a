"""System calls by their number: an answer, or the kernel's error."""

from __future__ import annotations

import errno
import os
import platform
import sys

import pytest

from strideweave.runtime import system_call as module
from strideweave.runtime.system_call import system_call


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="the numbers are of x86-64"
)
def test_the_answer_is_the_kernels() -> None:
    getpid = 39
    assert system_call(getpid) == os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has the calls")
def test_a_refusal_is_an_os_error_with_its_number() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)) as caught:
        system_call(100_000)  # no call has it
    assert caught.value.errno == errno.ENOSYS


def test_another_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SYSCALL", None)
    with pytest.raises(OSError, match=sys.platform) as caught:
        system_call(0)
    assert caught.value.errno == errno.ENOSYS
