"""Tiles live by themselves: any set may be resident, work keeps what it needs, release ends all of it."""

from __future__ import annotations

import numpy as np
import pytest

from strideweave import (
    CPU,
    FileBacked,
    PendingWorkError,
    ReleasedError,
    Tensor,
    TiledEvictable,
    TileSelection,
    TileSet,
)
from strideweave.errors import TileConflictError
from strideweave.layout import Layout


def test_the_resident_set_need_not_be_a_product():
    """Spec: *Residency state is independent of executable selection shape*, scenario *Cache unrelated tiles*."""
    slow = FileBacked().new_like(range(36))
    carrier = TiledEvictable(CPU(0), slow, (3, 3), (2, 2))
    unrelated = TileSet([(0, 0), (1, 2), (2, 1)])
    carrier.promote(unrelated)
    assert carrier.primary_tiles == unrelated
    for coordinate in unrelated.coordinates:
        state = carrier.tile_state(coordinate)
        assert (state.location, state.valid, state.dirty) == ("primary", True, False)
    assert carrier.tile_state((0, 1)).location == "secondary"
    # They cannot be consumed together, but every selection reads right whatever is resident.
    tensor = Tensor(carrier, 0, Layout(((2, 3), (2, 3)), ((1, 4), (2, 12))), requires_grad=False)
    compact = carrier.project(tensor, TileSelection([[2, 0], [1]])).wait()
    grid = np.arange(36).reshape(3, 3, 2, 2)  # tile y, tile x, y, x: the first axis runs fastest
    expected = np.concatenate([grid[1, 2].T, grid[1, 0].T])
    assert np.array_equal(compact.numpy(), expected)
    carrier.release()


def test_eviction_races_with_execution(make_model, control_moves):
    """Spec: *Residency remains valid while tiled work needs it*, scenario *Eviction races with execution*."""
    model = make_model()
    model.carrier.promote(TileSet([(3, 0, 0)]))
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    handle = model.project(3, 5)
    moves.wait_until_entered()
    before = model.snapshot()
    with pytest.raises(TileConflictError) as conflict:
        model.carrier.evict_async(TileSet([(3, 0, 0)]))
    assert conflict.value.tiles == TileSet([(3, 0, 0)])
    assert model.snapshot() == before
    moves.open()
    assert np.array_equal(handle.wait(10).numpy(), model.values[[3, 5]])
    conflict.value.free.wait(10)
    model.carrier.evict(TileSet([(3, 0, 0)]))
    assert model.primary() == [5]
    model.check(3, 5)


def test_a_failure_leaves_everything_usable(make_model, control_moves):
    """Spec: *Residency remains valid while tiled work needs it*; nothing partial is published."""
    model = make_model()
    moves = control_moves(FileBacked, CPU)
    moves.failures.append(OSError("a scratch"))
    before = model.snapshot()
    with pytest.raises(OSError, match="a scratch"):
        model.project(1, 2).wait(10)
    assert model.snapshot() == before
    assert model.at_rest()
    model.check(1, 2)


def test_release_after_completed_tiled_work(make_model, control_moves):
    """Spec: *Tiled release ends all owned residency*, scenario *Release after completed tiled work*."""
    model = make_model()
    carrier, tensor = model.carrier, model.tensor
    some, selection = TileSet([(1, 0, 0)]), model.select(1)
    carrier.promote(TileSet([(0, 0, 0), (1, 0, 0)]))
    moves = control_moves(FileBacked, CPU)
    moves.gate.clear()
    handle = model.project(6)
    with pytest.raises(PendingWorkError, match="wait"):
        carrier.release()
    assert not carrier.is_released()
    moves.open()
    handle.wait(10)
    tiers = (carrier.primary, carrier.secondary)
    assert carrier.release() is None
    assert carrier.release() is None
    assert carrier.is_released()
    assert all(tier.is_released() for tier in tiers)
    for refused in (
        lambda: carrier.project(tensor, selection),
        lambda: carrier.promote(some),
        lambda: carrier.evict(some),
        lambda: carrier[0],
        lambda: carrier.set_value(0, 1),
        lambda: carrier.dispatch_op("add"),
    ):
        with pytest.raises(ReleasedError):
            refused()
