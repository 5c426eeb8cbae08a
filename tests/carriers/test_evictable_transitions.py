"""Evictable in transition: where values go, what a failure leaves, who waits how, threads and fork."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import anyio
import numpy as np
import pytest

from strideweave import CPU, AwaitResult, DType, Evictable, FileBacked, Generic, Tensor, reduce_sum, row_major
from strideweave.carriers.move import (
    MoveOperation,
    dispatch_move,
    register_move_operation,
    registered_move_operation,
    unregister_move_operation,
)
from strideweave.errors import EvictedError, PendingWorkError, ReleasedError, StaleGraphError
from strideweave.testing import failing_transfers, held_transfers, values_of

VALUES = [1.0, 2.0, 3.0, 4.0]
EMPTY = {"Generic": lambda: Generic([]), "CPU": lambda: CPU(0), "FileBacked": FileBacked}
PAIRS = [(first, second) for first in EMPTY for second in EMPTY]


def hierarchy(primary="CPU", secondary="FileBacked", *, slots=0):
    fast = EMPTY[primary]().new_like(VALUES)
    slow = EMPTY[secondary]()
    return Evictable(fast, slow.allocate_like(slots) if slots else slow)


def snapshot(carrier):
    """Everything that a failed transition must preserve."""
    holder = carrier.secondary if carrier.is_evicted() else carrier.primary
    return (
        carrier.is_evicted(),
        carrier.primary,
        carrier.secondary,
        values_of(holder).tobytes(),
        carrier.primary.is_owned(),
        carrier.secondary.is_owned(),
        carrier.primary.is_released(),
        carrier.secondary.is_released(),
        carrier.size(),
        carrier.dtype(),
        carrier.is_mutable(),
        carrier.version,
        carrier.statistics(),
    )


@pytest.fixture
def fresh_carriers(monkeypatch):
    """Every carrier that ``allocate_like`` makes from here on."""
    made = []
    for kind in (CPU, Generic, FileBacked):
        real = kind.allocate_like

        def allocate(self, *arguments, real=real, **options):
            made.append(real(self, *arguments, **options))
            return made[-1]

        monkeypatch.setattr(kind, "allocate_like", allocate)
    return made


# Where the values go


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_evict_into_existing_secondary_storage(pair):
    """Spec: *Eviction moves complete storage into the secondary tier*, scenario *Evict into existing secondary
    storage*.
    """
    carrier = hierarchy(*pair, slots=6)
    primary, secondary = carrier.primary, carrier.secondary
    assert carrier.evict() is None
    assert carrier.is_evicted()
    assert carrier.secondary is secondary
    assert values_of(secondary).tolist() == [*VALUES, 0.0, 0.0]
    assert primary.is_released()
    assert secondary.is_owned()
    assert carrier.size() == 4


@pytest.mark.parametrize("slots", [0, 1, 3])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_provision_an_undersized_secondary(pair, slots):
    """Spec: *Eviction moves complete storage into the secondary tier*, scenario *Provision an undersized
    secondary*; the one that is replaced is released.
    """
    carrier = hierarchy(*pair, slots=slots)
    small = carrier.secondary
    carrier.evict()
    assert carrier.secondary is not small
    assert type(carrier.secondary) is type(small)
    assert carrier.secondary.size() == 4
    assert carrier.secondary.is_owned()
    assert small.is_released()
    assert not small.is_owned()
    assert values_of(carrier.secondary).tolist() == VALUES


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_promote_an_evicted_hierarchy(pair):
    """Spec: *Promotion restores fresh primary-class storage*, scenario *Promote an evicted hierarchy*."""
    carrier = hierarchy(*pair)
    before = carrier.primary
    carrier.evict()
    left = carrier.secondary
    assert carrier.promote() is None
    assert not carrier.is_evicted()
    assert carrier.primary is not before
    assert type(carrier.primary) is type(before)
    assert carrier.primary.size() == 4
    assert carrier.primary.is_owned()
    assert left.is_released()
    assert not left.is_owned()
    assert values_of(carrier).tolist() == VALUES
    carrier.evict()
    carrier.promote()
    assert values_of(carrier).tolist() == VALUES


def test_repeating_a_transition_does_nothing():
    """Spec: *Eviction moves complete storage into the secondary tier* and *Promotion restores fresh primary-class
    storage*: both are idempotent.
    """
    carrier = hierarchy()
    before = snapshot(carrier)
    assert carrier.promote() is None
    assert carrier.promote_async().done
    assert snapshot(carrier) == before
    carrier.evict()
    before = snapshot(carrier)
    assert carrier.evict() is None
    assert carrier.evict_async().done
    assert snapshot(carrier) == before


def test_round_trip_residency_without_mutation():
    """Spec: *Transitions preserve logical version identity*, scenario *Round-trip residency without mutation*."""
    carrier = hierarchy()
    carrier[0] = 9
    carrier[1] = 8
    for _ in range(3):
        carrier.evict()
        assert carrier.version == 2
        carrier.promote()
        assert carrier.version == 2
    carrier[2] = 7
    assert carrier.version == 3, "the wrapper counts, whatever tier object it stands on"
    assert values_of(carrier).tolist() == [9.0, 8.0, 7.0, 4.0]


def test_a_graph_survives_a_round_trip():
    """Transitions make no node and change no version, so what was saved is still good."""
    carrier = hierarchy()
    tensor = Tensor(carrier, 0, row_major(4))
    result = tensor * tensor
    node = result.grad_fn
    for one in (carrier, result.carrier):
        one.evict()
        one.promote()
    assert tensor.grad_fn is None
    assert result.grad_fn is node
    result.backward(Tensor(carrier.new_like([1.0] * 4), 0, row_major(4), requires_grad=False))
    assert tensor.grad.tolist() == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_graph_notices_that_an_eviction_wrote_over_what_it_saved(fails):
    """The secondary tier is storage that somebody made and may have computed with, whole or as a tier itself."""
    for wrap in (lambda carrier: carrier, lambda carrier: Evictable(carrier, FileBacked())):
        saved = CPU(0).new_like([5.0, 6.0, 7.0, 8.0])
        leaf = Tensor(saved, 0, row_major(4))
        total = reduce_sum(leaf * leaf)
        carrier = Evictable(CPU(0).new_like(VALUES), wrap(saved))
        if fails:
            with (
                failing_transfers(CPU, type(carrier.secondary), after=True),
                pytest.raises(OSError, match="filled the disk"),
            ):
                carrier.evict()
        else:
            carrier.evict()
        with pytest.raises(StaleGraphError):
            total.backward()
        assert leaf.grad is None
        assert carrier.version == 0


def test_a_large_hierarchy_moves_whole():
    values = np.random.default_rng(3).standard_normal(3_000_000).astype(np.float32)
    carrier = Evictable(CPU(0).new_like(values), FileBacked())
    carrier.evict()
    carrier.promote()
    assert np.array_equal(values_of(carrier), values)


# Failures


@pytest.mark.parametrize("after", [False, True], ids=["before copying", "after copying"])
@pytest.mark.parametrize("slots", [0, 4], ids=["fresh destination", "existing destination"])
def test_fail_eviction_without_changing_residency(slots, after, fresh_carriers):
    """Spec: *Residency transitions are failure-atomic*, scenario *Fail eviction without changing residency*."""
    carrier = hierarchy(slots=slots)
    before = snapshot(carrier)
    fresh_carriers.clear()
    with failing_transfers(CPU, FileBacked, times=2, after=after) as faults:
        for _ in range(2):
            with pytest.raises(OSError, match="filled the disk"):
                carrier.evict()
            assert snapshot(carrier) == before
        assert (faults.failed, faults.calls) == (2, 2)
        assert len(fresh_carriers) == (0 if slots else 2)
        assert all(made.is_released() and not made.is_owned() for made in fresh_carriers)
        carrier[0] = 1.0
        carrier.evict()
    assert carrier.is_evicted()
    assert values_of(carrier.secondary).tolist() == VALUES


@pytest.mark.parametrize("after", [False, True], ids=["before copying", "after copying"])
def test_fail_promotion_without_changing_residency(after, fresh_carriers):
    """Spec: *Residency transitions are failure-atomic*, scenario *Fail promotion without changing residency*."""
    carrier = hierarchy()
    carrier.evict()
    before = snapshot(carrier)
    fresh_carriers.clear()
    with failing_transfers(FileBacked, CPU, error=MemoryError("none left"), after=after):
        with pytest.raises(MemoryError, match="none left"):
            carrier.promote()
        assert snapshot(carrier) == before
        assert [(made.is_released(), made.is_owned()) for made in fresh_carriers] == [(True, False)]
        carrier.promote()
    assert values_of(carrier).tolist() == VALUES


@pytest.mark.parametrize("evict", [True, False], ids=["evict", "promote"])
def test_a_failed_allocation_changes_nothing(evict, monkeypatch):
    """Spec: *Residency transitions are failure-atomic*; allocation is the first thing that may fail."""
    carrier = hierarchy()
    if not evict:
        carrier.evict()
    transition = carrier.evict if evict else carrier.promote
    before = snapshot(carrier)

    def fail(self, size, **options):
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(FileBacked if evict else CPU, "allocate_like", fail)
        with pytest.raises(OSError, match="no room"):
            transition()
        assert snapshot(carrier) == before
    transition()
    assert carrier.is_evicted() is evict


def test_a_destination_that_cannot_be_claimed_is_disposed_of(monkeypatch, fresh_carriers):
    """Spec: *Residency transitions are failure-atomic*; fresh temporary destinations are released."""
    carrier = hierarchy()
    before = snapshot(carrier)
    fresh_carriers.clear()

    def refuse(self, owner):
        raise PendingWorkError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(FileBacked, "_claim", refuse)
        with pytest.raises(PendingWorkError, match="busy"):
            carrier.evict()
    assert snapshot(carrier) == before
    assert [made.is_released() for made in fresh_carriers] == [True]
    carrier.evict()


@pytest.mark.parametrize("evict", [True, False], ids=["evict", "promote"])
def test_the_move_is_looked_up_when_the_transition_begins(evict):
    """Spec: *Residency transitions are failure-atomic*; dispatch may fail, and may be corrected."""
    carrier = hierarchy("Generic")
    if not evict:
        carrier.evict()
    pair = (Generic, FileBacked) if evict else (FileBacked, Generic)
    transition = carrier.evict if evict else carrier.promote
    before = snapshot(carrier)
    real = dispatch_move(*pair)
    with registered_move_operation(*pair, real, replace=True):
        unregister_move_operation(*pair)
        with pytest.raises(NotImplementedError, match="no move operation is registered"):
            transition()
        assert snapshot(carrier) == before
        register_move_operation(*pair, real)
    transition()
    assert carrier.is_evicted() is evict


@pytest.mark.parametrize("nested", [False, True], ids=["plain tier", "tier inside a tier"])
@pytest.mark.parametrize("evict", [True, False], ids=["evict", "promote"])
def test_a_wrong_result_fails_the_transition(evict, nested):
    """Spec: *Residency transitions are failure-atomic*; a result that is not the destination is a RuntimeError."""
    primary = CPU(0).new_like(VALUES)
    carrier = Evictable(Evictable(primary, CPU(0)) if nested else primary, FileBacked())
    if not evict:
        carrier.evict()
    pair = (CPU, FileBacked) if evict else (FileBacked, CPU)
    real = dispatch_move(*pair)

    class Astray(real):
        async def transfer(self, transfers):
            await super().transfer(transfers)
            return [transfer.source for transfer in transfers]

    before = snapshot(carrier)
    transition = carrier.evict if evict else carrier.promote
    with registered_move_operation(*pair, Astray, replace=True):
        with pytest.raises(RuntimeError, match="not the destinations"):
            transition()
        assert snapshot(carrier) == before
    transition()
    assert carrier.is_evicted() is evict


def test_the_destination_may_be_named_as_the_result():
    class Proud(MoveOperation):
        async def transfer(self, transfers):
            await dispatch_move(Generic, FileBacked)().transfer(transfers)
            return [transfer.destination for transfer in transfers]

    carrier = hierarchy("CPU")
    with registered_move_operation(CPU, FileBacked, Proud, replace=True):
        carrier.evict()
    assert values_of(carrier.secondary).tolist() == VALUES


def test_a_tier_that_is_being_read_holds_a_transition_up_whole():
    """A reader of an alias must not find its file closed; the transition fails, and may be repeated."""
    carrier = hierarchy("FileBacked", "CPU")
    before, alias = snapshot(carrier), carrier.primary
    gate = AwaitResult()

    async def read():
        await gate

    reading = alias._scope.start(AwaitResult(), read)
    with pytest.raises(PendingWorkError, match="unfinished"):
        carrier.evict()
    assert snapshot(carrier) == before
    gate._finish()
    reading.wait(10)
    carrier.evict()
    assert alias.is_released()


def test_a_replaced_secondary_that_is_being_read_holds_it_up_too():
    """Two carriers end with such an eviction; neither may end alone."""
    carrier = hierarchy("CPU", "FileBacked", slots=1)
    before, gate = snapshot(carrier), AwaitResult()

    async def read():
        await gate

    reading = carrier.secondary._scope.start(AwaitResult(), read)
    with pytest.raises(PendingWorkError, match="unfinished"):
        carrier.evict()
    assert snapshot(carrier) == before
    gate._finish()
    reading.wait(10)
    carrier.evict()
    assert values_of(carrier.secondary).tolist() == VALUES


# Asynchronous use


@pytest.mark.anyio
async def test_transitions_can_be_awaited():
    """Spec: *Eviction moves complete storage into the secondary tier*; the same, from the caller's loop."""
    carrier = hierarchy()
    handle = carrier.evict_async()
    assert await handle is None
    assert await handle is None
    assert carrier.is_evicted()
    assert await carrier.promote_async() is None
    assert values_of(carrier).tolist() == VALUES


