"""The open files of this process."""

from __future__ import annotations

import asyncio
import os
import sys

from strideweave.io.engine import default_engine
from strideweave.io.spill import SpillDirectory
from strideweave.runtime.event_loop import current_runtime
from strideweave.runtime.wake_ups import wake_ups_of
from waiting import let_the_loop_turn

__all__ = ["descriptors", "open_what_stays"]


def descriptors() -> int:
    """How many files are open, where the system tells, and 0 elsewhere."""
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0  # noqa: PTH208 - names suffice


def open_what_stays() -> None:
    """Open what the first use opens for the process's life, which is not to be counted as a test's own."""
    default_engine()
    # Its directory stays open, with the lock on it.
    current_runtime().service(SpillDirectory).create().remove()
    current_runtime().post(_watch_a_counter)
    let_the_loop_turn()
    asyncio.run(_sleep_in_a_loop())


async def _sleep_in_a_loop() -> None:
    _watch_a_counter()


def _watch_a_counter() -> None:
    wake_ups_of(asyncio.get_running_loop())  # the last loop of a thread keeps its own
