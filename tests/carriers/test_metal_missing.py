"""Metal where MLX is not installed."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["mlx"] = None  # what makes "import mlx.core" fail, installed or not
import strideweave as sw
try:
    sw.Metal({argument})
except RuntimeError as error:
    assert "strideweave[metal]" in str(error), error
    assert isinstance(error.__cause__, ImportError)
else:
    raise SystemExit("a carrier was made")
assert (sw.asarray([1.0]) + 1).tolist() == [2.0]
tiers = sw.Evictable(sw.CPU(2), sw.FileBacked())
tiers.evict()
tiers.promote()
"""


def run(argument):
    subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(argument=argument)], check=True, timeout=60
    )


def test_construction_names_the_extra_and_nothing_else_changes():
    run("4")


def test_it_is_the_first_thing_that_is_said():
    run("-1, dtype=None")
