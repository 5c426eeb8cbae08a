"""A safetensors file with one tensor a tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.dataset import Dataset, cached_share, drop_cache
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
