"""A program that kills those who write a store before every one of their system calls, and looks at what is left.

Whoever is killed runs in a forked child. This process itself only looks, which takes no threads, so that a fork
loses none. What may be left: every tile whole, and none older than what an ended request had written.

Usage: killing.py {write,recover,save,replace} DIRECTORY STEP, which kills before every STEP-th call only.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from strideweave import Tensor, TileSet, asarray, save_tiled, tiled
from strideweave.io import positioned
from strideweave.runtime.workers import run_jobs
from strideweave.store import open_store, replacing, tile_files, tile_reader, writer

TILES, SLOTS = 3, 8
PIECE = 24  # bytes that one write moves: three quarters of a tile, so that tiles are torn
KILLED, FAILED = 9, 3


class Fuse:
    """Ends the process before its n-th system call that may change something."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def step(self) -> None:
        if self.left == 0:
            os._exit(KILLED)
        self.left -= 1

    def guard(self, plain: Callable) -> Callable:
        def call(*args, **kwargs):
            self.step()
            return plain(*args, **kwargs)

        return call


class PiecewiseEngine:
    """An engine whose writes are many small ones."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse

    async def read(self, spans):
        await run_jobs([lambda: positioned.read_spans(list(spans))])

    async def write(self, spans):
        await run_jobs([lambda: self.write_now(spans)])

    async def persist(self, file):
        await run_jobs([file.persist])

    def write_now(self, spans):
        for file, offset, buffer in spans:
            for start in range(0, len(buffer), PIECE):
                self.fuse.step()
                piece = buffer[start : start + PIECE]
                positioned.write_spans([positioned.FileSpan(file, offset + start, piece)])


def light(calls: int) -> None:
    """Have this process end before its n-th call."""
    fuse = Fuse(calls)
    engine = PiecewiseEngine(fuse)
    for module in (tile_files, writer):
        module.default_engine = lambda: engine
        module.write_spans = engine.write_now
    tile_reader.default_engine = lambda: engine
    if replacing._RENAMEAT2 is not None:
        replacing._RENAMEAT2 = fuse.guard(replacing._RENAMEAT2)
    for name in ("ftruncate", "fdatasync", "fsync", "mkdir", "rename", "open", "unlink", "rmdir"):
        setattr(os, name, fuse.guard(getattr(os, name)))


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked child; returns how it ended."""
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def was_killed(work: Callable[[], None], calls: int) -> bool:
    """Run in a child that ends before its n-th call; False where it got to its end first."""

    def run() -> None:
        light(calls)
        work()

    code = in_child(run)
    require(code in (0, KILLED), f"the child failed with {code}")
    return code == KILLED


def require(holds: bool, message: str) -> None:
    if not holds:
        sys.exit(message)


def values(version: int) -> np.ndarray:
    return np.full((TILES, SLOTS), version, np.float32) + np.arange(TILES, dtype=np.float32)[:, None] / 8


def versions(path: Path, *, writable: bool) -> list[int]:
    """The version of every tile, each of which must be whole."""
    files = tile_files.TileFiles(str(path), writable=writable)
    found = []
    for tile in range(TILES):
        row = files.read_blocking(tile).view(np.float32)
        version = int(row[0])
        require(bool((row == values(version)[tile]).all()), f"tile {tile} is a mixture: {row}")
        found.append(version)
    files.close()
    return found


def write(tensor: Tensor, version: int, tiles: list[int]) -> None:
    """Give tiles a new version; when this returns, the request that wrote them has ended."""
    carrier = tensor.carrier
    carrier.assign(asarray(values(version)[tiles]), tensor, carrier.select({0: tiles})).wait()
    carrier.evict(TileSet([(tile, 0) for tile in tiles]))


WRITES = ((2, [0, 1, 2]), (3, [1]), (4, [2, 0]), (5, [0, 1, 2]))


