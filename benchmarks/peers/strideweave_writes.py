"""Evictions of dirty tiles as contenders."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import strideweave as sw
from benchmarks.dataset import Dataset, sync_file_system
from benchmarks.method import Method
from benchmarks.peers.base import Peer
from benchmarks.peers.strideweave_tiles import Tiled, fill_device
from benchmarks.task import Picks, Task

__all__ = ["Eviction", "methods"]


@dataclass(slots=True)
class Eviction(Method):
    """An eviction of tiles that ``prepare`` makes dirty.

    Attributes:
        emptied: called between ``prepare`` and ``run`` of the verification; makes the tiles zero on the disk.
    """

    emptied: Callable[[Picks], None] = lambda _: None

    def once(self, picks: Picks) -> Any:
        """The request, untimed, above a disk that has nothing of it."""
        self.emptied(picks)
        return self.run(picks)


def methods(peer: Peer, task: Task) -> list[Method]:
    """Eviction to a file and to a block device, with and without making it durable."""
    path = peer.scratch(task, "strideweave.bin")
    Dataset(task).copy(path.name)
    file = sw.FileBacked.open(path, dtype=sw.DType.Float32, mutable=True)
    made = _evictions(peer, task, "FileBacked", path, file)
    if hasattr(sw, "BlockDevice"):
        path = peer.scratch(task, "written.device")
        made += _evictions(peer, task, "BlockDevice", path, fill_device(peer.stack, task, path, direct=True))
    return made


def _evictions(peer: Peer, task: Task, name: str, path: Path, secondary: sw.Carrier) -> list[Method]:
    tiled = Tiled(peer.stack, task, secondary)
    carrier, data = tiled.carrier, Dataset(task)
    number = os.open(path, os.O_RDWR)
    peer.stack.callback(os.close, number)

    def prepare(picks: Picks) -> None:
        carrier.promote(tiled.select(picks))
        for tile, value in zip(picks.tolist(), data.new_values(picks).tolist(), strict=True):
            carrier[tile * task.values] = value

    def empty(picks: Picks) -> None:
        for tile in picks.tolist():  # what is found is then what the eviction wrote, all of it
            os.pwrite(number, bytes(task.tile_bytes), tile * task.tile_bytes)
        os.fdatasync(number)

    def evict(picks: Picks) -> None:
        carrier.evict(tiled.select(picks))

    def evict_durably(picks: Picks) -> None:
        carrier.evict(tiled.select(picks), durable=True)

    def found(_: Any, picks: Picks) -> Any:
        return np.stack([_read(number, task, tile) for tile in picks.tolist()])

    def flush(_: Any) -> None:
        sync_file_system(path.parent)  # so that the next contender does not pay for this one

    return [
        Eviction(f"evict to {name}, durable", "", evict_durably, prepare, found=found, emptied=empty),
        Eviction(f"evict to {name}", "", evict, prepare, flush, found, emptied=empty),
    ]


def _read(number: int, task: Task, tile: int) -> Any:
    return np.frombuffer(os.pread(number, task.tile_bytes, tile * task.tile_bytes), np.float32)
