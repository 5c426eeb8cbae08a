"""Carrier: what every carrier promises, on the smallest carrier that can be written."""

import gc
import threading
import weakref

import anyio.to_thread
import numpy as np
import pytest

from strideweave.carriers import CPU, Carrier, Evictable, FileBacked, Generic, TiledEvictable
from strideweave.dtype import DType
from strideweave.errors import ImmutableError, OwnershipError, PendingWorkError, ReleasedError
from strideweave.layout import Layout, row_major
from strideweave.runtime.await_result import AwaitResult
from strideweave.tensor import Tensor


class Listed(Carrier):
    """A carrier over a Python list, with nothing but the required hooks."""

    def __init__(self, values, *, mutable=True, dtype=DType.Float32):
        super().__init__(len(values), dtype=dtype, mutable=mutable)
        self.slots = [self._convert(value) for value in values]
        self.freed = 0

    def _load_slot(self, i):
        return self.dtype().to_python(self.slots[i])

    def _store_slot(self, i, value):
        self.slots[i] = value

    def _free_storage(self):
        self.freed += 1

    def new_like(self, values, *, mutable=True, dtype=None):
        return Listed(list(values), mutable=mutable, dtype=dtype or self.dtype())

    def allocate_like(self, size, *, mutable=True, dtype=None, empty=False):
        return Listed([0] * size, mutable=mutable, dtype=dtype or self.dtype())


def state(carrier):
    """Everything that a refused call must leave as it was."""
    values = None if carrier.is_released() else list(carrier)
    return (
        values,
        carrier.size(),
        carrier.version,
        carrier.is_mutable(),
        carrier.is_owned(),
        carrier.is_released(),
    )


@pytest.fixture(params=[Listed, Generic, CPU], ids=lambda kind: kind.__name__)
def make(request):
    """Make a carrier of each kind with given values."""

    def make(values, **options):
        if request.param is CPU:
            return CPU(0, dtype=options.pop("dtype", DType.Float32)).new_like(values, **options)
        return request.param(values, **options)

    return make


def test_a_fresh_carrier_reads_back_its_values(make):
    carrier = make([1, 2.5, -0.0])
    assert state(carrier) == ([1.0, 2.5, 0.0], 3, 0, True, False, False)
    assert str(carrier[2]) == "-0.0"
    assert carrier.dtype() is DType.Float32
    assert carrier.get_value(1) == carrier[1] == 2.5


@pytest.mark.parametrize(("dtype", "kind"), [(DType.Bool, bool), (DType.Int16, int), (DType.BFloat16, float)])
def test_reads_give_python_scalars(make, dtype, kind):
    assert type(make([1], dtype=dtype)[0]) is kind


@pytest.mark.parametrize("index", [True, np.True_, 0.0, "0", None, (0,)])
def test_an_index_that_is_no_integer_is_a_type_error(make, index):
    carrier = make([1, 2])
    with pytest.raises(TypeError, match="integer"):
        carrier[index]
    with pytest.raises(TypeError, match="integer"):
        carrier[index] = 5
    assert state(carrier) == state(make([1, 2]))


@pytest.mark.parametrize("index", [-1, 2, 10**30])
def test_an_index_out_of_range_is_an_index_error(make, index):
    carrier = make([1, 2])
    with pytest.raises(IndexError, match=r"outside \[0, 2\)"):
        carrier[index]
    with pytest.raises(IndexError):
        carrier[index] = 5
    assert state(carrier) == state(make([1, 2]))


def test_any_integer_type_is_an_index(make):
    assert make([1, 2])[np.uint8(1)] == 2.0


def test_each_write_advances_the_version_by_one(make):
    carrier = make([1, 2])
    carrier[0] = 7
    carrier.set_value(1, np.float32(8))
    assert (list(carrier), carrier.version) == ([7.0, 8.0], 2)
    carrier.increment_version()
    assert carrier.version == 3


