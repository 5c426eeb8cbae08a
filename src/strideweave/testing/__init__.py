"""What proves a carrier: one suite of tests that any carrier class can be run through, and faults on demand.

Importing this package imports pytest (the extra ``strideweave[testing]``); the library itself does without.

    from strideweave.testing import CarrierContract

    class TestMyCarrier(CarrierContract):
        @pytest.fixture
        def make_carrier(self):
            return lambda values, mutable=True: MyCarrier(values, mutable=mutable)
"""

import pytest

# Before the modules are imported, so that their assertions explain themselves.
pytest.register_assert_rewrite("strideweave.testing.lifecycle", "strideweave.testing.storage")

from strideweave.testing.contract import CarrierContract  # noqa: E402
from strideweave.testing.faults import Faults, Hold, failing_transfers, held_transfers  # noqa: E402
from strideweave.testing.values import bit_patterns, values_of  # noqa: E402

__all__ = [
    "CarrierContract",
    "Faults",
    "Hold",
    "bit_patterns",
    "failing_transfers",
    "held_transfers",
    "values_of",
]
