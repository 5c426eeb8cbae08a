"""Projection of tiles beside what NumPy and the system offer: hot, warm and cold, in one run.

    python benchmarks/project.py [--tiles 64] [--sizes 16 256 4096] [--repetitions 9] [--quick] [--json FILE]

Each case is one request for ``--tiles`` tiles in random order, out of a file or array four times as large.
All contenders of a case take turns, in an order that changes with every turn, and every result is compared bit
for bit with the source before anything is timed. The figure of a contender is its median over the turns; the
ratio is the median, over the turns, of ours to the fastest other in the same turn, below 1 where ours is faster.

hot     the tiles are in memory (resident in the primary tier; an array elsewhere)
warm    the tiles are in the page cache of the file, and none is resident
cold    the file's pages are dropped before each turn (posix_fadvise), and none is resident
call    one resident tile of 4 KiB, beside a bare task round trip through a loop in another thread

``fresh`` results go to new memory, ``given`` ones to memory that was used before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import numpy as np

import strideweave as sw

Contender = Callable[[], np.ndarray | None]


@dataclass
class Case:
    """Contenders that do the same work; the names of ours begin with ``project``."""

    name: str
    payload: int
    expected: np.ndarray | None
    contenders: dict[str, Contender]
    prepare: Callable[[], None] = lambda: None
    times: dict[str, list[float]] = field(default_factory=dict)

    def verify(self) -> None:
        """Compare every result with the source, bit for bit."""
        for name, run in self.contenders.items():
            self.prepare()
            found = run()
            if self.expected is not None and not np.array_equal(
                np.asarray(found).reshape(-1).view(np.uint8), self.expected.reshape(-1).view(np.uint8)
            ):
                sys.exit(f"{self.name}: {name} gave a wrong result")

    def measure(self, repetitions: int) -> None:
        """Let the contenders take turns."""
        self.times = {name: [] for name in self.contenders}
        for _ in range(repetitions):
            for name in random.sample(list(self.contenders), len(self.contenders)):
                self.prepare()
                started = time.perf_counter()
                result = self.contenders[name]()
                self.times[name].append(time.perf_counter() - started)
                del result

    def rows(self) -> list[dict[str, object]]:
        """One row a contender: median, spread, rate, and for ours the ratio to the fastest other."""
        others = [times for name, times in self.times.items() if not name.startswith("project")]
        best = [min(turn) for turn in zip(*others, strict=True)]
        rows = []
        for name, times in self.times.items():
            ratios = [own / other for own, other in zip(times, best, strict=True)]
            rows.append(
                {
                    "case": self.name,
                    "contender": name,
                    "median_us": statistics.median(times) * 1e6,
                    "min_us": min(times) * 1e6,
                    "max_us": max(times) * 1e6,
                    "gb_per_s": self.payload / statistics.median(times) / 1e9,
                    "ratio": statistics.median(ratios) if name.startswith("project") else None,
                }
            )
        return rows


class Bench:
    """The data of one tile size, and the cases that use it.

    Args:
        folder: where the file goes.
        tile_bytes: bytes of one tile.
        tiles: tiles a request asks for.
    """

    def __init__(self, folder: Path, tile_bytes: int, tiles: int) -> None:
        self.tile, self.count = tile_bytes // 4, 4 * tiles
        rng = np.random.default_rng(0)
        self.source = rng.integers(0, 2**32, (self.count, self.tile), np.uint32).view(np.float32)
        self.picks = rng.permutation(self.count)[:tiles]
        self.expected = self.source[self.picks]
        self.path = folder / f"tiles-{tile_bytes}"
        self.source.tofile(self.path)
        self.fd = os.open(self.path, os.O_RDONLY)
        os.fsync(self.fd)
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.given = np.zeros_like(self.expected)
        self.label = f"{tile_bytes >> 10} KiB"

    def carrier(self, policy: sw.ResidencyPolicy | None = None) -> tuple[sw.TiledEvictable, sw.Tensor]:
        """A tiled carrier over the file, nothing of it resident."""
        disk = sw.FileBacked.open(self.path, dtype=sw.DType.Float32)
        carrier = sw.TiledEvictable(sw.CPU(0), disk, (self.count, 1), (1, self.tile), residency_policy=policy)
        return carrier, sw.Tensor(carrier, 0, sw.row_major(self.count, self.tile), requires_grad=False)

    def hot(self) -> Case:
        """All tiles in memory."""
        carrier, tensor = self.carrier()
        carrier.promote(carrier.select({}))
        chosen, destination = carrier.select({0: self.picks}), sw.CPU(self.expected.size)
        source, picks, given = self.source, self.picks, self.given

        def copies() -> np.ndarray:
            for row, pick in zip(given, picks, strict=True):
                np.copyto(row, source[pick])
            return given

        return Case(
            f"hot, {self.label}",
            self.expected.nbytes,
            self.expected,
            {
                "project, fresh": lambda: carrier.project(tensor, chosen).wait().numpy(),
                "project, given": lambda: carrier.project(tensor, chosen, destination).wait().numpy(),
                "a[idx], fresh": lambda: source[picks],
                "np.take(out=, clip), given": lambda: np.take(source, picks, axis=0, out=given, mode="clip"),
                "copy loop, given": copies,
            },
        )

    def from_file(self, *, cold: bool) -> Case:
        """No tile in memory; the page cache full or dropped."""
        promoting, promoted = self.carrier()
        passing, passed = self.carrier(sw.Streaming())
        chosen = promoting.select({0: self.picks})
        destination = sw.CPU(self.expected.size)

        def prepare() -> None:
            promoting.evict(promoting.primary_tiles)
            if cold:
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

        return Case(
            f"{'cold' if cold else 'warm'}, {self.label}",
            self.expected.nbytes,
            self.expected,
            {
                "project, promoting": lambda: promoting.project(promoted, chosen).wait().numpy(),
                "project, promoting, given": lambda: (
                    promoting.project(promoted, chosen, destination).wait().numpy()
                ),
                "project, streaming": lambda: passing.project(passed, chosen).wait().numpy(),
                "os.preadv, given": lambda: self.read(map, self.given),
                "os.preadv, threads, given": lambda: self.read(self.pool.map, self.given),
                "os.preadv, threads, fresh": lambda: self.read(self.pool.map, np.empty_like(self.given)),
                "np.memmap[idx], fresh": self.take_from_map,
            },
            prepare,
        )

    def take_from_map(self) -> np.ndarray:
        """Map the file and index the map; the map goes at once, for mapped pages cannot be dropped."""
        return np.memmap(self.path, np.float32, "r", shape=(self.count, self.tile))[self.picks].view(
            np.ndarray
        )

    def read(self, mapper: Callable, out: np.ndarray) -> np.ndarray:
        """Read the tiles one by one with a positioned system call."""
        nbytes = self.tile * 4

        def one(place: tuple[int, int]) -> None:
            row, pick = place
            if os.preadv(self.fd, [out[row]], pick * nbytes) != nbytes:
                raise EOFError(f"tile {pick} is shorter than {nbytes} bytes")

        for _ in mapper(one, enumerate(self.picks.tolist())):
            pass
        return out


class BareLoop:
    """A loop in a thread that runs empty tasks in an anyio task group: the floor of a request."""

    def __init__(self) -> None:
        self._up = threading.Event()
        threading.Thread(target=anyio.run, args=(self._serve,), daemon=True).start()
        self._up.wait()

    async def _serve(self) -> None:
        self._loop, self._context = asyncio.get_running_loop(), copy_context()
        async with anyio.create_task_group() as self._group:
            self._up.set()
            await anyio.sleep_forever()

    def round_trip(self) -> None:
        """Start one task and wait until it has run."""
        gate = threading.Lock()
        gate.acquire()

        async def task() -> None:
            gate.release()

        self._loop.call_soon_threadsafe(self._group.start_soon, task, context=self._context)
        gate.acquire()


def call_case() -> Case:
    """One resident tile of 4 KiB, a thousand times a turn."""
    tensor = sw.tiled(np.zeros((16, 1024), np.float32), (1, 1024))
    carrier, bare, times = tensor.carrier, BareLoop(), 1000
    chosen = carrier.select({0: [3]})

    def repeat(once: Callable[[], object]) -> Contender:
        def run() -> None:
            for _ in range(times):
                once()

        return run

    def awaited() -> None:
        async def main() -> None:
            for _ in range(times):
                await carrier.project(tensor, chosen)

        asyncio.run(main())

    return Case(
        f"call, 4 KiB, times {times}",
        4096 * times,
        None,
        {
            "project().wait()": repeat(lambda: carrier.project(tensor, chosen).wait()),
            "project, awaited": awaited,
            "bare task round trip": repeat(bare.round_trip),
        },
    )


def table(rows: list[dict[str, object]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| case | contender | median, us | min .. max, us | GB/s | ours / fastest other |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(
            f"| {row['case']} | {row['contender']} | {row['median_us']:,.0f} | {row['min_us']:,.0f} .. "
            f"{row['max_us']:,.0f} | {row['gb_per_s']:.2f} | {ratio} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read the options, run the cases, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", type=int, default=64)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 256, 4096], metavar="KIB")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small and few: does it still run?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.tiles, options.sizes, options.repetitions = 8, [16, 256], 3
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kib in options.sizes:
            bench = Bench(Path(folder), kib << 10, options.tiles)
            for case in (bench.hot(), bench.from_file(cold=False), bench.from_file(cold=True)):
                case.verify()
                case.measure(options.repetitions)
                rows += case.rows()
            bench.path.unlink()
    call = call_case()
    call.measure(options.repetitions)
    rows += call.rows()
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2), "utf-8")


if __name__ == "__main__":
    main()
