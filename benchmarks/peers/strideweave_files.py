"""Files that exist already, opened in place, and stores: from a path to tiles, and back."""

from __future__ import annotations

import shutil
from typing import Any

import strideweave as sw
from benchmarks.dataset import Dataset, cached_share, drop_cache
from benchmarks.first_tile import FirstTile
from benchmarks.memory import page_aligned
from benchmarks.method import FRESH, Method
from benchmarks.peers.base import Peer
from benchmarks.task import Picks, Task

__all__ = ["first_methods", "open_methods", "save_methods"]

PATTERN = "{tile}"  # the data set has one tensor a tile, named by its number


def open_methods(peer: Peer, task: Task, *, cold: bool) -> list[Method]:
    """From the path of a checkpoint to some of its tensors, and the same when it is open already."""
    path = Dataset(task).path
    opened = sw.open_tiled(path, tensor=PATTERN, residency_policy=sw.Streaming())
    peer.stack.callback(opened.carrier.release)

    def drop(_: Any = None) -> None:
        if cold:
            drop_cache([path])

    def project(tensor: sw.Tensor, picks: Picks) -> sw.Tensor:
        carrier = tensor.carrier
        return carrier.project(tensor, carrier.select({0: picks})).wait()

    def open_and_project(picks: Picks) -> tuple[sw.Tensor, sw.Tensor]:
        tensor = sw.open_tiled(path, tensor=PATTERN, residency_policy=sw.Streaming())
        return tensor, project(tensor, picks)

    def close(result: tuple[sw.Tensor, sw.Tensor] | None) -> None:
        if result is not None:
            result[0].carrier.release()

    def share() -> float:
        return cached_share([path])

    return [
        Method(
            "open_tiled + project",
            FRESH,
            open_and_project,
            drop,
            close,
            lambda result, _: result[1].numpy(),
            cached=share,
        ),
        Method(
            "project, open before",
            FRESH,
            lambda picks: project(opened, picks),
            drop,
            found=lambda result, _: result.numpy(),
            cached=share,
        ),
    ]


def save_methods(peer: Peer, task: Task) -> list[Method]:
    """An array in memory becomes a store, on the device when the call returns."""
    data, path = Dataset(task), peer.scratch(task, "saved.store")
    values = page_aligned(task.tiles, task.tile_bytes)
    tensor = sw.from_numpy(values)

    def prepare(picks: Picks) -> None:
        shutil.rmtree(path, ignore_errors=True)
        data.read(picks, values)

    def found(_: Any, __: Picks) -> Any:
        stored = sw.open_tiled(path)
        try:
            return stored.carrier.project(stored, stored.carrier.select({})).wait().numpy().copy()
        finally:
            stored.carrier.release()

    return [
        Method(
            "save_tiled",
            "",
            lambda _: sw.save_tiled(tensor, path, tile_shape=(1, task.values)),
            prepare,
            found=found,
        )
    ]


def first_methods(task: Task) -> list[Method]:
    """The first tile in a process that has nothing but its imports, and in one whose loop runs already."""
    return [
        FirstTile.contender("open_tiled + project", "strideweave", task),
        FirstTile.contender("open_tiled + project, loop running", "strideweave-running", task),
    ]
