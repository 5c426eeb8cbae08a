"""Fixtures of the runtime's tests: a scope, gates for requests, programs in a process of their own."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strideweave.runtime import AwaitResult, TaskScope

# The runtime needs no room above it, so the package's own __init__, which imports all of them, is left out:
# dozens of processes start here.
PRELUDE = """
import gc, importlib.util, os, signal, sys, threading, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in a shell's background ignores it
package = types.ModuleType("strideweave")
package.__path__ = importlib.util.find_spec("strideweave").submodule_search_locations
sys.modules["strideweave"] = package
import anyio
from strideweave.runtime import AwaitResult, TaskScope, current_runtime, lifecycle, run_jobs, statistics

scope = TaskScope("script")

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # also when stdout is gone

async def value(x):
    return x

async def slow(word):
    await anyio.sleep(0.06)
    await run_jobs([lambda: say(word)])  # needs a worker, whatever the interpreter thinks of new threads

def start(function, *args, handle=None):
    return scope.start(handle or AwaitResult(), function, *args, cleanup=lambda: say("cleanup"))
"""


@pytest.fixture
def scope() -> Iterator[TaskScope]:
    """An open scope; closing it at the end proves that nothing is left pending."""
    scope = TaskScope("test carrier")
    yield scope
    scope.close()


class Gate:
    """A request that begins, says so, and ends when it is told to."""

    def __init__(self) -> None:
        self.entered: AwaitResult[None] = AwaitResult()
        self._opened: AwaitResult[None] = AwaitResult()

    async def hold(self, value: object = None) -> object:
        """The request: return ``value``, or raise it if it is an exception, once the gate is open."""
        self.entered._finish()
        await self._opened
        if isinstance(value, BaseException):
            raise value
        return value

    def open(self) -> None:
        self._opened._finish()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def make_gate() -> Iterator[Callable[[], Gate]]:
    gates: list[Gate] = []

    def make() -> Gate:
        gates.append(Gate())
        return gates[-1]

    yield make
    for gate in gates:
        gate.open()


class Program:
    """What a script of its own process printed and returned."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.lines = done.stdout.split("\n")[:-1]
        self.errors = done.stderr
        self.code = done.returncode


@pytest.fixture
def run_program(tmp_path: Path) -> Callable[..., Program]:
    """Run source text after the prelude in a process of its own; a hang is a failure."""

    def run(source: str, *arguments: str) -> Program:
        path = tmp_path / "program.py"
        path.write_text(PRELUDE + textwrap.dedent(source))
        done = subprocess.run(
            # Forking beside a thread is deprecated from 3.12 on, and the point of some tests.
            [
                sys.executable,
                "-W",
                "always::ResourceWarning",
                "-W",
                "ignore::DeprecationWarning",
                path,
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        return Program(done)

    return run
