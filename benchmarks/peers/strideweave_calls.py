"""What one small request costs, beside a bare task round trip through the same loop."""

from __future__ import annotations

from typing import Any

import strideweave as sw
from benchmarks.method import FRESH, GIVEN, AwaitedMethod, Method
from benchmarks.peers.bare import Bare
from benchmarks.peers.base import Peer
from benchmarks.peers.strideweave_tiles import over_file
from benchmarks.task import Picks, Task
from strideweave.runtime import AwaitResult, TaskScope

__all__ = ["methods"]


async def _nothing() -> None:
    """The empty request."""


def methods(peer: Peer, task: Task) -> list[Method]:
    """One resident tile, waited for, awaited, and only begun."""
    tiled = over_file(peer.stack, task)
    carrier, tensor, place = tiled.carrier, tiled.tensor, tiled.destination(1)
    carrier.promote(carrier.select({}))
    bare, scope = Bare(), TaskScope("benchmark")
    peer.stack.callback(bare.close)
    peer.stack.callback(scope.close)
    chosen: list[sw.TileSelection] = []

    def choose(picks: Picks) -> None:
        chosen[:] = [carrier.select({0: picks})]

    def project(into: sw.CPU | None) -> Any:
        return lambda _: carrier.project(tensor, chosen[0], into)

    def wait(into: sw.CPU | None) -> Any:
        return lambda _: carrier.project(tensor, chosen[0], into).wait()

    def values(result: sw.Tensor, _: Picks) -> Any:
        return result.numpy()

    def empty(_: Picks) -> Any:
        return scope.start(AwaitResult[None](), _nothing)

    return [
        Method("project().wait()", FRESH, wait(None), choose, found=values),
        Method("project().wait()", GIVEN, wait(place), choose, found=values),
        AwaitedMethod("await project()", FRESH, project(None), choose, found=values),
        AwaitedMethod("await project()", GIVEN, project(place), choose, found=values),
        Method(
            "project() alone, until it returns",
            FRESH,
            project(None),
            choose,
            settle=lambda handle: handle.wait(),
            found=lambda handle, _: handle.wait().numpy(),
        ),
        Method("empty request, wait()", "", lambda picks: empty(picks).wait(), found=None),
        AwaitedMethod("empty request, await", "", empty, found=None),
        Method("bare task round trip, wait", "", lambda _: bare.wait(), found=None, reference=True),
        AwaitedMethod(
            "bare task round trip, await", "", lambda _: bare.wait_async(), found=None, reference=True
        ),
    ]
