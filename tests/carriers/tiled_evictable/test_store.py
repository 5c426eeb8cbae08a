"""Where tiles lie: places never overlap, memory goes back, what is recycled stays inside its bound."""

import ctypes
import sys
from mmap import PAGESIZE

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from strideweave.carriers import CPU, Generic
from strideweave.carriers.tiled_evictable import slabs as slabs_module
from strideweave.carriers.tiled_evictable.adopted import AdoptedStore
from strideweave.carriers.tiled_evictable.slabs import SlabStore
from strideweave.carriers.tiled_evictable.store import SecondaryStore
from strideweave.dtype import DType
from strideweave.io import recycling
from strideweave.runtime.event_loop import current_runtime
from strideweave.tiles.grid import TileGrid

GRID = TileGrid((16,), (1024,))  # 4 KiB a tile in float32
TILE_BYTES = 4096


def tiles(*ordinals):
    return np.array(ordinals, np.int64)


def one_by_one(arrays, count):
    """Places that were given carrier by carrier, in the order of the tiles."""
    found = [None] * count
    for which, carrier, starts in arrays:
        for position, start in zip(
            range(count) if which is None else which.tolist(), starts.tolist(), strict=True
        ):
            assert found[position] is None
            found[position] = (carrier, start)
    return found


def rows_of(store, ordinals):
    """The tiles one by one; where one array has them all, it must say the same, and so must arrays of places."""
    rows = store.rows(ordinals)
    assert one_by_one(store.place_arrays(ordinals), len(ordinals)) == list(store.places(ordinals))
    assert store.addresses(ordinals)[0].tolist() == [row.ctypes.data for row in rows]
    block = store.block(ordinals)
    if block is not None:
        array, places = block
        assert [array[place].ctypes.data for place in places.tolist()] == [row.ctypes.data for row in rows]
    return rows


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
    monkeypatch.setattr(slabs_module, "SLAB_BYTES", request.param)
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
    monkeypatch.setattr(slabs_module, "SLAB_BYTES", 2 * TILE_BYTES)
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
    monkeypatch.setattr(slabs_module, "SLAB_BYTES", TILE_BYTES)
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


TILES = 40
SIZES = st.sampled_from([1, 3, 100, 256, 1000, 1024, 1500, 5000, 300_000])  # slots of a tile
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sets(st.integers(0, TILES - 1), min_size=1)),
        st.tuples(st.just("go"), st.sets(st.integers(0, TILES - 1), min_size=1)),
        st.tuples(st.just("give back"), st.integers(0, 3)),
    ),
    max_size=30,
)


@given(SIZES, st.booleans(), st.sampled_from([0, 40_000, 1 << 23]), STEPS)
def test_any_sequence_of_comings_and_goings_keeps_tiles_apart(size, adopted, recycle_bytes, steps):
    """Also where pages go back late, when other tiles have come and gone meanwhile."""
    grid = TileGrid((TILES,), (size,))
    present: set[int] = set()
    if adopted:
        values = np.repeat(np.arange(1, TILES + 1, dtype=np.uint32), size)
        store = AdoptedStore(CPU(0).new_like(values.view(np.float32)), grid, recycle_bytes)
        present.update(range(TILES))
    else:
        store = SlabStore(CPU(0), grid, recycle_bytes)
    going = []
    for step, argument in steps:
        if step == "come" and (chosen := sorted(argument - present)):
            reserve(store, tiles(*chosen))
            write(store, tiles(*chosen))
            present.update(chosen)
        elif step == "go" and (chosen := sorted(argument & present)):
            going.append(store.discard(tiles(*chosen)))
            present.difference_update(chosen)
        elif step == "give back" and argument < len(going):
            leftovers = going.pop(argument)
            leftovers.give_back()
            store.reclaim(leftovers)
        check(store, tiles(*present))
        assert store.recycled_bytes <= recycle_bytes


def resident_bytes(carrier):
    """Bytes of the pages that a carrier's memory has now."""
    memory = carrier._bytes()
    start = memory.ctypes.data // PAGESIZE * PAGESIZE
    pages = (memory.ctypes.data + memory.nbytes - start + PAGESIZE - 1) // PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * PAGESIZE), found) == 0
    return sum(page & 1 for page in found) * PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops pages at once")
