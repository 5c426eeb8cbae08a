"""Carriers by definition: registering and sealing, storage that somebody else provides, and what fails there.

Spec: *TiledEvictable owns one flat logical storage extent*, which says who has a definition and who has none.
"""

from __future__ import annotations

import gc
import os
import runpy
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest

import strideweave as sw
from processes import in_a_forked_child
from strideweave import (
    CPU,
    BlockDeviceCarrier,
    DType,
    Evictable,
    FileBacked,
    Generic,
    Metal,
    Tensor,
    TiledEvictable,
)
from strideweave.carriers import Carrier, DependentCarrier, FileParts
from strideweave.carriers.extension import (
    CarrierDefinition,
    CarrierFacet,
    CompositeProvider,
    DefinedCarrier,
    StorageProvider,
    TransferRoute,
    carrier_definition,
    register_carrier,
    withdraw_carrier,
)
from strideweave.carriers.memory import MemoryCarrier
from strideweave.carriers.move import (
    ElementwiseMoveOperation,
    dispatch_move,
    move,
    registered_move_operation,
    unregister_move_operation,
)
from strideweave.carriers.numpy_operations import NumpyOperation
from strideweave.carriers.tiled_evictable import TiledResidencyFacet
from strideweave.errors import ImmutableError, OwnershipError, ReleasedError
from strideweave.layout import row_major
from strideweave.runtime.thread_role import waiting_is_forbidden
from strideweave.testing import CarrierContract, bit_patterns, failing_transfers, values_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_carrier.py"
MEMORY = {"CPU": CPU, "Generic": Generic, "Metal": Metal}


class ProviderError(OSError):
    """What a provider raises that a test has told to."""


class Plain(StorageProvider):
    """Slots in an array, which fail, answer wrongly or wait when a test says so."""

    def __init__(self):
        self.failing = set()
        self.answer = None
        self.calls = []
        self.threads = set()
        self.live = 0
        self.freed = threading.Semaphore(0)
        self.supported = None
        self.inside = 0
        self.overlapped = False

    def enter(self, name):
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)
        if name in self.failing:
            raise ProviderError(name)

    def supports_dtype(self, dtype):
        return self.supported is None or dtype in self.supported

    def allocate(self, slots, dtype):
        self.enter("allocate")
        self.live += 1
        return np.zeros(slots, dtype.numpy)

    def read(self, storage, start, slots):
        self.enter("read")
        found = storage[start : start + slots]
        return found if self.answer is None else self.answer(found)

    def write(self, storage, start, values):
        self.inside += 1
        self.overlapped |= self.inside > 1
        try:
            self.enter("write")
            storage[start : start + len(values)] = values
        finally:
            self.inside -= 1

    def free(self, storage):
        self.enter("free")
        self.live -= 1
        self.freed.release()


@pytest.fixture
def make_class():
    """Make a class with a provider of its own, registered; its moves go when the test is over."""
    made = []

    def make(provider=None, **options):
        class Kept(DefinedCarrier):
            """Slots in a provider."""

        Kept.provider = provider or Plain()
        register_carrier(CarrierDefinition(Kept, storage=Kept.provider, **options))
        made.append(Kept)
        return Kept

    yield make
    for cls in made:
        for other in (cls, CPU, FileBacked, Generic, Metal):
            for pair in {(cls, other), (other, cls)}:
                unregister_move_operation(*pair)


@pytest.fixture
def kept(make_class):
    return make_class()


@pytest.fixture(scope="module")
def zipped():
    """The class of the example, which its program registers."""
    return runpy.run_path(str(EXAMPLE))["Zipped"]


def full_tensor(carrier):
    return Tensor(carrier, 0, row_major(carrier.size()), requires_grad=False)


# The contract


class TestTheExampleKeepsTheContract(CarrierContract):
    @pytest.fixture
    def make_carrier(self, zipped):
        return lambda values, mutable=True: zipped(dtype=DType.from_numpy(values.dtype)).new_like(
            values, mutable=mutable
        )


