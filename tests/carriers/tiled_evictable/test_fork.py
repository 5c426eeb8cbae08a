"""A forked child uses the tiled carriers it inherits, whatever its parent's requests and threads were doing."""

import os
import threading

import numpy as np
import pytest

from processes import in_a_forked_child
from strideweave import (
    CPU,
    LRU,
    AwaitResult,
    Evictable,
    FileBacked,
    Generic,
    Streaming,
    TileConflictError,
    from_numpy,
    move,
)

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def write(model):
    model.carrier[0] = -1.0
    model.values[0, 0, 0] = -1.0


WORK = {
    "project": (None, lambda model: model.project(0, 1)),
    "project into a destination": (None, lambda model: model.project(0, 1, destination=model.destination)),
    "project in a stream": (Streaming(), lambda model: model.project(0, 1)),
    "project after an eviction": (LRU(max_tiles=2), lambda model: model.project(0, 1)),
    "promote": (None, lambda model: model.carrier.promote_async(model.select(0, 1))),
    "evict": (None, lambda model: model.carrier.evict_async(model.select(6, 7))),
    "scatter onto values": (
        None,
        lambda model: model.carrier.scatter(
            from_numpy(np.ones((2, 4, 6), np.float32)), model.tensor, model.select(0, 1), "add"
        ),
    ),
    "whole reads": (None, lambda model: model.tensor.numpy()),
    "a write": (None, write),
}


@pytest.mark.parametrize(("policy", "work"), WORK.values(), ids=WORK)
@pytest.mark.parametrize("secondary", [CPU, FileBacked])
def test_requests_that_the_parent_has_under_way(make_model, control_moves, policy, work, secondary):
    model = make_model(policy=policy, secondary=secondary)
    model.destination = CPU(48)
    model.check(6, 7)
    model.carrier.promote(model.select(6, 7))
    if secondary is CPU:
        model.carrier[6 * 24] = model.values[6, 0, 0] = 60.0
    model.carrier[7 * 24] = model.values[7, 0, 0] = 70.0
    moves = [control_moves(secondary, CPU), control_moves(CPU, secondary)]
    for move_ in moves:
        move_.gate.clear()
    started = []
    thread = threading.Thread(target=lambda: started.append(work(model)))
    thread.start()
    while not any(move_.entered.is_set() for move_ in moves):
        assert thread.is_alive() or not started[0].done
    before = model.snapshot()

    def child():
        for move_ in moves:
            move_.open()
        assert model.at_rest()
        assert not model.destination.is_owned()
        assert model.snapshot()[:3] == before[:3]
        values = model.values.copy()
        values[0, 0, 0] = model.carrier[0]  # an unfinished write is the parent's
        for experts in ([0, 1], [6, 7], list(range(8))):
            found = model.project(*experts).wait(5).numpy()
            assert np.array_equal(found, values[experts])
        model.carrier.promote(model.select(*range(8)))
        if secondary is CPU:  # the parent's spill file is not the child's to write to
            model.carrier.evict(model.select(*range(8)))
        assert np.array_equal(model.tensor.numpy(), values)
        assert model.at_rest()
        model.carrier.release()

    try:
        assert in_a_forked_child(child)
    finally:
        for move_ in moves:
            move_.open()
        thread.join()
    if isinstance(started[0], AwaitResult):
        started[0].wait(10)
    assert np.array_equal(model.tensor.numpy(), model.values)
    assert model.at_rest()


def test_threads_in_the_middle_of_anything(make_model):
    """What a thread of the parent was about to start, the child does not miss and does not hold on to."""
    model = make_model(policy=LRU(max_tiles=3))
    stop = threading.Event()

    def work(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            experts = rng.permutation(8)[: rng.integers(1, 8)].tolist()
            try:
                match rng.integers(4):
                    case 0:
                        model.carrier.promote(model.select(*experts))
                    case 1:
                        model.carrier.evict(model.select(*experts))
                    case 2:
                        model.carrier.statistics()
                    case _:
                        model.check(*experts)
            except TileConflictError:
                continue

    def child():
        assert model.idle()
        model.check(*range(8))
        assert model.at_rest()
        model.carrier.evict(model.select(*range(8)))
        model.carrier.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            assert in_a_forked_child(child)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    model.check(*range(8))
    assert model.at_rest()


def test_a_write_that_a_thread_of_the_parent_is_at(monkeypatch):
    carrier = FileBacked().new_like(range(24))
    entered, gate = threading.Event(), threading.Event()
    store = FileBacked._store_slot

    def held_up(self, i, value):
        entered.set()
        gate.wait()
        store(self, i, value)

    monkeypatch.setattr(FileBacked, "_store_slot", held_up)
    thread = threading.Thread(target=carrier.set_value, args=(3, 5.0))
    thread.start()
    entered.wait()

    def child():
        assert carrier.statistics().pending == 0
        assert carrier[3] == 3.0
        carrier.release()

    try:
        assert in_a_forked_child(child)
        assert carrier.statistics().pending == 1
    finally:
        gate.set()
        thread.join()
    assert (carrier[3], carrier.version) == (5.0, 1)
    carrier.release()


def test_moves_and_transitions_that_threads_of_the_parent_start():
    values = np.arange(24, dtype=np.float32)
    hierarchy = Evictable(CPU(0).new_like(values), Generic([]))
    stop = threading.Event()
    kept: list = [None]

    def turn():
        while not stop.is_set():
            hierarchy.evict()
            hierarchy.promote()

    def carry():
        tensor = from_numpy(values.copy())
        while not stop.is_set():
            kept[0] = (tensor.carrier, CPU(24))
            tensor = move(tensor, kept[0][1])

    def child():
        if hierarchy.is_evicted():
            hierarchy.promote()
        hierarchy.evict()
        hierarchy.promote()
        assert hierarchy[23] == 23.0
        hierarchy.release()
        for carrier in kept[0] or ():
            assert not carrier.is_owned()
            carrier.release()

    threads = [threading.Thread(target=turn), threading.Thread(target=carry)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            assert in_a_forked_child(child)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    hierarchy.release()
