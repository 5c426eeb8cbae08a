"""The end of the interpreter waits for the block that a worker is computing."""

import subprocess
import sys
import textwrap
import threading

import pytest

from strideweave.carriers.tiled_evictable.computations import Computations


def test_the_end_waits_for_what_runs_and_lets_nothing_begin():
    computations = Computations()
    entered, leave, closed = threading.Event(), threading.Event(), threading.Event()

    def compute():
        with computations:
            entered.set()
            leave.wait(10)

    def close():
        computations.close()
        closed.set()

    threads = [threading.Thread(target=compute), threading.Thread(target=close)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    while not computations._closed:
        assert not closed.wait(0.005)
    assert not closed.wait(0.05), "a computation was running"
    with pytest.raises(RuntimeError, match="interpreter is exiting"), computations:
        pass
    leave.set()
    for thread in threads:
        thread.join(10)
    assert closed.is_set()


def test_a_failed_computation_is_over():
    computations = Computations()
    with pytest.raises(ZeroDivisionError), computations:
        raise ZeroDivisionError
    computations.close()


PROGRAM = """
    import threading
    import numpy as np, strideweave as sw
    x = sw.tiled(np.ones((1024, 1024), np.float32), (32, 1024), resident=False)
    y = sw.asarray(np.ones((1024, 256), np.float32))
    first = threading.Event()

    def work():
        while True:
            sw.reduce_sum(x @ y).backward()
            first.set()

    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    first.wait(30)
"""


def test_a_program_may_end_in_the_middle_of_a_product():
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
