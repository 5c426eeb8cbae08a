"""What the tests of the contract start from: how a carrier is made, and what it is before a refused call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pytest

from strideweave.dtype import DType
from strideweave.testing.values import values_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from strideweave.carriers.base import Carrier

__all__ = ["ContractFixtures", "MakeCarrier", "state_of"]


class MakeCarrier(Protocol):
    """Makes a fresh carrier that holds the values of a 1-D array."""

    def __call__(self, values: NDArray[Any], *, mutable: bool = True) -> Carrier:
        """Make it; its dtype is the array's."""


def state_of(carrier: Carrier) -> tuple[Any, ...]:
    """Everything that a refused call must leave as it was."""
    live = not carrier.is_released()
    return (
        values_of(carrier).tobytes() if live else None,
        carrier.size(),
        carrier.dtype(),
        carrier.version,
        carrier.is_mutable(),
        carrier.is_owned(),
        carrier.is_released(),
    )


class ContractFixtures:
    """The attributes and fixtures that all tests of the contract share; ``CarrierContract`` documents them."""

    dtypes: ClassVar[tuple[DType, ...]] = tuple(DType.members())
    can_be_empty: ClassVar[bool] = True
    any_size: ClassVar[bool] = True
    moves: ClassVar[bool] = True
    keeps_bits: ClassVar[bool] = True
    owner_writes: ClassVar[bool] = True

    @pytest.fixture
    def make_carrier(self) -> MakeCarrier:
        """Say how a carrier is made; every subclass overrides this."""
        raise NotImplementedError("override the fixture make_carrier of CarrierContract")

    @pytest.fixture
    def carrier(self, make_carrier: MakeCarrier) -> Iterator[Carrier]:
        """A mutable carrier of the four Float32 values 1, 2, 3 and 4."""
        carrier = make_carrier(np.arange(1, 5, dtype=np.float32))
        yield carrier
        carrier.release()

    @pytest.fixture
    def constant(self, make_carrier: MakeCarrier) -> Iterator[Carrier]:
        """The same without public mutation."""
        carrier = make_carrier(np.arange(1, 5, dtype=np.float32), mutable=False)
        yield carrier
        carrier.release()
