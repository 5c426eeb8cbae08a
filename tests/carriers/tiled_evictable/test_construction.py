"""Spec: *TiledEvictable owns one flat logical storage extent*; the constructor and everything it refuses."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import strideweave
from strideweave import CPU, LRU, DType, FileBacked, Generic, Tensor, TiledEvictable, TileSelection, row_major
from strideweave.carriers.move import register_move_operation, unregister_move_operation
from strideweave.carriers.tiled_evictable import TiledEvictable as InItsRoom
from strideweave.carriers.tiled_evictable import hierarchy

GRID, TILE = (3, 2), (2, 4)
SLOTS = 48


def free(*carriers):
    return not any(carrier.is_owned() for carrier in carriers)


def test_importable_from_both_places():
    assert strideweave.TiledEvictable is InItsRoom


def test_geometry():
    carrier = TiledEvictable(CPU(0), CPU(0), GRID, TILE)
    assert carrier.grid_shape == GRID
    assert carrier.tile_shape == TILE
    assert carrier.logical_shape == (6, 8)
    assert carrier.size() == SLOTS
    assert carrier.dtype() is DType.Float32
    assert carrier.residency_policy is None
    assert carrier.is_mutable()


@pytest.mark.parametrize("values_in", ["primary", "secondary", "neither"])
def test_where_tiles_start(values_in):
    primary = CPU(SLOTS if values_in == "primary" else 0)
    secondary = CPU(SLOTS if values_in == "secondary" else 0)
    carrier = TiledEvictable(primary, secondary, GRID, TILE)
    assert carrier.primary is primary
    assert carrier.secondary is secondary
    every = carrier.select({}).tile_set
    nothing = strideweave.TileSet()
    assert carrier.primary_tiles == (every if values_in == "primary" else nothing)
    assert carrier.dirty_tiles == (every if values_in == "primary" else nothing)
    assert carrier.secondary_tiles == (every if values_in == "secondary" else nothing)
    assert carrier.valid_tiles == (nothing if values_in == "neither" else every)


def test_both_tiers_are_owned_and_aliases_only_read():
    primary, secondary = CPU(SLOTS), CPU(0)
    carrier = TiledEvictable(primary, secondary, GRID, TILE)
    for tier in (primary, secondary):
        assert tier.is_owned()
        assert not tier.is_mutable()
        with pytest.raises(strideweave.OwnershipError):
            tier.release()
        with pytest.raises(strideweave.OwnershipError):
            tier.increment_version()
    with pytest.raises(strideweave.OwnershipError):
        primary[0] = 1.0
    assert primary[0] == 0.0
    carrier[0] = 5.0
    assert primary[0] == 5.0


def test_values_are_adopted_without_a_copy():
    array = np.arange(SLOTS, dtype=np.float32)
    carrier = TiledEvictable(CPU.from_numpy(array), CPU(0), GRID, TILE)
    array[7] = -1.0
    assert carrier[7] == -1.0


def test_a_read_only_secondary_may_hold_the_values(tmp_path):
    path = tmp_path / "values"
    np.arange(SLOTS, dtype=np.float32).tofile(path)
    secondary = FileBacked.open(path, dtype=DType.Float32)
    carrier = TiledEvictable(CPU(0), secondary, GRID, TILE)
    assert carrier.is_mutable()
    carrier[3] = 99.0
    carrier.evict(carrier.primary_tiles)
    assert carrier[3] == 99.0
    carrier.release()
    assert np.array_equal(np.fromfile(path, np.float32), np.arange(SLOTS))


def test_mutability_is_the_primary_tiers():
    carrier = TiledEvictable(CPU(SLOTS, mutable=False), CPU(0), GRID, TILE)
    assert not carrier.is_mutable()
    with pytest.raises(strideweave.ImmutableError):
        carrier[0] = 1.0


@pytest.mark.parametrize(
    ("primary", "secondary", "error", "says"),
    [
        (object, lambda: CPU(0), TypeError, "primary must be a Carrier"),
        (lambda: CPU(0), lambda: np.zeros(3), TypeError, "secondary must be a Carrier"),
        (lambda: CPU(0), lambda: CPU(0, dtype=DType.Float64), TypeError, "dtype"),
        (FileBacked, lambda: CPU(0), TypeError, "memory"),
        (lambda: CPU(0), lambda: CPU(0, mutable=False), strideweave.ImmutableError, "immutable"),
        (lambda: CPU(SLOTS), lambda: CPU(SLOTS), ValueError, "both tiers hold values"),
        (lambda: CPU(SLOTS - 1), lambda: CPU(0), ValueError, "slots"),
        (lambda: CPU(0), lambda: CPU(SLOTS + 1), ValueError, "slots"),
    ],
)
def test_refused_tiers_stay_unowned(primary, secondary, error, says):
    primary, secondary = primary(), secondary()
    with pytest.raises(error, match=says):
        TiledEvictable(primary, secondary, GRID, TILE)
    assert free(*(tier for tier in (primary, secondary) if isinstance(tier, strideweave.Carrier)))


def test_one_carrier_cannot_be_both_tiers():
    tier = CPU(0)
    with pytest.raises(ValueError, match="same carrier"):
        TiledEvictable(tier, tier, GRID, TILE)
    assert free(tier)


@pytest.mark.parametrize("which", ["primary", "secondary"])
@pytest.mark.parametrize("state", ["released", "owned"])
def test_released_and_owned_tiers_are_refused(which, state):
    tiers = {"primary": CPU(0), "secondary": CPU(0)}
    if state == "released":
        tiers[which].release()
    else:
        tiers[which]._claim(object())
    other = tiers["secondary" if which == "primary" else "primary"]
    with pytest.raises(RuntimeError, match=which):
        TiledEvictable(**tiers, grid_shape=GRID, tile_shape=TILE)
    assert free(other)


@pytest.mark.parametrize("shape", [None, 3, 1.5, "34", object()])
def test_what_is_no_shape_is_named(shape):
    with pytest.raises(TypeError, match="grid_shape must be a tuple of integers, got"):
        TiledEvictable(CPU(0), CPU(0), shape, (2, 4))
    with pytest.raises(TypeError, match="tile_shape must be a tuple of integers, got"):
        TiledEvictable(CPU(0), CPU(0), iter([3, 2]), shape)


@pytest.mark.parametrize(
    ("grid", "tile", "error"),
    [
        ((3,), (2, 4), ValueError),
        ((0, 2), (2, 4), ValueError),
        ((3, 2), (2, -4), ValueError),
        ((3.0, 2), (2, 4), TypeError),
        ((3, 2), ("2", 4), TypeError),
        ((), (), ValueError),
        (3, 2, TypeError),
        ((2**40, 2**40), (2, 4), ValueError),
        ((2**62, 1), (2, 1), ValueError),
    ],
)
def test_bad_geometry_leaves_the_tiers_unowned(grid, tile, error):
    primary, secondary = CPU(0), CPU(0)
    with pytest.raises(error):
        TiledEvictable(primary, secondary, grid, tile)
    assert free(primary, secondary)


@pytest.mark.parametrize(
    "policy", [object(), "LRU", LRU, SimpleNamespace(plan=5), SimpleNamespace(plan=None)]
)
def test_a_policy_without_the_protocol_is_refused(policy):
    primary, secondary = CPU(0), CPU(0)
    with pytest.raises(TypeError, match=r"plan|class LRU"):
        TiledEvictable(primary, secondary, GRID, TILE, residency_policy=policy)
    assert free(primary, secondary)


PARTS = ["AdoptedStore", "SlabStore", "SecondaryStore", "TileTraffic"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_the_tiers_unowned(monkeypatch, part, error):
    """At once, and not only when the traceback has gone, which holds the half-made carrier."""
    primary, secondary = CPU(SLOTS if part == "AdoptedStore" else 0), FileBacked()

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(hierarchy, part, fail)
        with pytest.raises(type(error)) as caught:
            TiledEvictable(primary, secondary, GRID, TILE)
    assert free(primary, secondary)
    TiledEvictable(primary, secondary, GRID, TILE).release()
    assert caught.value is error


def test_a_tier_that_is_filled_while_the_policy_looks_at_the_grid_is_noticed():
    primary, secondary = CPU(0), CPU(SLOTS)

    class Meddler(LRU):
        def bind(self, grid, tile_bytes):
            primary._allocate_in_place(SLOTS)

    with pytest.raises(ValueError, match="both tiers hold values"):
        TiledEvictable(primary, secondary, GRID, TILE, residency_policy=Meddler(max_tiles=1))
    assert free(primary, secondary)


class Two:
    def __index__(self):
        return 2


@pytest.mark.parametrize(
    ("axes", "error"),
    [
        (None, TypeError),
        ([0, 1], TypeError),
        ([(0, [1])], TypeError),
        ({"0": [1]}, TypeError),
        ({True: [1]}, TypeError),
        ({0.0: [1]}, TypeError),
        ({0: 1}, TypeError),
        ({0: ["1"]}, TypeError),
        ({0: [True]}, TypeError),
        ({-1: [0]}, ValueError),
        ({2: [0]}, ValueError),
        ({0: []}, ValueError),
        ({0: [1, 1]}, ValueError),
        ({0: [3]}, ValueError),
        ({Two(): [0]}, ValueError),
    ],
)
def test_what_is_no_choice_of_tiles_is_refused(axes, error):
    carrier = TiledEvictable(CPU(0), CPU(0), GRID, TILE)
    with pytest.raises(error):
        carrier.select(axes)


def test_axes_are_named_by_anything_that_counts_as_an_integer():
    carrier = TiledEvictable(CPU(0), CPU(0), (3, 2, 4), (1, 1, 1))
    expected = TileSelection([[0, 1, 2], [1], [3, 0]])
    assert carrier.select({np.int64(1): [np.uint8(1)], Two(): iter([3, 0])}) == expected


@pytest.mark.parametrize("pair", [(CPU, Generic), (Generic, CPU)])
def test_both_directions_must_be_registered(pair):
    operation = unregister_move_operation(*pair)
    try:
        primary, secondary = CPU(0), Generic([])
        with pytest.raises(NotImplementedError, match=pair[0].__name__):
            TiledEvictable(primary, secondary, GRID, TILE)
        assert free(primary, secondary)
    finally:
        register_move_operation(*pair, operation)


def test_the_class_is_final():
    with pytest.raises(TypeError, match="final"):
        type("Mine", (TiledEvictable,), {})


def test_destroyed_without_release_gives_its_tiers_back():
    primary, secondary = CPU(SLOTS), CPU(0)
    carrier = TiledEvictable(primary, secondary, GRID, TILE)
    gone = weakref.ref(carrier)
    del carrier
    gc.collect()
    assert gone() is None
    assert free(primary, secondary)
    assert not primary.is_released()
    primary[0] = 1.0


def test_factories_keep_geometry_and_tier_kinds():
    carrier = TiledEvictable(CPU(0), FileBacked(), GRID, TILE, residency_policy=LRU(max_tiles=2))
    fresh = carrier.new_like(range(SLOTS), dtype=DType.Int32)
    assert (fresh.grid_shape, fresh.tile_shape) == (GRID, TILE)
    assert (type(fresh.primary), type(fresh.secondary)) == (CPU, FileBacked)
    assert fresh.dtype() is DType.Int32
    assert [fresh[slot] for slot in range(SLOTS)] == list(range(SLOTS))
    zeros = carrier.allocate_like(SLOTS, mutable=False)
    assert zeros[SLOTS - 1] == 0.0
    assert not zeros.is_mutable()
    with pytest.raises(ValueError, match="48 slots"):
        carrier.allocate_like(SLOTS + 1)
    with pytest.raises(ValueError, match="48 slots"):
        carrier.new_like(range(SLOTS - 1))
    for made in (fresh, zeros):
        made.release()


@pytest.mark.parametrize("values", [[], [1.0], range(9)])
def test_the_factory_needs_a_value_for_each_slot(values):
    carrier = TiledEvictable(CPU(8), CPU(0), (2,), (4,))
    with pytest.raises(ValueError, match="8 slots"):
        carrier.new_like(values)
    assert carrier.new_like(range(8))[7] == 7


def test_a_tensor_sees_the_whole_logical_array():
    carrier = TiledEvictable(CPU(0).new_like(range(SLOTS)), CPU(0), GRID, TILE)
    tensor = Tensor(carrier, 0, row_major(6, 8))
    assert tensor.shape == (6, 8)
    assert tensor.carrier is carrier


@pytest.mark.parametrize("axes", [[7, 2], (0,), 3, None])
def test_select_takes_a_mapping_and_says_so(axes):
    carrier = TiledEvictable(CPU(SLOTS), CPU(0), GRID, TILE)
    with pytest.raises(TypeError, match=r"axes must be a mapping such as \{0: "):
        carrier.select(axes)


def test_an_operation_on_a_raw_tiled_tensor_says_to_project():
    carrier = TiledEvictable(CPU(SLOTS), CPU(0), GRID, TILE)
    with pytest.raises(NotImplementedError, match=r"'sub'; project the tiles"):
        carrier.dispatch_op("sub")
