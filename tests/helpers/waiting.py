"""Waiting for what other threads do."""

from __future__ import annotations

import threading
from collections.abc import Callable

from strideweave.runtime.event_loop import current_runtime


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread is about to do."""
    deadline = threading.Event()
    for _ in range(2000):
        if condition():
            return
        deadline.wait(0.005)
    raise AssertionError("it never happened")


def let_the_loop_turn() -> None:
    """Return once the runtime's loop has run what it was given before."""
    passed = threading.Event()
    current_runtime().post(passed.set)
    assert passed.wait(10)
