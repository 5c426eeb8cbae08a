"""What tests look at of tiled tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strideweave import Tensor, TileSet
from strideweave.carriers.tiled_evictable import direct_request


def experts(*numbers: int) -> TileSet:
    """Tiles of a grid that is cut along its first of three axes only."""
    return TileSet([(number, 0, 0) for number in numbers])


def whole(gradient: Tensor) -> np.ndarray:
    """The values of a tiled gradient as one array."""
    return gradient.carrier.project(gradient, gradient.carrier.select({})).wait().numpy()


def residency(tensor: Tensor) -> tuple[Any, ...]:
    """What an operation that reads must leave alone."""
    carrier = tensor.carrier
    return carrier.primary_tiles, carrier.secondary_tiles, carrier.dirty_tiles, carrier.version


def assert_at_rest(*tensors: Tensor) -> None:
    """Nothing of any request is left."""
    for tensor in tensors:
        found = tensor.carrier.statistics()
        assert found.pending_requests == found.pinned_tiles == found.in_flight_bytes == 0
        assert found.staging_bytes == found.put_off_evictions == 0


def small_budget(monkeypatch: pytest.MonkeyPatch, nbytes: int = 256) -> None:
    """Cut the operations of small tensors into many blocks."""
    monkeypatch.setattr(direct_request, "WINDOW_BYTES", nbytes)
