"""TensorStore: the ``zarr3`` driver with one uncompressed chunk a tile, each a file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dataset import Dataset, cached_share, drop_cache, sync_file_system
from benchmarks.memory import page_aligned
from benchmarks.method import FRESH, GIVEN, AwaitedMethod, Method
from benchmarks.peers.base import Peer
from benchmarks.task import Picks, Task


class TensorStore(Peer):
    """TensorStore with its own defaults, and no cache of its own save where a case is about one."""

    modules = ("tensorstore", "numpy")

    def warm(self, task: Task) -> list[Method]:
        return self._reading(task, cold=False)

    def cold(self, task: Task) -> list[Method]:
        return self._reading(task, cold=True)

    def write(self, task: Task) -> list[Method]:
        rows, _ = self._create(task)
        data, values = Dataset(task), page_aligned(task.tiles, task.tile_bytes)
        return [
            Method(
                "write, fsync a tile",
                "",
                lambda picks: rows[picks].write(values).result(),
                lambda picks: data.changed(picks, values),
                found=lambda _, picks: rows[picks].read().result(),
            )
        ]

    def clients(self, task: Task) -> list[Method]:
        rows, _ = self._create(task)

        async def run(picks: Picks) -> Any:
            parts = np.split(picks, task.clients)
            return await asyncio.gather(*(_awaited(rows[part].read()) for part in parts))

        return [
            AwaitedMethod(
                "a read a client",
                FRESH,
                run,
                found=lambda results, _: np.concatenate(results),
                watched=True,
            )
        ]

    def call(self, task: Task) -> list[Method]:
        rows = self._create_in_memory(task)
        return [
            AwaitedMethod("await read, in memory", FRESH, lambda picks: _awaited(rows[int(picks[0])].read())),
            Method("read().result(), in memory", FRESH, lambda picks: rows[int(picks[0])].read().result()),
        ]

    def _reading(self, task: Task, *, cold: bool) -> list[Method]:
        import tensorstore as ts  # noqa: PLC0415  optional

        rows, folder = self._create(task)
        given = page_aligned(task.tiles, task.tile_bytes)
        target = ts.array(given)
        asked: list[Path] = []

        def prepare(picks: Picks) -> None:
            asked[:] = [folder / "c" / str(tile) / "0" for tile in picks.tolist()]
            if cold:
                drop_cache(asked)

        def into(picks: Picks) -> np.ndarray:
            target.write(rows[picks]).result()
            return given

        def share() -> float:
            return cached_share(asked)

        return [
            Method(
                "read", FRESH, lambda picks: rows[picks].read().result(), prepare, cached=share, brief=True
            ),
            Method("copied to an array", GIVEN, into, prepare, cached=share),
        ]

    def _create(self, task: Task) -> tuple[Any, Path]:
        folder = self.scratch(task, "store.tensorstore")
        rows = _open(task, {"driver": "file", "path": f"{folder}/"}, {"cache_pool": {"total_bytes_limit": 0}})
        _fill(task, rows)
        sync_file_system(folder)
        return rows, folder

    def _create_in_memory(self, task: Task) -> Any:
        context = {"cache_pool": {"total_bytes_limit": 1 << 28}}
        rows = _open(task, {"driver": "memory", "path": "tiles/"}, context)
        _fill(task, rows)
        rows.read().result()  # into its cache
        return rows


def _open(task: Task, place: dict[str, Any], context: dict[str, Any]) -> Any:
    import tensorstore as ts  # noqa: PLC0415  optional

    specification = {
        "driver": "zarr3",
        "kvstore": place,
        "context": context,
        "recheck_cached_data": False,
        "metadata": {
            "shape": [task.count, task.values],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, task.values]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "data_type": "float32",
        },
    }
    return ts.open(specification, create=True, delete_existing=True).result()


def _fill(task: Task, rows: Any) -> None:
    data, step = Dataset(task), max(1, (16 << 20) // task.tile_bytes)
    for first in range(0, task.count, step):
        tiles = range(first, min(first + step, task.count))
        rows[first : tiles.stop].write(data.read(tiles)).result()


async def _awaited(future: Any) -> Any:
    return await future