@pytest.mark.parametrize(
    ("value", "error"), [("x", TypeError), (None, TypeError), (128, OverflowError), (np.nan, ValueError)]
)
def test_a_value_that_does_not_fit_changes_nothing(make, value, error):
    carrier = make([1, 2], dtype=DType.Int8)
    with pytest.raises(error):
        carrier[0] = value
    assert (list(carrier), carrier.version) == ([1, 2], 0)


def test_an_immutable_carrier_refuses_every_public_change_but_release(make):
    carrier = make([1, 2], mutable=False)
    before = state(carrier)
    with pytest.raises(ImmutableError, match="mutable=False"):
        carrier[0] = 5
    with pytest.raises(ImmutableError):
        carrier.increment_version()
    assert state(carrier) == before
    carrier.release()
    assert carrier.is_released()


def test_release_is_idempotent_and_ends_access(make):
    carrier = make([1, 2])
    carrier.release()
    carrier.release()
    assert state(carrier) == (None, 0, 0, False, False, True)
    for access in (
        lambda: carrier[0],
        lambda: carrier.set_value(0, 1),
        carrier.increment_version,
        lambda: carrier.dispatch_op("add"),
        lambda: carrier._claim(object()),
        lambda: Tensor(carrier, 0, row_major(2)),
    ):
        with pytest.raises(ReleasedError):
            access()


def test_after_release_the_structural_questions_and_factories_still_answer(make):
    carrier = make([1, 2], dtype=DType.Int8)
    carrier.release()
    assert carrier.dtype() is DType.Int8
    assert carrier.supports_storage_dtype(DType.Float64)
    assert {entry.operation for entry in carrier.operation_capabilities()} >= {"permute", "reshape"}
    assert list(carrier.new_like([5, 6])) == [5, 6]
    assert list(carrier.allocate_like(2)) == [0, 0]


def test_release_frees_the_storage_exactly_once():
    carrier = Listed([1])
    carrier.release()
    carrier.release()
    assert carrier.freed == 1


def test_factories_make_the_same_class_and_keep_the_dtype_unless_told(make):
    carrier = make([1], dtype=DType.Int8)
    like = carrier.new_like([1.5, 2.5], mutable=False, dtype=DType.Float64)
    assert (type(like), like.dtype(), list(like)) == (type(carrier), DType.Float64, [1.5, 2.5])
    assert not like.is_mutable()
    fresh = carrier.allocate_like(3, empty=True)
    assert (type(fresh), fresh.dtype(), fresh.size(), fresh.version) == (type(carrier), DType.Int8, 3, 0)


def test_an_owned_carrier_may_be_read_and_nothing_else(make):
    """Spec: Child ownership makes retained aliases externally read-only."""
    carrier, owner = make([1, 2]), object()
    carrier._claim(owner)
    before = state(carrier)
    assert before == ([1.0, 2.0], 2, 0, False, True, False)
    for change in (
        lambda: carrier.set_value(0, 5),
        carrier.increment_version,
        carrier.release,
        lambda: carrier._claim(object()),
        lambda: carrier._claim(owner),
        lambda: carrier._relinquish(object()),
        lambda: carrier._release_as(object()),
        lambda: carrier._set_as(object(), 0, 5),
        lambda: carrier._advance_version(object()),
        lambda: carrier._set_as(None, 0, 5),
    ):
        with pytest.raises(OwnershipError):
            change()
        assert state(carrier) == before
    carrier._relinquish(owner)
    assert state(carrier) == ([1.0, 2.0], 2, 0, True, False, False)


def test_the_owner_writes_advances_and_releases_also_what_is_immutable(make):
    carrier, owner = make([1, 2], mutable=False), object()
    carrier._claim(owner)
    carrier._set_as(owner, 0, 5)
    carrier._advance_version(owner)
    assert (list(carrier), carrier.version, carrier.is_mutable()) == ([5.0, 2.0], 2, False)
    carrier._release_as(owner)
    assert state(carrier) == (None, 0, 2, False, False, True)
    carrier._relinquish(owner)  # a late clean-up finds nothing to do


def test_without_an_owner_nobody_may_act_as_one(make):
    carrier = make([1])
    with pytest.raises(OwnershipError, match="not owned"):
        carrier._relinquish(object())