@pytest.mark.anyio
async def test_a_failure_reaches_every_awaiter():
    carrier = hierarchy()
    with failing_transfers(CPU, FileBacked, error=OSError(errno.EIO, "a scratch")):
        handle = carrier.evict_async()
        caught = []
        for _ in range(2):
            with pytest.raises(OSError, match="a scratch") as info:
                await handle
            caught.append(info.value)
    assert caught[0] is caught[1]
    await carrier.evict_async()


@pytest.mark.anyio
async def test_a_cancelled_awaiter_leaves_the_transition_running():
    carrier = hierarchy()
    with held_transfers(CPU, FileBacked) as hold:
        handle = carrier.evict_async()
        await hold.entered
        with anyio.move_on_after(0) as scope:
            await handle
        assert scope.cancelled_caught
        assert not handle.done
        assert not carrier.is_evicted()
        hold.open()
        await handle
    assert carrier.is_evicted()
    assert values_of(carrier.secondary).tolist() == VALUES


@pytest.mark.anyio
async def test_what_a_transition_under_way_refuses():
    """Reads go on, writes and other transitions and release are refused, and the values are whole after it."""
    carrier = hierarchy()
    onto = Tensor(carrier, 0, row_major(4))
    with held_transfers(CPU, FileBacked) as hold:
        handle = carrier.evict_async()
        await hold.entered
        assert not carrier.is_evicted()
        assert carrier.statistics().pending == 1
        assert [carrier[i] for i in range(4)] == VALUES
        assert onto.tolist() == VALUES
        for refused in (
            lambda: carrier.set_value(0, 9),
            lambda: carrier.scatter(onto, onto, row_major(4)),
            carrier.evict_async,
            carrier.promote_async,
            carrier.release,
        ):
            with pytest.raises(PendingWorkError):
                refused()
        assert not carrier.is_released()
        assert carrier.version == 0
        hold.open()
        await handle
    carrier.promote()
    carrier[0] = 9
    assert values_of(carrier).tolist() == [9.0, 2.0, 3.0, 4.0]


