"""Projection of tiles beside what NumPy and the system offer: hot, warm and cold, in one run.

    python benchmarks/project.py [--tiles 64] [--sizes 16 256 4096] [--repetitions 9] [--quick] [--json FILE]

A turn is one request for ``--tiles`` tiles in random order, other ones in every turn, out of at least 256 MiB and at
least four times as many tiles. In each turn every contender does the same work, in an order that changes, after one
turn in which every result is compared with the source bit for bit. A contender's figure is its median over the
turns. A ratio is the median, over the turns, of our time to that of the peer with the best median among those with
the same kind of destination: below 1 we are faster.

hot     the tiles are in memory: resident in the primary tier; rows of an array for the others
warm    the tiles are in the page cache, and none is resident: what was promoted is evicted before each turn
cold    as warm, and the file's pages are dropped before each contender's turn (fsync, then posix_fadvise DONTNEED);
        a line below the table says how much of the file stayed in the cache all the same
call    one resident tile of 4 KiB at a time, beside a bare task round trip through the same loop

``fresh`` results go to new memory; ``given`` ones to memory that was used before and begins with a page, since the
system's copies to NumPy's own large arrays, which begin 16 bytes later, take several times as long on some CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from turns import Case, Contender, Picks, Row, table

import strideweave as sw
from runtime import Bare

LEAST_BYTES = 256 << 20  # of data to choose from: several times what the caches hold
CALLS = 200  # of one tile, in one turn


def page_aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Memory that begins with a page, as NumPy's own does not, and that was written to before."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, int(np.prod(shape)) * 4, private), np.float32).reshape(shape)
    memory[...] = 0
    return memory


class Bench:
    """The data of one tile size, and the cases that use it.

    Args:
        folder: where the file goes.
        tile_bytes: bytes of one tile.
        tiles: tiles that a request asks for.
    """

    def __init__(self, folder: Path, tile_bytes: int, tiles: int, least_bytes: int) -> None:
        self.tile, self.tiles = tile_bytes // 4, tiles
        self.count = max(4 * tiles, least_bytes // tile_bytes)
        self.payload = tiles * tile_bytes
        self.label = f"{tile_bytes >> 10} KiB"
        self.random = np.random.default_rng(0)
        self.source = self.random.integers(0, 2**32, (self.count, self.tile), np.uint32).view(np.float32)
        self.path = folder / f"tiles-{tile_bytes}"
        self.source.tofile(self.path)
        self.fd = os.open(self.path, os.O_RDONLY)
        os.fsync(self.fd)
        self.map = np.memmap(self.path, np.float32, "r", shape=self.source.shape)
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.given = page_aligned((tiles, self.tile))
        self.destination = sw.CPU(tiles * self.tile)
        self.kept = 0.0  # the largest share of the file that a drop left in the page cache
        self.carriers: list[sw.TiledEvictable] = []

    def run(self, repetitions: int) -> list[Row]:
        """Verify and measure each case in its turn."""
        rows: list[Row] = []
        for make in (self.hot, self.warm, self.cold):
            case = make()
            turns = [self.pick() for _ in range(repetitions)]
            case.verify(turns[0], self.source[turns[0]])
            case.measure(turns)
            rows += case.rows()
            while self.carriers:
                self.carriers.pop().release()
        return rows

    def close(self) -> None:
        """Give memory and disk back."""
        self.pool.shutdown()
        del self.map
        os.close(self.fd)
        self.path.unlink()

    def note(self) -> str:
        """Say whether the cold rows are cold."""
        verdict = (
            "" if self.kept < 0.01 else ": the file system ignores the drop, and these rows are not cold"
        )
        return f"cold, {self.label}: at most {self.kept:.1%} of the file stayed in the page cache{verdict}"

    def pick(self) -> Picks:
        """Choose the tiles of one turn."""
        return self.random.permutation(self.count)[: self.tiles]

    def carrier(self, policy: sw.ResidencyPolicy | None = None) -> tuple[sw.TiledEvictable, sw.Tensor]:
        """A tiled carrier over the file, nothing of it resident."""
        disk = sw.FileBacked.open(self.path, dtype=sw.DType.Float32)
        carrier = sw.TiledEvictable(sw.CPU(0), disk, (self.count, 1), (1, self.tile), residency_policy=policy)
        self.carriers.append(carrier)
        return carrier, sw.Tensor(carrier, 0, sw.row_major(self.count, self.tile), requires_grad=False)

    def hot(self) -> Case:
        """All tiles in memory."""
        carrier, tensor = self.carrier()
        carrier.promote(carrier.select({}))
        source, given = self.source, self.given

        def copies(picks: Picks) -> np.ndarray:
            for row, pick in zip(given, picks, strict=True):
                np.copyto(row, source[pick])
            return given

        ours = {
            "project, fresh": self.project(carrier, tensor, None),
            "project, given": self.project(carrier, tensor, self.destination),
        }
        peers = {
            "a[idx], fresh": lambda picks: source[picks],
            "np.take(out=, clip), given": lambda picks: np.take(source, picks, 0, out=given, mode="clip"),
            "copy loop, given": copies,
        }
        return Case(f"hot, {self.label}", self.payload, ours, peers)

    def warm(self) -> Case:
        """No tile in memory, the file in the page cache."""
        return self.from_file("warm", lambda: None)

    def cold(self) -> Case:
        """No tile in memory, nor in the page cache."""
        return self.from_file("cold", self.drop)

    def drop(self) -> None:
        """Have the file's pages dropped, and note how many were not."""
        for _ in range(5):  # pages on their way between the kernel's lists stay the first time
            self.map.base.madvise(mmap.MADV_DONTNEED)  # what is mapped cannot be dropped
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            share = self.cached_share()
            if share < 0.01:
                break
        self.kept = max(self.kept, share)

    def cached_share(self) -> float:
        """How much of the file is in the page cache."""
        pages = np.zeros(-(-self.source.nbytes // mmap.PAGESIZE), np.uint8)
        address = ctypes.c_void_p(self.map.ctypes.data)
        if ctypes.CDLL(None).mincore(
            address, ctypes.c_size_t(self.source.nbytes), pages.ctypes.data_as(ctypes.c_void_p)
        ):
            return float("nan")
        return float((pages & 1).mean())

    def from_file(self, name: str, drop: Callable[[], None]) -> Case:
        """No tile in memory."""
        promoting, promoted = self.carrier()
        passing, passed = self.carrier(sw.Streaming())

        def prepare() -> None:
            promoting.evict(promoting.primary_tiles)
            drop()

        ours = {
            "project, promoting, fresh": self.project(promoting, promoted, None),
            "project, promoting, given": self.project(promoting, promoted, self.destination),
            "project, streaming, fresh": self.project(passing, passed, None),
            "project, streaming, given": self.project(passing, passed, self.destination),
        }
        peers = {
            "os.preadv, given": lambda picks: self.read(map, picks, self.given),
            "os.preadv, threads, given": lambda picks: self.read(self.pool.map, picks, self.given),
            "os.preadv, fresh": lambda picks: self.read(map, picks, np.empty_like(self.given)),
            "os.preadv, threads, fresh": lambda picks: self.read(
                self.pool.map, picks, np.empty_like(self.given)
            ),
            "np.memmap[idx], fresh": lambda picks: np.asarray(self.map[picks]),
        }
        return Case(f"{name}, {self.label}", self.payload, ours, peers, prepare)

    def project(self, carrier: sw.TiledEvictable, tensor: sw.Tensor, destination: sw.CPU | None) -> Contender:
        """Our contender; choosing the tiles is part of a request, as it is of indexing."""

        def run(picks: Picks) -> np.ndarray:
            return carrier.project(tensor, carrier.select({0: picks}), destination).wait().numpy()

        return run

    def read(self, mapper: Callable[..., Any], picks: Picks, out: np.ndarray) -> np.ndarray:
        """Read the tiles one by one with a positioned system call."""
        nbytes = self.tile * 4

        def one(place: tuple[int, int]) -> None:
            row, pick = place
            if os.preadv(self.fd, [out[row]], pick * nbytes) != nbytes:
                raise EOFError(f"tile {pick} is shorter than {nbytes} bytes")

        for _ in mapper(one, enumerate(picks.tolist())):
            pass
        return out


def call_rows(repetitions: int) -> list[Row]:
    """One resident tile of 4 KiB: the whole request, awaited or not, and the part of it that the caller makes."""
    tensor = sw.tiled(np.zeros((16, 1024), np.float32), (1, 1024))
    carrier, bare, destination = tensor.carrier, Bare(), sw.CPU(1024)
    chosen, nothing = carrier.select({0: [3]}), np.empty(0)

    def repeat(once: Callable[[], object]) -> Contender:
        def run(_: Picks) -> np.ndarray:
            for _ in range(CALLS):
                once()
            return nothing

        return run

    def repeat_awaited(once: Callable[[], Any]) -> Contender:
        async def main() -> None:
            for _ in range(CALLS):
                await once()

        def run(_: Picks) -> np.ndarray:
            asyncio.run(main())
            return nothing

        return run

    waited = {
        "project().wait()": repeat(lambda: carrier.project(tensor, chosen).wait()),
        "project(destination).wait()": repeat(lambda: carrier.project(tensor, chosen, destination).wait()),
    }
    awaited = {"await project()": repeat_awaited(lambda: carrier.project(tensor, chosen))}
    cases = [
        Case("call, 4 KiB", 4096, waited, {"bare task round trip": repeat(bare.wait)}),
        Case(
            "call, 4 KiB", 4096, awaited, {"bare task round trip, awaited": repeat_awaited(bare.wait_async)}
        ),
    ]
    rows: list[Row] = []
    for case in cases:
        case.measure([nothing] * (4 * repetitions))
        case.times = {name: [turn / CALLS for turn in turns] for name, turns in case.times.items()}
        rows += case.rows()
    begun = []
    for _ in range(4 * repetitions * 10):
        started = time.perf_counter()
        handle = carrier.project(tensor, chosen)
        begun.append(time.perf_counter() - started)
        handle.wait()
    bare.close()
    initiation = Case("call, 4 KiB", 4096, {}, {}, times={"project() alone, until it returns": begun})
    return [*rows, *initiation.rows()]


def main() -> None:
    """Read the options, run the cases, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", type=int, default=64, help="tiles that one request asks for")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 256, 4096], metavar="KIB")
    parser.add_argument("--repetitions", type=int, default=9, help="turns of each case")
    parser.add_argument("--quick", action="store_true", help="small and few: does it still run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    options = parser.parse_args()
    least_bytes = LEAST_BYTES
    if options.quick:
        options.tiles, options.sizes, options.repetitions, least_bytes = 8, [16, 256], 3, 0
    rows: list[Row] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for kib in options.sizes:
            bench = Bench(Path(folder), kib << 10, options.tiles, least_bytes)
            rows += bench.run(options.repetitions)
            notes.append(bench.note())
            bench.close()
    rows += call_rows(options.repetitions)
    where = f"Python {platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} CPUs"
    print(f"{options.tiles} tiles a request, {options.repetitions} turns; {where}\n\n{table(rows)}\n")
    print("\n".join(notes))
    if options.json is not None:
        options.json.write_text(json.dumps({"where": where, "rows": rows, "notes": notes}, indent=2), "utf-8")


if __name__ == "__main__":
    main()