class TestAsSecondaryTierOfAnEvictable(CarrierContract):
    can_be_empty = False

    @pytest.fixture
    def make_carrier(self, zipped):
        def make(values, *, mutable=True):
            primary = CPU(0, dtype=DType.from_numpy(values.dtype)).new_like(values, mutable=mutable)
            carrier = Evictable(primary, zipped(dtype=primary.dtype()))
            carrier.evict()
            carrier.promote()
            return carrier

        return make


class TestAsSecondaryTierOfATiledEvictable(CarrierContract):
    can_be_empty = any_size = False  # one geometry

    @pytest.fixture
    def make_carrier(self, zipped):
        def make(values, *, mutable=True):
            dtype = DType.from_numpy(values.dtype)
            primary, secondary = CPU(0, dtype=dtype, mutable=mutable), zipped(dtype=dtype).new_like(values)
            # A slot a tile: writes to a tile that is still being fetched are refused.
            return TiledEvictable(primary, secondary, (len(values),), (1,))

        return make


# Registering, and being sealed


def test_shipped_carriers_but_the_tiled_one_have_no_definition():
    """Spec: *TiledEvictable owns one flat logical storage extent*: it is the only one installed through one."""
    for plain in (Generic, CPU, Metal, FileBacked, Evictable, Carrier, DependentCarrier, DefinedCarrier):
        assert plain._installed() is None
    for plain in (Generic, CPU, Metal, FileBacked, Evictable):
        assert carrier_definition(plain) is None
        with pytest.raises(RuntimeError, match="sealed"):
            register_carrier(CarrierDefinition(plain))
    assert carrier_definition(TiledEvictable).carrier_class is TiledEvictable
    with pytest.raises(RuntimeError, match="sealed"):
        withdraw_carrier(TiledEvictable)
    with pytest.raises(RuntimeError, match="sealed"):
        register_carrier(carrier_definition(TiledEvictable), replace=True)


def test_carriers_without_a_definition_answer_as_before():
    """Spec: *TiledEvictable owns one flat logical storage extent*: composition changes no tier's behaviour."""
    cpu, generic, file = CPU(2), Generic([1, 2]), FileBacked().new_like([1, 2])
    tiled = sw.tiled(np.zeros((2, 2)), (1, 2), secondary=FileBacked(dtype=DType.Float64))
    for carrier in (cpu, generic, file):
        before = (
            carrier.operation_capabilities(),
            carrier.facet(TiledResidencyFacet),
            type(carrier)._installed(),
        )
        TiledEvictable(CPU(2), FileBacked(), (2,), (1,))
        after = (
            carrier.operation_capabilities(),
            carrier.facet(TiledResidencyFacet),
            type(carrier)._installed(),
        )
        assert before == after
        assert after[1:] == (None, None)
        assert all(carrier.supports_storage_dtype(dtype) for dtype in DType.members())
    assert cpu.operation_capabilities() == generic.operation_capabilities()
    assert {entry.result for entry in file.operation_capabilities()} == {"view"}
    assert isinstance(tiled.carrier.require_facet(TiledResidencyFacet), TiledResidencyFacet)
    assert "facet" not in vars(TiledEvictable)
    tiled.carrier.release()


def test_the_tiled_carrier_is_what_its_definition_says():
    """Spec: *TiledEvictable owns one flat logical storage extent*; *A direct tiled operand means the full logical
    Tensor*: the six operations, and no other, come from the definition.
    """
    definition = carrier_definition(TiledEvictable)
    assert sorted(definition.operations) == ["add", "elementwise_mul", "matmul", "mul", "reduce_sum", "relu"]
    assert [facet.facet_type for facet in definition.facets] == [TiledResidencyFacet]
    others = {BlockDeviceCarrier, CPU, Evictable, FileBacked, FileParts, Generic, Metal, TiledEvictable}
    ends = {(route.source, route.destination) for route in definition.routes}
    assert ends == {(TiledEvictable, other) for other in others} | {
        (other, TiledEvictable) for other in others
    }
    assert all(dispatch_move(*pair) for pair in ends)
    carrier = TiledEvictable(Generic([]), FileBacked(), (3,), (2,))
    assert {entry.operation for entry in carrier.operation_capabilities()} == set(definition.operations)
    for name in definition.operations:
        assert (carrier.dispatch_op(name).name, carrier.dispatch_op(name).carrier_class) == (
            name,
            TiledEvictable,
        )
    for other in (
        carrier.allocate_like(6),
        carrier.new_like(range(6)),
        carrier.allocate_like(6, dtype=DType.Int8),
    ):
        assert (type(other.primary), type(other.secondary)) == (Generic, FileBacked)
        assert (other.grid_shape, other.tile_shape, other.size()) == ((3,), (2,), 6)
        other.release()
    carrier.release()


