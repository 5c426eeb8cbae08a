"""``numpy.memmap``."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.dataset import Dataset, cached_share, drop_cache
from benchmarks.first_tile import FirstTile
from benchmarks.memory import page_aligned
from benchmarks.method import FRESH, GIVEN, Method
from benchmarks.peers.base import Peer
from benchmarks.task import Picks, Task


class MemoryMap(Peer):
    """A file as an array."""

    modules = ("numpy",)

    def warm(self, task: Task) -> list[Method]:
        return self._reading(task, cold=False)

    def cold(self, task: Task) -> list[Method]:
        return self._reading(task, cold=True)

    def _reading(self, task: Task, *, cold: bool) -> list[Method]:
        data = Dataset(task)
        given = page_aligned(task.tiles, task.tile_bytes)
        opened: list[Any] = []

        def open_rows(_: Any = None) -> None:
            opened[:] = [np.memmap(data.path, np.float32, "r", data.offset, (task.count, task.values))]

        def prepare(_: Picks) -> None:
            if cold:
                opened.clear()
                drop_cache([data.path])
                open_rows()

        def settle(_: Any) -> None:
            if cold:  # what is mapped, by whomever, cannot be dropped
                opened.clear()

        def fresh(picks: Picks) -> np.ndarray:
            return np.asarray(opened[0][picks])

        def into(picks: Picks) -> np.ndarray:
            return np.take(opened[0], picks, 0, out=given, mode="clip")

        def share() -> float:
            return cached_share([data.path])

        self.stack.callback(opened.clear)
        if not cold:
            open_rows()
        return [
            Method("m[idx]", FRESH, fresh, prepare, settle, cached=share),
            Method("np.take(m, out=, clip)", GIVEN, into, prepare, settle, cached=share),
        ]

    def open_warm(self, task: Task) -> list[Method]:
        return self._opening(task, cold=False)

    def open_cold(self, task: Task) -> list[Method]:
        return self._opening(task, cold=True)

    def first(self, task: Task) -> list[Method]:
        return [FirstTile.contender("np.memmap, copied; knows the place", "memmap", task)]

    def _opening(self, task: Task, *, cold: bool) -> list[Method]:
        """From the path to the tiles; the place of the first one is known, no header is read."""
        data = Dataset(task)

        def run(picks: Picks) -> np.ndarray:
            rows = np.memmap(data.path, np.float32, "r", data.offset, (task.count, task.values))
            return np.asarray(rows[picks])

        return [self.opening(task, "np.memmap, m[idx]; knows the place", run, cold=cold)]

    def write(self, task: Task) -> list[Method]:
        data = Dataset(task)
        path = self.scratch(task, "memmap.bin")
        data.copy(path.name)
        rows = np.memmap(path, np.float32, "r+", shape=(task.count, task.values))
        values = page_aligned(task.tiles, task.tile_bytes)

        def run(picks: Picks) -> None:
            rows[picks] = values
            rows.flush()

        return [
            Method(
                "m[idx] = values, flush()",
                "",
                run,
                lambda picks: data.changed(picks, values),
                found=lambda _, picks: np.fromfile(path, np.float32).reshape(rows.shape)[picks],
            )
        ]
