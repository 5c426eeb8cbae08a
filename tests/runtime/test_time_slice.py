"""Workers ask for long turns on their processors, and for nothing else."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from strideweave.runtime import time_slice
from strideweave.runtime.system_call import system_call
from strideweave.runtime.time_slice import LONG_TURN_NANOSECONDS, ask_for_long_turns
from strideweave.runtime.workers import WorkerPool

_GET_ATTRIBUTES = {"x86_64": 315, "aarch64": 275}
_LINUX = tuple(int(part) for part in platform.release().split(".")[:2]) if sys.platform == "linux" else (0, 0)

knows_turns = pytest.mark.skipif(
    _LINUX < (6, 12) or platform.machine() not in _GET_ATTRIBUTES,
    reason="turns have no length of their own here",
)


class Attributes(NamedTuple):
    """What the kernel says of a thread."""

    size: int
    policy: int
    flags: int
    nice: int
    priority: int
    runtime: int
    deadline: int
    period: int


def attributes() -> Attributes:
    """Of the calling thread."""
    found = ctypes.create_string_buffer(48)
    system_call(_GET_ATTRIBUTES[platform.machine()], 0, found, 48, 0)
    return Attributes(*struct.unpack("=IIQiIQQQ", found.raw))


@knows_turns
def test_a_worker_has_long_turns_and_its_caller_has_those_it_had() -> None:
    before = attributes()
    pool = WorkerPool()
    try:
        worker = pool.submit(attributes).result()
    finally:
        pool.shutdown()
    assert worker.runtime == LONG_TURN_NANOSECONDS
    assert worker._replace(runtime=0) == before._replace(runtime=0)
    assert attributes() == before


@knows_turns
@pytest.mark.parametrize("policy", ["SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE"])
@pytest.mark.parametrize("nice", [0, 7])
def test_class_and_nice_value_stay(policy: str, nice: int) -> None:
    def ask() -> tuple[Attributes, Attributes]:
        os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        before = attributes()
        assert ask_for_long_turns()
        return before, attributes()

    with ThreadPoolExecutor(1) as own:
        before, after = own.submit(ask).result()
    assert before.nice == nice
    assert before.policy == getattr(os, policy)
    assert after._replace(runtime=0) == before._replace(runtime=0)


def test_a_machine_without_the_call_has_workers_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slice, "_SET_ATTRIBUTES", {})
    assert not ask_for_long_turns()
    pool = WorkerPool()
    assert pool.submit(lambda: 3).result() == 3
    pool.shutdown()


@pytest.mark.skipif(platform.machine() not in _GET_ATTRIBUTES, reason="no number of the call is known here")
@pytest.mark.skipif(sys.platform != "linux", reason="Linux has the call")
def test_a_refused_call_is_told_and_leaves_the_worker_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = 100_000  # the kernel has no call of this number, and says so as a filter does: with -1
    monkeypatch.setattr(time_slice, "_SET_ATTRIBUTES", {platform.machine(): unknown})
    assert not ask_for_long_turns()
    pool = WorkerPool()
    assert pool.submit(lambda: 3).result() == 3
    pool.shutdown()
