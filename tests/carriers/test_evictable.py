"""Evictable: construction, tiers, ownership, state, factories, results and release."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from boxed import Boxed
from strideweave import (
    CPU,
    AwaitResult,
    DType,
    Evictable,
    FileBacked,
    Generic,
    Layout,
    Tensor,
    add,
    move,
    permute,
    reshape,
    row_major,
)
from strideweave.carriers import Carrier
from strideweave.carriers.move import (
    ElementwiseMoveOperation,
    register_move_operation,
    registered_move_operation,
    unregister_move_operation,
)
from strideweave.errors import EvictedError, ImmutableError, OwnershipError, PendingWorkError, ReleasedError
from strideweave.testing import failing_transfers, held_transfers, values_of

VALUES = [1.0, 2.0, 3.0, 4.0]


def cpu(values=VALUES, **options):
    return CPU(0, dtype=options.pop("dtype", DType.Float32)).new_like(values, **options)


def hierarchy(values=VALUES, **options):
    return Evictable(cpu(values, **options), FileBacked())


def tensor_on(carrier, shape=None, **options):
    return Tensor(carrier, 0, row_major(*(shape or (carrier.size(),))), **options)


def released(carrier):
    carrier.release()
    return carrier


def owned(carrier):
    carrier._claim(object())
    return carrier


# Construction


def test_construct_a_promoted_hierarchy():
    """Spec: *Evictable construction validates a complete two-tier hierarchy*, scenario *Construct a promoted
    hierarchy*; *The hierarchy exposes current tier identities*, scenario *Inspect initial tiers*.
    """
    primary, secondary = cpu(), FileBacked()
    carrier = Evictable(primary, secondary)
    assert carrier.primary is primary
    assert carrier.secondary is secondary
    assert carrier.is_evicted() is False
    assert (carrier.size(), carrier.dtype(), carrier.version) == (4, DType.Float32, 0)
    assert primary.is_owned()
    assert secondary.is_owned()
    assert not carrier.is_owned()
    assert values_of(carrier).tolist() == VALUES


CONSTRUCTION_ERRORS = {
    "primary is no carrier": (lambda: ([1.0], FileBacked()), TypeError),
    "secondary is no carrier": (lambda: (cpu(), "file"), TypeError),
    "empty primary": (lambda: (CPU(0), FileBacked()), ValueError),
    "released primary": (lambda: (released(cpu()), FileBacked()), ReleasedError),
    "released secondary": (lambda: (cpu(), released(FileBacked())), ReleasedError),
    "owned primary": (lambda: (owned(cpu()), FileBacked()), OwnershipError),
    "owned secondary": (lambda: (cpu(), owned(FileBacked())), OwnershipError),
    "immutable secondary": (lambda: (cpu(), FileBacked(mutable=False)), ImmutableError),
    "other dtype": (lambda: (cpu(), FileBacked(dtype=DType.Float64)), TypeError),
    "no move": (lambda: (cpu(), Boxed([0])), NotImplementedError),
    "no move back": (lambda: (Boxed([0]), CPU(1)), NotImplementedError),
}


def tier_states(tiers):
    return [
        (tier.is_owned(), tier.is_released(), tier.is_mutable(), tier.size(), tier.version)
        for tier in tiers
        if isinstance(tier, Carrier)
    ]


@pytest.mark.parametrize("case", CONSTRUCTION_ERRORS)
def test_construction_refuses(case):
    """Spec: *Evictable construction validates a complete two-tier hierarchy*, scenario *Reject mismatched tier
    dtypes*; *Construction failure leaves ownership unchanged*.
    """
    make, error = CONSTRUCTION_ERRORS[case]
    tiers = make()
    before = tier_states(tiers)
    with pytest.raises(error):
        Evictable(*tiers)
    assert tier_states(tiers) == before


def test_one_carrier_is_not_two_tiers():
    """Spec: *Evictable construction validates a complete two-tier hierarchy*."""
    carrier = cpu()
    with pytest.raises(ValueError, match="same carrier"):
        Evictable(carrier, carrier)
    assert not carrier.is_owned()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        pytest.param(lambda: (None, released(cpu())), TypeError, id="type before released"),
        pytest.param(lambda: [released(CPU(0))] * 2, ValueError, id="same before released"),
        pytest.param(lambda: (CPU(0), released(FileBacked())), ValueError, id="empty before released"),
        pytest.param(lambda: (CPU(0), owned(FileBacked())), ValueError, id="empty before owned"),
        pytest.param(lambda: (CPU(0), FileBacked(mutable=False)), ValueError, id="empty before immutable"),
        pytest.param(lambda: (CPU(0), FileBacked(dtype=DType.Bool)), ValueError, id="empty before dtype"),
        pytest.param(
            lambda: (released(cpu()), FileBacked(mutable=False)),
            ReleasedError,
            id="released before immutable",
        ),
        pytest.param(
            lambda: (cpu(), released(FileBacked(dtype=DType.Bool))), ReleasedError, id="released before dtype"
        ),
        pytest.param(
            lambda: (owned(cpu()), FileBacked(dtype=DType.Bool)), OwnershipError, id="owned before dtype"
        ),
        pytest.param(
            lambda: (cpu(), FileBacked(dtype=DType.Bool, mutable=False)),
            ImmutableError,
            id="immutable before dtype",
        ),
        pytest.param(lambda: (cpu(), Boxed([0], dtype=DType.Bool)), TypeError, id="dtype before the moves"),
    ],
)
def test_construction_errors_come_in_the_stated_order(make, error):
    """Spec: *Evictable construction validates a complete two-tier hierarchy*; what is stated first wins."""
    with pytest.raises(error):
        Evictable(*make())


@pytest.mark.parametrize("missing", [(CPU, Boxed), (Boxed, CPU)])
def test_both_directions_need_a_move(missing):
    """Spec: *Evictable construction validates a complete two-tier hierarchy*; one direction is not enough."""
    present = tuple(reversed(missing))
    primary, secondary = cpu(), Boxed([0])
    with (
        registered_move_operation(*present, ElementwiseMoveOperation),
        pytest.raises(NotImplementedError, match=f"from {missing[0].__name__} to {missing[1].__name__}"),
    ):
        Evictable(primary, secondary)
    assert not primary.is_owned()
    assert not secondary.is_owned()


def test_an_evicted_hierarchy_is_no_tier():
    """Its values are not at hand, and once it is owned nobody could promote it."""
    for position in (0, 1):
        inner = hierarchy()
        inner.evict()
        tiers = [inner, CPU(4)] if position == 0 else [cpu(), inner]
        with pytest.raises(EvictedError, match="promote"):
            Evictable(*tiers)
        assert not any(tier.is_owned() for tier in tiers)


@pytest.mark.parametrize("position", [0, 1])
def test_a_hierarchy_that_another_thread_evicts_meanwhile_is_no_tier(position, monkeypatch):
    """The check that counts is the one after the claim: an owned hierarchy cannot be evicted."""
    inner = hierarchy()
    claim = inner._claim

    def late(owner):
        inner.evict()
        claim(owner)

    monkeypatch.setattr(inner, "_claim", late)
    tiers = [inner, CPU(4)] if position == 0 else [cpu(), inner]
    with pytest.raises(EvictedError, match="promote"):
        Evictable(*tiers)
    assert not any(tier.is_owned() for tier in tiers)
    inner.promote()


def test_it_is_final():
    with pytest.raises(TypeError, match="final"):
        type("Mine", (Evictable,), {})


def test_failing_to_claim_the_secondary_gives_the_primary_back(monkeypatch):
    """Spec: *Construction failure leaves ownership unchanged*, scenario *Fail while claiming the secondary*."""
    primary, secondary = cpu(), FileBacked()
    claims = []

    def refuse(owner):
        claims.append(primary.is_owned())
        raise OwnershipError("another thread was quicker")

    monkeypatch.setattr(secondary, "_claim", refuse)
    with pytest.raises(OwnershipError, match="quicker"):
        Evictable(primary, secondary)
    assert claims == [True]
    assert not primary.is_owned()
    assert primary.is_mutable()
    monkeypatch.undo()
    Evictable(primary, secondary).release()


def test_failing_to_freeze_the_capabilities_gives_both_back(monkeypatch):
    """Spec: *Construction failure leaves ownership unchanged*, scenario *Fail while freezing hierarchy
    capabilities*.
    """
    primary, secondary = cpu(), FileBacked()
    seen = []

    def fail(name=None):
        seen.append((primary.is_owned(), secondary.is_owned()))
        raise LookupError("no capabilities today")

    monkeypatch.setattr(primary, "operation_capabilities", fail)
    with pytest.raises(LookupError, match="today") as caught:
        Evictable(primary, secondary)
    assert caught.tb is not None, "which keeps the failed hierarchy from being destroyed"
    assert seen == [(True, True)]
    assert not primary.is_owned()
    assert not secondary.is_owned()
    monkeypatch.undo()
    Evictable(primary, secondary).release()


# Tiers and ownership


def test_tiers_are_replaced_by_storage_of_the_same_class():
    """Spec: *The hierarchy exposes current tier identities*; exact objects, replacements of the exact class."""
    carrier = hierarchy()
    first, file = carrier.primary, carrier.secondary
    carrier.evict()
    assert carrier.is_evicted() is True
    assert carrier.primary is first
    evicted_to = carrier.secondary
    assert evicted_to is not file
    assert type(evicted_to) is FileBacked
    carrier.promote()
    assert carrier.is_evicted() is False
    assert carrier.primary is not first
    assert type(carrier.primary) is CPU
    assert carrier.secondary is evicted_to
    assert (carrier.size(), carrier.dtype()) == (4, DType.Float32)


def test_read_but_do_not_mutate_an_owned_tier_alias():
    """Spec: *Child ownership makes retained aliases externally read-only*, scenario *Read but do not mutate an
    owned tier alias*.
    """
    primary, secondary = cpu(), CPU(8)
    carrier = Evictable(primary, secondary)
    alias = tensor_on(primary)
    assert primary[2] == 3.0
    assert alias.tolist() == VALUES
    for tier in (primary, secondary):
        assert tier.is_owned()
        assert not tier.is_mutable()
        onto = tensor_on(tier)
        for refused in (
            lambda tier=tier: tier.set_value(0, 9),
            tier.increment_version,
            tier.release,
            lambda tier=tier, onto=onto: tier.scatter(alias, onto, row_major(4)),
            lambda onto=onto: onto.numpy(writable=True),
            lambda onto=onto: move(onto, CPU(0)),
            lambda tier=tier: move(tensor_on(cpu()), tier),
            lambda tier=tier: Evictable(tier, FileBacked()),
        ):
            with pytest.raises(RuntimeError):
                refused()
    assert values_of(primary).tolist() == VALUES
    assert (primary.version, secondary.version) == (0, 0)
    assert not carrier.is_evicted()


def test_mutate_through_the_owner():
    """Spec: *Child ownership makes retained aliases externally read-only*, scenario *Mutate through the owner*."""
    carrier = hierarchy()
    alias = carrier.primary
    carrier[1] = 20
    assert not alias.is_mutable()
    assert alias[1] == carrier[1] == 20.0
    assert carrier.version == 1


def test_ownership_composes():
    """Spec: *Child ownership makes retained aliases externally read-only*; a tier that is an Evictable."""
    inner = hierarchy()
    outer = Evictable(inner, CPU(0))
    assert inner.is_owned()
    assert not inner.is_mutable()
    for refused in (
        lambda: inner.set_value(0, 9),
        inner.increment_version,
        inner.release,
        inner.evict,
        inner.promote,
        inner.evict_async,
        lambda: inner.scatter(tensor_on(inner), tensor_on(inner), row_major(4)),
    ):
        with pytest.raises(OwnershipError):
            refused()
    assert not inner.is_evicted()
    outer[0] = 7
    assert inner[0] == outer[0] == inner.primary[0] == 7.0
    outer.evict()
    assert inner.is_released()
    assert inner.primary.is_released()
    outer.promote()
    assert type(outer.primary) is Evictable
    assert values_of(outer).tolist() == [7.0, 2.0, 3.0, 4.0]
    outer.release()


def test_an_evictable_receives_an_eviction():
    outer = Evictable(cpu(), Evictable(CPU(1), FileBacked()))
    for _ in range(2):
        outer.evict()
        assert type(outer.secondary) is Evictable
        assert values_of(outer.secondary).tolist() == VALUES
        outer.promote()
        assert values_of(outer).tolist() == VALUES
    assert type(outer.new_like([1]).secondary) is Evictable
    assert type((tensor_on(outer) + 1).carrier.secondary) is Evictable


def test_a_hierarchy_in_transition_is_not_claimed():
    """Whoever claimed it would own a carrier that changes under it."""
    with held_transfers(CPU, FileBacked) as hold:
        carrier = hierarchy()
        handle = carrier.evict_async()
        with pytest.raises(PendingWorkError):
            Evictable(carrier, CPU(0))
        assert not carrier.is_owned()
        hold.open()
        handle.wait(10)


# Mutability


def test_preserve_an_immutable_hierarchy():
    """Spec: *Composite mutability is captured from the primary*, scenario *Preserve an immutable hierarchy*."""
    carrier = hierarchy(mutable=False)
    for _ in range(2):
        assert carrier.is_mutable() is False
        with pytest.raises(ImmutableError):
            carrier[0] = 9
        with pytest.raises(ImmutableError):
            carrier.scatter(tensor_on(carrier), tensor_on(carrier), row_major(4))
        carrier.evict()
        assert carrier.is_mutable() is False
        carrier.promote()
    assert (values_of(carrier).tolist(), carrier.version) == (VALUES, 0)


def test_a_mutable_hierarchy_stays_mutable():
    """Spec: *Composite mutability is captured from the primary*; ownership of the hierarchy counts too."""
    carrier = hierarchy()
    carrier.evict()
    assert carrier.is_mutable()
    carrier.promote()
    carrier[0] = 9
    assert carrier.is_mutable()
    token = object()
    carrier._claim(token)
    assert not carrier.is_mutable()
    carrier._relinquish(token)
    assert carrier.is_mutable()


# State


def test_block_access_while_evicted():
    """Spec: *Promoted state is required for public data access and execution*, scenario *Block access while
    evicted*.
    """
    carrier = hierarchy()
    tensor, other = tensor_on(carrier), tensor_on(hierarchy())
    carrier.evict()
    for refused in (
        lambda: carrier.get_value(0),
        lambda: carrier[0],
        lambda: carrier.set_value(0, 9),
        carrier.increment_version,
        lambda: carrier.scatter(other, tensor, row_major(4)),
        lambda: other.carrier.scatter(tensor, other, row_major(4)),
        lambda: carrier.dispatch_op("add"),
        lambda: carrier.dispatch_op("permute"),
        lambda: add(tensor, 1.0),
        lambda: add(other, tensor),
        lambda: permute(tensor, (0,)),
        lambda: tensor[0],
        tensor.numpy,
        tensor.tolist,
        lambda: tensor.numpy(copy=True),
    ):
        with pytest.raises(EvictedError, match=r"promote\(\)"):
            refused()
    assert issubclass(EvictedError, RuntimeError)
    assert (carrier.version, other.carrier.version) == (0, 0)
    assert other.tolist() == VALUES
    carrier.promote()
    assert tensor.tolist() == VALUES


def test_what_an_evicted_hierarchy_still_answers():
    """Spec: *Promoted state is required for public data access and execution*; structure stays available."""
    carrier = hierarchy()
    before = carrier.operation_capabilities()
    assert {entry.operation for entry in before} == {
        entry.operation for entry in carrier.primary.operation_capabilities()
    }
    carrier.evict()
    assert carrier.is_evicted()
    assert (carrier.size(), carrier.dtype()) == (4, DType.Float32)
    assert carrier.supports_storage_dtype(DType.BFloat16)
    assert carrier.operation_capabilities() == before
    assert {entry.operation for entry in carrier.operation_capabilities("matmul")} == {"matmul"}
    assert carrier.operation_capabilities("no such operation") == ()
    assert carrier.statistics().is_evicted
    carrier.release()
    assert carrier.operation_capabilities() == before


@pytest.mark.parametrize("evicted", [False, True])
def test_no_dlpack_buffer_in_either_state(evicted):
    """Spec: *Promoted state is required for public data access and execution*; DLPack is a BufferError."""
    carrier = hierarchy()
    tensor = tensor_on(carrier, requires_grad=False)
    if evicted:
        carrier.evict()
    with pytest.raises(BufferError):
        np.from_dlpack(tensor)
    with pytest.raises(BufferError):
        carrier.__dlpack__()
    with pytest.raises(BufferError):
        carrier.__dlpack_device__()


def test_a_view_is_read_only():
    """A write through a view would be lost with the next eviction."""
    carrier = hierarchy()
    tensor = tensor_on(carrier)
    view = tensor.numpy()
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="no writable view"):
        tensor.numpy(writable=True)
    carrier.evict()
    assert view.tolist() == VALUES, "the memory lives as long as the view"


def test_scatter_goes_through_the_primary():
    """Spec: *Promoted state is required for public data access and execution*; *Transitions preserve logical
    version identity*: one scatter is one version step.
    """
    carrier = Evictable(cpu([0] * 6), CPU(0))
    source = tensor_on(hierarchy())
    assert carrier.scatter(source, tensor_on(carrier), Layout(4, 1), 1) is None
    assert values_of(carrier).tolist() == [0.0, *VALUES, 0.0]
    assert (carrier.version, source.carrier.version) == (1, 0)
    assert values_of(carrier.primary).tolist() == [0.0, *VALUES, 0.0]


@pytest.mark.parametrize("make", [cpu, Generic], ids=["CPU", "Generic"])
def test_scatter_keeps_every_bit(make):
    bits = np.array([0x7F800001, 0x80000000, 0x00000001, 0xFFC00123], np.uint32).view(np.float32)
    carrier, source = Evictable(make([0.0] * 4), FileBacked()), Evictable(make(bits), FileBacked())
    carrier.scatter(tensor_on(source), tensor_on(carrier, (1,)), Layout(4, 1))
    assert values_of(carrier).tobytes() == bits.tobytes()


def test_scatter_may_read_the_slots_it_writes():
    carrier = Evictable(cpu(range(6)), CPU(0))
    carrier.scatter(tensor_on(carrier), Tensor(carrier, 5, row_major(1)), Layout(6, -1))
    assert values_of(carrier).tolist() == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    outer = Evictable(carrier, FileBacked())
    outer.scatter(tensor_on(outer), Tensor(outer, 5, row_major(1)), Layout(6, -1))
    assert values_of(outer).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert outer.version == 1


def test_a_refused_scatter_changes_nothing():
    carrier, plain = hierarchy(), tensor_on(cpu())
    onto = tensor_on(carrier)
    for source, mapping, error in (
        (plain, row_major(4), TypeError),
        (tensor_on(Evictable(Generic(VALUES), FileBacked())), row_major(4), TypeError),
        (onto, row_major(3), ValueError),
        (onto, Layout(4, 0), ValueError),
        (onto, Layout(4, 2), ValueError),
    ):
        with pytest.raises(error):
            carrier.scatter(source, onto, mapping)
    on_file = Evictable(FileBacked().new_like(VALUES), CPU(0))
    with pytest.raises(NotImplementedError):
        on_file.scatter(tensor_on(on_file), tensor_on(on_file), row_major(4))
    assert (carrier.version, on_file.version) == (0, 0)
    assert carrier.statistics().pending == on_file.statistics().pending == 0


# Factories


@pytest.mark.parametrize("make", [lambda one: one.allocate_like(6), lambda one: one.new_like(range(6))])
@pytest.mark.parametrize("evicted", [False, True])
def test_allocate_a_fresh_hierarchy(make, evicted):
    """Spec: *Evictable factories preserve the hierarchy pattern*, scenario *Allocate a fresh hierarchy*."""
    carrier = hierarchy()
    if evicted:
        carrier.evict()
    made = make(carrier)
    assert type(made) is Evictable
    assert (type(made.primary), type(made.secondary)) == (CPU, FileBacked)
    assert (made.size(), made.secondary.size(), made.is_evicted()) == (6, 0, False)
    assert made.primary.is_owned()
    assert made.secondary.is_owned()
    assert made.is_mutable()
    made.evict()
    made.promote()
    assert made.size() == 6


def test_factories_take_a_dtype_that_both_tiers_store(monkeypatch):
    """Spec: *Evictable factories preserve the hierarchy pattern*; the override has to fit both tiers."""
    carrier = hierarchy()
    made = carrier.allocate_like(3, dtype=DType.Int8, mutable=False)
    assert made.dtype() is made.primary.dtype() is made.secondary.dtype() is DType.Int8
    assert not made.is_mutable()
    assert values_of(carrier.new_like([1, 2], dtype=DType.Bool)).tolist() == [True, True]
    for tier in (carrier.primary, carrier.secondary):
        with monkeypatch.context() as patch:
            patch.setattr(tier, "supports_storage_dtype", lambda dtype: dtype is DType.Float32)
            assert not carrier.supports_storage_dtype(DType.Int8)
            for make in (
                lambda: carrier.allocate_like(3, dtype=DType.Int8),
                lambda: carrier.new_like([1], dtype=DType.Int8),
            ):
                with pytest.raises(TypeError, match="Int8"):
                    make()


def test_a_hierarchy_has_at_least_one_element():
    carrier = hierarchy()
    for make in (lambda: carrier.allocate_like(0), lambda: carrier.new_like([])):
        with pytest.raises(ValueError, match="at least one"):
            make()


# Results


def test_own_an_allocating_result():
    """Spec: *Evictable results retain composition ownership*, scenario *Own an allocating result*."""
    carrier = hierarchy()
    tensor = tensor_on(carrier)
    result = add(tensor, tensor)
    made = result.carrier
    assert type(made) is Evictable
    assert made is not carrier
    assert (type(made.primary), type(made.secondary), made.secondary.size()) == (CPU, FileBacked, 0)
    for child in (made.primary, made.secondary):
        assert child.is_owned()
        assert not child.is_mutable()
    with pytest.raises(OwnershipError):
        made.primary[0] = 9
    made[0] = 9
    made.evict()
    made.promote()
    assert result.tolist() == [9.0, 4.0, 6.0, 8.0]
    assert tensor.tolist() == VALUES


def test_a_layout_only_result_reuses_the_evictable():
    """Spec: *Evictable results retain composition ownership*; the same child gets no second owner."""
    carrier = hierarchy()
    tensor = tensor_on(carrier, (2, 2))
    for view in (tensor.T, reshape(tensor, (4,)), tensor.unsqueeze(0), tensor.broadcast_to(3, 2, 2)):
        assert view.carrier is carrier
    copied = reshape(tensor_on(hierarchy(range(6)), (2, 3)).T, (2, 3))
    assert type(copied.carrier) is Evictable
    assert copied.carrier.primary.is_owned()
    assert copied.tolist() == [[0.0, 3.0, 1.0], [4.0, 2.0, 5.0]]


def test_gradients_are_evictables_that_own_their_storage():
    """Spec: *Evictable results retain composition ownership*; gradients as well as results."""
    left, right = tensor_on(hierarchy()), tensor_on(hierarchy([5.0, 6.0, 7.0, 8.0]))
    (left * right).backward(tensor_on(hierarchy([1.0] * 4), requires_grad=False))
    for tensor, expected in ((left, [5.0, 6.0, 7.0, 8.0]), (right, VALUES)):
        assert tensor.grad.tolist() == expected
        made = tensor.grad.carrier
        assert type(made) is Evictable
        assert made.primary.is_owned()
        assert made.secondary.is_owned()
    with pytest.raises(OwnershipError):
        left.grad.carrier.primary[0] = 9


def test_an_empty_result_is_a_hierarchy_too():
    result = tensor_on(hierarchy()).broadcast_to(0, 4) + 1.0
    assert type(result.carrier) is Evictable
    assert result.shape == (0, 4)


def test_operands_may_have_other_secondary_tiers():
    left, right = tensor_on(hierarchy()), tensor_on(Evictable(cpu(), Generic([])))
    assert type((left + right).carrier.secondary) is FileBacked
    assert type((right + left).carrier.secondary) is Generic
    with pytest.raises(TypeError):
        left + tensor_on(cpu())
    with pytest.raises(TypeError):
        left + tensor_on(Evictable(Generic(VALUES), FileBacked()))


# Release and the end


def test_release_both_tiers():
    """Spec: *Release ends the whole hierarchy lifecycle*, scenario *Release both tiers*."""
    for evicted in (False, True):
        carrier = hierarchy()
        if evicted:
            carrier.evict()
        tensor, tiers = None if evicted else tensor_on(carrier), (carrier.primary, carrier.secondary)
        assert carrier.release() is None
        assert carrier.release() is None
        assert all(tier.is_released() and not tier.is_owned() for tier in tiers)
        assert (carrier.size(), carrier.is_released(), carrier.dtype()) == (0, True, DType.Float32)
        for refused in (
            carrier.evict,
            carrier.promote,
            carrier.evict_async,
            carrier.promote_async,
            lambda one=carrier: one[0],
            lambda one=carrier: one.set_value(0, 1),
            lambda one=carrier: one.dispatch_op("add"),
            lambda one=carrier, onto=tensor: one.scatter(onto, onto, row_major(4)),
        ):
            with pytest.raises(ReleasedError):
                refused()


def test_release_is_all_or_nothing():
    """Spec: *Release ends the whole hierarchy lifecycle*; somebody who reads a tier holds it up."""
    carrier = hierarchy()
    with held_transfers(CPU, Generic) as hold:
        # a request of the primary alias itself, as a blocking read of a file makes one
        handle = carrier.primary._scope.start(AwaitResult(), hold.pass_through)
        with pytest.raises(PendingWorkError):
            carrier.release()
        assert not carrier.is_released()
        assert not carrier.secondary.is_released()
        assert values_of(carrier).tolist() == VALUES
        hold.open()
        handle.wait(10)
    carrier.release()
    assert carrier.secondary.is_released()


@pytest.mark.parametrize("evicted", [False, True])
def test_destroy_without_release(evicted):
    """Spec: *Release ends the whole hierarchy lifecycle*, scenario *Destroy without release*."""
    primary, secondary = cpu(), CPU(4)
    carrier = Evictable(primary, secondary)
    if evicted:
        carrier.evict()
    gone = weakref.ref(carrier)
    del carrier
    gc.collect()
    assert gone() is None
    assert not primary.is_owned()
    assert not secondary.is_owned()
    assert primary.is_released() is evicted
    holder = secondary if evicted else primary
    assert values_of(holder).tolist() == VALUES
    holder[0] = 9
    assert holder[0] == 9.0


def test_destruction_restores_the_tiers_own_mutability():
    primary, secondary = cpu(mutable=False), FileBacked()
    carrier = Evictable(primary, secondary)
    del carrier
    gc.collect()
    assert not primary.is_mutable()
    assert secondary.is_mutable()


def test_an_alias_does_not_keep_the_hierarchy():
    carrier = hierarchy()
    alias, gone = carrier.primary, weakref.ref(carrier)
    carrier.evict()
    carrier.promote()
    del carrier
    gc.collect()
    assert gone() is None
    assert alias.is_released()


def test_registering_a_pair_makes_it_work_at_once():
    """Each transition looks its move up when it begins."""
    register_move_operation(CPU, Boxed, ElementwiseMoveOperation)
    register_move_operation(Boxed, CPU, ElementwiseMoveOperation)
    try:
        carrier = Evictable(cpu(), Boxed([0]))
        removed = unregister_move_operation(CPU, Boxed)
        with pytest.raises(NotImplementedError):
            carrier.evict()
        assert not carrier.is_evicted()
        register_move_operation(CPU, Boxed, removed)
        carrier.evict()
        assert values_of(carrier.secondary).tolist() == VALUES
        carrier.promote()
        assert values_of(carrier).tolist() == VALUES
    finally:
        unregister_move_operation(CPU, Boxed)
        unregister_move_operation(Boxed, CPU)


def test_statistics_count_what_was_done():
    carrier = hierarchy()
    with failing_transfers(CPU, FileBacked):
        with pytest.raises(OSError, match="filled the disk"):
            carrier.evict()
        carrier.evict()
    carrier.promote()
    carrier.evict()
    record = carrier.statistics()
    assert (record.evictions, record.promotions, record.is_evicted) == (2, 1, True)
    assert (record.slots, record.nbytes, record.pending, record.is_owned) == (4, 16, 0, False)


def test_values_keep_every_bit():
    bits = np.array([0x7F800001, 0x80000000, 0x00000001, 0xFFC00123], np.uint32).view(np.float32)
    carrier = Evictable(cpu(bits), FileBacked())
    carrier.evict()
    carrier.promote()
    assert values_of(carrier).tobytes() == bits.tobytes()
