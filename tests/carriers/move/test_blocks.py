"""Batches in blocks: the same transfers as arrays, moved and checked as they are one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from strideweave.carriers import CPU, FileBacked, Generic
from strideweave.carriers.move import ElementwiseMoveOperation, Transfer, dispatch_move
from strideweave.carriers.move.planning import TransferBatch, TransferBlock
from strideweave.dtype import DType
from strideweave.errors import ReleasedError
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.task_scope import TaskScope

KINDS = {
    "Generic": lambda size: Generic(np.zeros(size), dtype=DType.Float32),
    "CPU": lambda size: CPU(size, dtype=DType.Float32),
    "FileBacked": lambda size: FileBacked(dtype=DType.Float32).allocate_like(size),
}


def run(operation, transfers):
    scope = TaskScope("test")
    scope.start(AwaitResult(), operation().transfer, transfers).wait(60)
    scope.close()


def numbered(kind, size, first=0):
    return KINDS[kind](0).new_like(np.arange(first, first + size, dtype=np.float32))


def block(source, starts, destination, places, slots):
    return TransferBlock(source, np.array(starts, np.int64), destination, np.array(places, np.int64), slots)


@pytest.mark.parametrize("pair", list(itertools.product(KINDS, KINDS)), ids="-".join)
@pytest.mark.parametrize("elementwise", [False, True])
def test_a_batch_in_blocks_is_moved_as_its_transfers_are(pair, elementwise):
    source, destination = pair
    sources = [numbered(source, 100), numbered(source, 50, 1000)]
    found = [KINDS[destination](120), KINDS[destination](40)]
    expected = [KINDS[destination](120), KINDS[destination](40)]

    def batch(targets):
        return TransferBatch(
            [
                block(sources[0], [0, 50, 10, 99], targets[0], [7, 0, 119, 60], 1),
                block(sources[1], [0, 20], targets[0], [20, 70], 13),
                block(sources[1], [], targets[1], [], 5),
                block(sources[0], [3], targets[1], [40], 0),
                block(sources[0], [60], targets[1], [0], 40),
            ]
        )

    operation = ElementwiseMoveOperation if elementwise else dispatch_move(type(sources[0]), type(found[0]))
    run(operation, batch(found))
    run(operation, list(batch(expected)))
    for one, other in zip(found, expected, strict=True):
        assert one._read_slots(0, one.size()).tobytes() == other._read_slots(0, other.size()).tobytes()
    assert found[0]._read_slots(70, 13).tolist() == list(range(1020, 1033))


def test_a_batch_is_a_sequence_of_transfers():
    source, destination = numbered("CPU", 10), KINDS["CPU"](10)
    batch = TransferBatch(
        [block(source, [0, 4], destination, [5, 1], 2), block(source, [9], destination, [0], 1)]
    )
    transfers = [
        Transfer(source, 0, destination, 5, 2),
        Transfer(source, 4, destination, 1, 2),
        Transfer(source, 9, destination, 0, 1),
    ]
    assert len(batch) == 3
    assert list(batch) == transfers
    assert (batch[-1], batch[1:]) == (transfers[2], transfers[1:])


@pytest.mark.parametrize(
    ("starts", "places", "slots"),
    [([0, 9], [0, 4], 2), ([0, -1], [0, 4], 2), ([0, 2], [0, 9], 2), ([0, 2], [-1, 0], 2), ([0], [0], -1)],
)
@pytest.mark.parametrize(
    "kinds", [("CPU", "FileBacked"), ("FileBacked", "CPU"), ("CPU", "CPU")], ids="-".join
)
def test_what_lies_outside_is_refused_before_anything_moves(kinds, starts, places, slots):
    source, destination = numbered(kinds[0], 10), KINDS[kinds[1]](10)
    good = block(source, [0], destination, [0], 3)
    operation = dispatch_move(type(source), type(destination))
    with pytest.raises(ValueError, match="reaches beyond"):
        run(operation, TransferBatch([good, block(source, starts, destination, places, slots)]))
    assert not destination._read_slots(0, 10).any()


def test_other_dtypes_and_released_carriers_are_refused():
    source, destination = numbered("CPU", 10), FileBacked(dtype=DType.Int32).allocate_like(10)
    operation = dispatch_move(CPU, FileBacked)
    with pytest.raises(TypeError, match="one dtype"):
        run(operation, TransferBatch([block(source, [0], destination, [0], 3)]))
    good = KINDS["FileBacked"](10)
    source.release()
    with pytest.raises(ReleasedError):
        run(operation, TransferBatch([block(source, [0], good, [0], 3)]))
