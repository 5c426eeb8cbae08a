"""Rows of an array in memory: indexing, ``take``, and plain copies on one and two threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.dataset import Dataset
from benchmarks.memory import page_aligned
from benchmarks.method import FRESH, GIVEN, Method
from benchmarks.peers.base import Peer
from benchmarks.task import Picks, Task


class NumPy(Peer):
    """NumPy alone."""

    modules = ("numpy",)

    def hot(self, task: Task) -> list[Method]:
        source = Dataset(task).load(page_aligned(task.count, task.tile_bytes))
        given = page_aligned(task.tiles, task.tile_bytes)
        pool = self.stack.enter_context(ThreadPoolExecutor(2))

        def copy(picks: Picks, into: Any) -> Any:
            for row, tile in zip(into, picks.tolist(), strict=True):
                np.copyto(row, source[tile])
            return into

        def copy_on_two(picks: Picks, into: Any) -> Any:
            half = len(picks) // 2
            other = pool.submit(copy, picks[half:], into[half:])
            copy(picks[:half], into[:half])
            other.result()
            return into

        return [
            Method("a[idx]", FRESH, lambda picks: source[picks], brief=True),
            Method(
                "np.take(out=, clip)",
                GIVEN,
                lambda picks: np.take(source, picks, 0, out=given, mode="clip"),
                brief=True,
            ),
            Method("copy loop", GIVEN, lambda picks: copy(picks, given)),
            Method("copy, 2 threads", GIVEN, lambda picks: copy_on_two(picks, given), brief=True),
            Method("copy, 2 threads", FRESH, lambda picks: copy_on_two(picks, np.empty_like(given))),
        ]

    def save(self, task: Task) -> list[Method]:
        return [self.saving(task, "np.save, fsync", "saved.npy", np.save, np.load)]

    def call(self, task: Task) -> list[Method]:
        source = Dataset(task).load()
        given = np.empty((1, task.values), np.float32)
        return [
            Method("a[idx]", FRESH, lambda picks: source[picks]),
            Method(
                "np.take(out=, clip)", GIVEN, lambda picks: np.take(source, picks, 0, out=given, mode="clip")
            ),
        ]
