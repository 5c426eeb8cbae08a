"""The half of the contract that is about lives: ownership and release."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from strideweave.carriers.base import CarrierStatistics
from strideweave.dtype import DType
from strideweave.errors import OwnershipError, PendingWorkError, ReleasedError
from strideweave.layout import row_major
from strideweave.runtime.await_result import AwaitResult
from strideweave.tensor import Tensor
from strideweave.testing.fixtures import ContractFixtures, MakeCarrier, state_of
from strideweave.testing.values import values_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from strideweave.carriers.base import Carrier

__all__ = ["LifecycleContract"]


class LifecycleContract(ContractFixtures):
    """What a carrier promises about owners and its end. ``CarrierContract`` documents the attributes."""

    # Ownership

    def test_an_owned_carrier_is_read_only_to_everybody_else(self, carrier: Carrier) -> None:
        """Reading goes on; writing, the version and release are refused, and nothing changes."""
        owner = object()
        carrier._claim(owner)
        before = state_of(carrier)
        assert carrier.is_owned()
        assert not carrier.is_mutable()
        calls: tuple[Callable[[], object], ...] = (
            lambda: carrier.set_value(0, 5),
            carrier.increment_version,
            carrier.release,
            lambda: carrier._claim(object()),
            lambda: carrier._relinquish(object()),
            lambda: carrier._release_as(object()),
            lambda: carrier._advance_version(object()),
            lambda: carrier._set_as(object(), 0, 5),
        )
        for refused in calls:
            with pytest.raises(OwnershipError):
                refused()
            assert state_of(carrier) == before
        assert carrier[1] == 2.0
        carrier._relinquish(owner)

    def test_the_owner_writes_and_gives_back(self, carrier: Carrier) -> None:
        """An owner's access is bound to its token, and ends with it."""
        owner = object()
        carrier._claim(owner)
        carrier._set_as(owner, 0, 9)
        carrier._advance_version(owner)
        assert (carrier[0], carrier.version) == (9.0, 2)
        carrier._relinquish(owner)
        assert carrier.is_mutable()
        assert not carrier.is_owned()
        with pytest.raises(OwnershipError):
            carrier._set_as(owner, 0, 1)
        carrier[0] = 1
        assert (carrier[0], carrier.version) == (1.0, 3)

    def test_the_owner_writes_what_the_public_may_not(self, constant: Carrier) -> None:
        """Mutability is a policy for the public."""
        if not self.owner_writes:
            pytest.skip("the storage itself cannot be written")
        owner = object()
        constant._claim(owner)
        constant._set_as(owner, 0, 9)
        constant._relinquish(owner)
        assert constant[0] == 9.0
        assert not constant.is_mutable()

    def test_the_owner_may_release(self, make_carrier: MakeCarrier) -> None:
        """That ends the ownership too."""
        carrier, owner = make_carrier(np.ones(2, np.float32)), object()
        carrier._claim(owner)
        carrier._release_as(owner)
        assert carrier.is_released()
        assert not carrier.is_owned()
        carrier._release_as(owner)
        carrier._relinquish(owner)

    # Release

    def test_release_ends_everything_but_the_factories(self, make_carrier: MakeCarrier) -> None:
        """A RuntimeError afterwards, whatever is asked; a second release does nothing."""
        carrier = make_carrier(np.ones(4, np.float32))
        tensor = Tensor(carrier, 0, row_major(4), requires_grad=False)
        assert carrier.release() is None  # type: ignore[func-returns-value]
        assert carrier.release() is None  # type: ignore[func-returns-value]
        assert carrier.is_released()
        assert not carrier.is_mutable()
        assert carrier.size() == 0
        for refused in (
            lambda: carrier[0],
            lambda: carrier.set_value(0, 1),
            carrier.increment_version,
            lambda: carrier.dispatch_op("add"),
            lambda: carrier._claim(object()),
            lambda: Tensor(carrier, 0, row_major(4)),
            tensor.numpy,
            tensor.detach,
        ):
            with pytest.raises(ReleasedError):
                refused()
        assert carrier.dtype() is DType.Float32
        assert carrier.supports_storage_dtype(DType.Float32)
        assert values_of(carrier.new_like([1, 2, 3, 4])).tolist() == [1.0, 2.0, 3.0, 4.0]
        assert values_of(carrier.allocate_like(4)).tolist() == [0.0] * 4
        assert isinstance(carrier.operation_capabilities(), tuple)

    def test_release_waits_for_nobody(self, make_carrier: MakeCarrier) -> None:
        """It is refused while a request of the carrier is unfinished."""
        carrier, gate = make_carrier(np.ones(4, np.float32)), AwaitResult[None]()

        async def hold() -> None:
            await gate

        handle = carrier._scope.start(AwaitResult[None](), hold)
        before = state_of(carrier)
        try:
            with pytest.raises(PendingWorkError):
                carrier.release()
            assert state_of(carrier) == before
        finally:
            gate._finish()
            handle.wait(60)
        carrier.release()
        assert carrier.is_released()

    def test_a_with_block_releases(self, make_carrier: MakeCarrier) -> None:
        """It gives the carrier itself, ends with its release, and may have released it already."""
        carrier, owner = make_carrier(np.ones(4, np.float32)), object()
        with carrier as same:
            assert same is carrier
            assert not carrier.is_released()
        assert carrier.is_released()
        with pytest.raises(ReleasedError), carrier:
            pytest.fail("a released carrier began a block")
        with make_carrier(np.ones(4, np.float32)) as early:
            early.release()
        owned = make_carrier(np.ones(4, np.float32))
        with pytest.raises(OwnershipError), owned:  # as release() itself
            owned._claim(owner)
        assert not owned.is_released()
        owned._release_as(owner)

    def test_a_with_block_keeps_its_error(self, make_carrier: MakeCarrier) -> None:
        """The carrier is released, or the error has a note on why it was not."""
        carrier, owner, error = make_carrier(np.ones(4, np.float32)), object(), KeyError("the block's")
        with pytest.raises(KeyError) as caught, carrier:
            raise error
        assert caught.value is error
        assert carrier.is_released()
        assert not hasattr(error, "__notes__")
        owned = make_carrier(np.ones(4, np.float32))
        with pytest.raises(KeyError) as caught, owned:
            owned._claim(owner)
            raise error
        assert caught.value is error
        assert not owned.is_released()
        assert "owned by a composite" in error.__notes__[0]
        owned._release_as(owner)

    def test_a_with_block_waits_for_nobody(self, make_carrier: MakeCarrier) -> None:
        """Its end is refused while a request is unfinished, and nothing is released."""
        carrier, gate = make_carrier(np.ones(4, np.float32)), AwaitResult[None]()

        async def hold() -> None:
            await gate

        handle: AwaitResult[None] | None = None
        try:
            with pytest.raises(PendingWorkError), carrier:
                handle = carrier._scope.start(AwaitResult[None](), hold)
            assert not carrier.is_released()
        finally:
            gate._finish()
            if handle is not None:
                handle.wait(60)
        carrier.release()

    def test_a_carrier_nobody_holds_goes(self, make_carrier: MakeCarrier) -> None:
        """No cycle of the library's own keeps it, even after it has worked."""
        carrier = make_carrier(np.ones(4, np.float32))
        carrier[0] = 2
        values_of(carrier)
        gone = weakref.ref(carrier)
        del carrier
        gc.collect()
        assert gone() is None

    # What it says about itself

    def test_statistics_say_what_it_is(self, carrier: Carrier) -> None:
        """One frozen record, whose common fields are right."""
        record: Any = carrier.statistics()
        if isinstance(record, CarrierStatistics):
            assert (record.slots, record.nbytes, record.version, record.pending) == (4, 16, 0, 0)
        hash(record)  # dataclasses that can change have none
        assert type(carrier).__name__ in repr(carrier)

    def test_operations_are_asked_by_name(self, carrier: Carrier) -> None:
        """Capabilities and dispatch agree, and an unknown name is a NotImplementedError."""
        assert carrier.operation_capabilities("no such operation") == ()
        with pytest.raises(NotImplementedError):
            carrier.dispatch_op("no such operation")
        for name in {capability.operation for capability in carrier.operation_capabilities()}:
            assert carrier.dispatch_op(name).name == name
            assert carrier.operation_capabilities(name)

    def test_facets_are_asked_by_type(self, carrier: Carrier) -> None:
        """None and NotImplementedError for one that it has not, TypeError for what is no type."""
        assert carrier.facet(float) is None
        with pytest.raises(NotImplementedError):
            carrier.require_facet(float)
        with pytest.raises(TypeError):
            carrier.facet("float")  # type: ignore[arg-type]
