"""``torch.index_select``."""

from __future__ import annotations

from typing import Any

from benchmarks.dataset import Dataset
from benchmarks.memory import page_aligned
from benchmarks.method import FRESH, GIVEN, Method
from benchmarks.peers.base import Peer
from benchmarks.task import Picks, Task


class Torch(Peer):
    """PyTorch on the CPU, with as many threads as it takes by itself."""

    modules = ("torch",)

    def facts(self) -> dict[str, str]:
        import torch  # noqa: PLC0415  optional

        return super().facts() | {"threads": str(torch.get_num_threads())}

    def hot(self, task: Task) -> list[Method]:
        import torch  # noqa: PLC0415  optional

        source = torch.from_numpy(Dataset(task).load(page_aligned(task.count, task.tile_bytes)))
        given = torch.from_numpy(page_aligned(task.tiles, task.tile_bytes))

        def fresh(picks: Picks) -> Any:
            return torch.index_select(source, 0, torch.from_numpy(picks))

        def into(picks: Picks) -> Any:
            return torch.index_select(source, 0, torch.from_numpy(picks), out=given)

        def found(result: Any, _: Picks) -> Any:
            return result.numpy()

        return [
            Method("index_select", FRESH, fresh, found=found),
            Method("index_select(out=)", GIVEN, into, found=found),
        ]
