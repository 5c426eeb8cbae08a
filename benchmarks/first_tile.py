"""The first tile of a large sparse checkpoint, in a process of its own that has nothing but its imports.

``python -m benchmarks.first_tile KIND PATH TILE OFFSET VALUES RESULT`` writes the tile to a file and prints what it
took. The page cache is emptied by the caller.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.dataset import Dataset, drop_cache
from benchmarks.method import FRESH, Method, Sample
from benchmarks.task import Picks, Task

__all__ = ["FirstTile", "main"]

ROOT = Path(__file__).parents[1]
KIB = 1 << 10

Fetched = tuple[Any, dict[str, float]]


@dataclass(slots=True)
class FirstTile(Method):
    """One tile, fetched by a fresh process, which measures itself."""

    @classmethod
    def contender(cls, name: str, kind: str, task: Task) -> Self:
        """The contender of one kind."""
        data = Dataset(task)
        result = Path(task.folder) / f"first-{kind}.bin"

        def run(picks: Picks) -> dict[str, float]:
            tile = int(picks[0])
            arguments = [kind, data.path, tile * task.spread, data.place(tile), task.values, result]
            ended = subprocess.run(
                [sys.executable, "-m", "benchmarks.first_tile", *map(str, arguments)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found: dict[str, float] = json.loads(ended.stdout)
            return found

        return cls(
            name,
            FRESH,
            run,
            lambda _: drop_cache([data.path]),
            found=lambda _, __: np.fromfile(result, np.float32),
        )

    def sample(self, requests: Iterable[Picks], budget: float) -> Sample:
        """Let processes fetch a tile each; the figures are theirs."""
        figures: dict[str, list[float]] = {}
        deadline = time.perf_counter() + budget
        for picks in requests:
            self.prepare(picks)
            for name, value in self.run(picks).items():
                figures.setdefault(name, []).append(value)
            if time.perf_counter() > deadline:
                break
        return figures


def _strideweave() -> Callable[[str, int, int, int], Fetched]:
    import strideweave as sw  # noqa: PLC0415  what a process imports is not timed

    def fetch(path: str, tile: int, _: int, __: int) -> Fetched:
        tensor = sw.open_tiled(path, tensor="{tile}")
        carrier = tensor.carrier
        values = carrier.project(tensor, carrier.select({0: [tile]})).wait().numpy()
        return values, {"projected_kib": carrier.statistics().bytes_read / KIB}

    return fetch


def _strideweave_running() -> Callable[[str, int, int, int], Fetched]:
    import strideweave as sw  # noqa: PLC0415  what a process imports is not timed

    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(4096))
        file.flush()
        tensor = sw.open_tiled(file.name, dtype=sw.DType.UInt8, shape=4096)
        tensor.carrier.project(tensor, tensor.carrier.select({})).wait()  # starts the loop and the engine
        tensor.carrier.release()
    return _strideweave()


def _safetensors() -> Callable[[str, int, int, int], Fetched]:
    from safetensors import safe_open  # noqa: PLC0415  optional

    def fetch(path: str, tile: int, _: int, __: int) -> Fetched:
        with safe_open(path, "np") as file:
            return file.get_tensor(str(tile)), {}

    return fetch


def _memmap() -> Callable[[str, int, int, int], Fetched]:
    def fetch(path: str, _: int, offset: int, values: int) -> Fetched:
        return np.array(np.memmap(path, np.float32, "r", offset, (values,))), {}

    return fetch


KINDS: Mapping[str, Callable[[], Callable[[str, int, int, int], Fetched]]] = {
    "strideweave": _strideweave,
    "strideweave-running": _strideweave_running,
    "safetensors": _safetensors,
    "memmap": _memmap,
}


def main(kind: str, path: str, tile: int, offset: int, values: int, result: str) -> None:
    """Fetch a tile and print the seconds, and the KiB that the device gave and that the library asked for."""
    fetch = KINDS[kind]()
    before = _device_bytes()
    started = time.perf_counter()
    found, figures = fetch(path, tile, offset, values)
    seconds = time.perf_counter() - started
    device = (_device_bytes() - before) / KIB
    np.ascontiguousarray(found).tofile(result)
    print(json.dumps({"seconds": seconds, "device_kib": device} | figures))


def _device_bytes() -> int:
    """Bytes that this process has had read from devices."""
    fields: Any = Path("/proc/self/io").read_text("ascii").split()
    return int(fields[fields.index("read_bytes:") + 1])


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:6]), sys.argv[6])
