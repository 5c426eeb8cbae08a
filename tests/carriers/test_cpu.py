"""CPU: memory of this process, allocated here or owned by the caller."""

import ctypes
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from strideweave.carriers import CPU
from strideweave.dtype import DType
from strideweave.errors import ImmutableError, OwnershipError, ReleasedError
from strideweave.layout import row_major
from strideweave.tensor import Tensor


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("size", [0, 1, 1000, 100_000])
def test_fresh_memory_is_zero_and_aligned(size, empty):
    carrier = CPU(size, dtype=DType.Float64, empty=empty)
    assert carrier.size() == size
    assert not carrier.numpy().any()
    assert carrier.numpy().ctypes.data % (4096 if size * 8 >= 65536 else 64) == 0 or size == 0


def test_large_memory_costs_nothing_until_it_is_written():
    before = resident_bytes()
    carrier = CPU(1 << 28, dtype=DType.Int8)
    assert resident_bytes() - before < 1 << 27
    carrier.release()


def test_from_numpy_shares_both_ways():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    carrier = CPU.from_numpy(array)
    assert (carrier.size(), carrier.dtype(), carrier.is_mutable()) == (6, DType.Int16, True)
    carrier[4] = 40
    array[0, 0] = 10
    assert (array[1, 1], carrier[0]) == (40, 10)
    assert np.shares_memory(carrier.numpy(), array)


def test_from_numpy_keeps_the_array_alive_until_release():
    array = np.arange(6)
    alive = weakref.ref(array)
    carrier = CPU.from_numpy(array)
    del array
    gc.collect()
    assert alive() is not None
    assert carrier[5] == 5
    carrier.release()
    gc.collect()
    assert alive() is None


