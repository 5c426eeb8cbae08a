"""Zarr 3: a store with one uncompressed chunk a tile, each a file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dataset import Dataset, cached_share, drop_cache, sync_file_system
from benchmarks.method import FRESH, AwaitedMethod, Method
from benchmarks.peers.base import Peer
from benchmarks.task import Picks, Task


class Zarr(Peer):
    """zarr-python as it comes."""

    modules = ("zarr", "numpy")

    def warm(self, task: Task) -> list[Method]:
        return self._reading(task, cold=False)

    def cold(self, task: Task) -> list[Method]:
        return self._reading(task, cold=True)

    def write(self, task: Task) -> list[Method]:
        rows, folder = self._create(task)
        data = Dataset(task)
        values = np.empty((task.tiles, task.values), np.float32)

        def run(picks: Picks) -> None:
            for tile, row in zip(picks.tolist(), values, strict=True):
                rows[tile] = row
            sync_file_system(folder)

        return [
            Method(
                "z[i] = row, syncfs",
                "",
                run,
                lambda picks: data.changed(picks, values),
                found=lambda _, picks: rows[:][picks],
            )
        ]

    def save(self, task: Task) -> list[Method]:
        import zarr  # noqa: PLC0415  optional

        def save(folder: Path, values: Any) -> None:
            _empty_array(folder, values.shape)[:] = values

        def load(folder: Path) -> Any:
            return zarr.open_array(store=str(folder), mode="r")[:]

        name = "create_array, z[:] = values, fsync of each file"
        return [self.saving(task, name, "saved.zarr", save, load)]

    def _reading(self, task: Task, *, cold: bool) -> list[Method]:
        import zarr.api.asynchronous  # noqa: PLC0415  optional

        rows, folder = self._create(task)
        asked: list[Path] = []

        def prepare(picks: Picks) -> None:
            asked[:] = [folder / "c" / str(tile) / "0" for tile in picks.tolist()]
            if cold:
                drop_cache(asked)

        def one_by_one(picks: Picks) -> Any:
            return np.stack([rows[tile] for tile in picks.tolist()])

        opened = asyncio.run(zarr.api.asynchronous.open_array(store=str(folder), mode="r"))

        async def together(picks: Picks) -> Any:
            return np.stack(await asyncio.gather(*(opened.getitem((tile,)) for tile in picks.tolist())))

        def share() -> float:
            return cached_share(asked)

        # One request with an index array, oindex[idx], takes ten times as long as either.
        return [
            Method("z[i], stacked", FRESH, one_by_one, prepare, cached=share),
            AwaitedMethod("awaited together, stacked", FRESH, together, prepare, cached=share),
        ]

    def _create(self, task: Task) -> tuple[Any, Path]:
        data, folder = Dataset(task), self.scratch(task, "store.zarr")
        rows = _empty_array(folder, (task.count, task.values))
        step = max(1, (16 << 20) // task.tile_bytes)
        for first in range(0, task.count, step):
            tiles = range(first, min(first + step, task.count))
            rows[first : tiles.stop] = data.read(tiles)
        sync_file_system(folder)
        return rows, folder


def _empty_array(folder: Path, shape: tuple[int, int]) -> Any:
    """An array with one uncompressed chunk a row."""
    import zarr  # noqa: PLC0415  optional

    return zarr.create_array(
        store=str(folder),
        shape=shape,
        chunks=(1, shape[1]),
        dtype="float32",
        compressors=None,
        filters=None,
    )