def test_ownership_belongs_to_the_token_and_not_to_a_thread(make):
    carrier, owner = make([1]), object()
    thread = threading.Thread(target=carrier._claim, args=(owner,))
    thread.start()
    thread.join()
    carrier._relinquish(owner)
    assert not carrier.is_owned()


def test_one_of_many_threads_gets_the_claim(make):
    carrier, barrier, won = make([1]), threading.Barrier(8), []

    def claim():
        token = object()
        barrier.wait()
        try:
            carrier._claim(token)
        except OwnershipError:
            return
        won.append(token)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_writes_of_many_threads_are_all_counted(make):
    carrier = make([0, 0, 0, 0])

    def write(slot):
        for value in range(200):
            carrier[slot] = value

    threads = [threading.Thread(target=write, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (list(carrier), carrier.version) == ([199.0] * 4, 800)


class Slow(Listed):
    """Stops in the middle of a write until it is let on."""

    def __init__(self, values):
        super().__init__(values)
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.error = None

    def _store_slot(self, i, value):
        self.entered.set()
        assert self.go_on.wait(10)
        if self.error:
            raise self.error
        super()._store_slot(i, value)


def test_a_write_under_way_holds_no_lock_and_puts_off_release_and_claims():
    carrier = Slow([1, 2])
    thread = threading.Thread(target=carrier.set_value, args=(0, 5))
    thread.start()
    assert carrier.entered.wait(10)
    assert (carrier[1], carrier.version, carrier.statistics().pending) == (2.0, 0, 1)
    with pytest.raises(PendingWorkError) as refused:
        carrier.release()
    assert refused.value.pending == 1
    with pytest.raises(PendingWorkError):
        carrier._claim(object())
    carrier.go_on.set()
    thread.join()
    assert (list(carrier), carrier.version, carrier.statistics().pending) == ([5.0, 2.0], 1, 0)
    carrier.release()


def test_a_write_that_fails_leaves_nothing_pending():
    carrier = Slow([1, 2])
    carrier.error = OSError("disk full")
    carrier.go_on.set()
    with pytest.raises(OSError, match="disk full"):
        carrier[0] = 5
    assert (list(carrier), carrier.version, carrier.statistics().pending) == ([1.0, 2.0], 0, 0)


def test_a_number_that_releases_the_carrier_while_it_is_converted_is_noticed(make):
    carrier = make([1])

    class Treacherous:
        def __float__(self):
            carrier.release()
            return 1.0

    with pytest.raises(ReleasedError):
        carrier[0] = Treacherous()
    assert carrier.version == 0


def test_release_is_refused_while_requests_are_pending():
    carrier, handle = Listed([1]), AwaitResult()
    gate = threading.Event()

    async def request():
        await wait_for(gate)

    carrier._scope.start(handle, request)
    assert carrier.statistics().pending == 1
    with pytest.raises(PendingWorkError):
        carrier.release()
    assert not carrier.is_released()
    gate.set()
    handle.wait(10)
    carrier.release()
    assert carrier.is_released()


async def wait_for(event):
    """Wait for a thread's event in the runtime loop, yielding."""
    await anyio.to_thread.run_sync(event.wait, 10)


def test_the_scope_is_made_on_first_use_and_not_after_release():
    carrier = Listed([1])
    assert carrier._task_scope is None
    assert carrier._scope is carrier._scope
    other = Listed([1])
    other.release()
    with pytest.raises(ReleasedError):
        _ = other._scope


def test_a_forgotten_carrier_is_collected_though_it_had_a_scope():
    carrier = Listed([1])
    carrier._scope.start(AwaitResult(), wait_for, threading_event_that_is_set()).wait(10)
    gone = weakref.ref(carrier)
    del carrier
    gc.collect()
    assert gone() is None


def threading_event_that_is_set():
    event = threading.Event()
    event.set()
    return event


def test_statistics_are_a_frozen_record(make):
    carrier = make([1, 2], dtype=DType.Int16)
    carrier[0] = 3
    found = carrier.statistics()
    assert (found.slots, found.nbytes, found.version, found.is_owned, found.is_released, found.pending) == (
        2,
        4,
        1,
        False,
        False,
        0,
    )
    with pytest.raises(AttributeError):
        found.slots = 3


def test_facets_are_asked_by_type(make):
    carrier = make([1])
    assert carrier.facet(int) is None
    with pytest.raises(NotImplementedError, match="carries no int"):
        carrier.require_facet(int)
    with pytest.raises(TypeError, match="class"):
        carrier.facet("int")


def test_a_carrier_that_does_not_compute_says_so_and_still_gives_views():
    carrier = Listed([0, 1, 2, 3, 4, 5])
    tensor = Tensor(carrier, 0, row_major(2, 3))
    with pytest.raises(NotImplementedError, match="Listed does not run the operation 'add'"):
        tensor + tensor
    assert {entry.operation for entry in carrier.operation_capabilities("reshape")} == {"reshape"}
    assert carrier.operation_capabilities("add") == ()
    assert tensor.T.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert tensor.T.carrier is carrier


def test_a_carrier_may_withhold_views():
    class Rigid(Listed):
        _gives_views = False

    tensor = Tensor(Rigid([0, 1]), 0, row_major(2))
    with pytest.raises(NotImplementedError, match="'permute'"):
        _ = tensor.T
    assert tensor.carrier.operation_capabilities() == ()


def test_a_carrier_without_memory_gives_arrays_by_copying():
    carrier = Listed(range(12))
    tensor = Tensor(carrier, 2, Layout(((2, 2), 2), ((1, 4), 2)))
    assert tensor.numpy().tolist() == [[2, 4], [3, 5], [6, 8], [7, 9]]
    assert np.asarray(tensor).tolist() == tensor.numpy().tolist()
    with pytest.raises(ValueError, match="no view"):
        tensor.numpy(copy=False)
    backwards = Tensor(carrier, 11, Layout((3,), (-2,)))
    assert backwards.tolist() == [11, 9, 7]
    assert Tensor(carrier, 5, Layout((0, 3), (1, 1))).numpy().shape == (0, 3)


@pytest.mark.parametrize(
    "ask", [lambda c: c._bytes(), lambda c: c._file(), lambda c: c.scatter(None, None, row_major(1))]
)
def test_what_a_carrier_cannot_do_is_not_implemented(ask):
    with pytest.raises(NotImplementedError, match="Listed"):
        ask(Listed([1]))


def test_a_carrier_that_cannot_grow_says_so():
    carrier = Listed([])
    assert not carrier._can_allocate()
    with pytest.raises(ValueError, match="cannot be given storage"):
        carrier._allocate_in_place(3)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"size": True}, TypeError), ({"size": 1.0}, TypeError), ({"size": -1}, ValueError)],
)
def test_a_size_is_a_natural_number(options, error):
    with pytest.raises(error, match="size"):
        CPU(**options)


def test_a_dtype_is_needed_and_named_when_it_is_not_one():
    for kind, argument in ((CPU, 1), (Generic, [1]), (Listed, [])):
        with pytest.raises(TypeError, match="dtype must be a DType"):
            kind(argument, dtype=np.float32)


def test_carriers_iterate_and_describe_themselves(make):
    carrier = make([1, 2])
    assert list(carrier) == [1.0, 2.0]
    assert "2 slots" in repr(carrier)
    carrier.release()
    assert "released" in repr(carrier)


@pytest.mark.parametrize("name", [3, ["add"], {}, b"add"], ids=repr)
@pytest.mark.parametrize(
    "carrier", [CPU(2), FileBacked(), Evictable(CPU(2), CPU(0)), TiledEvictable(CPU(2), CPU(0), (2,), (1,))]
)
def test_an_operation_is_named_by_a_string(carrier, name):
    with pytest.raises(TypeError, match="named by a string such as 'add', found"):
        carrier.dispatch_op(name)
    with pytest.raises(TypeError, match="named by a string such as 'add', found"):
        carrier.operation_capabilities(name)
