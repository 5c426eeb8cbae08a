"""Pieces of memory that lie in several arrays: copied together, bit for bit, and kept alive."""

import gc
import mmap
import random
import tracemalloc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.io.buffers import address_of
from strideweave.io.scattered import ScatteredMemory

PAGE = mmap.PAGESIZE


def mapped(nbytes, first):
    """Page-aligned memory of its own, with numbers from ``first`` on."""
    array = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint32)
    array[:] = np.arange(first, first + len(array))
    return array


def pieces_of(arrays, slots):
    """Every array cut into pieces, and where each begins."""
    pieces = [array[start : start + slots] for array in arrays for start in range(0, len(array), slots)]
    return pieces, np.array([address_of(piece) for piece in pieces], np.int64)


@pytest.mark.parametrize("nbytes", [64, 1024, PAGE, 3 * PAGE, 16 * PAGE, 65 * PAGE, 256 * PAGE])
@pytest.mark.parametrize("job_bytes", [1, PAGE, 1 << 30])
def test_pieces_are_copied_in_the_order_asked_for(nbytes, job_bytes):
    arrays = [mapped(nbytes * count, 1000 * nbytes * number) for number, count in enumerate((64, 1, 64))]
    pieces, addresses = pieces_of(arrays, nbytes // 4)
    chosen = np.array([128, 3, 64, 0, 65, 127])
    memory = ScatteredMemory.of(addresses[chosen], nbytes, np.dtype("u4"), arrays)
    assert memory is not None
    assert (len(memory), memory.piece_slots, memory.dtype) == (6, nbytes // 4, np.uint32)
    order = np.array([4, 0, 2])
    expected = np.concatenate([pieces[which] for which in chosen[order]])
    copied = np.zeros_like(expected)
    memory.copy(order, copied)
    np.testing.assert_array_equal(copied, expected)

    copied[:] = 0
    jobs = memory.jobs(order, copied, job_bytes)
    random.Random(1).shuffle(jobs)
    for job in jobs:
        job()
    np.testing.assert_array_equal(copied, expected)

    whole = np.zeros(6 * nbytes // 4, np.uint32)
    memory.copy(None, whole)
    np.testing.assert_array_equal(whole, np.concatenate([pieces[which] for which in chosen]))


@given(
    st.lists(st.integers(0, 40), min_size=1, unique=True), st.sampled_from([2, 4, 12, 100, 1000, 2048, 5000])
)
def test_pieces_of_one_array_are_copied_together_whatever_their_size(chosen, nbytes):
    array = np.arange(41 * nbytes // 2).astype(np.uint16)
    pieces, addresses = pieces_of([array], nbytes // 2)
    memory = ScatteredMemory.of(addresses[chosen], nbytes, np.dtype("u2"), array)
    assert memory is not None
    copied = np.zeros(len(chosen) * nbytes // 2, np.uint16)
    memory.copy(None, copied)
    np.testing.assert_array_equal(copied, np.concatenate([pieces[which] for which in chosen]))


@pytest.mark.parametrize("nbytes", [PAGE, 64 * PAGE])
def test_no_pieces_are_copied_where_none_are_asked_for(nbytes):
    array = mapped(4 * nbytes, 0)
    _, addresses = pieces_of([array], nbytes // 4)
    memory = ScatteredMemory.of(addresses, nbytes, array.dtype, array)
    none = np.array([], np.int64)
    for out in (np.zeros(0, array.dtype), array[8:8]):
        memory.copy(none, out)
        assert memory.jobs(none, out, PAGE) == []
    with pytest.raises(ValueError, match="cannot reshape"):
        memory.copy(none, np.zeros(8, array.dtype))


def test_jobs_have_about_the_size_asked_for():
    array = mapped(64 * PAGE, 0)
    _, addresses = pieces_of([array], 4 * PAGE // 4)
    memory = ScatteredMemory.of(addresses, 4 * PAGE, np.dtype("u4"), array)
    out = np.zeros_like(array)
    assert [len(memory.jobs(None, out, size * PAGE)) for size in (64, 32, 8)] == [1, 2, 8]


def test_pieces_that_have_only_short_rows_in_common_are_left_to_others():
    memory = mapped(PAGE, 0).view(np.uint8)
    addresses = np.array([0, 1032]) + address_of(memory)
    assert ScatteredMemory.of(addresses, 1024, np.dtype("u4"), memory) is None
    assert ScatteredMemory.of(addresses[:1], 1024, np.dtype("u4"), memory) is not None


def test_pieces_that_are_not_aligned_to_their_items_are_left_to_others():
    """NumPy would make a copy of all that lies between them."""
    memory = mapped(PAGE, 0).view(np.uint8)
    addresses = np.array([2, 1026]) + address_of(memory)
    assert ScatteredMemory.of(addresses, 1024, np.dtype("u4"), memory) is None
    assert ScatteredMemory.of(addresses, 1024, np.dtype("u2"), memory) is not None


def test_what_lies_between_the_pieces_may_be_gone():
    """Only the pieces are looked at: a hole in the middle that is not mapped any more would end the process."""
    ordered = sorted([mapped(64 * PAGE, number) for number in range(3)], key=address_of)
    addresses = np.array([address_of(ordered[0]), address_of(ordered[2])])
    memory = ScatteredMemory.of(addresses, 64 * PAGE, np.dtype("u4"), [ordered[0], ordered[2]])
    expected = np.concatenate([ordered[0], ordered[2]])
    gap = weakref.ref(ordered.pop(1))
    gc.collect()
    assert gap() is None  # and with the array its mapping
    copied = np.zeros_like(expected)
    memory.copy(None, copied)
    np.testing.assert_array_equal(copied, expected)


@pytest.mark.parametrize("pages", [8, 64, 256])
def test_nothing_is_copied_twice_on_its_way_to_memory_between_the_pieces(pages):
    """NumPy would take it for a part of the source, and write to memory of its own first."""
    ordered = sorted([mapped(256 * PAGE, number) for number in range(3)], key=address_of)
    pieces, addresses = pieces_of([ordered[0], ordered[2]], pages * PAGE // 4)
    chosen = np.arange(len(pieces))[::2]
    memory = ScatteredMemory.of(addresses[chosen], pages * PAGE, np.dtype("u4"), ordered)
    out = ordered[1][: len(chosen) * pages * PAGE // 4]
    tracemalloc.start()
    try:
        memory.copy(None, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(out, np.concatenate([pieces[which] for which in chosen]))
    assert peak < out.nbytes // 4


def test_memory_stays_as_long_as_anything_may_copy_it():
    class Owner:
        pass

    array = mapped(8 * PAGE, 7)
    owner = Owner()
    owner.array = array
    alive = weakref.ref(owner)
    memory = ScatteredMemory.of(np.array([address_of(array)]), 8 * PAGE, np.dtype("u4"), owner)
    out = np.zeros(2 * PAGE, np.uint32)
    jobs = memory.jobs(None, out, PAGE)
    del array, owner, memory
    gc.collect()
    assert alive() is not None
    for job in jobs:
        job()
    np.testing.assert_array_equal(out, np.arange(7, 7 + len(out)))
    del jobs, job
    gc.collect()
    assert alive() is None


def test_what_does_not_fit_is_refused_and_nothing_copied():
    array = mapped(4 * PAGE, 1)
    _, addresses = pieces_of([array], PAGE // 4)
    memory = ScatteredMemory.of(addresses, PAGE, np.dtype("u4"), array)
    out = np.zeros(PAGE // 4, np.uint32)
    for order, error in ((np.array([4]), IndexError), (np.array([0, 1]), ValueError)):
        with pytest.raises(error):
            memory.copy(order, out)
    assert not out.any()
