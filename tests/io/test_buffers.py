"""Buffers: alignment, and that what the system refuses is said."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from strideweave.io.buffers import ALIGNMENT, MAPPED_BYTES, aligned_array, map_memory, page_aligned

PAGE = mmap.PAGESIZE
SIZES = [0, 1, 64, 4096, MAPPED_BYTES - 1, MAPPED_BYTES, MAPPED_BYTES + 1, 1 << 20]


@pytest.mark.parametrize("nbytes", SIZES)
def test_an_aligned_array_is_zero_writable_and_aligned(nbytes: int) -> None:
    array = aligned_array(nbytes)
    assert (array.shape, array.dtype) == ((nbytes,), np.dtype(np.uint8))
    assert not array.any()
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert nbytes == 0 or array.ctypes.data % (PAGE if nbytes >= MAPPED_BYTES else ALIGNMENT) == 0
    array[:] = 255


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_page_aligned_array_begins_with_a_page(nbytes: int) -> None:
    array = page_aligned(nbytes)
    assert (array.shape, array.dtype) == ((nbytes,), np.dtype(np.uint8))
    assert nbytes == 0 or array.ctypes.data % PAGE == 0
    array[:] = 255


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1.5, TypeError), ("8", TypeError)])
def test_a_size_that_is_no_byte_count_is_refused(bad: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        aligned_array(bad)  # type: ignore[arg-type]


def test_memory_that_the_system_does_not_have_is_a_memory_error() -> None:
    for make in (map_memory, aligned_array):
        with pytest.raises(MemoryError, match=str(1 << 60)):
            make(1 << 60)


def test_a_view_keeps_the_memory_alive() -> None:
    view = aligned_array(MAPPED_BYTES)[PAGE:]
    view[:] = 7
    assert (view == 7).all()
