"""A tiled carrier that nobody holds any more goes at once, tiles and all, without the cycle collector."""

import os
import threading
import weakref

import numpy as np
import pytest

import strideweave
from strideweave import CPU, FileBacked, TiledResidencyFacet, TileSelection
from strideweave.runtime.event_loop import current_runtime


def let_the_loop_finish():
    """The loop lets go of a task a few steps after its handle is done."""
    for _ in range(8):
        passed = threading.Event()
        current_runtime().post(passed.set)
        assert passed.wait(10)


def fail(model, moves):
    moves.failures.append(OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        model.project(3).wait()


def refuse(model, moves):
    with pytest.raises(ValueError, match="grid"):
        model.carrier.promote(TileSelection([[9], [0], [0]]))


WORK = {
    "nothing": lambda model, moves: None,
    "reads and writes": lambda model, moves: model.carrier.set_value(0, model.carrier[30]),
    "promotion and eviction": lambda model, moves: (
        model.carrier.promote(model.select(1, 2)),
        model.carrier.evict(model.select(2)),
    ),
    "projection": lambda model, moves: model.check(1, 0),
    "the facet": lambda model, moves: model.carrier.require_facet(TiledResidencyFacet).promote(
        model.select(4)
    ),
    "whole reads": lambda model, moves: model.tensor.numpy(),
    "a failure": fail,
    "a refusal": refuse,
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_dropped_carrier_goes_at_once(make_model, control_moves, no_collector, work):
    model = make_model(keep=False)
    moves = control_moves(FileBacked, CPU)
    work(model, moves)
    gone = [weakref.ref(model.carrier), weakref.ref(model.carrier.primary)]
    spill = model.carrier.secondary.path
    del model
    let_the_loop_finish()
    assert [ref() for ref in gone] == [None, None]
    with pytest.raises(FileNotFoundError):
        open(spill)  # noqa: PTH123, SIM115


@pytest.mark.parametrize(
    "limit", [None, 16 * 4096], ids=["in one block", "in blocks, of which the second fails"]
)
@pytest.mark.parametrize("kind", ["operation", "pass", "two operands"])
def test_a_failed_direct_operation_keeps_nothing(no_collector, kind, limit):
    ones = np.ones((16, 1024), np.float32)
    tensor = strideweave.tiled(ones, (1, 1024), resident=False, memory_limit=limit)
    other = strideweave.tiled(ones, (1, 1024), resident=False)
    before = strideweave.reduce_sum(tensor * tensor) if kind == "pass" else None
    os.truncate(tensor.carrier.secondary.path, 4096)
    with pytest.raises(EOFError, match="were wanted"):
        if before is not None:
            before.backward()
        elif kind == "operation":
            strideweave.reduce_sum(tensor)
        else:
            strideweave.add(other, tensor)
    gone = [weakref.ref(one.carrier) for one in (tensor, other)]
    del tensor, other, before
    let_the_loop_finish()
    assert [ref() for ref in gone] == [None, None]


def test_unfinished_work_keeps_the_carrier_until_it_ends(make_model, control_moves, no_collector):
    model = make_model(keep=False)
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    handle, expected = model.project(3, 1), model.values[[3, 1]]
    moves.wait_until_entered()
    gone = weakref.ref(model.carrier)
    del model
    assert gone() is not None
    moves.open()
    compact = handle.wait(10)
    assert (compact.numpy() == expected).all()
    let_the_loop_finish()
    assert gone() is not None  # the graph of what came out of it leads to the carrier
    del handle, compact
    assert gone() is None