class Adding(MemoryCarrier):
    """A user's own memory, which adds and multiplies and does no more."""

    def __init__(self, size=0, *, mutable=True, dtype=DType.Float32):
        super().__init__(np.zeros(size, dtype.numpy), dtype=dtype, mutable=mutable)

    @classmethod
    def _make_slots(cls, size, dtype):
        return np.zeros(size, dtype.numpy)

    def supports_storage_dtype(self, dtype):
        return super().supports_storage_dtype(dtype) and dtype is not DType.Int8

    def operation_capabilities(self, name=None):
        return tuple(
            entry for entry in super().operation_capabilities(name) if entry.operation in {"add", "mul"}
        )


def test_a_composite_can_do_what_its_tiers_can():
    """Spec: *TiledEvictable owns one flat logical storage extent*: tiers say themselves what they store and run."""
    with (
        registered_move_operation(Adding, FileBacked, ElementwiseMoveOperation),
        registered_move_operation(FileBacked, Adding, ElementwiseMoveOperation),
    ):
        carrier = TiledEvictable(Adding(), FileBacked(), (3,), (2,))
        assert {entry.operation for entry in carrier.operation_capabilities()} == {"add", "mul"}
        assert carrier.operation_capabilities("matmul") == ()
        with pytest.raises(NotImplementedError, match="matmul"):
            carrier.dispatch_op("matmul")
        assert carrier.dispatch_op("add").name == "add"
        assert carrier.supports_storage_dtype(DType.Float64)
        assert not carrier.supports_storage_dtype(DType.Int8)
        carrier.release()
        assert {entry.operation for entry in carrier.operation_capabilities()} == {"add", "mul"}, (
            "after release too"
        )


def test_a_composite_of_ones_own_has_factories_from_its_definition():
    class Pair(DependentCarrier):
        """Two carriers of which the first is read."""

        def __init__(self, first, second):
            super().__init__(first.size(), dtype=first.dtype(), mutable=first.is_mutable())
            self.tiers = (first, second)
            self._own(first, second)

        def _load_slot(self, i):
            return self.tiers[0]._load_slot(i)

        def _store_slot(self, i, value):
            self.tiers[0]._store_slot(i, value)

        def new_like(self, values, *, mutable=True, dtype=None):
            return super().new_like(values, mutable=mutable, dtype=dtype)

        def allocate_like(self, size, *, mutable=True, dtype=None, empty=False):
            return super().allocate_like(size, mutable=mutable, dtype=dtype, empty=empty)

    with pytest.raises(NotImplementedError, match="no definition with storage"):
        type("Other", (Pair,), {})(CPU(1), CPU(0)).allocate_like(1)
    provider = CompositeProvider(lambda pair: pair.tiers, lambda pair, tiers: Pair(*tiers))
    register_carrier(CarrierDefinition(Pair, storage=provider))
    pair = Pair(CPU(2), FileBacked())
    made = pair.new_like([1, 2, 3], dtype=DType.Int8)
    assert ([type(tier) for tier in made.tiers], made[2], made.dtype()) == ([CPU, FileBacked], 3, DType.Int8)
    assert all(tier.is_owned() for tier in made.tiers)
    assert pair.allocate_like(5, mutable=False).is_mutable() is False
    pair.release()
    assert pair.allocate_like(4).size() == 4, "factories work after release"


