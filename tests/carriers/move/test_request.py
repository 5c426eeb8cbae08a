"""move and move_async: what is checked in which order, what moves, who owns, what a failure leaves, gradients."""

from __future__ import annotations

import gc
import weakref

import anyio
import numpy as np
import pytest

from boxed import Boxed
from strideweave import (
    CPU,
    AwaitMove,
    AwaitResult,
    DType,
    Evictable,
    FileBacked,
    Generic,
    Layout,
    Tensor,
    add,
    asarray,
    move,
    move_async,
    no_grad,
    reduce_sum,
    row_major,
)
from strideweave.carriers import Carrier
from strideweave.carriers.move import ElementwiseMoveOperation, dispatch_move, registered_move_operation
from strideweave.errors import (
    EvictedError,
    ImmutableError,
    OwnershipError,
    PendingWorkError,
    ReleasedError,
    StaleGraphError,
)
from strideweave.testing import bit_patterns, failing_transfers, held_transfers, values_of

VALUES = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def evictable(values=(0.0,), dtype=DType.Float32):
    return Evictable(CPU(0, dtype=dtype).new_like(values), FileBacked(dtype=dtype))


EMPTY = {
    "Generic": lambda dtype: Generic([], dtype=dtype),
    "CPU": lambda dtype: CPU(0, dtype=dtype),
    "FileBacked": lambda dtype: FileBacked(dtype=dtype),
}
PROTOTYPES = {**EMPTY, "Evictable": lambda dtype: evictable(dtype=dtype)}
PAIRS = [(first, second) for first in PROTOTYPES for second in PROTOTYPES]


def holding(kind, values, dtype=DType.Float32):
    return PROTOTYPES[kind](dtype).new_like(values)


def place_for(kind, size, dtype=DType.Float32):
    return PROTOTYPES[kind](dtype).allocate_like(size)


def on(carrier, *shape, offset=0, **options):
    return Tensor(carrier, offset, row_major(*(shape or (carrier.size(),))), **options)


# What moves


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_move_brings_every_slot_to_the_destination(pair):
    source, destination = holding(pair[0], VALUES), place_for(pair[1], 8)
    tensor = on(source, 2, 2, offset=1)
    moved = move(tensor, destination)
    assert moved.carrier is destination
    assert (moved.offset, moved.layout, moved.dtype) == (1, tensor.layout, tensor.dtype)
    assert moved.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert values_of(destination).tolist() == [*VALUES, 0.0, 0.0], "slots outside the tensor move too"
    assert destination.version == 1
    assert source.is_released()
    for carrier in (source, destination):
        assert not carrier.is_owned()
    assert destination.is_mutable()
    destination[0] = 9


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("source", PROTOTYPES)
def test_an_empty_destination_is_allocated(source, kind):
    moved = move(on(holding(source, VALUES)), EMPTY[kind](DType.Float32))
    assert (moved.carrier.size(), moved.tolist(), moved.version) == (6, VALUES, 1)


@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_move_keeps_every_bit(pair, dtype):
    values = bit_patterns(dtype)
    moved = move(on(holding(pair[0], values, dtype)), place_for(pair[1], len(values), dtype))
    assert values_of(moved.carrier).tobytes() == values.tobytes()


def test_a_tensor_without_slots_moves():
    moved = move(on(CPU(0), 0), FileBacked())
    assert moved.tolist() == []
    assert moved.version == 1


@pytest.mark.anyio
async def test_move_async_can_be_awaited():
    handle = move_async(on(holding("CPU", VALUES)), FileBacked())
    assert isinstance(handle, AwaitMove)
    assert not isinstance(handle, Tensor)
    moved = await handle
    assert moved is handle.wait()
    assert moved.tolist() == VALUES


def test_a_handle_is_no_operand():
    handle = move_async(on(holding("CPU", VALUES)), CPU(0))
    with pytest.raises(TypeError, match="wait"):
        move(handle, CPU(0))
    with pytest.raises(TypeError):
        add(handle, 1.0)
    assert add(handle.wait(), 1.0).tolist() == [value + 1 for value in VALUES]


