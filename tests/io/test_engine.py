"""The process's one engine: chosen once, counted without being started."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np

from strideweave.io.engine import ENGINES, Engine, FileSpan, default_engine, statistics
from strideweave.io.files import OpenFile
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.task_scope import TaskScope


def in_a_fresh_process(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_runtime_has_one_engine() -> None:
    engine: Engine = default_engine()
    assert engine is default_engine()
    assert engine.name in ENGINES


def test_the_process_statistics_are_those_of_its_engine(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcd")
    buffer = np.zeros(4, np.uint8)
    scope = TaskScope("test")
    before = statistics()
    spans = [FileSpan(OpenFile.open(tmp_path / "file"), 0, buffer)]
    scope.start(AwaitResult(), default_engine().read, spans).wait()
    scope.close()
    assert buffer.tobytes() == b"abcd"
    after = statistics()
    assert replace(after, engine="", reason="") == default_engine().statistics()
    assert after.engine == default_engine().name
    assert (after.batches, after.bytes_read) == (before.batches + 1, before.bytes_read + 4)


def test_asking_for_statistics_starts_nothing() -> None:
    program = """
        import threading
        from strideweave.io.engine import EngineStatistics, statistics
        assert statistics() == EngineStatistics()
        from strideweave.runtime import current_runtime
        assert threading.active_count() == 1
        current_runtime()
        assert statistics() == EngineStatistics()
        assert current_runtime().service_count == 0
        print("nothing")
    """
    assert in_a_fresh_process(program) == "nothing\n"
