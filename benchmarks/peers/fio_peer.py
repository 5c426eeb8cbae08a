"""The device's limit: ``fio`` through io_uring, past the page cache, at random tiles of the same size."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.dataset import Dataset
from benchmarks.method import GIVEN, Method, Sample
from benchmarks.peers.base import Peer
from benchmarks.task import MIB, Picks, Task

DEPTHS = (32, 64, 128)
MOST_IN_FLIGHT = 256 * MIB  # fio's memory
SECONDS = 0.5  # of one run


@dataclass(slots=True)
class FioMethod(Method):
    """A run of fio, scaled to the bytes of one request."""

    arguments: tuple[str, ...] = ()
    payload: int = 0
    direction: str = "read"

    def sample(self, requests: Iterable[Picks], budget: float) -> Sample:
        """Run fio once and scale its rate."""
        seconds = min(SECONDS, budget)
        command = ("fio", *self.arguments, "--time_based", f"--runtime={round(1e3 * seconds)}ms")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise RuntimeError(
                f"fio ended with {done.returncode}: {(done.stderr or done.stdout).strip()[:500]}"
            )
        # Notes about the system may come before the document.
        report = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][self.direction]
        return {"seconds": [self.payload * report["runtime"] / 1e3 / report["io_bytes"]]}


class Fio(Peer):
    """fio with the queue depths of :data:`DEPTHS`, and none deeper than a request has tiles."""

    programs = ("fio",)

    def facts(self) -> dict[str, str]:
        done = subprocess.run(("fio", "--version"), capture_output=True, text=True, check=True, timeout=60)
        return {"fio": done.stdout.strip().removeprefix("fio-")}

    def cold(self, task: Task) -> list[Method]:
        data = Dataset(task)
        return _methods(task, data.path, data.offset, "randread")

    def write(self, task: Task) -> list[Method]:
        path = self.scratch(task, "fio.bin")
        Dataset(task).copy(path.name)  # written once, so that no block has to be found for it any more
        return _methods(task, path, 0, "randwrite")


def _methods(task: Task, path: Path, offset: int, kind: str) -> list[Method]:
    fitting = {min(depth, task.tiles, max(1, MOST_IN_FLIGHT // task.tile_bytes)) for depth in DEPTHS}
    return [
        FioMethod(
            f"io_uring {kind}, depth {depth}",
            GIVEN if kind == "randread" else "",
            run=lambda _: None,
            found=None,
            brief=depth == max(fitting),
            reference=True,
            arguments=(
                "--name=limit",
                f"--filename={path}",
                f"--offset={offset}",
                f"--size={task.count * task.tile_bytes}",
                f"--rw={kind}",
                f"--bs={task.tile_bytes}",
                f"--iodepth={depth}",
                "--ioengine=io_uring",
                "--direct=1",
                "--norandommap",
                "--randrepeat=0",
                "--allow_file_create=0",
                "--output-format=json",
                *(("--readonly",) if kind == "randread" else ()),
            ),
            payload=task.payload,
            direction=kind.removeprefix("rand"),
        )
        for depth in sorted(fitting)
    ]
