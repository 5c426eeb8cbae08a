"""The cases of each group, at each size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.task import KIB, MIB, Task

if TYPE_CHECKING:
    from benchmarks.options import Options

__all__ = ["GROUPS", "tasks"]

LEAST_HOT = 256 * MIB  # several times what processors cache
LEAST_FILE = 64 * MIB  # stores of one file a tile have thousands at the smallest size
MOST = 1152 * MIB  # of tiles, whatever a request asks for
ROUND_BYTES = 32 * MIB  # of a turn: several small requests, one large one
MOST_ROUNDS = 32
CALLS = 200  # of a turn
MOST_SAVED = 64 * MIB
SPARSE_TILE, SPARSE_COUNT, SPARSE_BYTES = 1 * MIB, 8, 10240 * MIB
CLIENTS, TILES_OF_A_CLIENT = 64, 4
GRIDS = (1_000, 10_000, 100_000, 1_000_000)
GROWING_TILES = (1, 4, 16, 64, 256, 1024, 4096)
GROWING_SIZES = (4 * KIB, 64 * KIB, 1 * MIB)


def tasks(options: Options, folder: str) -> Iterator[Task]:
    """Everything that a run measures, in its order."""
    for group in options.groups:
        yield from GROUPS[group](options, folder)


def _task(
    options: Options,
    folder: str,
    group: str,
    case: str,
    tile_bytes: int,
    tiles: int,
    *,
    least: int = LEAST_FILE,
    brief: bool = False,
) -> Task:
    payload = tiles * tile_bytes
    most = max(tiles, MOST // tile_bytes)
    count = min(max(4 * tiles, least // tile_bytes), most)
    if options.quick:
        count = 4 * tiles
    rounds = 2 if options.quick else max(1, min(MOST_ROUNDS, ROUND_BYTES // payload))
    return Task(
        group=group,
        case=case,
        tile_bytes=tile_bytes,
        tiles=tiles,
        count=count,
        folder=folder,
        rounds=rounds,
        budget=0.1 if options.quick else 1.0,
        brief=brief,
        quick=options.quick,
    )


def _by_size(case: str, least: int = LEAST_FILE) -> Callable[[Options, str], Iterator[Task]]:
    def make(options: Options, folder: str) -> Iterator[Task]:
        for size in options.sizes:
            yield _task(options, folder, case, case, size, options.tiles, least=least)

    return make


def _clients(options: Options, folder: str) -> Iterator[Task]:
    clients = 4 if options.quick else CLIENTS
    for size in options.sizes:
        tiles = clients * TILES_OF_A_CLIENT
        if tiles * size <= MOST:
            task = _task(options, folder, "clients", "clients", size, tiles)
            yield replace(task, clients=clients)


def _call(options: Options, folder: str) -> Iterator[Task]:
    task = _task(options, folder, "call", "call", 4 * KIB, 1)
    yield replace(task, count=16, rounds=5 if options.quick else CALLS)


def _growing_tiles(options: Options, folder: str) -> Iterator[Task]:
    for case, least in (("hot", LEAST_HOT), ("warm", LEAST_FILE), ("cold", LEAST_FILE)):
        for tiles in GROWING_TILES[:2] if options.quick else GROWING_TILES:
            yield _task(options, folder, "tiles", case, 16 * KIB, tiles, least=least, brief=True)


def _growing_sizes(options: Options, folder: str) -> Iterator[Task]:
    for case, least in (("hot", LEAST_HOT), ("warm", LEAST_FILE), ("cold", LEAST_FILE)):
        for size in GROWING_SIZES[:1] if options.quick else sorted({*GROWING_SIZES, *options.sizes}):
            yield _task(options, folder, "sizes", case, size, options.tiles, least=least, brief=True)


def _grid(options: Options, folder: str) -> Iterator[Task]:
    for grid in GRIDS[:1] if options.quick else GRIDS:
        task = _task(options, folder, "grid", "grid", 4 * KIB, options.tiles)
        count = min(GRIDS[0], 4 * options.tiles)
        yield replace(task, count=count, spread=grid // count, rounds=min(8, task.rounds))


def _files(options: Options, folder: str) -> Iterator[Task]:
    for size in options.sizes:
        for case in ("open_warm", "open_cold"):
            yield _task(options, folder, "files", case, size, options.tiles)
    for size in options.sizes:
        tiles = max(1, min(options.tiles, MOST_SAVED // size))
        yield replace(_task(options, folder, "files", "save", size, tiles), rounds=1)
    yield replace(
        _task(options, folder, "files", "first", SPARSE_TILE, 1),
        count=SPARSE_COUNT,
        spread=SPARSE_BYTES // SPARSE_TILE // SPARSE_COUNT,
        rounds=1,
    )


def _memory(options: Options, folder: str) -> Iterator[Task]:
    for size in options.sizes:
        yield replace(_task(options, folder, "memory", "memory", size, options.tiles), rounds=1)


GROUPS: Mapping[str, Callable[[Options, str], Iterator[Task]]] = {
    "hot": _by_size("hot", LEAST_HOT),
    "warm": _by_size("warm"),
    "cold": _by_size("cold"),
    "write": _by_size("write"),
    "clients": _clients,
    "call": _call,
    "tiles": _growing_tiles,
    "sizes": _growing_sizes,
    "grid": _grid,
    "memory": _memory,
    "files": _files,
}
"""What can be chosen, and what it consists of."""