def test_a_class_is_sealed_by_its_first_carrier(make_class):
    kept = make_class()
    definition = kept._installed()
    kept(1)
    for refused in (
        lambda: register_carrier(definition),
        lambda: register_carrier(definition, replace=True),
        lambda: withdraw_carrier(kept),
    ):
        with pytest.raises(RuntimeError, match="sealed"):
            refused()
    assert carrier_definition(kept) is definition


def test_a_class_is_sealed_by_a_look(make_class):
    kept = make_class()
    assert carrier_definition(kept).carrier_class is kept
    with pytest.raises(RuntimeError, match="sealed"):
        withdraw_carrier(kept)


def test_a_look_seals_the_lack_of_a_definition_too():
    class Bare(DefinedCarrier):
        """Nobody defines it."""

    assert carrier_definition(Bare) is None
    with pytest.raises(RuntimeError, match="sealed"):
        register_carrier(CarrierDefinition(Bare, storage=Plain()))


def test_registering_twice_is_refused_and_replacing_is_asked_for(make_class):
    kept = make_class()
    other = CarrierDefinition(kept, storage=Plain())
    with pytest.raises(ValueError, match="already"):
        register_carrier(other)
    assert kept._installed().storage is kept.provider
    register_carrier(other, replace=True)
    assert kept._installed() is other
    assert withdraw_carrier(kept) is other
    with pytest.raises(NotImplementedError):
        dispatch_move(kept, CPU)
    with pytest.raises(KeyError):
        withdraw_carrier(kept)
    register_carrier(other)


def test_a_refused_carrier_does_not_seal_its_class(make_class):
    class Late(DefinedCarrier):
        """Defined after somebody was too early."""

    with pytest.raises(RuntimeError, match="register_carrier"):
        Late(3)
    register_carrier(CarrierDefinition(Late, storage=Plain()))
    assert Late(3)[1] == 0
    for other in (Late, CPU, FileBacked, Generic, Metal):
        for pair in {(Late, other), (other, Late)}:
            unregister_move_operation(*pair)


def test_subclasses_inherit_no_definition(kept):
    class Derived(kept):
        """Another class."""

    assert carrier_definition(Derived) is None
    with pytest.raises(RuntimeError, match="no storage"):
        Derived(1)


def test_a_move_that_somebody_registered_is_in_the_way():
    class Kept(DefinedCarrier):
        """Slots in a provider."""

    definition = CarrierDefinition(Kept, storage=Plain())
    with registered_move_operation(CPU, Kept, ElementwiseMoveOperation):
        with pytest.raises(ValueError, match="already"):
            register_carrier(definition)
        with pytest.raises(NotImplementedError):
            dispatch_move(Kept, CPU)
        assert Kept._installed() is None


def test_own_routes_take_the_place_of_derived_ones(make_class):
    class Kept(DefinedCarrier):
        """Slots in a provider."""

    route = TransferRoute(CPU, Kept, ElementwiseMoveOperation)
    register_carrier(CarrierDefinition(Kept, storage=Plain(), routes=(route,)))
    assert dispatch_move(CPU, Kept) is ElementwiseMoveOperation
    assert dispatch_move(Kept, CPU) is not ElementwiseMoveOperation
    withdraw_carrier(Kept)


def test_routes_to_composites_are_those_that_serve_memory():
    """What moves a composite through its tiers, or tile by tile, serves any class that memory moves to and from."""

    class Kept(DefinedCarrier):
        """Slots in a provider."""

    routes = [
        TransferRoute(*pair, dispatch_move(*memory))
        for composite in (Evictable, TiledEvictable)
        for pair, memory in (
            ((composite, Kept), (composite, CPU)),
            ((Kept, composite), (CPU, composite)),
        )
    ]
    register_carrier(CarrierDefinition(Kept, storage=Plain(), routes=tuple(routes)))
    values = np.arange(6, dtype=np.float32)
    x = sw.tiled(values, 2, resident=False)
    x.carrier.promote(x.carrier.select({0: [1]}))
    kept = move(x, Kept())
    tiled = move(kept, TiledEvictable(CPU(0), FileBacked(), (2,), (3,)))
    evictable = move(move(tiled, Kept()), Evictable(CPU(6), FileBacked()))
    assert np.array_equal(evictable.numpy(), values)
    picked = move(evictable, Kept())
    assert np.array_equal(picked.numpy(), values)
    sw.reduce_sum(move(picked, CPU(0))).backward()
    assert (type(x.grad.carrier), x.grad.tolist()) == (TiledEvictable, [1.0] * 6)
    withdrawn = carrier_definition(Kept)
    for route in withdrawn.routes:
        unregister_move_operation(route.source, route.destination)
    for other in (Kept, CPU, FileBacked, Generic, Metal):
        for pair in {(Kept, other), (other, Kept)}:
            unregister_move_operation(*pair)


