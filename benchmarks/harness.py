"""The run: every contender of a case takes its turn, verified first."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import cases, machine
from benchmarks.dataset import Dataset, sync_file_system
from benchmarks.figures import Row
from benchmarks.options import Options
from benchmarks.processes import PeerError, PeerProcess
from benchmarks.task import Task

__all__ = ["Contender", "order", "run"]


@dataclass(slots=True)
class Contender:
    """One method of one peer, and what its turns gave."""

    process: PeerProcess
    number: int
    row: Row
    failure: str | None = None

    def ask(self, do: str, **arguments: Any) -> dict[str, Any] | None:
        """Have the peer do something with this method; None once it has failed."""
        if self.failure is not None:
            return None
        try:
            return self.process.ask(do, method=self.number, **arguments)
        except PeerError as error:
            self.failure = str(error)
            return None


@dataclass(slots=True)
class Run:
    """What the report is made of."""

    options: Options
    peers: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)


def run(options: Options) -> dict[str, Any]:
    """Measure everything; returns what the JSON file holds."""
    found = Run(options)
    before = machine.load()
    options.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tiles-", dir=options.scratch) as scratch, ExitStack() as stack:
        facts = machine.facts(Path(scratch))
        processes = [started for name in options.peers if (started := _start(found, stack, name)) is not None]
        _ask_facts(found, processes)
        for number, task in enumerate(cases.tasks(options, scratch)):
            _say(f"{number + 1}: {task.group}: {task.title}")
            found.results.append(_measure(task, processes, options.repetitions))
    facts["load before and after"] = f"{before}, {machine.load()}"
    facts["commit"] = machine.commit()
    return {
        "machine": facts,
        "options": {
            "cases": options.groups,
            "peers": options.peers,
            "repetitions": options.repetitions,
            "quick": options.quick,
        },
        "peers": found.peers,
        "skipped": found.skipped,
        "results": found.results,
    }


def order(count: int, turn: int) -> list[int]:
    """Who comes when: everybody starts once, and every other turn goes backwards, so that neighbours change too."""
    start = turn % count if count else 0
    places = [(start + step) % count for step in range(count)]
    return places[::-1] if turn % 2 else places


def _start(found: Run, stack: ExitStack, name: str) -> PeerProcess | None:
    process = stack.enter_context(PeerProcess(name))
    try:
        obstacle = process.ask("hello")["obstacle"]
    except PeerError as error:
        obstacle = str(error)
    if obstacle is None:
        return process
    found.skipped[name] = obstacle
    _say(f"{name} is left out: {obstacle}")
    return None


def _ask_facts(found: Run, processes: Sequence[PeerProcess]) -> None:
    for process in processes:
        try:
            found.peers[process.name] = process.ask("facts")["facts"]
        except PeerError as error:
            found.peers[process.name] = {"error": str(error)}


def _measure(task: Task, processes: Sequence[PeerProcess], repetitions: int) -> dict[str, Any]:
    """One task: open, verify, one turn that does not count, and the turns that do."""
    with _folder(task):
        Dataset(task).create()
        contenders, failures = _open(task, processes)
        for contender in contenders:
            contender.ask("verify")
        sync_file_system(task.folder)  # what opening has written must not disturb the first turn
        for turn in range(-1, repetitions):
            for place in order(len(contenders), turn + 1):
                _take_turn(contenders[place], turn)
        for process in processes:
            try:
                process.ask("close")
            except PeerError as error:
                failures.append({"peer": process.name, "name": "close", "reason": str(error)})
    for contender in contenders:
        if contender.failure is not None:
            failures.append({**_names(contender.row), "reason": contender.failure})
    for failure in failures:
        _say(f"   {failure['peer']}, {failure['name']}: {failure['reason']}")
    rows = [contender.row for contender in contenders if contender.failure is None]
    record = {name: value for name, value in asdict(task).items() if name != "folder"}
    return {**record, "payload": task.payload, "title": task.title, "rows": rows, "failures": failures}


def _open(task: Task, processes: Sequence[PeerProcess]) -> tuple[list[Contender], list[dict[str, str]]]:
    contenders: list[Contender] = []
    failures: list[dict[str, str]] = []
    for process in processes:
        try:
            methods = process.ask("open", task=task.to_json())["methods"]
        except PeerError as error:
            failures.append({"peer": process.name, "name": "open", "reason": str(error)})
            continue
        for number, method in enumerate(methods):
            row = {"peer": process.name, **method, "turns": []}
            contenders.append(Contender(process, number, row))
    return contenders, failures


def _take_turn(contender: Contender, turn: int) -> None:
    reply = contender.ask("run", turn=turn + 1)
    if reply is None or turn < 0:
        return
    contender.row["turns"].append(reply["sample"])
    if "cached" in reply:
        contender.row["cached"] = [*contender.row.get("cached", []), reply["cached"]]


@contextmanager
def _folder(task: Task) -> Iterator[None]:
    """What a task leaves in its folder goes, and only that."""
    folder = Path(task.folder)
    try:
        yield
    finally:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _names(row: Row) -> dict[str, str]:
    return {"peer": row["peer"], "name": row["name"]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
