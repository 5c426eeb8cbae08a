"""A memory limit at the ends of things: a fork, the interpreter's exit, and the kernel's own limit."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from processes import in_a_forked_child
from strideweave import CPU, FileBacked, Streaming, Tensor, tiled
from strideweave.layout import Layout
from strideweave.testing import failing_transfers
from tiled_tensors import experts
from waiting import until

TILE = 4 * 6 * 4  # bytes of a tile of make_model


def statistics(model):
    return model.carrier.statistics()


# The ends


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_inherits_no_queue(make_model, control_moves):
    model = make_model(memory_limit=2 * TILE)
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    handles = [model.project(0, 1)]
    moves.wait_until_entered()
    handles += [model.project(2, 3), model.carrier.promote_async(experts(4, 5))]
    until(lambda: statistics(model).waiting_requests == 2)

    def projects() -> None:
        moves.open()
        found = statistics(model)
        assert (found.waiting_requests, found.pending_requests, found.staging_bytes) == (0, 0, 0)
        assert model.carrier._traffic.budget.promised == (0, 0, 0)
        for pair in ((2, 3), (0, 1), (6, 7)):
            model.project(*pair).wait(5)
        assert np.array_equal(model.project(4, 5).wait(5).numpy(), model.values[[4, 5]])

    assert in_a_forked_child(projects)
    moves.open()
    for handle in handles:
        handle.wait(10)
    assert model.at_rest()


def test_the_end_of_the_interpreter_does_not_wait_for_room():
    """Requests that wait are dropped with the others, without a word."""
    program = """
        import numpy as np, strideweave as sw
        tensor = sw.tiled(np.ones((8, 4), np.float32), (1, 4), resident=False, memory_limit=16)
        carrier = tensor.carrier
        handles = [carrier.project(tensor, carrier.select({0: [row % 8]})) for row in range(50)]
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


PROGRAM = """
    import resource, sys
    import numpy as np
    import strideweave as sw

    MIB = 1 << 20
    limit = int(sys.argv[1]) * MIB or None
    tile = int(sys.argv[2])
    count = 192 * MIB // tile
    tensor = sw.tiled(np.broadcast_to(np.arange(count, dtype=np.float32)[:, None], (count, tile // 4)),
                      (1, tile // 4), resident=False, memory_limit=limit)
    carrier = tensor.carrier
    few = max(1, MIB // tile)
    carrier.project(tensor, carrier.select({0: [0]})).wait()  # what starts with the first request
    carrier.evict(carrier.primary_tiles)
    data = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + 56 * MIB,) * 2)
    try:
        for turn in range(2):
            for first in range(0, count - few + 1, few):
                rows = list(range(first, first + few))
                found = carrier.project(tensor, carrier.select({0: rows})).wait().numpy()
                assert (found[:, 0] == rows).all()
    except MemoryError:
        print("no memory")
    else:
        peak = carrier.statistics().peak_memory_bytes
        print("ran", peak <= (limit or 1 << 60))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts memory on Linux only")
@pytest.mark.parametrize(
    ("tile", "limit", "outcome"),
    [
        (64 << 10, 32, "ran True"),
        (97 << 10, 32, "ran True"),
        (4 << 20, 32, "ran True"),
        (4 << 20, 0, "no memory"),
    ],
)
def test_the_process_itself_stays_within_the_limit(tile, limit, outcome):
    """Under the kernel's own limit 192 MiB of tiles pass through 32 MiB, and without one they do not fit."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(limit), str(tile)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.strip() == outcome, ran.stderr


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_error_that_somebody_keeps_keeps_no_staging():
    """Its traceback refers to what was read when it failed, and that memory has long been given to others."""
    values = np.ones((4 << 20, 2), np.float32)  # 32 MiB, in tiles whose slots come apart in the result
    tensor = tiled(values, (1 << 20, 2), resident=False, residency_policy=Streaming(), memory_limit=32 << 20)
    carrier = tensor.carrier
    across = Tensor(carrier, 0, Layout(((1 << 10, 1 << 10, 4), 2), ((1 << 11, 2, 1 << 21), 1)))
    errors = []
    for _ in range(2):
        before = anonymous_bytes()
        with failing_transfers(FileBacked, CPU, after=True) as faults, pytest.raises(OSError) as caught:
            carrier.project(across, carrier.select({})).wait(10)
        errors.append(caught.value)
        assert faults.failed == 1
    assert anonymous_bytes() - before < 4 << 20
    assert carrier.statistics().peak_staging_bytes == 8 << 20
    carrier.release()