def test_a_promotion_under_way_refuses_too():
    carrier = hierarchy()
    carrier.evict()
    with held_transfers(FileBacked, CPU) as hold:
        handle = carrier.promote_async()
        with pytest.raises(EvictedError):
            carrier[0]
        for refused in (carrier.evict_async, carrier.promote_async, carrier.release):
            with pytest.raises(PendingWorkError):
                refused()
        hold.open()
        handle.wait(10)
    assert values_of(carrier).tolist() == VALUES


def test_a_write_under_way_refuses_a_transition(monkeypatch):
    """The other way round: a slow write of a slot, and somebody evicts."""
    carrier = hierarchy("FileBacked", "CPU")
    entered, goon = threading.Event(), threading.Event()
    real = FileBacked._store_slot

    def slow(self, i, value):
        entered.set()
        assert goon.wait(10)
        real(self, i, value)

    monkeypatch.setattr(FileBacked, "_store_slot", slow)
    writer = threading.Thread(target=carrier.set_value, args=(0, 9))
    writer.start()
    assert entered.wait(10)
    with pytest.raises(PendingWorkError, match="writes"):
        carrier.evict()
    goon.set()
    writer.join()
    carrier.evict()
    assert values_of(carrier.secondary).tolist() == [9.0, 2.0, 3.0, 4.0]
    assert carrier.version == 1