@pytest.mark.parametrize("size", [16, 250, 1024, 1500, 3000, 40_000])
@pytest.mark.parametrize("adopted", [True, False])
@pytest.mark.parametrize(("together", "mebibytes"), [(3, 1), (10_000, 1), (50, 5), (10_000, 5)])
def test_memory_of_tiles_of_any_size_goes_back_in_any_order(size, adopted, together, mebibytes):
    """What stays is what is recycled: tiles that share pages hold no memory once they have all left."""
    count, recycle_bytes = (mebibytes << 20) // (4 * size), 64 * 1024
    grid = TileGrid((count,), (size,))
    everything = tiles(*range(count))
    if adopted:
        carrier = CPU(0).new_like(np.ones(grid.slot_count, np.float32))
        store = AdoptedStore(carrier, grid, recycle_bytes)
        carriers = {carrier}
    else:
        store = SlabStore(CPU(0), grid, recycle_bytes)
        reserve(store, everything)
        write(store, everything)
        carriers = {carrier for carrier, _ in store.places(everything)}
    assert sum(map(resident_bytes, carriers)) >= grid.slot_count * 4
    order = np.random.default_rng(5).permutation(count)
    for part in np.array_split(order, -(-count // together)):
        leftovers = store.discard(part)
        leftovers.give_back()
        store.reclaim(leftovers)
    left = sum(resident_bytes(carrier) for carrier in carriers if not carrier.is_released())
    assert left <= store.recycled_bytes + 2 * PAGESIZE * len(carriers)


def test_write_backs_go_to_the_tier_when_it_may_be_written():
    tier = CPU(0)
    store = SecondaryStore(tier, GRID, writable=True)
    store.prepare_write()
    assert tier.size() == GRID.slot_count
    assert one_by_one(store.write_places(tiles(2)), 1) == [(tier, 2048)]
    store.commit_write(tiles(2))
    assert list(store.places(tiles(1, 2))) == [(tier, 1024), (tier, 2048)]


def test_write_backs_go_to_a_spill_beside_a_read_only_tier():
    tier = CPU.from_numpy(np.ones(GRID.slot_count, np.float32), mutable=False)
    store = SecondaryStore(tier, GRID, writable=False)
    store.prepare_write()
    ((spill, start),) = one_by_one(store.write_places(tiles(2)), 1)
    assert (spill is tier, start, type(spill)) == (False, 2048, CPU)
    assert list(store.places(tiles(2))) == [(tier, 2048)]
    store.commit_write(tiles(2))
    assert list(store.places(tiles(1, 2, 3))) == [(tier, 1024), (spill, 2048), (tier, 3072)]
    assert one_by_one(store.place_arrays(tiles(1, 2, 3)), 3) == list(store.places(tiles(1, 2, 3)))
    store.release()
    assert spill.is_released()
    assert not tier.is_released()


def test_dtype_is_moved_as_unsigned_integers_of_its_size():
    for dtype, kind in ((DType.Bool, "u1"), (DType.BFloat16, "u2"), (DType.Float64, "u8")):
        store = SlabStore(CPU(0, dtype=dtype), GRID, recycle_bytes=0)
        reserve(store, tiles(0))
        assert rows_of(store, tiles(0))[0].dtype == np.dtype(kind)


def test_tiles_of_one_slab_are_rows_of_one_array_and_those_of_several_are_not(slab_bytes):
    store = SlabStore(CPU(0), GRID, recycle_bytes=0)
    reserve(store, tiles(*range(16)))
    per_slab = max(1, slab_bytes // TILE_BYTES)
    assert store.block(tiles()) is None
    assert store.block(tiles(3)) is not None
    assert (store.block(tiles(*range(16))) is not None) == (per_slab >= 16)


def test_many_tiles_that_arrive_together_share_large_slabs_unless_nothing_may_be_kept():
    grid = TileGrid((40,), (1 << 16,))  # 256 KiB a tile
    for exact, sizes in ((False, [16, 16, 4]), (True, [4] * 9)):
        store = SlabStore(CPU(0), grid, recycle_bytes=0, exact=exact)
        reserve(store, np.arange(36))
        carriers = dict.fromkeys(carrier for carrier, _ in store.places(np.arange(36)))
        assert sorted((carrier.size() >> 16 for carrier in carriers), reverse=True) == sizes
        reserve(store, tiles(36, 37))
        write(store, np.arange(38))
        check(store, np.arange(38))
        leftovers = store.discard(np.arange(38))
        assert set(leftovers.carriers) >= set(carriers)
        leftovers.give_back()
        store.release()


def test_tiles_at_home_are_rows_of_the_adopted_array():
    store = AdoptedStore(CPU(GRID.slot_count), GRID, recycle_bytes=0)
    array, rows = store.block(tiles(5, 2))
    assert (array.shape, rows.tolist()) == ((16, 1024), [5, 2])
    store.reclaim(store.discard(tiles(2)))
    reserve(store, tiles(2))
    assert store.block(tiles(5, 2)) is None
    assert store.block(tiles(2)) is not None


@pytest.mark.parametrize("exact", [False, True])
def test_a_whole_slab_goes_to_the_pool_of_recycled_memory_unless_nothing_may_be_kept(exact):
    current_runtime()
    grid = TileGrid((8,), (1 << 16,))  # 256 KiB a tile, four tiles a slab
    store = SlabStore(CPU(0), grid, recycle_bytes=0, exact=exact)
    recycling.trim()
    before = recycling.statistics()
    reserve(store, tiles(0, 1, 2, 3, 4, 5))
    store.discard(tiles(0, 1, 2, 3)).give_back()
    after = recycling.statistics()
    assert after.held_bytes == (0 if exact else 1 << 20)
    reserve(store, tiles(2, 3, 6, 7))
    write(store, tiles(2, 3, 4, 5, 6, 7))
    check(store, tiles(2, 3, 4, 5, 6, 7))
    found = recycling.statistics()
    assert (found.held_bytes, found.reused - before.reused) == (0, 0 if exact else 1)
    store.release()
    recycling.trim()