def test_definitions_are_frozen(kept):
    definition = kept._installed()
    with pytest.raises(FrozenInstanceError):
        definition.storage = None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"carrier_class": int}, TypeError),
        ({"storage": Plain}, TypeError),
        ({"carrier_class": CPU, "storage": Plain()}, TypeError),
        ({"storage": CompositeProvider(lambda carrier: (), lambda carrier, tiers: carrier)}, TypeError),
        ({"operations": ("add",)}, ValueError),
        ({"operations": ("frobnicate",), "make_operation": NumpyOperation}, ValueError),
        ({"operations": ("add", "add"), "make_operation": NumpyOperation}, ValueError),
        ({"facets": (int,)}, TypeError),
        ({"routes": ((CPU, CPU),)}, TypeError),
        ({"routes": (TransferRoute(CPU, CPU, ElementwiseMoveOperation),)}, ValueError),
    ],
)
def test_a_definition_is_checked_when_it_is_made(options, error):
    class Kept(DefinedCarrier):
        """Slots in a provider."""

    with pytest.raises(error):
        CarrierDefinition(**{"carrier_class": Kept, **options})


@pytest.mark.parametrize(
    "make",
    [
        lambda: CarrierFacet("name"),
        lambda: CarrierFacet(int, 3),
        lambda: CompositeProvider(None, lambda carrier, tiers: carrier),
        lambda: TransferRoute(int, CPU, ElementwiseMoveOperation),
        lambda: TransferRoute(CPU, CPU, int),
        lambda: register_carrier(CPU),
        lambda: carrier_definition(3),
        lambda: withdraw_carrier("CPU"),
    ],
)
def test_parts_are_checked_when_they_are_made(make):
    with pytest.raises(TypeError):
        make()


# What a definition installs


def test_operations_and_facets_come_from_the_definition(make_class):
    class Label:
        """Says whose it is."""

        def __init__(self, carrier):
            self.carrier = carrier

    kept = make_class(operations=("add",), make_operation=NumpyOperation, facets=(CarrierFacet(Label),))
    x = full_tensor(kept().new_like([1, 2, 3]))
    total = sw.add(x, x)
    assert (type(total.carrier), total.tolist()) == (kept, [2.0, 4.0, 6.0])
    assert {entry.operation for entry in x.carrier.operation_capabilities() if entry.result == "tensor"} == {
        "add"
    }
    assert x.carrier.require_facet(Label).carrier is x.carrier
    assert x.carrier.facet(dict) is None
    with pytest.raises(NotImplementedError, match="mul"):
        sw.mul(x, x)
    assert sw.reshape(x, (3, 1)).shape == (3, 1)


def test_a_provider_says_which_dtypes_it_stores(make_class):
    kept = make_class()
    kept.provider.supported = {DType.Float32}
    carrier = kept(2)
    assert not carrier.supports_storage_dtype(DType.Int8)
    for refused in (
        lambda: kept(2, dtype=DType.Int8),
        lambda: carrier.allocate_like(2, dtype=DType.Int8),
        lambda: carrier.new_like([1], dtype=DType.Int8),
        lambda: kept(2, dtype="float32"),
    ):
        with pytest.raises(TypeError):
            refused()
    assert kept.provider.live == 0, "nothing was allocated for nothing"


# Moves, tiers