def test_dropped_handles_and_carriers_finish_their_transition():
    """Nobody waits, and nobody holds the hierarchy: its tiers are whole and free afterwards."""
    with held_transfers(CPU, CPU) as hold:
        primary, secondary = CPU(0).new_like(VALUES), CPU(4)
        carrier = Evictable(primary, secondary)
        carrier.evict_async()
        hold.entered.wait(10)
        ended = AwaitResult()
        weakref.finalize(carrier, ended._finish)
        del carrier
        assert not ended.done, "the request keeps it"
        hold.open()
        ended.wait(10)
    assert primary.is_released()
    assert not secondary.is_owned()
    assert values_of(secondary).tolist() == VALUES


def test_readers_of_other_threads_meet_values_or_an_error():
    """One thread moves the hierarchy to and fro, others read: never a wrong value, never another error."""
    carrier = hierarchy()
    tensor = Tensor(carrier, 0, row_major(4), requires_grad=False)
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                found = (carrier[3], tensor.tolist())
            except (EvictedError, ReleasedError):
                continue
            except Exception as error:
                wrong.append(error)
                return
            if found != (4.0, VALUES):
                wrong.append(found)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(12):
        carrier.evict()
        carrier.promote()
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_many_threads_may_ask_for_the_same_transition():
    """One of them starts it; the others are refused while it runs, or find it done."""
    carrier = hierarchy()
    barrier, outcomes = threading.Barrier(6), []

    def evict():
        barrier.wait()
        try:
            outcomes.append(carrier.evict())
        except PendingWorkError:
            outcomes.append("refused")

    threads = [threading.Thread(target=evict) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None in outcomes
    assert set(outcomes) <= {None, "refused"}
    assert carrier.statistics().evictions == 1
    assert values_of(carrier.secondary).tolist() == VALUES


def test_gather_takes_many_hierarchies_at_once():
    async def main():
        carriers = [hierarchy() for _ in range(8)]
        await asyncio.gather(*[carrier.evict_async() for carrier in carriers])
        assert all(carrier.is_evicted() for carrier in carriers)
        await asyncio.gather(*[carrier.promote_async() for carrier in carriers])
        return [values_of(carrier).tolist() for carrier in carriers]

    assert asyncio.run(main()) == [VALUES] * 8


# Fork


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_goes_on_by_itself():
    """The child ends the parent's transition as failed, in the state before it, and makes its own."""
    program = textwrap.dedent("""
        import os, sys
        from strideweave import CPU, Evictable, FileBacked
        from strideweave.testing import held_transfers, values_of

        VALUES = [1.0, 2.0, 3.0, 4.0]
        at_rest = Evictable(CPU(0).new_like(VALUES), FileBacked())
        at_rest.evict()
        moving = Evictable(CPU(0).new_like(VALUES), FileBacked())
        with held_transfers(CPU, FileBacked) as hold:
            handle = moving.evict_async()
            hold.entered.wait(20)
            child = os.fork()
            if child == 0:
                failed = False
                try:
                    handle.wait(20)
                except RuntimeError:
                    failed = True
                good = failed and not moving.is_evicted() and moving.statistics().pending == 0
                at_rest.promote()
                good = good and values_of(at_rest).tolist() == VALUES
                good = good and values_of(moving).tolist() == VALUES
                hold.open()
                moving[0] = 9
                moving.evict()
                moving.promote()
                good = good and values_of(moving).tolist() == [9.0, 2.0, 3.0, 4.0]
                moving.release()
                os._exit(0 if good else 1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert not moving.is_evicted()
            hold.open()
            handle.wait(20)
        assert values_of(moving.secondary).tolist() == VALUES
        at_rest.promote()
        assert values_of(at_rest).tolist() == VALUES, "the child's promotion left the parent's file alone"
        sys.exit(status)
    """)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_dtypes_are_kept_by_identity():
    for dtype in DType.members():
        carrier = Evictable(CPU(3, dtype=dtype), FileBacked(dtype=dtype))
        carrier.evict()
        assert carrier.secondary.dtype() is carrier.dtype() is dtype
        carrier.promote()
        assert carrier.primary.dtype() is dtype
