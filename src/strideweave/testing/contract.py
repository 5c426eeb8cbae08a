"""``CarrierContract``: everything that every carrier promises, as tests for one carrier class."""

from __future__ import annotations

from strideweave.testing.lifecycle import LifecycleContract
from strideweave.testing.storage import StorageContract

__all__ = ["CarrierContract"]


class CarrierContract(StorageContract, LifecycleContract):
    """The tests that a carrier class must pass; subclass it as ``Test…`` and say how to make a carrier.

    Override the fixture ``make_carrier``. It gives a function that takes a 1-D NumPy array, whose dtype says the
    carrier's, and the keyword ``mutable``; it returns a fresh carrier with those values. The array has at least
    one element, unless ``can_be_empty``. The class attributes say what a carrier class cannot do.

    Spec: *Child ownership makes retained aliases externally read-only*; *Release ends the whole hierarchy
    lifecycle*; contract.

    Attributes:
        dtypes: the dtypes that the class stores.
        can_be_empty: whether it makes carriers without slots.
        any_size: whether ``allocate_like`` and ``new_like`` take any number of slots, not only the carrier's own.
        moves: whether moves are registered between the class and CPU, in both directions.
        keeps_bits: whether ``new_like`` and moves keep every bit, NaN payloads too.
        owner_writes: whether an owner may write although ``mutable=False``; not so on a file opened for reading.
    """
