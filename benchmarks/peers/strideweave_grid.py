"""What a grid of many tiles costs, and how much memory a projection takes at its peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import strideweave as sw
from benchmarks.dataset import Dataset
from benchmarks.memory import peak_growth, reset_peak
from benchmarks.method import FRESH, GIVEN, Method, Sample
from benchmarks.peers.base import Peer
from benchmarks.peers.strideweave_tiles import Tiled, open_file, over_file
from benchmarks.task import MIB, Picks, Task
from strideweave.io import recycling

__all__ = ["MemoryMethod", "memory_methods", "methods"]


def methods(peer: Peer, task: Task) -> list[Method]:
    """Construction, choosing tiles, one projection from a sparse file, and one eviction of dirty tiles."""
    tiled = over_file(peer.stack, task, sw.Streaming())
    rewritten = Tiled(peer.stack, task, open_file(task))  # dirty tiles go to a spill beside it
    carrier = rewritten.carrier

    def construct(_: Picks) -> Any:
        tiers = sw.CPU(0), open_file(task)
        return sw.TiledEvictable(*tiers, (task.grid, 1), (1, task.values))

    def dirty(picks: Picks) -> None:
        carrier.promote(rewritten.select(picks))
        for tile, value in zip(picks.tolist(), Dataset.new_values(picks).tolist(), strict=True):
            carrier[tile * task.spread * task.values] = value

    def evict(picks: Picks) -> None:
        carrier.evict(rewritten.select(picks))

    return [
        Method("construct", "", construct, settle=lambda made: made.release(), found=None, brief=True),
        Method("select", "", tiled.select, found=None, brief=True),
        tiled.projecting("project", GIVEN, brief=True),
        Method("evict, dirty", "", evict, dirty, found=None, brief=True),
    ]


@dataclass(slots=True)
class MemoryMethod(Method):
    """A projection of which the largest growth of resident memory is noted, beside the time.

    What the values take that were asked for is left out: in a fresh result, in tiles that were promoted, or where they
    wait to become a given destination's all at once.
    """

    carrier: sw.TiledEvictable | None = None

    def sample(self, requests: Iterable[Picks], budget: float) -> Sample:
        """Do one request."""
        picks = next(iter(requests))
        self.prepare(picks)
        recycling.trim()  # or what an earlier request has left would hide what this one takes
        before = reset_peak()
        found = Method.sample(self, [picks], budget)
        growth = peak_growth(before)
        if self.carrier is not None:
            record = self.carrier.statistics()
            found["peak_mib"] = [(growth - len(picks) * record.tile_bytes) / MIB]
            found["staging_mib"] = [record.peak_staging_bytes / MIB]
        return found


def memory_methods(peer: Peer, task: Task) -> list[Method]:
    """Projections of missing tiles."""
    streaming, promoting = over_file(peer.stack, task, sw.Streaming()), over_file(peer.stack, task)
    contenders = [
        (streaming, streaming.projecting("FileBacked, streaming", GIVEN)),
        (streaming, streaming.projecting("FileBacked, streaming", FRESH)),
        (promoting, promoting.projecting("FileBacked, promoting", GIVEN, promoting.evicting())),
    ]
    return [
        MemoryMethod(one.name, one.destination, one.run, one.prepare, found=one.found, carrier=tiled.carrier)
        for tiled, one in contenders
    ]
