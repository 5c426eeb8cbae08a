"""What direct operations take: under a memory limit of the carrier, under the kernel's own, and over Metal."""

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import strideweave as sw
from strideweave import DType, FileBacked, KeepResident, Tensor, TiledEvictable, row_major, tiled
from strideweave.carriers.tiled_evictable import direct_request

RNG = np.random.default_rng(5)
ROW = 64 * 4  # bytes of a tile of one row


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def whole(gradient):
    """The values of a tiled gradient as one array, read a tile at a time."""
    carrier, rows = gradient.carrier, []
    for row in range(carrier.grid_shape[0]):
        rows.append(carrier.project(gradient, carrier.select({0: [row]})).wait().numpy())
        carrier.evict(carrier.primary_tiles)
    return np.concatenate(rows)


def at_rest(tensor):
    found = tensor.carrier.statistics()
    assert found.pending_requests == found.pinned_tiles == found.staging_bytes == found.waiting_requests == 0
    assert found.peak_memory_bytes <= tensor.carrier.memory_limit


# The limit of a carrier


@pytest.mark.parametrize("tiles", [2, 3, 5, 12, 64])
def test_operations_and_gradients_stay_within_the_limit(tiles):
    values, others = normal(48, 64), normal(64, 3)
    x, y = tiled(values, (1, 64), resident=False, memory_limit=tiles * ROW), sw.asarray(others)
    result = x @ y
    np.testing.assert_allclose(result.numpy(), values @ others, 1e-4, 1e-4)
    np.testing.assert_allclose(sw.reduce_sum(x, axis=0).numpy(), values.sum(0), 1e-4, 1e-4)
    result.backward(sw.asarray(np.ones((48, 3), np.float32)))
    np.testing.assert_allclose(y.grad.numpy(), np.repeat(values.sum(0)[:, None], 3, 1), 1e-4, 1e-4)
    assert x.grad.carrier.memory_limit == tiles * ROW
    np.testing.assert_allclose(whole(x.grad), np.repeat(others.sum(1)[None], 48, 0), 1e-4, 1e-4)
    at_rest(x)
    at_rest(x.grad)


def test_two_operands_need_room_for_two_windows():
    values = normal(16, 64)
    x = tiled(values, (1, 64), resident=False, memory_limit=2 * ROW)
    y = tiled(values, (1, 64), resident=False, memory_limit=2 * ROW)
    assert np.array_equal(sw.add(x, y).numpy(), values + values)
    other = Tensor(x.carrier, 0, row_major(16, 64))  # the same tiles, read once
    assert np.array_equal(sw.mul(x, other).numpy(), values * values)
    square = tiled(normal(16, 16), (4, 16), resident=False, memory_limit=2 * ROW)
    with pytest.raises(
        MemoryError, match=r"operation needs 768 bytes at once .* memory_limit=512; cut the array"
    ):
        sw.matmul(square, square)
    at_rest(square)


def test_gradients_of_rows_against_columns_need_room_for_one_of_their_tiles():
    values, others = normal(64, 64), normal(64, 64)
    rows = tiled(values, (1, 64), resident=False, memory_limit=2 * ROW)
    columns = tiled(others, (64, 1), resident=False, memory_limit=2 * ROW)
    sw.reduce_sum(rows * columns).backward()
    assert np.array_equal(rows.grad.numpy(), others)
    assert np.array_equal(columns.grad.numpy(), values)
    for tensor in (rows, columns, rows.grad, columns.grad):
        at_rest(tensor)


def test_what_a_policy_keeps_counts():
    values = normal(8, 64)
    x = tiled(values, (1, 64), resident=False, memory_limit=8 * ROW, residency_policy=KeepResident())
    with pytest.raises(
        MemoryError, match=r"needs 2560 bytes at once \(8 tiles of 256 bytes and 512 to stage\)"
    ):
        sw.relu(x)
    assert x.carrier.statistics().misses == 0
    x = tiled(values, (1, 64), resident=False, memory_limit=10 * ROW, residency_policy=KeepResident())
    assert np.array_equal(sw.relu(x).numpy(), np.maximum(values, 0))
    assert x.carrier.statistics().resident_tiles == 8
    at_rest(x)


def test_the_share_of_a_large_tile_reads_as_much_of_the_other_operand():
    """A tile of a gradient is computed at once, so a limit that has no room for as much of the rest is too small."""
    values = normal(16, 64)
    for limit, fits in ((20 * 16, True), (17 * 16, True), (12 * 16, False)):
        x = tiled(values, (1, 4), resident=False, memory_limit=limit)
        y = tiled(values, (1, 64), resident=False)
        result = sw.reduce_sum(sw.mul(x, y))
        if fits:
            result.backward()
            assert np.array_equal(whole(y.grad), values)
        else:
            with pytest.raises(MemoryError, match="backward needs 272 bytes"):
                result.backward()
            assert y.grad is None
        at_rest(x)


