"""Metal: memory that MLX computes on, with the life of a carrier, its moves, and as a tier."""

import threading

import anyio
import anyio.to_thread
import numpy as np
import pytest

import strideweave as sw
from strideweave import CPU, Evictable, FileBacked, Generic, Metal, Tensor, TiledEvictable, row_major
from strideweave.carriers.move import dispatch_move
from strideweave.dtype import DType
from strideweave.errors import EvictedError, ImmutableError, OwnershipError, ReleasedError

pytest.importorskip("mlx.core", reason="the extra strideweave[metal] is not installed")

PLAIN = (Generic, CPU, FileBacked, Metal)
FRESH = {
    Generic: lambda dtype: Generic([], dtype=dtype),
    CPU: lambda dtype: CPU(0, dtype=dtype),
    FileBacked: lambda dtype: FileBacked(dtype=dtype),
    Metal: lambda dtype: Metal(0, dtype=dtype),
}


def patterns(dtype, count=300):
    """Values with every kind of bits: all patterns of one byte, NaN payloads, denormals, both zeros."""
    if dtype is DType.Bool:
        return np.arange(count) % 3 == 0
    bits = np.random.default_rng(3).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype.itemsize == 1:
        bits[:256] = np.arange(256)
    return bits.view(dtype.numpy)


def filled(values):
    return Metal(0).new_like(values, dtype=DType.from_numpy(values.dtype))


def tensor_on(carrier, *shape, **options):
    return Tensor(carrier, 0, row_major(*shape), **options)


@pytest.mark.parametrize("dtype", DType.members())
def test_every_dtype_is_stored_bit_for_bit(dtype):
    values = patterns(dtype)
    carrier = filled(values)
    assert carrier.supports_storage_dtype(dtype)
    assert (carrier.size(), carrier.dtype()) == (len(values), dtype)
    assert tensor_on(carrier, len(values)).numpy().tobytes() == values.tobytes()
    first = 2 if np.isnan(values.astype(np.float64)[1]) else 1
    assert carrier[first] == dtype.to_python(values[first])


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_fresh_memory_is_zero_unless_empty_values_will_do(size, empty):
    carrier = Metal(size, dtype=DType.Int32, empty=empty)
    assert (carrier.size(), carrier.version, carrier.is_mutable()) == (size, 0, True)
    assert empty or not tensor_on(carrier, size).numpy().any()
    again = carrier.allocate_like(size, empty=empty)
    assert again.size() == size
    assert empty or not tensor_on(again, size).numpy().any()


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="dtype must be a DType"):
        Metal(3, dtype=np.float32)
    with pytest.raises(ValueError, match="must not be negative"):
        Metal(-1)
    with pytest.raises(TypeError, match="size"):
        Metal(1.5)
    with pytest.raises(TypeError, match="final"):
        type("Mine", (Metal,), {})


def test_writes_count_and_an_operation_sees_them():
    carrier = Metal(4)
    x = tensor_on(carrier, 4, requires_grad=False)
    before = x + 1
    carrier[2] = 5
    x.numpy(writable=True)[3] = 7
    assert carrier.version == 1
    assert (x + 1).tolist() == [1, 1, 6, 8]
    assert before.tolist() == [1, 1, 1, 1]


def test_an_immutable_or_owned_carrier_refuses_writes():
    with pytest.raises(ImmutableError):
        Metal(2, mutable=False)[0] = 1
    carrier = Metal(2)
    Evictable(carrier, FileBacked()).statistics()  # the composite is gone at once and gives it back
    carrier[0] = 1
    owner = Evictable(carrier, FileBacked())
    with pytest.raises(OwnershipError):
        carrier[0] = 2
    owner.release()
    assert carrier.is_released()


def test_release_ends_it_and_views_keep_the_memory():
    carrier = filled(np.arange(6, dtype=np.float32))
    x = tensor_on(carrier, 6)
    view = x.numpy()
    carrier.release()
    carrier.release()
    assert view.tolist() == [0, 1, 2, 3, 4, 5]
    for access in (lambda: carrier[0], lambda: x + 1, x.numpy, carrier._bytes):
        with pytest.raises(ReleasedError):
            access()
    assert (carrier.size(), carrier.dtype()) == (0, DType.Float32)
    assert tensor_on(carrier.new_like([2, 3]), 2).tolist() == [2, 3]
    assert carrier.allocate_like(3, dtype=DType.Int8, mutable=False).is_mutable() is False


def test_an_empty_carrier_is_given_storage_once():
    carrier = Metal(0, dtype=DType.Int16)
    carrier._allocate_in_place(3)
    carrier[1] = 4
    assert (tensor_on(carrier, 3) + 1).tolist() == [1, 5, 1]
    with pytest.raises(ValueError, match="cannot be given storage"):
        carrier._allocate_in_place(3)


@pytest.mark.parametrize("name", ["clamp", "reduce_sum", "select"])
def test_a_result_shares_no_memory_with_its_operands(name):
    x = tensor_on(filled(np.arange(6, dtype=np.float32)), 2, 3, requires_grad=False)
    result = {
        "clamp": lambda: sw.clamp(x),
        "reduce_sum": lambda: sw.reduce_sum(x, axis=()),
        "select": lambda: sw.select(sw.eq(x, x), x, 0),
    }[name]()
    assert not np.may_share_memory(result.numpy(), x.numpy())
    result.carrier[0] = 100
    assert x[0] == 0


