"""The process of one peer: answers one line of JSON for each line that it gets."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Any

from benchmarks import peers
from benchmarks.dataset import Dataset
from benchmarks.method import Method
from benchmarks.peers.base import Peer
from benchmarks.task import Task

__all__ = ["main"]

VERIFICATION = 1 << 20  # the turn of the verification; no measured one has its tiles


class Worker:
    """One peer and the contenders of the task that is open.

    Args:
        peer: what is measured.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._task: Task | None = None
        self._methods: list[Method] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what one request says."""
        handler = getattr(self, f"do_{request.pop('do')}")
        reply: dict[str, Any] = handler(**request)
        return reply

    def do_hello(self) -> dict[str, Any]:
        """Whether the peer can run."""
        return {"obstacle": self._peer.obstacle()}

    def do_facts(self) -> dict[str, Any]:
        """Versions and settings."""
        return {"facts": self._peer.facts()}

    def do_open(self, task: str) -> dict[str, Any]:
        """Get ready for a task."""
        self._task = Task.from_json(task)
        self._methods = self._peer.open(self._task)
        return {
            "methods": [
                {"name": m.name, "destination": m.destination, "reference": m.reference}
                for m in self._methods
            ]
        }

    def do_verify(self, method: int) -> dict[str, Any]:
        """Compare a contender's result with the data set, bit for bit."""
        task = self._opened()
        picks = task.picks(VERIFICATION)
        data = Dataset(task)
        one = self._methods[method]
        one.verify(picks, data.changed(picks) if task.case == "write" else data.read(picks))
        return {"compared": one.found is not None}

    def do_run(self, method: int, turn: int) -> dict[str, Any]:
        """One turn of a contender."""
        task, one = self._opened(), self._methods[method]
        reply: dict[str, Any] = {}
        if one.cached is not None:
            one.prepare(task.picks(turn))
            reply["cached"] = one.cached()
            one.settle(None)
        reply["sample"] = one.sample(task.requests(turn), task.budget)
        return reply

    def do_close(self) -> dict[str, Any]:
        """Let go of everything of the task."""
        self._methods = []
        self._peer.close()
        gc.collect()
        return {}

    def _opened(self) -> Task:
        if self._task is None:
            raise RuntimeError("no task is open")
        return self._task


def main(name: str) -> None:
    """Answer until the input ends."""
    # Libraries may print; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker(peers.load(name))
    for line in sys.stdin:
        try:
            reply = worker.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
