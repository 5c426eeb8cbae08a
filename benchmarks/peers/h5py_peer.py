"""HDF5 through h5py: one dataset, contiguous or with one chunk a tile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dataset import Dataset, cached_share, drop_cache
from benchmarks.memory import page_aligned
from benchmarks.method import GIVEN, Method
from benchmarks.peers.base import Peer
from benchmarks.task import Picks, Task


class HDF5(Peer):
    """h5py with its file locked by nobody."""

    modules = ("h5py", "numpy")

    def facts(self) -> dict[str, str]:
        import h5py  # noqa: PLC0415  optional

        return super().facts() | {"HDF5": h5py.version.hdf5_version}

    def warm(self, task: Task) -> list[Method]:
        whole, whole_path = self._create(task, "whole.h5")
        parts, parts_path = self._create(task, "parts.h5", chunks=(1, task.values))
        return [
            self._direct(task, whole, whole_path, cold=False),
            self._chunks(task, parts, parts_path),
        ]

    def cold(self, task: Task) -> list[Method]:
        whole, path = self._create(task, "whole.h5")
        return [self._direct(task, whole, path, cold=True)]

    def write(self, task: Task) -> list[Method]:
        rows, _ = self._create(task, "written.h5")
        data, values = Dataset(task), page_aligned(task.tiles, task.tile_bytes)
        number = rows.file.id.get_vfd_handle()

        def run(picks: Picks) -> None:
            for row, tile in zip(values, picks.tolist(), strict=True):
                rows.write_direct(row, dest_sel=np.s_[tile])
            rows.file.flush()
            os.fsync(number)

        def found(_: Any, picks: Picks) -> np.ndarray:
            return np.stack([rows[tile] for tile in picks.tolist()])

        return [
            Method("write_direct, fsync", "", run, lambda picks: data.changed(picks, values), found=found)
        ]

    def _create(self, task: Task, name: str, **options: Any) -> tuple[Any, Path]:
        import h5py  # noqa: PLC0415  optional

        data, path = Dataset(task), self.scratch(task, name)
        file = self.stack.enter_context(h5py.File(path, "w"))
        rows = file.create_dataset("tiles", (task.count, task.values), np.float32, **options)
        step = max(1, (4 << 20) // task.tile_bytes)
        for first in range(0, task.count, step):
            tiles = range(first, min(first + step, task.count))
            rows[first : tiles.stop] = data.read(tiles)
        file.flush()
        os.fsync(file.id.get_vfd_handle())
        return rows, path

    def _direct(self, task: Task, rows: Any, path: Path, *, cold: bool) -> Method:
        given = page_aligned(task.tiles, task.tile_bytes)

        def run(picks: Picks) -> np.ndarray:
            for row, tile in zip(given, picks.tolist(), strict=True):
                rows.read_direct(row, np.s_[tile])
            return given

        def drop(_: Picks) -> None:
            if cold:
                drop_cache([path])

        return Method("read_direct, contiguous", GIVEN, run, drop, cached=lambda: cached_share([path]))

    def _chunks(self, task: Task, rows: Any, path: Path) -> Method:
        given = page_aligned(task.tiles, task.tile_bytes)
        chunks = given.view(np.uint8)

        def run(picks: Picks) -> np.ndarray:
            for row, tile in zip(chunks, picks.tolist(), strict=True):
                rows.id.read_direct_chunk((tile, 0), out=row)
            return given

        return Method("read_direct_chunk", GIVEN, run, cached=lambda: cached_share([path]))
