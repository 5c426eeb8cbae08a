"""Where tiles lie: places never overlap, memory goes back, what is recycled stays inside its bound."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from strideweave.carriers import CPU, Generic
from strideweave.carriers.tiled_evictable import store as store_module
from strideweave.carriers.tiled_evictable.store import AdoptedStore, SecondaryStore, SlabStore
from strideweave.dtype import DType
from strideweave.tiles.grid import TileGrid

GRID = TileGrid((16,), (1024,))  # 4 KiB a tile in float32
TILE_BYTES = 4096


def tiles(*ordinals):
    return np.array(ordinals, np.int64)


def rows_of(store, ordinals):
    found = {}
    for block in store.blocks(ordinals):
        for row, position in zip(block.rows.tolist(), block.positions.tolist(), strict=True):
            found[position] = block.array[row]
    return [found[position] for position in range(len(ordinals))]


def reserve(store, ordinals):
    store.make_room(len(ordinals))
    store.reserve(ordinals)


def write(store, ordinals):
    for ordinal, row in zip(ordinals.tolist(), rows_of(store, ordinals), strict=True):
        row[...] = ordinal + 1


def check(store, ordinals):
    for ordinal, row in zip(ordinals.tolist(), rows_of(store, ordinals), strict=True):
        assert (row == ordinal + 1).all()


@pytest.fixture(params=[4096, 16384, 1 << 20], ids=lambda size: f"slab{size}")
def slab_bytes(request, monkeypatch):
    monkeypatch.setattr(store_module, "SLAB_BYTES", request.param)
    return request.param


@pytest.mark.parametrize("kind", [CPU, Generic])
def test_places_hold_what_was_written_there(slab_bytes, kind):
    prototype = CPU(0) if kind is CPU else Generic([])
    store = SlabStore(prototype, GRID, recycle_bytes=0)
    reserve(store, tiles(3, 9, 0, 15))
    write(store, tiles(0, 3, 9, 15))
    check(store, tiles(15, 0, 9, 3))
    for (carrier, start), ordinal in zip(store.places(tiles(9, 3)), (9, 3), strict=True):
        assert carrier._bytes().view("u4")[start] == ordinal + 1


def test_recycled_places_are_bounded_and_counted(slab_bytes):
    store = SlabStore(CPU(0), GRID, recycle_bytes=3 * TILE_BYTES + 1)
    reserve(store, tiles(*range(10)))
    leftovers = store.discard(tiles(*range(8)))
    assert store.recycled_bytes == 3 * TILE_BYTES
    leftovers.give_back()
    store.reclaim(leftovers)
    reserve(store, tiles(*range(3)))
    assert store.recycled_bytes == 0
    write(store, tiles(0, 1, 2, 8, 9))
    check(store, tiles(0, 1, 2, 8, 9))


def test_the_warmest_place_is_used_again_first():
    store = SlabStore(CPU(0), GRID, recycle_bytes=1 << 20)
    reserve(store, tiles(0, 1, 2))
    place = next(store.places(tiles(1)))
    assert not store.discard(tiles(1))
    reserve(store, tiles(7))
    assert next(store.places(tiles(7))) == place


def test_a_slab_without_tiles_is_released(monkeypatch):
    monkeypatch.setattr(store_module, "SLAB_BYTES", 2 * TILE_BYTES)
    store = SlabStore(CPU(0), GRID, recycle_bytes=0)
    reserve(store, tiles(0, 1, 2, 3))
    carriers = {id(carrier): carrier for carrier, _ in store.places(tiles(0, 1, 2, 3))}
    assert len(carriers) == 2
    leftovers = store.discard(tiles(0, 1))
    leftovers.give_back()
    store.reclaim(leftovers)
    assert sorted(carrier.is_released() for carrier in carriers.values()) == [False, True]
    reserve(store, tiles(4, 5, 6))
    write(store, tiles(2, 3, 4, 5, 6))
    check(store, tiles(2, 3, 4, 5, 6))


def test_a_slab_is_not_released_while_its_pages_go_back():
    """Two evictions at once: one gives pages of a slab back while the other empties that slab."""
    store = SlabStore(CPU(0), GRID, recycle_bytes=0)
    reserve(store, tiles(0, 1))
    first = store.discard(tiles(0))
    second = store.discard(tiles(1))
    second.give_back()
    store.reclaim(second)
    first.give_back()
    store.reclaim(first)
    reserve(store, tiles(2, 3))
    write(store, tiles(2, 3))
    check(store, tiles(2, 3))


def test_no_memory_leaves_everything_as_it_was(monkeypatch):
    prototype = CPU(0)
    store = SlabStore(prototype, GRID, recycle_bytes=0)
    monkeypatch.setattr(store_module, "SLAB_BYTES", TILE_BYTES)
    store = SlabStore(prototype, GRID, recycle_bytes=0)
    reserve(store, tiles(0))
    write(store, tiles(0))

    def refuse(*_args, **_options):
        raise MemoryError("none left")

    allocate, made = CPU.allocate_like, []

    def allocate_once(*arguments, **options):
        if made:
            refuse()
        made.append(allocate(*arguments, **options))
        return made[0]

    for failing in (refuse, allocate_once):
        with monkeypatch.context() as patch:
            patch.setattr(type(prototype), "allocate_like", failing)
            with pytest.raises(MemoryError):
                reserve(store, tiles(1, 2))
        check(store, tiles(0))
    assert made[0].is_released()
    reserve(store, tiles(1, 2))
    write(store, tiles(1, 2))
    check(store, tiles(0, 1, 2))


@pytest.mark.parametrize("writeable", [True, False])
def test_adopted_tiles_stay_in_place_until_they_leave(writeable):
    array = np.repeat(np.arange(1, 17, dtype=np.uint32), 1024)
    array.flags.writeable = writeable
    carrier = CPU.from_numpy(array.view(np.float32))
    store = AdoptedStore(carrier, GRID, recycle_bytes=0)
    assert np.shares_memory(rows_of(store, tiles(5))[0], array)
    check(store, tiles(*range(16)))
    leftovers = store.discard(tiles(4, 5, 6, 9))
    assert [(start, slots) for _, start, slots in leftovers.ranges] == [(4096, 3072), (9216, 1024)]
    leftovers.give_back()
    store.reclaim(leftovers)
    reserve(store, tiles(5, 9))
    write(store, tiles(5, 9))
    check(store, tiles(9, 3, 5, 8))
    assert [carrier_ is carrier for carrier_, _ in store.places(tiles(9, 3, 5, 8))] == [
        False,
        True,
        False,
        True,
    ]
    assert (array == np.repeat(np.arange(1, 17), 1024)).all()  # the caller's memory was only let go


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 15), min_size=1)), max_size=30))
def test_any_sequence_of_comings_and_goings_keeps_tiles_apart(steps):
    store = SlabStore(CPU(0), GRID, recycle_bytes=5 * TILE_BYTES)
    present: set[int] = set()
    for arrives, some in steps:
        chosen = sorted(some - present) if arrives else sorted(some & present)
        if not chosen:
            continue
        ordinals = tiles(*chosen)
        if arrives:
            reserve(store, ordinals)
            write(store, ordinals)
            present.update(chosen)
        else:
            leftovers = store.discard(ordinals)
            leftovers.give_back()
            store.reclaim(leftovers)
            present.difference_update(chosen)
        if present:
            check(store, tiles(*present))
        assert store.recycled_bytes <= 5 * TILE_BYTES


def test_write_backs_go_to_the_tier_when_it_may_be_written():
    tier = CPU(0)
    store = SecondaryStore(tier, GRID, writable=True)
    store.prepare_write()
    assert tier.size() == GRID.slot_count
    assert list(store.write_places(tiles(2))) == [(tier, 2048)]
    store.commit_write(tiles(2))
    assert list(store.places(tiles(1, 2))) == [(tier, 1024), (tier, 2048)]


def test_write_backs_go_to_a_spill_beside_a_read_only_tier():
    tier = CPU.from_numpy(np.ones(GRID.slot_count, np.float32), mutable=False)
    store = SecondaryStore(tier, GRID, writable=False)
    store.prepare_write()
    ((spill, start),) = store.write_places(tiles(2))
    assert (spill is tier, start, type(spill)) == (False, 2048, CPU)
    assert list(store.places(tiles(2))) == [(tier, 2048)]
    store.commit_write(tiles(2))
    assert list(store.places(tiles(1, 2, 3))) == [(tier, 1024), (spill, 2048), (tier, 3072)]
    store.release()
    assert spill.is_released()
    assert not tier.is_released()


def test_dtype_is_moved_as_unsigned_integers_of_its_size():
    for dtype, kind in ((DType.Bool, "u1"), (DType.BFloat16, "u2"), (DType.Float64, "u8")):
        store = SlabStore(CPU(0, dtype=dtype), GRID, recycle_bytes=0)
        reserve(store, tiles(0))
        assert rows_of(store, tiles(0))[0].dtype == np.dtype(kind)
