"""StrideWeave: tiled carriers over files and block devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import strideweave as sw
from benchmarks.dataset import Dataset, cached_share, drop_cache
from benchmarks.method import FRESH, GIVEN, AwaitedMethod, Method
from benchmarks.peers import (
    TWO_UNDER_WAY,
    strideweave_calls,
    strideweave_files,
    strideweave_grid,
    strideweave_writes,
)
from benchmarks.peers.base import Peer
from benchmarks.peers.strideweave_tiles import Tiled, fill_device, over_file
from benchmarks.task import Picks, Task
from strideweave.io.engine import default_engine, statistics


class StrideWeave(Peer):
    """This package, with the I/O engine that it chooses."""

    modules = ("strideweave", "numpy", "anyio", "aiofiles", "ml_dtypes")

    def facts(self) -> dict[str, str]:
        default_engine()
        chosen = statistics()
        return super().facts() | {"engine": chosen.engine, "reason": chosen.reason}

    def hot(self, task: Task) -> list[Method]:
        tiled = over_file(self.stack, task)
        tiled.carrier.promote(tiled.carrier.select({}))
        return [
            tiled.projecting("project", FRESH, brief=True),
            tiled.projecting("project", GIVEN, brief=True),
        ]

    def warm(self, task: Task) -> list[Method]:
        methods = self._from_file(task, cold=False)
        if hasattr(sw, "BlockDevice"):
            methods += self._from_device(task, "BlockDevice(direct=False)", direct=False)
        return methods

    def cold(self, task: Task) -> list[Method]:
        methods = self._from_file(task, cold=True)
        if hasattr(sw, "BlockDevice"):
            methods += self._from_device(task, "BlockDevice", direct=True)
        return methods

    def _from_file(self, task: Task, *, cold: bool) -> list[Method]:
        path = Dataset(task).path

        def drop(_: Any = None) -> None:
            if cold:
                drop_cache([path])

        streaming = over_file(self.stack, task, sw.Streaming())
        promoting = over_file(self.stack, task)
        share = lambda: cached_share([path])  # noqa: E731
        return [
            streaming.projecting("FileBacked, streaming", GIVEN, drop, share, brief=True),
            streaming.projecting("FileBacked, streaming", FRESH, drop, share),
            promoting.projecting("FileBacked, promoting", GIVEN, promoting.evicting(drop), share),
            promoting.projecting("FileBacked, promoting", FRESH, promoting.evicting(drop), share),
        ]

    def _from_device(self, task: Task, name: str, *, direct: bool) -> list[Method]:
        methods = []
        for kind, policy in (("streaming", sw.Streaming()), ("promoting", None)):
            path = self.scratch(task, f"{kind}.device")
            carrier = fill_device(self.stack, task, path, direct=direct)
            tiled = Tiled(self.stack, task, carrier, policy)
            share, drop = _share_of(path), _drop_of(path) if direct else None
            prepare = tiled.evicting(drop) if policy is None else drop
            methods += [
                tiled.projecting(f"{name}, {kind}", GIVEN, prepare, share, brief=kind == "streaming"),
                tiled.projecting(f"{name}, {kind}", FRESH, prepare, share),
            ]
            if (
                direct and policy is not None and task.rounds > 1
            ):  # a turn of one request has nothing to overlap
                methods.append(tiled.overlapping(f"{name}, {kind}, {TWO_UNDER_WAY}", prepare, share))
        return methods

    def write(self, task: Task) -> list[Method]:
        return strideweave_writes.methods(self, task)

    def clients(self, task: Task) -> list[Method]:
        tiled = over_file(self.stack, task, sw.Streaming())
        each = task.tiles // task.clients
        carrier, tensor = tiled.carrier, tiled.tensor
        places = [tiled.destination(each) for _ in range(task.clients)]
        whole = tiled.destination(task.tiles)

        async def client(picks: Picks, into: sw.CPU | None) -> sw.Tensor:
            return await carrier.project(tensor, carrier.select({0: picks}), into)

        def together(places: list[Any]) -> Callable[[Picks], Any]:
            async def run(picks: Picks) -> list[sw.Tensor]:
                parts = np.split(picks, task.clients)
                return await asyncio.gather(
                    *(client(part, into) for part, into in zip(parts, places, strict=True))
                )

            return run

        def joined(results: list[sw.Tensor], _: Picks) -> Any:
            return np.concatenate([result.numpy(copy=True) for result in results])

        def values(result: sw.Tensor, _: Picks) -> Any:
            return result.numpy(copy=True)

        fresh = together([None] * task.clients)
        return [
            AwaitedMethod("a project a client", GIVEN, together(places), found=joined, watched=True),
            AwaitedMethod("a project a client", FRESH, fresh, found=joined, watched=True),
            AwaitedMethod(
                "one project", GIVEN, lambda picks: client(picks, whole), found=values, watched=True
            ),
        ]

    def call(self, task: Task) -> list[Method]:
        return strideweave_calls.methods(self, task)

    def grid(self, task: Task) -> list[Method]:
        return strideweave_grid.methods(self, task)

    def open_warm(self, task: Task) -> list[Method]:
        return strideweave_files.open_methods(self, task, cold=False)

    def open_cold(self, task: Task) -> list[Method]:
        return strideweave_files.open_methods(self, task, cold=True)

    def save(self, task: Task) -> list[Method]:
        return strideweave_files.save_methods(self, task)

    def first(self, task: Task) -> list[Method]:
        return strideweave_files.first_methods(task)

    def memory(self, task: Task) -> list[Method]:
        return strideweave_grid.memory_methods(self, task)


def _drop_of(path: Path) -> Callable[[Any], None]:
    """Direct reads that are not aligned go through the page cache."""
    return lambda _: drop_cache([path])


def _share_of(path: Path) -> Callable[[], float]:
    return lambda: cached_share([path])
