"""The program that runs the sessions of a whole check side by side, with a stand-in for nox."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / ".ci" / "side_by_side.py"

NOX = """
import json, sys
from pathlib import Path

def value(option):
    return sys.argv[sys.argv.index(option) + 1]

if "--list" in sys.argv:
    print(json.dumps([{"session": name} for name in sys.argv[sys.argv.index("-s") + 1 :]]))
    sys.exit()
name = value("-s")
print("this is", name)
if name == "crash":
    sys.exit(7)
if name == "left":
    open("fifo", "w").close()  # waits for the other end to be opened
if name == "right":
    open("fifo").close()
if name == "endless":
    alive = open("fifo", "w")
    print("running", file=alive, flush=True)
    sys.stdin = open("never")
how = {"bad": "failed", "absent": "skipped"}.get(name, "success")
Path(value("--report")).write_text(json.dumps({"sessions": [{"result": how}]}))
sys.exit(how == "failed")
"""


@pytest.fixture
def start(tmp_path: Path):
    (tmp_path / "nox.py").write_text(NOX)
    (tmp_path / ".nox").mkdir()
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "never")

    def start(*sessions: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "error", PROGRAM, *sessions],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def ending(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def test_everything_is_printed_and_what_is_missing_is_named(start, tmp_path: Path):
    status, said = ending(start("good", "absent"))
    assert status == 0
    assert "===== good =====\nthis is good\n" in said
    assert "===== absent =====\nthis is absent\n" in said
    summary = said.partition("===== all =====\n")[2].splitlines()
    assert [line.partition(" after")[0] for line in summary] == ["good: success", "absent: skipped"]
    assert (tmp_path / ".nox" / "good.log").read_text() == "this is good\n"


@pytest.mark.parametrize("one", ["bad", "crash"])
def test_a_failure_of_any_fails_the_whole_when_the_others_have_ended(start, one: str):
    status, said = ending(start(one, "good", "absent"))
    assert status == 1
    assert f"\n{one}: failed after" in said
    assert "\ngood: success after" in said


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
def test_two_run_at_the_same_time(start):
    assert ending(start("left", "right"))[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_interruption_ends_what_runs(start, tmp_path: Path, number: signal.Signals):
    if number == signal.SIGINT and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        pytest.skip("interrupts are ignored here, and so by every program that is started")
    process = start("endless", "good")
    with (tmp_path / "fifo").open() as alive:
        assert alive.readline() == "running\n"
        process.send_signal(number)
        assert alive.read() == ""  # nobody holds the other end any more
    status, said = ending(process)
    assert status == 1
    assert said.endswith("interrupted: every session has been ended\n")