def test_scatter_writes_the_named_slots():
    onto = tensor_on(filled(np.arange(8, dtype=np.int32)), 8)
    source = tensor_on(filled(np.array([50, 60], np.int32)), 2)
    onto.carrier.scatter(source, onto, sw.Layout(2, 3), 1)
    assert (onto + 0).tolist() == [0, 50, 2, 3, 60, 5, 6, 7]
    assert onto.carrier.version == 1


@pytest.mark.parametrize("dtype", [DType.Float32, DType.BFloat16, DType.Float8E5M2, DType.Float64])
@pytest.mark.parametrize(("source", "destination"), [(a, b) for a in PLAIN for b in PLAIN if Metal in (a, b)])
def test_every_pair_moves_every_bit(source, destination, dtype):
    values = patterns(dtype)
    start = sw.move(tensor_on(filled(values), 300), FRESH[source](dtype))
    moved = sw.move(start, FRESH[destination](dtype))
    assert type(moved.carrier) is destination
    assert start.carrier.is_released()
    assert moved.numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize("other", [*PLAIN, Evictable])
def test_moves_are_registered_both_ways(other):
    assert dispatch_move(Metal, other)
    assert dispatch_move(other, Metal)


def test_a_gradient_lands_on_metal():
    x = tensor_on(filled(np.array([1, 2], np.float32)), 2)
    sw.reduce_sum(x * x).backward()
    assert x.grad.tolist() == [2, 4]
    assert type(x.grad.carrier) is Metal


def test_threads_share_carriers_and_results():
    x = tensor_on(filled(np.linspace(0, 1, 1000, dtype=np.float32)), 1000, requires_grad=False)
    results, errors = [None] * 6, []
    ready = threading.Barrier(len(results))

    def compute(number):
        try:
            ready.wait()
            value = x
            for _ in range(20):
                value = value + number
            results[number] = value
        except Exception as error:  # shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number, result in enumerate(results):  # made by threads that have ended
        assert np.allclose((result - 20 * number).numpy(), x.numpy(), atol=1e-5)


@pytest.mark.anyio
async def test_operations_run_in_the_callers_loop_and_in_worker_threads():
    x = tensor_on(filled(np.arange(4, dtype=np.float32)), 4, requires_grad=False)
    here = x * 2
    there = await anyio.to_thread.run_sync(lambda: here + 1)
    moved = await sw.move_async(there, Metal(0))
    assert (moved - 1).tolist() == here.tolist()


class TestEvictable:
    def test_results_and_gradients_are_hierarchies_over_metal(self):
        carrier = Evictable(filled(np.arange(4, dtype=np.float32)), FileBacked())
        x = tensor_on(carrier, 4)
        y = sw.exp(x)
        assert type(y.carrier) is Evictable
        assert type(y.carrier.primary) is Metal
        assert np.allclose(y.numpy(), np.exp(np.arange(4)), rtol=1e-5)
        sw.reduce_sum(y).backward()
        assert type(x.grad.carrier.primary) is Metal
        assert np.allclose(x.grad.numpy(), y.numpy(), rtol=1e-5)

    def test_values_survive_eviction_and_promotion(self):
        values = patterns(DType.Float32)
        carrier = Evictable(filled(values), FileBacked())
        x = tensor_on(carrier, len(values), requires_grad=False)
        carrier.evict()
        with pytest.raises(EvictedError):
            x + 1
        carrier.promote()
        assert type(carrier.primary) is Metal
        assert x.numpy().tobytes() == values.tobytes()
        carrier[0] = 8
        assert (x + 1)[0] == 9


class TestTiledEvictable:
    @staticmethod
    def make(start, dtype=np.float32):
        values = np.arange(6 * 8, dtype=np.float32).astype(dtype).reshape(6, 2, 4)
        flat, kind = values.reshape(-1), DType.from_numpy(np.dtype(dtype))
        if start == "primary":
            tiers = filled(flat), FileBacked(dtype=kind)
        else:
            tiers = Metal(0, dtype=kind), sw.move(sw.from_numpy(flat), FileBacked(dtype=kind)).carrier
        carrier = TiledEvictable(*tiers, (6, 1, 1), (1, 2, 4))
        return carrier, tensor_on(carrier, 6, 2, 4, requires_grad=False), values

    @pytest.mark.parametrize("start", ["primary", "secondary"])
    def test_projections_are_compact_tensors_on_metal(self, start):
        carrier, tensor, values = self.make(start)
        compact = carrier.project(tensor, carrier.select({0: (4, 1)})).wait()
        assert type(compact.carrier) is Metal
        assert compact.numpy().tobytes() == values[[4, 1]].tobytes()
        assert np.allclose((compact @ compact.permute(0, 2, 1)).numpy(), values[[4, 1]] @ values[[4, 1]].mT)

    def test_a_destination_is_filled_in_place(self):
        carrier, tensor, values = self.make("secondary")
        destination = Metal(20)
        compact = carrier.project(tensor, carrier.select({0: (5, 0)}), destination).wait()
        assert compact.carrier is destination
        assert (destination.version, destination.is_owned()) == (1, False)
        assert (compact + 0).numpy().tobytes() == values[[5, 0]].tobytes()

    @pytest.mark.parametrize("start", ["primary", "secondary"])
    def test_tiles_written_evicted_and_promoted_keep_their_values(self, start):
        carrier, tensor, values = self.make(start)
        tiles = carrier.select({0: (2, 3)})
        carrier.promote(tiles)
        carrier[2 * 8] = -1
        values[2, 0, 0] = -1
        carrier.evict(tiles)
        assert carrier.tile_state((2, 0, 0)).location == "secondary"
        assert carrier[2 * 8] == -1
        carrier.promote(tiles)
        assert tensor.numpy().tobytes() == values.tobytes()
        carrier.release()