@pytest.mark.anyio
async def test_a_cancelled_awaiter_leaves_the_move_running():
    source, destination = holding("CPU", VALUES), FileBacked()
    with held_transfers(CPU, FileBacked) as hold:
        handle = move_async(on(source), destination)
        await hold.entered
        with anyio.move_on_after(0) as scope:
            await handle
        assert scope.cancelled_caught
        hold.open()
        assert (await handle).tolist() == VALUES
    assert source.is_released()


# What is refused, and in which order


def bring_down(carrier):
    carrier.release()
    return carrier


def take(carrier):
    carrier._claim(object())
    return carrier


def tensor_whose_source(change):
    tensor = on(holding("CPU", VALUES))
    change(tensor.carrier)
    return tensor


def onto_itself():
    tensor = on(CPU(6, mutable=False))
    return tensor, tensor.carrier


# Each entry breaks its own rule and as many later ones as it can, so that only the stated order explains the error.
ORDER = {
    "tensor type": (lambda: ([1.0], None), TypeError, "takes a Tensor"),
    "source released": (lambda: (tensor_whose_source(bring_down), None), ReleasedError, "tensor's carrier"),
    "source owned": (lambda: (tensor_whose_source(take), None), OwnershipError, "tensor's carrier is owned"),
    "destination type": (lambda: (on(holding("CPU", VALUES)), "disk"), TypeError, "must be a Carrier"),
    "same carrier": (onto_itself, ValueError, "already"),
    "destination released": (
        lambda: (on(CPU(6)), bring_down(Boxed([0], dtype=DType.Bool, mutable=False))),
        ReleasedError,
        "was released",
    ),
    "destination owned": (
        lambda: (on(CPU(6)), take(Boxed([0], dtype=DType.Bool, mutable=False))),
        OwnershipError,
        "owned",
    ),
    "not mutable": (
        lambda: (on(CPU(6)), Boxed([0], dtype=DType.Bool, mutable=False)),
        ImmutableError,
        "mutable=False",
    ),
    "dtype": (lambda: (on(CPU(6)), Boxed([0], dtype=DType.Bool)), TypeError, "keeps the dtype"),
    "unsupported pair": (lambda: (on(CPU(6)), Boxed([0])), NotImplementedError, "CPU to Boxed"),
    "too small": (lambda: (on(CPU(6)), CPU(5)), ValueError, "5 slots"),
}


def state(carrier):
    return (
        carrier.size(),
        carrier.version,
        carrier.is_owned(),
        carrier.is_released(),
        None if carrier.is_released() else values_of(carrier).tobytes(),
    )


@pytest.mark.parametrize("case", ORDER)
def test_refusals_come_in_the_stated_order_and_change_nothing(case):
    make, error, message = ORDER[case]
    tensor, destination = make()
    carriers = [part for part in (getattr(tensor, "carrier", None), destination) if isinstance(part, Carrier)]
    before = [state(carrier) for carrier in carriers]
    with pytest.raises(error, match=message):
        move_async(tensor, destination)
    assert [state(carrier) for carrier in carriers] == before


def test_a_file_that_exists_cannot_be_allocated(tmp_path):
    path = tmp_path / "empty.bin"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="0 slots"):
        move(on(CPU(6)), FileBacked.open(path, dtype=DType.Float32, mutable=True))


@pytest.mark.parametrize("which", ["source", "destination"])
def test_an_evicted_hierarchy_has_to_be_promoted_first(which):
    carrier = evictable(VALUES)
    tensor = on(carrier) if which == "source" else on(CPU(6))
    carrier.evict()
    with pytest.raises(EvictedError, match="promote"):
        move(tensor, CPU(0) if which == "source" else carrier)
    assert not carrier.is_owned()
    assert not tensor.carrier.is_owned()
    carrier.promote()
    assert values_of(carrier).tolist() == VALUES


