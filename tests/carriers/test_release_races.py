"""Reads meet ``release()`` in another thread: a value or ReleasedError, and nothing else."""

import threading

import numpy as np
import pytest

from strideweave import CPU, Evictable, FileBacked, Generic, PendingWorkError, ReleasedError, TiledEvictable

VALUES = np.arange(24, dtype=np.float32)


def tiled(fast, slow):
    carrier = TiledEvictable(fast, slow, (4,), (6,))
    if fast.size() == 0:
        carrier.promote(carrier.select({0: [1, 3]}))
    return carrier


MAKERS = {
    "CPU": lambda: CPU(0).new_like(VALUES),
    "Generic": lambda: Generic(VALUES),
    "FileBacked": lambda: FileBacked().new_like(VALUES),
    "Evictable": lambda: Evictable(CPU(0).new_like(VALUES), FileBacked()),
    "tiled, primary": lambda: tiled(CPU(0).new_like(VALUES), FileBacked()),
    "tiled, file": lambda: tiled(CPU(0), FileBacked().new_like(VALUES)),
    "tiled, memory": lambda: tiled(Generic([]), CPU(0).new_like(VALUES)),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_read_gives_the_value_or_says_that_the_carrier_was_released(make):
    for _ in range(60):
        outcomes = read_while_released(make())
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert [type(error) for error in errors] == [ReleasedError] * 2
        assert all(outcomes)


def read_while_released(carrier):
    """What reads in two threads gave: whether each value was right, and what ended the thread."""
    begin, outcomes = threading.Barrier(3), []

    def read(slot):
        begin.wait()
        try:
            while True:
                outcomes.append(carrier[slot] == slot)
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=read, args=(slot,)) for slot in (3, 9)]
    for thread in threads:
        thread.start()
    begin.wait()
    while not carrier.is_released():
        try:
            carrier.release()
        except PendingWorkError:  # somebody reads a tier this moment
            continue
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_release_in_the_middle_of_a_read_is_what_the_read_reports(make, monkeypatch):
    carrier = make()
    kind = type(carrier)
    load = kind._load_slot

    def released_first(self, i):
        carrier.release()
        return load(self, i)

    monkeypatch.setattr(kind, "_load_slot", released_first)
    with pytest.raises(ReleasedError, match=f"this {kind.__name__} was released"):
        carrier.get_value(3)