def test_two_operations_at_once_over_the_same_two_limited_carriers():
    """Each in another order, so that neither may hold one carrier while it waits for the other."""
    values = normal(32, 64)
    x, y = (tiled(values, (1, 64), resident=False, memory_limit=4 * ROW) for _ in range(2))
    results = []

    def work(left, right):
        for _ in range(10):
            found = sw.add(left, right).numpy()
            results.append(np.array_equal(found, values + values))

    threads = [threading.Thread(target=work, args=pair) for pair in ((x, y), (y, x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 20
    at_rest(x)
    at_rest(y)


def test_a_tight_limit_makes_blocks_smaller_and_not_results_different():
    values, others = normal(48, 64), normal(64, 3)
    found = set()
    for tiles in (2, 3, 7, 20, None):
        limit = None if tiles is None else tiles * ROW
        x = tiled(values, (1, 64), resident=False, memory_limit=limit)
        found.add(sw.add(x, 1.0).numpy().tobytes())
        np.testing.assert_allclose(sw.matmul(x, sw.asarray(others)).numpy(), values @ others, 1e-4, 1e-4)
    assert len(found) == 1


# The limit of the kernel

PROGRAM = """
    import resource, sys
    import numpy as np
    import strideweave as sw

    MIB = 1 << 20
    rows, columns = 192, 1 << 18  # tiles of 1 MiB
    values = np.broadcast_to(np.arange(rows, dtype=np.float32)[:, None] % 7, (rows, columns))
    x = sw.tiled(values, (1, columns), resident=False, memory_limit=32 * MIB)
    y = sw.asarray(np.ones((columns, 1), np.float32))
    sw.relu(sw.tiled(np.ones((8, 8), np.float32), (4, 8)))  # what starts with the first request
    small = sw.asarray(np.ones((64, 64), np.float32))
    small @ small
    data = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + int(sys.argv[1]) * MIB,) * 2)
    try:
        if sys.argv[2] == "dense":
            x.numpy()
        result = x @ y
        assert (result.numpy()[:, 0] == values[:, 0] * columns).all()
        assert (sw.reduce_sum(x, axis=0).numpy() == values[:, 0].sum()).all()
        if sys.argv[2] == "backward":
            sw.reduce_sum(result).backward()
            assert (y.grad.numpy() == values[:, 0].sum()).all()
            gradient = x.grad.carrier
            compact = gradient.project(x.grad, gradient.select({0: [100]})).wait()
            assert (compact.numpy() == 1).all()
    except MemoryError:
        print("no memory")
    else:
        print("ran")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts memory on Linux only")
@pytest.mark.parametrize(
    ("room", "way", "outcome"),
    [(64, "forward", "ran"), (128, "backward", "ran"), (128, "dense", "no memory")],
)
def test_192_mib_pass_through_a_process_that_has_no_room_for_them(room, way, outcome):
    """Forward takes a few windows; backward as much again, for a gradient that spills what its limit does not hold.

    The values as one array would not fit.
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(room), way],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.strip() == outcome, ran.stderr


# Over Metal


def test_over_metal(monkeypatch):
    pytest.importorskip("mlx.core", reason="the extra strideweave[metal] is not installed")
    monkeypatch.setattr(direct_request, "WINDOW_BYTES", 64)
    values, others = normal(8, 6), normal(6, 4)

    def on_metal(array):
        carrier = sw.Metal(0).new_like(array.ravel(), dtype=DType.Float32)
        return Tensor(carrier, 0, row_major(*array.shape))

    slow = FileBacked(dtype=DType.Float32).new_like(values.ravel())
    carrier = TiledEvictable(sw.Metal(0, dtype=DType.Float32), slow, (8, 1), (1, 6))
    x, y = Tensor(carrier, 0, row_major(8, 6)), on_metal(others)
    result = sw.relu(x) @ y
    assert type((x + 1.0).carrier) is sw.Metal
    np.testing.assert_allclose(result.numpy(), np.maximum(values, 0) @ others, 1e-4, 1e-5)
    sw.reduce_sum(x @ y * (x @ y)).backward()
    product = 2 * (values @ others)
    np.testing.assert_allclose(y.grad.numpy(), values.T @ product, 1e-4, 1e-4)
    gradient = x.grad.carrier
    found = gradient.project(x.grad, gradient.select({})).wait()
    np.testing.assert_allclose(found.numpy(), product @ others.T, 1e-4, 1e-4)
