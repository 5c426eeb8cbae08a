"""The peers' processes, seen from the one that directs them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from benchmarks import peers

__all__ = ["PeerError", "PeerProcess"]

ROOT = Path(__file__).parents[1]
PATIENCE = 900  # seconds for one answer


class PeerError(Exception):
    """A peer failed; the message is for the report."""


class PeerProcess:
    """A peer in a process of its own, which does nothing unless it is asked.

    Args:
        name: which peer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env={**os.environ, **peers.ENVIRONMENTS.get(name, {})},
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have it do something and wait for the answer.

        Raises:
            PeerError: it failed, ended, or took longer than anybody waits.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            process.kill()
            raise PeerError(f"no answer to {do!r} within {PATIENCE} s")
        line = process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def close(self) -> None:
        """End it."""
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        code = self._process.wait(60)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f"its process ended with {code}" + (f": {lines[-1]}" if lines else "")