@pytest.mark.parametrize("dtype", [DType.Float32, DType.BFloat16, DType.Bool], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", ["CPU", "Generic", "Metal", "FileBacked", "Kept"])
def test_moves_are_derived_from_the_provider(kept, kind, dtype):
    if kind == "Metal":
        pytest.importorskip("mlx.core")
    other = {**MEMORY, "FileBacked": FileBacked, "Kept": kept}[kind]
    prototype = (
        Generic([], dtype=dtype)
        if other is Generic
        else other(dtype=dtype, **({} if other in {FileBacked, kept} else {"size": 0}))
    )
    if not prototype.supports_storage_dtype(dtype):
        pytest.skip(f"{kind} does not store it")
    values = bit_patterns(dtype, 300)
    there = move(full_tensor(prototype.new_like(values)), kept(dtype=dtype))
    assert (type(there.carrier), there.numpy().tobytes()) == (kept, values.tobytes())
    back = move(there, prototype.allocate_like(300))
    assert back.numpy().tobytes() == values.tobytes()
    assert kept.provider.freed.acquire(timeout=60), (
        "a move frees what it left in a worker thread, maybe later"
    )
    if kind == "Kept":
        assert kept.provider.freed.acquire(timeout=60)
    assert kept.provider.live == (kind == "Kept")


def test_a_batch_is_one_hop_off_the_loop(kept, monkeypatch):
    """Every call of one batch comes from one worker, and none from the runtime's thread."""
    values = np.arange(64, dtype=np.float32)
    tensor = sw.tiled(values, 1, secondary=kept(), resident=False)
    kept.provider.threads.clear()
    kept.provider.calls.clear()
    tensor.carrier.promote(tensor.carrier.select({0: range(0, 64, 2)}))
    assert kept.provider.calls == ["read"] * 32
    assert len(kept.provider.threads) == 1
    assert kept.provider.threads.pop().startswith("strideweave-worker")
    tensor.carrier.release()


def test_large_spans_are_handed_over_in_pieces(kept):
    values = np.arange(5 << 20, dtype=np.float32)
    there = move(full_tensor(CPU.from_numpy(values)), kept())
    assert kept.provider.calls == ["allocate", "write", "write", "write"]
    assert np.array_equal(there.numpy(), values)


def test_calls_for_one_storage_do_not_overlap(kept):
    carrier = kept(4)

    def write(slot):
        for number in range(50):
            carrier[slot] = number

    threads = [threading.Thread(target=write, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert carrier.version == 200
    assert not kept.provider.overlapped


def test_a_tiled_carrier_works_on_it(kept):
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    tensor = sw.tiled(values, (1, 4), secondary=kept(), resident=False, residency_policy=sw.LRU(max_tiles=2))
    carrier = tensor.carrier
    assert np.array_equal(carrier.project(tensor, carrier.select({0: [4, 1, 3]})).wait(), values[[4, 1, 3]])
    tensor[1, 1] = 70
    values[1, 1] = 70
    carrier.evict(carrier.primary_tiles)
    assert np.array_equal(tensor.numpy(), values)
    assert carrier.secondary.statistics().is_allocated
    carrier.release()
    assert kept.provider.live == 0


def test_a_tier_that_may_not_be_written_spills_to_its_own_kind(kept):
    values = np.arange(8, dtype=np.float32)
    secondary = kept().new_like(values, mutable=False)
    carrier = TiledEvictable(CPU(0), secondary, (4,), (2,))
    carrier[0] = 50
    carrier.evict(carrier.select({}))
    assert (carrier[0], secondary[0]) == (50.0, 0.0)
    assert kept.provider.live == 2
    carrier.release()
    assert kept.provider.live == 0


def test_gradients_cross_back_to_it(kept):
    x = Tensor(kept().new_like([1.0, 2.0]), 0, row_major(2))
    y = move(x, CPU(0))
    sw.reduce_sum(y * y).backward()
    assert (type(x.grad.carrier), x.grad.tolist()) == (kept, [2.0, 4.0])


# Faults


@pytest.mark.parametrize("function", ["allocate", "write"])
def test_new_like_reports_what_the_provider_raised_and_leaves_nothing(kept, function):
    kept.provider.failing.add(function)
    with pytest.raises(ProviderError) as caught:
        kept().new_like([1, 2])
    assert "Plain failed in writing slots [0, 2) of a Kept" in caught.value.__notes__
    assert kept.provider.live == 0


@pytest.mark.parametrize("function", ["allocate", "read", "write"])
def test_single_slots_report_what_the_provider_raised(kept, function):
    carrier = kept(3)
    kept.provider.failing.add(function)
    with pytest.raises(ProviderError):
        carrier[0] if function == "read" else carrier.set_value(0, 1)
    assert carrier.version == 0
    kept.provider.failing.clear()
    carrier[0] = 5
    assert (carrier[0], carrier.version, carrier.statistics().pending) == (5.0, 1, 0)
    carrier.release()


@pytest.mark.parametrize("function", ["allocate", "write"])
def test_an_eviction_that_the_provider_refuses_loses_nothing(kept, function):
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    tensor = sw.tiled(values, (1, 2), secondary=kept())
    carrier = tensor.carrier
    kept.provider.failing.add(function)
    with pytest.raises(ProviderError):
        carrier.evict(carrier.primary_tiles)
    assert len(carrier.dirty_tiles) == 3
    assert np.array_equal(tensor.numpy(), values)
    kept.provider.failing.clear()
    carrier.evict(carrier.primary_tiles)
    assert np.array_equal(tensor.numpy(), values)
    carrier.release()
    assert kept.provider.live == 0


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (lambda found: found[1:], ValueError, "shape"),
        (lambda found: found.reshape(1, -1), ValueError, "shape"),
        (lambda found: found.astype(np.float64), TypeError, "float64"),
        (lambda found: found.tobytes()[1:], ValueError, "bytes"),
        (lambda found: found.tolist(), TypeError, "list"),
        (lambda found: None, TypeError, "NoneType"),
    ],
)
def test_a_wrong_answer_is_an_error_and_never_data(kept, answer, error, words):
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    tensor = sw.tiled(values, (1, 2), secondary=kept(), resident=False)
    carrier = tensor.carrier
    kept.provider.answer = answer
    with pytest.raises(error, match=f"Plain.read returned .*{words}"):
        carrier.promote(carrier.select({}))
    with pytest.raises(error, match=r"Plain\.read"):
        carrier[0]
    assert len(carrier.primary_tiles) == 0
    kept.provider.answer = None
    carrier.promote(carrier.select({}))
    assert np.array_equal(tensor.numpy(), values)
    carrier.release()


def test_any_bytes_are_an_answer(kept):
    carrier = kept().new_like([1, 2, 3])
    for answer in (lambda found: found.tobytes(), bytearray, memoryview):
        kept.provider.answer = answer
        assert values_of(carrier).tolist() == [1.0, 2.0, 3.0]


def test_a_provider_may_use_its_memory_again(make_class):
    """What it gave is copied before the next call."""

    class Thrifty(Plain):
        def allocate(self, slots, dtype):
            self.scratch = np.zeros(2, dtype.numpy)
            return super().allocate(slots, dtype)

        def read(self, storage, start, slots):
            self.scratch[:slots] = super().read(storage, start, slots)
            return self.scratch[:slots]

    kept = make_class(Thrifty())
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    tensor = sw.tiled(values, (1, 2), secondary=kept(), resident=False)
    picked = tensor.carrier.project(tensor, tensor.carrier.select({0: [5, 0, 3]})).wait()
    assert np.array_equal(picked.numpy(), values[[5, 0, 3]])
    tensor.carrier.release()


def test_what_is_written_cannot_be_changed_by_the_provider(make_class):
    class Greedy(Plain):
        def write(self, storage, start, values):
            values[0] = 9

    kept = make_class(Greedy())
    source = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        move(full_tensor(CPU.from_numpy(source)), kept())
    assert source.tolist() == [1.0, 1.0]


def test_storage_that_cannot_be_freed_is_reported_by_release(kept, caplog):
    carrier = kept(2)
    carrier[0] = 1
    kept.provider.failing.add("free")
    with pytest.raises(ProviderError):
        carrier.release()
    assert carrier.is_released()
    assert carrier.release() is None
    moved = move(full_tensor(kept().new_like([1, 2])), CPU(0))
    assert moved.tolist() == [1.0, 2.0], "the values have moved, whatever becomes of the old storage"


def test_storage_is_freed_once_by_release_or_by_the_collector(kept):
    carrier = kept().new_like([1, 2])
    carrier.release()
    carrier.release()
    assert kept.provider.calls.count("free") == 1
    other = kept().new_like([1, 2])
    assert kept.provider.live == 1
    del other, carrier
    gc.collect()
    assert (kept.provider.live, kept.provider.calls.count("free")) == (0, 2)


def test_storage_that_was_never_used_is_never_asked_for(kept):
    carrier = kept(1000)
    assert not carrier.statistics().is_allocated
    carrier.release()
    assert kept.provider.calls == []


def test_read_only_memory_is_refused_before_anything_moves(kept):
    array = np.zeros(2, np.float32)
    array.flags.writeable = False
    destination = CPU.from_numpy(array)
    with pytest.raises(ImmutableError):
        move(full_tensor(kept().new_like([1, 2])), destination)


def test_transfers_to_it_fail_on_demand(kept):
    """The suite's own faults work on derived moves, as on any."""
    tensor = sw.tiled(np.ones(4, np.float32), 1, secondary=kept())
    with failing_transfers(CPU, kept), pytest.raises(OSError, match="filled the disk"):
        tensor.carrier.evict(tensor.carrier.primary_tiles)
    tensor.carrier.evict(tensor.carrier.primary_tiles)
    assert tensor.numpy().tolist() == [1.0] * 4
    tensor.carrier.release()


def test_a_tier_is_owned(kept):
    secondary = kept(4)
    carrier = Evictable(CPU(4), secondary)
    with pytest.raises(OwnershipError):
        secondary[0] = 1
    with pytest.raises(OwnershipError):
        secondary.release()
    carrier.release()
    with pytest.raises(ReleasedError):
        secondary[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork()")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_and_leaves_the_storage_to_its_parent(kept):
    carrier = kept().new_like([1, 2, 3])

    def reads() -> None:
        assert carrier[1] == 2.0
        assert carrier_definition(kept).storage is kept.provider
        carrier.release()
        assert "free" not in kept.provider.calls

    assert in_a_forked_child(reads)
    assert carrier[2] == 3.0
    carrier.release()
    assert "free" in kept.provider.calls


def test_storage_is_freed_at_the_end_of_the_interpreter():
    program = """
import sys
import numpy as np
from strideweave.carriers.extension import CarrierDefinition, DefinedCarrier, StorageProvider, register_carrier

class Loud(StorageProvider):
    def allocate(self, slots, dtype):
        return np.zeros(slots, dtype.numpy)
    def read(self, storage, start, slots):
        return storage[start : start + slots]
    def write(self, storage, start, values):
        storage[start : start + len(values)] = values
    def free(self, storage):
        print("freed", len(storage))

class Kept(DefinedCarrier):
    "Slots."

register_carrier(CarrierDefinition(Kept, storage=Loud()))
kept, unused = Kept().new_like([1, 2, 3]), Kept(7)
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "freed 3\n"


def test_no_call_comes_from_the_loop(make_class):
    """Neither reads and writes nor the storage's end, also where an Evictable leaves a tier behind."""

    class Watchful(Plain):
        def enter(self, name):
            super().enter(name)
            assert threading.current_thread().name != "strideweave-runtime", name
            self.forbidden = waiting_is_forbidden()

    kept = make_class(Watchful())
    carrier = Evictable(CPU(0).new_like([1, 2]), kept())
    carrier.evict()
    carrier.promote()
    carrier.evict()
    carrier.release()
    assert {"allocate", "read", "write", "free"} == set(kept.provider.calls)
