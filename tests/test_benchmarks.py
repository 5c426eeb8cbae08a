"""The benchmark programs still run, and check what they time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="drops pages from Linux's page cache")
def test_projection_is_measured_beside_its_peers(tmp_path):
    target = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-W",
        "error",
        str(BENCHMARKS / "project.py"),
        "--quick",
        "--json",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(target.read_text("utf-8"))["rows"]
    cases = {row["case"] for row in rows}
    assert cases == {f"{kind}, {size} KiB" for kind in ("hot", "warm", "cold") for size in (16, 256)} | {
        "call, 4 KiB"
    }
    ours = [row for row in rows if "ratio" in row]
    assert len(ours) == 2 * (2 + 4 + 4) + 3
    assert all(row["ratio"] > 0 and row["contender"] in done.stdout for row in ours)