def write_all(path: Path, progress: Path) -> None:
    """Write several versions, and note each one that has ended."""
    tile_files.JOURNAL_BYTES = 500  # three of these entries: it is retired on the way
    tensor = open_store(path, "r+")
    for version, tiles in WRITES:
        write(tensor, version, tiles)
        with progress.open("a") as file:
            file.write(f"{version}\n")
    tensor.carrier.flush(durable=True)


def allowed(ended: list[int]) -> list[set[int]]:
    """The versions that each tile may have when these writes have ended and perhaps one more had begun."""
    result = []
    for tile in range(TILES):
        history = [1, *(version for version, tiles in WRITES if tile in tiles)]
        done = [version for version in history if version == 1 or version in ended]
        later = [version for version, _ in WRITES if version not in ended][:1]
        result.append({done[-1], *(version for version in later if version in history)})
    return result


def check_left(path: Path, progress: Path, call: int) -> None:
    """Look at what a killed writer left, as a reader and as the next writer."""
    ended = [int(line) for line in progress.read_text().split()] if progress.exists() else []
    for writable in (False, True, False):
        found = versions(path, writable=writable)
        fits = all(one in those for one, those in zip(found, allowed(ended), strict=True))
        require(fits, f"killed before call {call}: versions {found}, writes ended {ended}")
    require((path / "journal.bin").stat().st_size == 0, "the journal was not retired")


def fresh(base: Path, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, path)


def make_base(path: Path) -> None:
    require(in_child(lambda: save_tiled(tiled(values(1), (1, SLOTS)), path)) == 0, "no store to begin with")


def kill_writes(directory: Path, step: int) -> int:
    base, path, progress = directory / "base", directory / "store", directory / "progress"
    make_base(base)
    call = 0
    while True:
        fresh(base, path)
        progress.unlink(missing_ok=True)
        killed = was_killed(lambda: write_all(path, progress), call)
        check_left(path, progress, call)
        if not killed:
            require(versions(path, writable=False) == [5, 5, 5], "the last version is missing")
            return call
        call += step


def kill_recoveries(directory: Path, step: int) -> int:
    """Kill writers, and those who finish for them, and those who finish for these."""
    base, path, progress = directory / "base", directory / "store", directory / "progress"
    again = directory / "again"
    make_base(base)
    call = kills = 0
    while True:
        fresh(base, path)
        progress.unlink(missing_ok=True)
        if not was_killed(lambda: write_all(path, progress), call):
            return kills
        second = 0
        while True:
            fresh(path, again)
            if not was_killed(lambda: tile_files.TileFiles(str(again), writable=True).close(), second):
                break
            check_left(again, progress, call)
            second, kills = second + step, kills + 1
        call += 5 * step


def kill_saves(directory: Path, step: int, *, replace: bool) -> int:
    base, path = directory / "base", directory / "place" / "store"
    make_base(base)
    path.parent.mkdir()
    call = 0

    def save() -> None:
        save_tiled(tiled(values(2), (1, SLOTS)), path, overwrite=True)

    while True:
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        if replace:
            shutil.copytree(base, path)
        killed = was_killed(save, call)
        if path.exists():
            wanted = [[1] * TILES, [2] * TILES] if replace else [[2] * TILES]
            found = versions(path, writable=False)
            require(found in wanted, f"killed before call {call}: versions {found}")
        else:
            require(not replace and killed, "there is no store")
        require(in_child(save) == 0, "the next save failed")
        left = [entry.name for entry in path.parent.iterdir() if entry != path]
        require(not left, f"{left} was left behind")
        require(versions(path, writable=False) == [2] * TILES, "the next save is not there")
        if not killed:
            return call
        call += step


def main() -> None:
    kind, directory, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    kills = {
        "write": kill_writes,
        "recover": kill_recoveries,
        "save": lambda *given: kill_saves(*given, replace=False),
        "replace": lambda *given: kill_saves(*given, replace=True),
    }[kind](directory, step)
    print(kills)


main()
