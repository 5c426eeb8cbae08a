"""Tiled carriers over the data set, and their projections as contenders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import strideweave as sw
from benchmarks.dataset import Dataset, sync_file_system
from benchmarks.method import GIVEN, Method, OverlappingMethod
from benchmarks.task import Picks, Task

__all__ = ["Tiled", "fill_device", "open_file", "over_file"]


class Tiled:
    """One tiled carrier with the data set's tiles as rows, in the slow tier at first.

    Args:
        stack: releases it.
        task: says how many rows of which length.
        secondary: has the values.
        policy: of the carrier.
    """

    def __init__(
        self, stack: ExitStack, task: Task, secondary: sw.Carrier, policy: sw.ResidencyPolicy | None = None
    ) -> None:
        self.task = task
        self.carrier = sw.TiledEvictable(
            sw.CPU(0), secondary, (task.grid, 1), (1, task.values), residency_policy=policy
        )
        stack.callback(self.carrier.release)
        layout = sw.row_major(task.grid, task.values)
        self.tensor = sw.Tensor(self.carrier, 0, layout, requires_grad=False)

    def select(self, picks: Picks) -> sw.TileSelection:
        """The tiles of a request, a part of which this is, as it is of indexing."""
        return self.carrier.select({0: picks * self.task.spread if self.task.spread > 1 else picks})

    def destination(self, tiles: int) -> sw.CPU:
        """Memory for so many tiles that was written to before, and whose address nobody was given."""
        return sw.CPU(0).new_like(np.zeros(tiles * self.task.values, np.float32))

    def projecting(
        self,
        name: str,
        destination: str,
        prepare: Callable[[Picks], Any] | None = None,
        share: Callable[[], float] | None = None,
        *,
        brief: bool = False,
    ) -> Method:
        """A projection of the tiles asked for."""
        carrier, tensor, select = self.carrier, self.tensor, self.select
        into = self.destination(self.task.tiles) if destination == GIVEN else None

        def run(picks: Picks) -> sw.Tensor:
            return carrier.project(tensor, select(picks), into).wait()

        made = Method(
            name, destination, run, found=lambda result, _: result.numpy(copy=True), cached=share, brief=brief
        )
        if prepare is not None:
            made.prepare = prepare
        return made

    def overlapping(
        self, name: str, prepare: Callable[[Picks], Any] | None, share: Callable[[], float]
    ) -> OverlappingMethod:
        """Projections of the tiles asked for, two at a time, each into a destination of its own."""
        carrier, tensor, select = self.carrier, self.tensor, self.select
        places = [self.destination(self.task.tiles) for _ in range(2)]

        def begin(picks: Picks, number: int) -> Callable[[], sw.Tensor]:
            return carrier.project(tensor, select(picks), places[number]).wait

        made = OverlappingMethod(
            name,
            GIVEN,
            lambda picks: begin(picks, 0)(),
            found=lambda result, _: result.numpy(copy=True),
            cached=share,
            begin=begin,
            under_way=len(places),
        )
        if prepare is not None:
            made.prepare = prepare
        return made

    def evicting(self, also: Callable[[Picks], Any] | None = None) -> Callable[[Picks], None]:
        """Something to do before a request, so that no tile is in memory."""

        def prepare(picks: Picks) -> None:
            self.carrier.evict(self.carrier.primary_tiles)
            if also is not None:
                also(picks)

        return prepare


def open_file(task: Task) -> sw.FileBacked:
    """The data set as a carrier."""
    data = Dataset(task)
    return sw.FileBacked.open(
        data.path, dtype=sw.DType.Float32, offset=data.offset, size=task.grid * task.values
    )


def over_file(stack: ExitStack, task: Task, policy: sw.ResidencyPolicy | None = None) -> Tiled:
    """A tiled carrier over the data set itself."""
    return Tiled(stack, task, open_file(task), policy)


def fill_device(stack: ExitStack, task: Task, path: Path, *, direct: bool) -> sw.Carrier:
    """A carrier with the data set's values in a regular file held as a block device."""
    nbytes = -(-task.count * task.tile_bytes // (1 << 20)) << 20
    device = sw.BlockDevice(path, direct=direct, size=nbytes)
    stack.callback(device.close)
    carrier = device.allocate(task.count * task.values, dtype=sw.DType.Float32, empty=True)
    layout = sw.row_major(task.count, task.values)
    sw.move(sw.Tensor(open_file(task), 0, layout, requires_grad=False), carrier)
    sync_file_system(path.parent)
    return carrier
