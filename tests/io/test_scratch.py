"""Scratch memory: where it begins, and that what was freed is used again."""

import mmap

import numpy as np
import pytest

from strideweave.io.buffers import MAPPED_BYTES
from strideweave.io.recycling import scratch_array

MIB = 1 << 20


@pytest.mark.parametrize(
    "nbytes", [0, 1, 4096, MAPPED_BYTES - 1, MAPPED_BYTES, MAPPED_BYTES + 5, MIB, 33 * MIB]
)
def test_scratch_is_writable_and_begins_with_a_page_when_it_is_not_small(nbytes):
    array = scratch_array(nbytes)
    assert (array.shape, array.dtype) == ((nbytes,), np.uint8)
    array[:] = 7
    assert array.all()
    assert nbytes < MAPPED_BYTES or array.ctypes.data % mmap.PAGESIZE == 0


@pytest.mark.parametrize(("nbytes", "error"), [(-1, ValueError), (1.0, TypeError)])
def test_a_size_that_is_none_is_refused(nbytes, error):
    with pytest.raises(error):
        scratch_array(nbytes)


def test_arrays_that_live_at_once_do_not_share_memory():
    arrays = [scratch_array(MAPPED_BYTES + number) for number in range(20)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [set(array.tolist()) for array in arrays] == [{number} for number in range(20)]
