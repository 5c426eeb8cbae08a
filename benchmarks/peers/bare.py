"""The least that a request can cost: a task in a task group of the runtime's loop, and nothing else.

The caller posts with ``call_soon_threadsafe``, the loop calls ``TaskGroup.start_soon``, and the task wakes the
caller: a waiting thread by releasing its lock, an awaiting task by setting an ``anyio.Event`` in its own loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

import anyio
from anyio.lowlevel import current_token

from strideweave.runtime import current_runtime

__all__ = ["Bare"]


class Bare:
    """A task group in the runtime's loop."""

    def __init__(self) -> None:
        self._runtime = current_runtime()
        self._open = threading.Event()
        self._runtime.post(self._spawn)
        self._open.wait()

    def wait(self) -> None:
        """Have an empty task run, and wait for it."""
        gate = threading.Lock()
        gate.acquire()
        self._start(_release, gate)
        gate.acquire()

    async def wait_async(self) -> None:
        """Have an empty task run, and await it."""
        event = anyio.Event()
        native: Any = current_token().native_token
        self._start(_set, native.call_soon_threadsafe, event)
        await event.wait()

    def close(self) -> None:
        """End the task group."""
        self._runtime.post(self._closing.set)

    def _spawn(self) -> None:
        self._runtime.root.start_soon(self._host)

    async def _host(self) -> None:
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as group:
            self._start = partial(loop.call_soon_threadsafe, group.start_soon, context=copy_context())
            self._closing = anyio.Event()
            self._open.set()
            await self._closing.wait()


async def _release(gate: threading.Lock) -> None:
    gate.release()


async def _set(call_soon: Callable[[Callable[[], None]], object], event: anyio.Event) -> None:
    call_soon(event.set)
