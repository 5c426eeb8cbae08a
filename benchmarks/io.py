"""What a batch of file reads costs through the engine, beside a plain ``os.preadv`` loop, measured in turns.

Each row reads the same random tiles of one file into the same memory, already touched. *loop* is one thread
that calls ``os.preadv`` once a tile; *engine* is one ``engine.read`` of the whole batch, started as a request
from the calling thread and waited for; *move* is the registered move from FileBacked to CPU with one transfer
a tile, made in the measured time. The warm rows find the file in the page cache; before each turn of the cold
rows the cache is asked to drop it, so they measure the device (and mean nothing where the temporary directory
is held in memory).

The methods take turns, so that whatever else the machine does meets all of them. The table gives medians in
milliseconds and the medians of the ratios of neighbouring turns to the loop. Targets: 4096 warm tiles of 16 KiB
within 1.3 of the loop, 64 warm tiles of 4 MiB not slower than the loop.

Run it: ``python benchmarks/io.py [--turns 15] [--json]``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strideweave import CPU, DType, FileBacked
from strideweave.carriers.move import AwaitResult, Transfer, dispatch_move
from strideweave.io.engine import default_engine
from strideweave.io.files import OpenFile
from strideweave.io.positioned import FileSpan
from strideweave.runtime import TaskScope

if TYPE_CHECKING:
    from collections.abc import Callable

KIB, MIB = 1 << 10, 1 << 20
FILE_BYTES = 256 * MIB


class Case(NamedTuple):
    """``count`` random tiles of ``nbytes`` bytes; ``target`` is what the engine's ratio should not exceed."""

    nbytes: int
    count: int
    cold: bool = False
    target: float | None = None

    @property
    def name(self) -> str:
        size = f"{self.nbytes // MIB} MiB" if self.nbytes >= MIB else f"{self.nbytes // KIB} KiB"
        return f"{'cold' if self.cold else 'warm'} {self.count} x {size}"


CASES = (
    Case(16 * KIB, 1),
    Case(16 * KIB, 64),
    Case(16 * KIB, 4096, target=1.3),
    Case(256 * KIB, 512),
    Case(4 * MIB, 64, target=1.0),
    Case(16 * KIB, 1024, cold=True),
    Case(256 * KIB, 128, cold=True),
    Case(4 * MIB, 16, cold=True),
)


class Bench:
    """One file, one piece of memory, and three ways to fill it."""

    def __init__(self, path: Path) -> None:
        block = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
        with path.open("wb") as file:
            for _ in range(FILE_BYTES // MIB):
                file.write(block)
            os.fsync(file.fileno())
        self.file = OpenFile.open(path)
        self.source = FileBacked.open(path, dtype=DType.UInt8)
        self.memory = CPU(FILE_BYTES, dtype=DType.UInt8)
        self.array = self.memory.numpy(writable=True)
        self.array[:] = 1
        self.scope = TaskScope("benchmark")

    def methods(self, case: Case, seed: int) -> dict[str, Callable[[], object]]:
        size = case.nbytes
        order = np.random.default_rng(seed).permutation(FILE_BYTES // size)[: case.count].tolist()
        places = [(k * size, i * size) for i, k in enumerate(order)]
        spans = [FileSpan(self.file, offset, self.array[at : at + size]) for offset, at in places]

        def loop() -> None:
            number = self.file.fd
            for _, offset, buffer in spans:
                os.preadv(number, [buffer], offset)

        def engine() -> None:
            self.scope.start(AwaitResult(), default_engine().read, spans).wait()

        def move() -> None:
            operation = dispatch_move(FileBacked, CPU)()
            transfers = [Transfer(self.source, offset, self.memory, at, size) for offset, at in places]
            self.scope.start(AwaitResult(), operation.transfer, transfers).wait()

        return {"loop": loop, "engine": engine, "move": move}

    def time(self, call: Callable[[], object], case: Case) -> float:
        if case.cold:
            os.posix_fadvise(self.file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def measure(bench: Bench, case: Case, turns: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each method, and the median ratio to the loop of the same turn."""
    taken: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        for name, call in bench.methods(case, turn).items():
            taken.setdefault(name, []).append(bench.time(call, case))
    measured = {name: values[1:] for name, values in taken.items()}  # the first turn warms up
    return {
        name: {
            "ms": 1e3 * statistics.median(values),
            "ratio": statistics.median(
                mine / loop for mine, loop in zip(values, measured["loop"], strict=True)
            ),
        }
        for name, values in measured.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory) / "tiles.bin")
        results = {case: measure(bench, case, options.turns) for case in CASES}
    if options.json:
        print(json.dumps({case.name: row for case, row in results.items()}, indent=2))
    else:
        print(f"{'case':<22}{'loop, ms':>12}{'engine, ms':>20}{'move, ms':>20}{'target':>9}")
        for case, row in results.items():
            cells = [f"{row[key]['ms']:.2f} ({row[key]['ratio']:.2f}x)" for key in ("engine", "move")]
            target = f"{case.target:.1f}x" if case.target else ""
            print(f"{case.name:<22}{row['loop']['ms']:>12.2f}{cells[0]:>20}{cells[1]:>20}{target:>9}")
    missed = [case for case, row in results.items() if case.target and row["engine"]["ratio"] > case.target]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