def test_a_hierarchy_in_transition_neither_moves_nor_receives():
    with held_transfers(CPU, FileBacked) as hold:
        carrier = evictable(VALUES)
        tensor, handle = on(carrier), carrier.evict_async()
        with pytest.raises(PendingWorkError):
            move(tensor, CPU(0))
        with pytest.raises(PendingWorkError):
            move(on(CPU(6)), carrier)
        assert not carrier.is_owned()
        hold.open()
        handle.wait(10)


def test_a_source_with_unfinished_work_waits():
    source, destination = holding("CPU", VALUES), CPU(6)
    with held_transfers(CPU, CPU) as hold:
        filling = move_async(on(CPU(6)), source)  # the request runs in its destination's scope
        with pytest.raises(RuntimeError):
            move(on(source), destination)
        hold.open()
        filling.wait(10)
    assert not destination.is_owned()


# While it runs


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_both_carriers_belong_to_the_move_until_it_ends(pair):
    source, destination = holding(pair[0], VALUES), place_for(pair[1], 6)
    tensor = on(source)
    with held_transfers(type(source), type(destination)) as hold:
        handle = move_async(tensor, destination)
        hold.entered.wait(10)
        for carrier in (source, destination):
            assert carrier.is_owned()
            assert not carrier.is_mutable()
            assert len(values_of(carrier)) == 6, "reading goes on"
            for refused in (
                lambda one=carrier: one.set_value(0, 9),
                carrier.increment_version,
                lambda one=carrier: move(on(CPU(6)), one),
                lambda one=carrier: move(on(one), CPU(0)),
                lambda one=carrier: Evictable(one, CPU(0)),
            ):
                with pytest.raises(RuntimeError):
                    refused()
            with pytest.raises(RuntimeError):
                carrier.release()
            if type(carrier) is Evictable:
                with pytest.raises(OwnershipError):
                    carrier.evict()
        assert (source.version, destination.version) == (0, 0)
        assert not source.is_released()
        hold.open()
        assert handle.wait(10).tolist() == VALUES


def test_nothing_holds_the_carriers_after_it():
    source, destination = holding("CPU", VALUES), FileBacked()
    with no_grad():
        moved = move(on(source), destination)
    gone = [weakref.ref(source), weakref.ref(destination)]
    del source, destination, moved
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


# Failures


