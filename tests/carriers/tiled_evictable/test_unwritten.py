"""New values that a file below was meant to keep are not lost in silence."""

import contextlib
import gc
import sys
import threading
import warnings

import numpy as np
import pytest

import strideweave as sw
from processes import in_a_forked_child
from strideweave.runtime import AwaitResult

GRID, TILE = (4,), (8,)
LOST = "{} with {} dirty tile.*flush"


def over_store(tmp_path):
    sw.save_tiled(sw.tiled(np.zeros(32, np.float32), TILE), tmp_path / "store", overwrite=True)
    return sw.open_tiled(tmp_path / "store", mode="r+").carrier


def over_file(tmp_path, *, mutable=True):
    np.zeros(32, np.float32).tofile(tmp_path / "values.bin")
    disk = sw.FileBacked.open(tmp_path / "values.bin", dtype=sw.DType.Float32, mutable=mutable)
    return sw.TiledEvictable(sw.CPU(0), disk, GRID, TILE)


def over_read_only_file(tmp_path):
    return over_file(tmp_path, mutable=False)


def over_spill(tmp_path):
    return sw.tiled(np.zeros(32, np.float32), TILE, resident=False).carrier


def over_device(tmp_path):
    device = sw.BlockDevice(tmp_path / "disk", size=1 << 20)
    return sw.TiledEvictable(sw.CPU(32), device.allocate(0), GRID, TILE)


kept = pytest.mark.parametrize("over", [over_store, over_file])


@kept
@pytest.mark.parametrize("tiles", [1, 3])
def test_releasing_dirty_tiles_above_a_file_that_stays_warns(tmp_path, over, tiles):
    carrier = over(tmp_path)
    for tile in range(tiles):
        carrier[tile * 8] = 1.0
    with pytest.warns(RuntimeWarning, match=LOST.format("released", tiles)) as caught:
        carrier.release()
    assert [warning.filename for warning in caught] == [__file__]
    carrier.release()  # and once only


@kept
def test_the_end_of_a_with_block_warns_where_the_block_is(tmp_path, over):
    with pytest.warns(RuntimeWarning, match=LOST.format("released", 1)) as caught, over(tmp_path) as carrier:
        carrier[0] = 1.0
    assert [warning.filename for warning in caught] == [__file__]


@kept
def test_dropping_the_last_reference_warns_too(tmp_path, over):
    carrier = over(tmp_path)
    carrier[0] = 1.0
    with pytest.warns(RuntimeWarning, match=LOST.format(r"dropped without release\(\)", 1)):
        del carrier
        gc.collect()


@kept
def test_a_warning_that_is_made_an_error_leaves_nothing_behind(tmp_path, over):
    carrier = over(tmp_path)
    carrier[0] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            carrier.release()
    assert carrier.is_released()
    assert carrier.secondary.is_released()
    assert carrier.statistics().pending_requests == 0
    over(tmp_path).release()  # the right to write, or the file, is free again


@kept
@pytest.mark.parametrize("end", ["release", "drop"])
def test_a_forked_child_does_not_warn_of_what_its_parent_has(tmp_path, over, end):
    carriers = [over(tmp_path)]
    carriers[0][0] = 1.0

    def child():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            carriers.pop().release() if end == "release" else carriers.clear()
            gc.collect()
        return not caught

    assert in_a_forked_child(child)
    carriers[0].flush()
    carriers[0].release()


@kept
@pytest.mark.parametrize("write", ["flush", "evict"])
def test_what_was_written_is_not_warned_of(tmp_path, over, write):
    carrier = over(tmp_path)
    carrier[0] = 1.0
    carrier.flush() if write == "flush" else carrier.evict(carrier.dirty_tiles)
    carrier.release()


@pytest.mark.parametrize("over", [over_spill, over_device, over_read_only_file])
def test_what_would_be_gone_anyway_is_not_warned_of(tmp_path, over):
    carrier = over(tmp_path)
    carrier[0] = 1.0
    assert len(carrier.dirty_tiles) >= 1
    carrier.release()


@kept
def test_values_that_moved_elsewhere_are_not_lost(tmp_path, over):
    carrier = over(tmp_path)
    carrier[0] = 1.0
    moved = sw.move(sw.Tensor(carrier, 0, sw.row_major(32)), sw.CPU(0))
    assert carrier.is_released()
    assert moved[0] == 1.0


@kept
def test_two_threads_that_release_while_tiles_are_written_warn_once_or_not_at_all(tmp_path, over):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    seen = set()
    try:
        for flush in [False, True] * 20:
            carrier = over(tmp_path)
            carrier[0] = 1.0
            pending = carrier.flush_async() if flush else AwaitResult.completed()

            def end(carrier=carrier):
                while not carrier.is_released():
                    with contextlib.suppress(sw.PendingWorkError):
                        carrier.release()

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                threads = [threading.Thread(target=end) for _ in range(2)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            pending.wait()
            seen.add((flush, len(caught)))
    finally:
        sys.setswitchinterval(interval)
    assert seen == {(False, 1), (True, 0)}
