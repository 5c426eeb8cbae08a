"""What the command line chooses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cases, peers
from benchmarks.task import KIB

__all__ = ["Options", "parse"]

SIZES = (16 * KIB, 256 * KIB, 4096 * KIB, 16384 * KIB)
QUICK_SIZES = (16 * KIB,)
QUICK_TILES = 8
QUICK_TURNS = 2


@dataclass(frozen=True, slots=True)
class Options:
    """One run.

    Attributes:
        groups: what to measure, by the names of :data:`benchmarks.cases.GROUPS`.
        peers: whom to measure.
        repetitions: measured turns of each case.
        sizes: bytes of a tile, where a case does not fix them.
        tiles: tiles of a request, where a case does not fix them.
        output: folder of the report.
        scratch: folder of the files; on the disk that is to be measured.
        quick: a smoke run.
    """

    groups: tuple[str, ...]
    peers: tuple[str, ...]
    repetitions: int
    sizes: tuple[int, ...]
    tiles: int
    output: Path
    scratch: Path
    quick: bool


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Measure StrideWeave beside its peers: one process a peer, in turns, verified first.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=cases.GROUPS,
        default=list(cases.GROUPS),
        metavar="CASE",
        help=f"what to measure, of: {', '.join(cases.GROUPS)}",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=peers.NAMES,
        default=list(peers.DEFAULT),
        metavar="PEER",
        help=f"whom to measure, of: {', '.join(peers.NAMES)}",
    )
    parser.add_argument("--repetitions", type=_positive, default=9, help="measured turns of each case")
    parser.add_argument(
        "--sizes",
        type=_size,
        nargs="+",
        default=list(SIZES),
        metavar="SIZE",
        help="bytes of a tile, multiples of 4096, such as 16K or 4M",
    )
    parser.add_argument("--tiles", type=_positive, default=64, help="tiles of one request")
    parser.add_argument("--output", type=Path, default=Path("benchmark-results"), help="folder of the report")
    parser.add_argument(
        "--scratch", type=Path, help="folder on the disk to measure; the output's if left out"
    )
    parser.add_argument("--quick", action="store_true", help="little of everything: does it still run?")
    found = parser.parse_args(arguments)
    if found.quick:
        found.sizes = list(QUICK_SIZES)
        found.tiles, found.repetitions = min(QUICK_TILES, found.tiles), min(QUICK_TURNS, found.repetitions)
    return Options(
        groups=tuple(name for name in cases.GROUPS if name in found.cases),
        peers=tuple(name for name in peers.NAMES if name in found.peers),
        repetitions=found.repetitions,
        sizes=tuple(sorted(set(found.sizes))),
        tiles=found.tiles,
        output=found.output,
        scratch=found.output if found.scratch is None else found.scratch,
        quick=found.quick,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1 is needed, not {value}")
    return value


def _size(text: str) -> int:
    units = {"K": KIB, "M": KIB * KIB}
    unit = units.get(text[-1:].upper())
    nbytes = int(text[:-1]) * unit if unit else int(text)
    if nbytes < 1 or nbytes % 4096:
        raise argparse.ArgumentTypeError(f"a multiple of 4096 is needed, not {nbytes}")
    return nbytes
