"""Carriers and spans beyond the limits of 32 bits, and of what the system copies in one call."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from strideweave import CPU, DType, Evictable, FileBacked, Generic, Tensor, move, row_major
from strideweave.carriers.move import Transfer, dispatch_move
from strideweave.carriers.move.operations import run_transfers
from strideweave.io import positioned
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.task_scope import TaskScope
from strideweave.testing import bit_patterns, values_of

GIB = 1 << 30
EMPTY = {"Generic": lambda: Generic([]), "CPU": lambda: CPU(0), "FileBacked": FileBacked}


def transfer(*transfers):
    scope = TaskScope("a test")
    operation = dispatch_move(type(transfers[0].source), type(transfers[0].destination))
    try:
        scope.start(AwaitResult(), run_transfers, operation, list(transfers)).wait(120)
    finally:
        scope.close()


def memory_available():
    """Bytes that may be used without swapping; as good as endless where the system does not say."""
    table = Path("/proc/meminfo")
    if not table.exists():
        return 1 << 62
    lines = dict(line.split(":", 1) for line in table.read_text("utf-8").splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


@pytest.mark.parametrize("dtype", [DType.UInt8, DType.Float64], ids=lambda dtype: dtype.name)
def test_slots_of_a_sparse_file_beyond_four_gib(dtype):
    size = 5 * GIB // dtype.itemsize
    carrier = FileBacked(dtype=dtype).allocate_like(size)
    last = size - 1
    carrier[last] = 7
    assert (carrier.size(), carrier[last], carrier[last - 1], carrier[0]) == (size, 7, 0, 0)
    assert carrier.statistics().nbytes == 5 * GIB
    assert carrier.statistics().occupied_bytes < GIB
    assert Tensor(carrier, last - 3, row_major(4), requires_grad=False).tolist() == [0, 0, 0, 7]
    carrier.release()


@pytest.mark.parametrize("edge", [2 * GIB, 0x7FFFF000, 4 * GIB])
def test_spans_across_the_edges_of_a_large_file(edge):
    values = bit_patterns(DType.UInt8, 8192)
    memory = CPU(0, dtype=DType.UInt8).new_like(values)
    file = FileBacked(dtype=DType.UInt8).allocate_like(5 * GIB)
    other = FileBacked(dtype=DType.UInt8).allocate_like(5 * GIB)
    back = CPU(8192, dtype=DType.UInt8)
    transfer(Transfer(memory, 0, file, edge - 4096, 8192))
    transfer(Transfer(file, edge - 4096, other, edge - 100, 8192))
    transfer(Transfer(other, edge - 100, back, 0, 8192))
    assert values_of(back).tobytes() == values.tobytes()
    for carrier in (file, other):
        carrier.release()


@pytest.mark.parametrize("pair", list(itertools.product(EMPTY, EMPTY)), ids="-".join)
def test_a_span_larger_than_one_call(pair, monkeypatch):
    """One call moves at most half a mebibyte; here a small part of that stands for it."""
    monkeypatch.setattr(positioned, "MAX_CALL_BYTES", 1000)
    values = bit_patterns(DType.Float32, 25_001)
    source = EMPTY[pair[0]]().new_like(values)
    moved = move(Tensor(source, 0, row_major(25_001)), EMPTY[pair[1]]())
    assert values_of(moved.carrier).tobytes() == values.tobytes()


def test_an_evictable_larger_than_one_call(monkeypatch):
    monkeypatch.setattr(positioned, "MAX_CALL_BYTES", 4096)
    values = bit_patterns(DType.Float16, 100_001)
    carrier = Evictable(CPU(0, dtype=DType.Float16).new_like(values), FileBacked(dtype=DType.Float16))
    carrier.evict()
    carrier.promote()
    assert values_of(carrier).tobytes() == values.tobytes()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(memory_available() < 6 * GIB, reason="needs 6 GiB of free memory")
def test_a_span_larger_than_one_call_could_be():
    size = 0x7FFFF000 + 3 * 4096 + 5  # Linux moves no more than that at once, whatever is asked
    marks = {0: 1, 0x7FFFF000 - 1: 2, 0x7FFFF000: 3, size - 1: 4}
    primary = CPU(size, dtype=DType.UInt8)
    for slot, value in marks.items():
        primary[slot] = value
    carrier = Evictable(primary, FileBacked(dtype=DType.UInt8))
    carrier.evict()
    assert {slot: carrier.secondary[slot] for slot in marks} == marks
    assert carrier.secondary[0x7FFFF000 + 1] == 0
    carrier.promote()
    assert {slot: carrier[slot] for slot in marks} == marks
    values = Tensor(carrier, 0, row_major(size), requires_grad=False).numpy()
    assert np.count_nonzero(values) == len(marks)
    carrier.release()
