"""Worker threads as a caller would use them from a loop, without a library for tensors."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from benchmarks.dataset import Dataset
from benchmarks.memory import page_aligned
from benchmarks.method import FRESH, GIVEN, AwaitedMethod, Method
from benchmarks.peers.base import Peer
from benchmarks.peers.system_peer import read_tiles
from benchmarks.task import Picks, Task


class AnyIO(Peer):
    """``anyio.to_thread`` and asyncio's own executor."""

    modules = ("anyio", "numpy")

    def call(self, task: Task) -> list[Method]:
        source = Dataset(task).load()
        pool = self.stack.enter_context(ThreadPoolExecutor(1))

        async def hop(picks: Picks) -> np.ndarray:
            return await anyio.to_thread.run_sync(source.__getitem__, picks)

        async def executor(picks: Picks) -> np.ndarray:
            return await asyncio.get_running_loop().run_in_executor(pool, source.__getitem__, picks)

        return [
            AwaitedMethod("anyio.to_thread a[idx]", FRESH, hop),
            AwaitedMethod("run_in_executor a[idx]", FRESH, executor),
        ]

    def clients(self, task: Task) -> list[Method]:
        data = Dataset(task)
        number = os.open(data.path, os.O_RDONLY)
        self.stack.callback(os.close, number)
        given = page_aligned(task.tiles, task.tile_bytes)
        each = task.tiles // task.clients

        def gather(threads: int) -> Any:
            async def run(picks: Picks) -> np.ndarray:
                limit = anyio.CapacityLimiter(threads)
                async with anyio.create_task_group() as group:
                    for first in range(0, len(picks), each):
                        group.start_soon(
                            read_one, picks[first : first + each], given[first : first + each], limit
                        )
                return given

            return run

        async def read_one(picks: Picks, into: np.ndarray, limit: anyio.CapacityLimiter) -> None:
            await anyio.to_thread.run_sync(read_tiles, number, data, picks, into, limiter=limit)

        async def idle(_: Picks) -> None:
            await asyncio.sleep(0.05)

        processors = os.cpu_count() or 1
        return [
            AwaitedMethod(f"to_thread preadv, limiter {processors}", GIVEN, gather(processors), watched=True),
            AwaitedMethod("to_thread preadv, limiter 40", GIVEN, gather(40), watched=True),
            AwaitedMethod("nothing but a sleep of 50 ms", "", idle, found=None, watched=True, reference=True),
        ]
