"""A safetensors file with one tensor a tile; and one with all tiles as a tensor, saved."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.dataset import Dataset, cached_share, drop_cache
from benchmarks.first_tile import FirstTile
from benchmarks.memory import page_aligned
from benchmarks.method import FRESH, GIVEN, Method
from benchmarks.peers.base import Peer
from benchmarks.task import Picks, Task


class SafeTensors(Peer):
    """``safe_open(...).get_tensor``."""

    modules = ("safetensors", "numpy")

    def warm(self, task: Task) -> list[Method]:
        return self._reading(task, cold=False)

    def cold(self, task: Task) -> list[Method]:
        return self._reading(task, cold=True)

    def open_warm(self, task: Task) -> list[Method]:
        return self._opening(task, cold=False)

    def open_cold(self, task: Task) -> list[Method]:
        return self._opening(task, cold=True)

    def save(self, task: Task) -> list[Method]:
        from safetensors.numpy import load_file, save_file  # noqa: PLC0415  optional

        return [
            self.saving(
                task,
                "save_file, fsync",
                "saved.safetensors",
                lambda path, values: save_file({"tiles": values}, path),
                lambda path: load_file(path)["tiles"],
            )
        ]

    def first(self, task: Task) -> list[Method]:
        return [FirstTile.contender("safe_open, get_tensor", "safetensors", task)]

    def _opening(self, task: Task, *, cold: bool) -> list[Method]:
        """From the path to the tensors; what was opened is closed after the request."""
        from safetensors import safe_open  # noqa: PLC0415  optional

        path = Dataset(task).path

        def run(picks: Picks) -> np.ndarray:
            with safe_open(path, "np") as file:
                return np.stack([file.get_tensor(str(tile)) for tile in picks.tolist()])

        return [self.opening(task, "safe_open, get_tensor, stacked", run, cold=cold)]

    def _reading(self, task: Task, *, cold: bool) -> list[Method]:
        from safetensors import safe_open  # noqa: PLC0415  optional

        data = Dataset(task)
        given = page_aligned(task.tiles, task.tile_bytes)
        opened: list[Any] = []

        def close(_: Any = None) -> None:
            while opened:
                opened.pop().__exit__(None, None, None)

        def prepare(_: Picks) -> None:
            if cold:
                close()
            if not opened:
                opened.append(safe_open(data.path, "np").__enter__())
            if cold:  # what opening it has read ahead goes, too
                drop_cache([data.path])

        def settle(_: Any) -> None:
            if cold:  # what is mapped, by whomever, cannot be dropped
                close()

        def fresh(picks: Picks) -> np.ndarray:
            return np.stack([opened[0].get_tensor(str(tile)) for tile in picks.tolist()])

        def into(picks: Picks) -> np.ndarray:
            for row, tile in zip(given, picks.tolist(), strict=True):
                row[...] = opened[0].get_tensor(str(tile))
            return given

        def share() -> float:
            return cached_share([data.path])

        self.stack.callback(close)
        return [
            Method("get_tensor, stacked", FRESH, fresh, prepare, settle, cached=share),
            Method("get_tensor", GIVEN, into, prepare, settle, cached=share),
        ]