@pytest.mark.parametrize("after", [False, True], ids=["before copying", "after copying"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_failed_move_publishes_nothing(pair, after):
    source, destination = holding(pair[0], VALUES), place_for(pair[1], 6)
    tensor = on(source)
    with failing_transfers(type(source), type(destination), after=after):
        handle = move_async(tensor, destination)
        with pytest.raises(OSError, match="filled the disk"):
            handle.wait(10)
        assert not source.is_released()
        assert values_of(source).tolist() == VALUES
        assert (source.version, destination.version) == (
            0,
            1,
        )  # what the destination holds is unspecified now
        for carrier in (source, destination):
            assert not carrier.is_owned()
            assert carrier.is_mutable()
            assert carrier.statistics().pending == 0
        assert move(tensor, destination).tolist() == VALUES


def test_a_destination_that_cannot_be_allocated_fails_the_move(monkeypatch):
    source, destination = holding("CPU", VALUES), FileBacked()

    def fail(self, size):
        raise OSError(28, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(FileBacked, "_allocate_in_place", fail)
        with pytest.raises(OSError, match="no room"):
            move(on(source), destination)
    assert not source.is_owned()
    assert move(on(source), destination).tolist() == VALUES


def test_a_wrong_result_fails_the_move():
    real = dispatch_move(CPU, FileBacked)

    class Astray(real):
        async def transfer(self, transfers):
            await super().transfer(transfers)
            return [CPU(6) for _ in transfers]

    source, destination = holding("CPU", VALUES), FileBacked()
    with (
        registered_move_operation(CPU, FileBacked, Astray, replace=True),
        pytest.raises(RuntimeError, match="not the destinations"),
    ):
        move(on(source), destination)
    assert not source.is_released()


def test_a_source_that_is_being_read_lives():
    """The release of the source is the last thing that can be refused, so nothing is published before it."""
    source, destination = holding("FileBacked", VALUES), CPU(6)
    tensor = on(source)
    with held_transfers(FileBacked, CPU) as hold:
        handle = move_async(tensor, destination)
        hold.entered.wait(10)
        with held_transfers(CPU, Generic) as reading:
            reader = source._scope.start(AwaitResult(), reading.pass_through)
            hold.open()
            with pytest.raises(PendingWorkError):
                handle.wait(10)
            assert not source.is_released()
            assert not source.is_owned()
            reading.open()
            reader.wait(10)
    assert move(tensor, destination).tolist() == VALUES


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_graph_notices_that_a_move_wrote_over_what_it_saved(fails):
    """A destination may be in a graph, itself or as the tier that an Evictable was made of later."""
    for wrap in (lambda carrier: carrier, lambda carrier: Evictable(carrier, Generic([]))):
        saved = holding("CPU", VALUES)
        leaf = on(saved)
        total = reduce_sum(leaf * leaf)
        source, destination = holding("CPU", VALUES[::-1]), wrap(saved)
        if fails:
            with (
                failing_transfers(CPU, type(destination), after=True),
                pytest.raises(OSError, match="filled the disk"),
            ):
                move(on(source), destination)
        else:
            move(on(source), destination)
        with pytest.raises(StaleGraphError):
            total.backward()
        assert leaf.grad is None


@pytest.mark.parametrize("error", [OSError(5, "broken"), ValueError("odd")], ids=["system", "own"])
@pytest.mark.parametrize("start", ["move", "evict"])
def test_storage_that_cannot_be_freed_does_not_undo_what_moved(start, error, monkeypatch, caplog):
    """The values are at the destination by then, so an error would only hide the way to them."""
    source, destination = holding("FileBacked", VALUES), CPU(0)
    real = source._free_storage

    def fail():
        real()
        raise error

    monkeypatch.setattr(source, "_free_storage", fail)
    if start == "move":
        assert move(on(source), destination).tolist() == VALUES
    else:
        carrier = Evictable(source, destination)
        carrier.evict()
        assert values_of(carrier.secondary).tolist() == VALUES
    assert source.is_released()
    assert "could not be freed" in caplog.text


# Gradients


def ones_on(tensor):
    carrier = tensor.carrier.new_like([1.0] * tensor.size)
    return Tensor(carrier, 0, row_major(*tensor.shape), requires_grad=False)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_gradient_crosses_back_to_the_sources_class(pair):
    source = holding(pair[0], VALUES)
    tensor = on(source, 2, 3)
    moved = move(tensor, place_for(pair[1], 6))
    assert moved.requires_grad
    assert moved.grad_fn.name == "move"
    assert moved.grad_fn.inputs == (tensor,)
    cotangent = Tensor(moved.carrier.new_like(range(6)), 0, row_major(2, 3), requires_grad=False)
    moved.backward(cotangent)
    assert type(tensor.grad.carrier) is type(source)
    assert tensor.grad.layout == row_major(2, 3)
    assert tensor.grad.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert not tensor.grad.carrier.is_owned()
    assert not cotangent.carrier.is_released(), "the caller's gradient stays the caller's"
    assert cotangent.tolist() == tensor.grad.tolist()
    if pair[0] == "Evictable":
        assert tensor.grad.carrier.primary.is_owned()


@pytest.mark.parametrize("kind", ["Generic", "CPU", "Evictable"])
@pytest.mark.parametrize("source", PROTOTYPES)
def test_the_gradient_of_what_is_computed_after_a_move(source, kind):
    tensor = on(holding(source, VALUES), 2, 3)
    moved = move(tensor, place_for(kind, 6))
    loss = reduce_sum(moved * moved)  # its cotangent arrives as a broadcast view
    loss.backward()
    assert type(tensor.grad.carrier) is type(tensor.carrier)
    assert tensor.grad.tolist() == [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]


def test_a_broadcast_cotangent_is_laid_out():
    tensor = on(holding("FileBacked", VALUES), 2, 3)
    reduce_sum(move(tensor, CPU(0))).backward()
    assert tensor.grad.tolist() == [[1.0] * 3] * 2
    assert tensor.grad.carrier.size() == 6


@pytest.mark.parametrize(
    ("layout", "offset"),
    [(Layout((2, 3), (1, 2)), 0), (Layout((2, 3), (-3, -1)), 5), (Layout((2, 3), (0, 1)), 1)],
)
def test_any_layout_of_the_tensor_and_the_cotangent(layout, offset):
    tensor = Tensor(holding("Generic", VALUES), offset, layout)
    expected = tensor.numpy(copy=True)
    moved = move(tensor, CPU(0))
    assert np.array_equal(moved.numpy(), expected)
    gradient = Tensor(CPU(0).new_like(range(6)), 0, Layout((2, 3), (1, 2)), requires_grad=False)
    moved.backward(gradient)
    assert tensor.grad.tolist() == gradient.tolist()
    assert tensor.grad.layout == row_major(2, 3)


def test_a_chain_of_two_moves():
    tensor = on(holding("FileBacked", VALUES))
    middle = move(tensor, CPU(0))
    last = move(middle * 3.0, evictable().allocate_like(6))
    (last * last).backward(ones_on(last))
    assert type(tensor.grad.carrier) is FileBacked
    assert tensor.grad.tolist() == [18.0 * value for value in VALUES]
    assert last.grad_fn.name == "move"


def test_gradients_accumulate_on_the_sources_class():
    for kind in PROTOTYPES:
        tensor = on(holding(kind, VALUES))
        moved = move(tensor, CPU(0))
        for _ in range(2):
            moved.backward(ones_on(moved), retain_graph=True)
        assert type(tensor.grad.carrier) is type(tensor.carrier)
        assert tensor.grad.tolist() == [2.0] * 6


def test_no_node_under_no_grad_or_without_a_wish():
    with no_grad():
        handle = move_async(on(holding("CPU", VALUES)), CPU(0))
    moved = handle.wait()
    assert (moved.requires_grad, moved.grad_fn) == (False, None)
    moved = move(on(holding("CPU", VALUES), requires_grad=False), CPU(0))
    assert (moved.requires_grad, moved.grad_fn) == (False, None)
    moved = move(on(holding("CPU", [1, 2], DType.Int32)), CPU(0, dtype=DType.Int32))
    assert (moved.requires_grad, moved.grad_fn) == (False, None)


def test_the_gradient_mode_is_that_of_the_call():
    with held_transfers(CPU, FileBacked) as hold:
        with no_grad():
            without = move_async(on(holding("CPU", VALUES)), FileBacked())
        with_it = move_async(on(holding("CPU", VALUES)), FileBacked())
        with no_grad():
            hold.open()
            assert with_it.wait(10).requires_grad
        assert not without.wait(10).requires_grad


def test_saved_values_do_not_outlive_their_carrier():
    tensor = on(holding("CPU", VALUES))
    square = tensor * tensor
    move(tensor, FileBacked())
    with pytest.raises(StaleGraphError, match="released"):
        square.backward(ones_on(square))


def test_a_failed_way_back_can_be_gone_again():
    tensor = on(holding("FileBacked", VALUES))
    moved = move(tensor, CPU(0))
    with failing_transfers(CPU, FileBacked):
        with pytest.raises(OSError, match="filled the disk"):
            moved.backward(ones_on(moved))
        assert tensor.grad is None
        moved.backward(ones_on(moved))
    assert tensor.grad.tolist() == [1.0] * 6


def test_a_way_back_needs_a_move_of_its_own():
    source = Boxed([0] * 6)
    with registered_move_operation(Boxed, CPU, ElementwiseMoveOperation):
        moved = move(on(source), CPU(0))
    with pytest.raises(NotImplementedError, match="CPU to Boxed"):
        moved.backward(ones_on(moved))
    with registered_move_operation(CPU, Boxed, ElementwiseMoveOperation):
        moved.backward(ones_on(moved))


def test_moving_an_intermediate_result():
    weights = asarray(VALUES, dtype=DType.Float32)
    moved = move(weights * 2.0, Generic([]))
    moved.backward(ones_on(moved))
    assert weights.grad.tolist() == [2.0] * 6