def test_a_read_only_array_gives_an_immutable_carrier():
    array = np.arange(3)
    array.flags.writeable = False
    carrier = CPU.from_numpy(array)
    with pytest.raises(ImmutableError):
        carrier[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        CPU.from_numpy(array, mutable=True)
    assert not CPU.from_numpy(np.arange(3), mutable=False).is_mutable()


@pytest.mark.parametrize(
    ("array", "error", "hint"),
    [
        (np.zeros((3, 4)).T, ValueError, "ascontiguousarray"),
        (np.zeros(8)[::2], ValueError, "ascontiguousarray"),
        (np.zeros(3, np.dtype("f4").newbyteorder()), ValueError, "newbyteorder"),
        (np.zeros(3, complex), TypeError, "no DType"),
        ([1, 2, 3], TypeError, "NumPy array"),
    ],
)
def test_from_numpy_refuses_what_it_cannot_share_and_says_what_to_do(array, error, hint):
    with pytest.raises(error, match=hint):
        CPU.from_numpy(array)


def test_a_pointer_is_memory_of_the_caller():
    memory = (ctypes.c_float * 4)(1, 2, 3, 4)
    carrier = CPU(4, ctypes.addressof(memory))
    assert list(carrier) == [1.0, 2.0, 3.0, 4.0]
    carrier[1] = 20
    assert memory[1] == 20.0
    assert not carrier.statistics().owns_memory
    carrier.release()
    assert list(memory) == [1.0, 20.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("pointer", "error"),
    [(0, ValueError), (-8, ValueError), (4097, ValueError), (True, TypeError), (1.0, TypeError)],
)
def test_a_pointer_that_cannot_be_one_is_refused(pointer, error):
    with pytest.raises(error, match="pointer"):
        CPU(1, pointer)


def test_numpy_is_read_only_unless_writing_is_asked_and_allowed():
    carrier = CPU(3)
    view = carrier.numpy()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    carrier.numpy(writable=True)[0] = 7
    assert (carrier[0], carrier.version) == (7.0, 0)
    with pytest.raises(ImmutableError):
        CPU(3, mutable=False).numpy(writable=True)
    carrier._claim(self_token := object())
    with pytest.raises(OwnershipError):
        carrier.numpy(writable=True)
    carrier._release_as(self_token)
    with pytest.raises(ReleasedError):
        carrier.numpy()


def test_a_view_outlives_the_carrier():
    carrier = CPU(100_000)
    view = carrier.numpy(writable=True)
    view[:] = 3
    carrier.release()
    del carrier
    gc.collect()
    assert view.sum() == 300_000


def test_discard_gives_whole_pages_back_and_keeps_the_neighbours():
    carrier = CPU(1 << 24, dtype=DType.Int8)
    carrier.numpy(writable=True)[:] = 1
    held = resident_bytes()
    carrier._discard(100, (1 << 24) - 200)
    given = carrier.statistics().discarded_bytes
    assert (1 << 24) - 200 - 2 * 4096 < given <= (1 << 24) - 200
    assert held - resident_bytes() > given // 2
    values = carrier.numpy()
    assert values[:100].all()
    assert values[-100:].all()
    carrier[1 << 23] = 5
    assert carrier[1 << 23] == 5


def test_discard_inside_one_page_or_in_memory_of_the_caller_changes_nothing():
    carrier = CPU(100_000)
    carrier.numpy(writable=True)[:] = 1
    carrier._discard(10, 20)
    shared = CPU.from_numpy(np.ones(100_000, np.float32))
    shared._discard(0, 100_000)
    for one in (carrier, shared):
        assert one.numpy().all()
        assert one.statistics().discarded_bytes == 0


def test_an_empty_carrier_can_be_given_storage_once():
    carrier = CPU(0, dtype=DType.Int8)
    assert carrier._can_allocate()
    carrier._allocate_in_place(5)
    assert (carrier.size(), list(carrier)) == (5, [0] * 5)
    assert not carrier._can_allocate()
    with pytest.raises(ValueError, match="cannot be given storage"):
        carrier._allocate_in_place(6)
    assert carrier.size() == 5
    released = CPU(0)
    released.release()
    assert not released._can_allocate()
    with pytest.raises(ReleasedError):
        released._allocate_in_place(1)


def test_bytes_are_all_slots_and_writable():
    carrier = CPU(0, dtype=DType.BFloat16).new_like([1, 2])
    raw = carrier._bytes()
    assert raw.tobytes() == np.array([1, 2]).astype(DType.BFloat16.numpy).tobytes()
    raw[:] = 0
    assert list(carrier) == [0.0, 0.0]
    carrier.release()
    with pytest.raises(ReleasedError):
        carrier._bytes()


@pytest.mark.parametrize("dtype", [DType.Float8E4M3FN, DType.Float8E5M2])
def test_new_like_keeps_all_patterns_of_the_small_floats(dtype):
    patterns = np.arange(256, dtype=np.uint8)
    carrier = CPU(0, dtype=dtype).new_like(patterns.view(dtype.numpy))
    assert carrier._bytes().tolist() == patterns.tolist()


def test_new_like_keeps_the_payload_of_a_nan():
    bits = np.array([0x7FC01234, 0x80000000, 0x7F800001], np.uint32)
    carrier = CPU(0).new_like(bits.view(np.float32))
    assert carrier._bytes().view(np.uint32).tolist() == bits.tolist()


def test_new_like_copies():
    array = np.ones(3, np.float32)
    carrier = CPU(0).new_like(array)
    array[0] = 9
    assert carrier[0] == 1.0


@pytest.mark.parametrize("values", [3, None, "12", [[1, 2]], np.ones((2, 2)), [1, None]])
def test_new_like_takes_a_flat_iterable_of_numbers(values):
    with pytest.raises(TypeError):
        CPU(0).new_like(values)


def test_new_like_checks_an_array_of_a_wider_type():
    with pytest.raises(OverflowError):
        CPU(0, dtype=DType.Int8).new_like(np.array([1, 300]))


def test_cpu_is_final():
    with pytest.raises(TypeError, match="final"):
        type("Mine", (CPU,), {})


def taken_over(destination, other):
    """Whether the destination has the other's memory now; in any case it has the values it should have."""
    place, before = other._slots.ctypes.data, destination._slots.tobytes()
    values = other._slots.tobytes()
    done = destination._take_over(other)
    expected = values if done else before  # memory that was in use before may hold any bits: NaN is no == NaN
    assert destination._slots.tobytes() == expected
    assert other.is_released() is done
    assert not done or destination._slots.ctypes.data == place
    return done


def result(slots, dtype=DType.Float32):
    made = CPU(0, dtype=dtype)._allocate_result(slots)
    made._slots[...] = 7
    return made


@pytest.mark.parametrize("slots", [20_000, 300_000])
def test_a_carrier_takes_over_memory_where_nobody_knows_its_own(slots):
    destination = CPU(slots)
    assert taken_over(destination, result(slots))
    assert taken_over(destination, result(slots))
    whole = Tensor(destination, 0, row_major(slots), requires_grad=False)
    assert whole.numpy(copy=True).max() == (whole + 1).numpy().max() - 1 == destination.get_value(5) == 7
    assert taken_over(destination, result(slots)), "copies and sums give no address away"
    assert taken_over(CPU(0), result(slots))
    assert not taken_over(CPU(slots + 1), result(slots))
    assert not taken_over(CPU.from_numpy(np.zeros(slots, np.float32)), result(slots))
    memory = np.zeros(slots, np.float32)
    assert not taken_over(CPU(slots, memory.ctypes.data), result(slots))
    assert not taken_over(CPU(100), result(100))


@pytest.mark.parametrize(
    "see",
    [
        lambda carrier: carrier.numpy(),
        lambda carrier: carrier.numpy(writable=True)[5:9],
        lambda carrier: memoryview(carrier.numpy()),
        lambda carrier: carrier.numpy().view(np.uint8).reshape(2, -1),
        lambda carrier: Tensor(carrier, 0, row_major(carrier.size())).numpy(),
        lambda carrier: np.asarray(Tensor(carrier, 0, row_major(carrier.size()))),
        lambda carrier: np.from_dlpack(Tensor(carrier, 0, row_major(carrier.size()), requires_grad=False)),
        lambda carrier: CPU(carrier.size(), carrier.numpy().ctypes.data).numpy(),
        lambda carrier: np.frombuffer(
            (ctypes.c_float * carrier.size()).from_address(carrier.numpy().ctypes.data), np.float32
        ),
    ],
)
def test_a_carrier_whose_address_somebody_may_know_keeps_its_memory(see):
    for slots in (20_000, 300_000):
        for destination in (CPU(slots), CPU(0)._allocate_result(slots)):
            view = see(destination)
            assert not taken_over(destination, result(slots))
            destination.numpy(writable=True)[...] = 3
            assert np.asarray(view).view(np.float32).max() == 3
            del view
            assert not taken_over(destination, result(slots)), "the address may be known still"


def test_a_computation_under_way_keeps_the_memory_it_reads():
    destination = CPU(300_000)
    operand = destination._operand_array(Tensor(destination, 0, row_major(300_000), requires_grad=False))
    assert not taken_over(destination, result(300_000))
    assert operand.max() == 0
    del operand
    assert taken_over(destination, result(300_000))


def test_memory_that_was_shown_is_shown_still_when_it_has_changed_hands():
    destination, other = CPU(300_000), result(300_000)
    assert other.numpy()[0] == 7
    assert taken_over(destination, other)
    assert not taken_over(destination, result(300_000))


@pytest.mark.parametrize("size", [1 << 61, 1 << 63, 10**30])
def test_more_slots_than_an_address_has_bits_for_are_no_memory(size):
    for make in (CPU, CPU(0).allocate_like):
        with pytest.raises(MemoryError, match=f"{4 * size} bytes of memory"):
            make(size)
