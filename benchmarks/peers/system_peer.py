"""The system's own calls: positioned reads and writes on a few threads, through the page cache or past it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.dataset import Dataset, cached_share, drop_cache
from benchmarks.memory import page_aligned
from benchmarks.method import FRESH, GIVEN, Method
from benchmarks.peers.base import Peer
from benchmarks.task import Picks, Task

DIRECT = getattr(os, "O_DIRECT", 0)


class System(Peer):
    """``os.preadv``, ``os.pwritev`` and ``os.fdatasync``."""

    modules = ("numpy",)

    def warm(self, task: Task) -> list[Method]:
        data, given = Dataset(task), page_aligned(task.tiles, task.tile_bytes)
        number = self._open(data.path, os.O_RDONLY)

        def share() -> float:
            return cached_share([data.path])

        def make(threads: int, fresh: bool) -> Method:
            run = self._split(threads, lambda picks, into: read_tiles(number, data, picks, into))
            target = (lambda: np.empty_like(given)) if fresh else (lambda: given)
            return Method(
                f"preadv, {threads} threads" if threads > 1 else "preadv",
                FRESH if fresh else GIVEN,
                lambda picks: run(picks, target()),
                cached=share,
                brief=not fresh,
            )

        return [make(threads, fresh=False) for threads in (1, 2, 4)] + [
            make(threads, fresh=True) for threads in (1, 4)
        ]

    def cold(self, task: Task) -> list[Method]:
        data, given = Dataset(task), page_aligned(task.tiles, task.tile_bytes)
        direct, cached = self._open(data.path, os.O_RDONLY | DIRECT), self._open(data.path, os.O_RDONLY)

        def make(threads: int, number: int, name: str) -> Method:
            run = self._split(threads, lambda picks, into: read_tiles(number, data, picks, into))
            return Method(
                f"preadv{name}, {threads} threads" if threads > 1 else f"preadv{name}",
                GIVEN,
                lambda picks: run(picks, given),
                lambda _: drop_cache([data.path]),
                cached=lambda: cached_share([data.path]),
                brief=number == direct and threads == 16,
            )

        past = [make(threads, direct, " O_DIRECT") for threads in (1, 4, 16)]
        return [*past, make(4, cached, " buffered")]

    def write(self, task: Task) -> list[Method]:
        data, values = Dataset(task), page_aligned(task.tiles, task.tile_bytes)
        path = self.scratch(task, "system.bin")
        data.copy(path.name)

        def make(threads: int, flags: int, name: str) -> Method:
            number = self._open(path, os.O_RDWR | flags)
            write = self._split(threads, lambda picks, rows: write_tiles(number, picks, rows))

            def run(picks: Picks) -> None:
                write(picks, values)
                os.fdatasync(number)

            return Method(
                f"pwritev {name}, {threads} threads" if threads > 1 else f"pwritev {name}",
                "",
                run,
                lambda picks: data.changed(picks, values),
                found=lambda _, picks: np.fromfile(path, np.float32).reshape(-1, task.values)[picks],
            )

        return [
            make(1, 0, "buffered + fdatasync"),
            make(1, DIRECT, "O_DIRECT + fdatasync"),
            make(4, DIRECT, "O_DIRECT + fdatasync"),
        ]

    def call(self, task: Task) -> list[Method]:
        data, given = Dataset(task), page_aligned(1, task.tile_bytes)
        number = self._open(data.path, os.O_RDONLY)
        return [Method("preadv, warm", GIVEN, lambda picks: read_tiles(number, data, picks, given))]

    def _open(self, path: Any, flags: int) -> int:
        number = os.open(path, flags)
        self.stack.callback(os.close, number)
        return number

    def _split(self, threads: int, work: Callable[[Picks, Any], Any]) -> Callable[[Picks, Any], Any]:
        """Have as many threads do equal shares of a request."""
        if threads == 1:
            return lambda picks, rows: (work(picks, rows), rows)[1]
        pool = self.stack.enter_context(ThreadPoolExecutor(threads))

        def run(picks: Picks, rows: Any) -> Any:
            shares = zip(np.array_split(picks, threads), np.array_split(rows, threads), strict=True)
            for future in [pool.submit(work, *share) for share in shares]:
                future.result()
            return rows

        return run


def read_tiles(number: int, data: Dataset, picks: Picks, into: np.ndarray) -> np.ndarray:
    """Read tiles one by one."""
    for row, tile in zip(into, picks.tolist(), strict=True):
        wanted, place, done = row.nbytes, data.place(tile), 0
        while done < wanted:
            got = os.preadv(number, [row.view(np.uint8)[done:]] if done else [row], place + done)
            if got == 0:
                raise EOFError(f"tile {tile} is shorter than {wanted} bytes")
            done += got
    return into


def write_tiles(number: int, picks: Picks, rows: np.ndarray) -> None:
    """Write tiles one by one."""
    for row, tile in zip(rows, picks.tolist(), strict=True):
        done = 0
        while done < row.nbytes:
            done += os.pwritev(
                number, [row.view(np.uint8)[done:]] if done else [row], tile * row.nbytes + done
            )
