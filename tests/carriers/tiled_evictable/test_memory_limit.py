"""One hard limit on the memory of a tiled carrier, kept at every instant by requests that wait their turn."""

import errno

import numpy as np
import pytest

from strideweave import (
    CPU,
    LRU,
    FileBacked,
    Generic,
    InvalidTileError,
    KeepResident,
    ResidencyPlan,
    Streaming,
    TiledEvictable,
    TileSet,
    tiled,
)
from strideweave.testing import failing_transfers
from tiled_tensors import experts

TILE = 4 * 6 * 4  # bytes of a tile of make_model


def statistics(model):
    return model.carrier.statistics()


# What a limit may be


@pytest.mark.parametrize(
    ("limit", "error", "words"),
    [
        ("many", TypeError, "memory_limit"),
        (100.0, TypeError, "memory_limit"),
        (0, ValueError, "less than one tile of 96 bytes"),
        (-1, ValueError, "less than one tile"),
        (TILE - 1, ValueError, "less than one tile"),
    ],
)
def test_a_limit_that_is_none(make_model, limit, error, words):
    with pytest.raises(error, match=words):
        make_model(memory_limit=limit)


def test_values_that_start_in_the_primary_tier_fit_the_limit(make_model):
    with pytest.raises(ValueError, match=r"768 bytes of tiles, more than memory_limit=767"):
        make_model("primary", memory_limit=8 * TILE - 1)
    model = make_model("primary", memory_limit=8 * TILE)
    model.check(*range(8))
    assert model.primary() == list(range(8))


def test_a_refused_limit_leaves_both_tiers_free():
    primary, secondary = CPU(0).new_like(range(4)), FileBacked()
    with pytest.raises(ValueError, match="memory_limit"):
        TiledEvictable(primary, secondary, (4,), (1,), memory_limit=8)
    assert not primary.is_owned()
    assert not secondary.is_owned()


def test_the_limit_can_be_read(make_model):
    model = make_model(memory_limit=np.int64(300))
    assert (model.carrier.memory_limit, type(model.carrier.memory_limit)) == (300, int)
    assert statistics(model).memory_limit_bytes == 300
    without = make_model()
    assert (without.carrier.memory_limit, statistics(without).memory_limit_bytes) == (None, None)
    without.check(3)
    assert statistics(without).peak_memory_bytes == TILE


@pytest.mark.parametrize("chosen", [[0], [0, 2], [0, 1, 2, 3]])
def test_the_peak_counts_the_pages_that_small_tiles_leave_warm(make_model, chosen):
    model = make_model()
    model.carrier.promote(experts(*chosen))
    model.carrier.evict(experts(*chosen))
    found = statistics(model)
    assert found.memory_bytes == found.recycled_bytes > len(chosen) * TILE
    assert found.peak_memory_bytes >= found.memory_bytes


def test_tiled_takes_a_limit():
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    with pytest.raises(ValueError, match="resident=False"):
        tiled(values, (1, 8), memory_limit=128)
    tensor = tiled(values, (1, 8), memory_limit=128, resident=False)
    assert tensor.carrier.memory_limit == 128
    assert np.array_equal(tensor.numpy(), values)
    for row in range(8):
        found = tensor.carrier.project(tensor, tensor.carrier.select({0: [row]})).wait()
        assert np.array_equal(found.numpy()[0], values[row])
    found = tensor.carrier.statistics()
    assert (found.resident_tiles, found.peak_memory_bytes) == (4, 128)


def test_a_carrier_like_a_limited_one_is_limited(make_model):
    model = make_model(memory_limit=3 * TILE)
    other = model.carrier.new_like(range(192))
    assert other.memory_limit == 3 * TILE
    assert [other[slot] for slot in (0, 100, 191)] == [0.0, 100.0, 191.0]
    assert len(other.secondary_tiles) == 8
    roomy = make_model(memory_limit=8 * TILE)
    assert len(roomy.carrier.new_like(range(192)).primary_tiles) == 8
    assert len(model.carrier.allocate_like(192).secondary_tiles) == 8


# Room is made


@pytest.mark.parametrize("primary", [CPU, Generic])
@pytest.mark.parametrize("secondary", [CPU, FileBacked])
def test_the_least_recently_used_tiles_make_room(make_model, primary, secondary):
    model = make_model(primary=primary, secondary=secondary, memory_limit=4 * TILE)
    for expert in (0, 1, 2, 3):
        model.check(expert)
    model.check(0, 2)
    model.check(4)
    assert model.primary() == [0, 2, 3, 4]
    model.check(1, 0)
    assert model.primary() == [0, 1, 2, 4]
    model.carrier.promote(experts(2, 4))
    model.check(5)
    model.check(6)
    assert model.primary() == [2, 4, 5, 6]
    assert model.at_rest()


def test_dirty_tiles_are_written_back_before_they_make_room(make_model):
    model = make_model(memory_limit=2 * TILE)
    for expert in range(8):
        model.carrier[expert * 24] = model.values[expert, 0, 0] = -expert
    assert len(model.dirty()) == 2
    assert np.array_equal(model.tensor.numpy(), model.values)
    for expert in range(8):
        model.check(expert)
    assert statistics(model).peak_memory_bytes == 2 * TILE
    assert model.at_rest()


def test_implicit_and_written_tiles_obey_too(make_model):
    model = make_model("nothing", memory_limit=2 * TILE)
    with pytest.raises(InvalidTileError):
        model.project(0)
    assert model.at_rest()


@pytest.mark.parametrize("tile_slots", [24, 1024, 1500, 100_000])
@pytest.mark.parametrize("policy", [None, KeepResident, Streaming, lambda: LRU(max_tiles=2)])
def test_no_tile_size_and_no_policy_exceeds_the_limit(tile_slots, policy):
    """Tiles that share pages, that fill them, and that are more than a slab."""
    rng = np.random.default_rng(tile_slots)
    values = rng.standard_normal((12, tile_slots)).astype(np.float32)
    tensor = tiled(
        values,
        (1, tile_slots),
        resident=False,
        memory_limit=4 * tile_slots * 4 + 1,
        residency_policy=policy() if policy else None,
    )
    carrier = tensor.carrier
    for _ in range(30):
        chosen = rng.permutation(12)[: rng.integers(1, 4)].tolist()
        found = carrier.project(tensor, carrier.select({0: chosen})).wait(10).numpy()
        assert np.array_equal(found, values[chosen])
        now = carrier.statistics()
        assert now.resident_bytes + now.recycled_bytes + now.staging_bytes <= now.memory_bytes
        assert now.memory_bytes <= now.peak_memory_bytes <= now.memory_limit_bytes
    assert np.array_equal(tensor.numpy(), values)
    assert carrier.statistics().peak_memory_bytes <= carrier.memory_limit
    carrier.release()


def test_what_is_kept_warm_counts_and_gives_way_to_staging():
    values = np.arange(8 * 2048, dtype=np.float32).reshape(8, 2048)
    tensor = tiled(values, (1, 2048), resident=False, memory_limit=3 * 8192)
    carrier = tensor.carrier
    carrier.promote(TileSet([(0, 0), (1, 0), (2, 0)]))
    carrier.evict(TileSet([(0, 0), (1, 0), (2, 0)]))
    found = carrier.statistics()
    assert (found.memory_bytes, found.recycled_bytes, found.resident_tiles) == (3 * 8192, 3 * 8192, 0)
    assert np.array_equal(carrier._read_slots(1, 5 * 2048), values.reshape(-1)[1 : 1 + 5 * 2048])
    found = carrier.statistics()
    assert (found.peak_memory_bytes, found.peak_staging_bytes) == (3 * 8192, 8192)
    assert found.recycled_bytes == 2 * 8192
    carrier.promote(TileSet([(3, 0), (4, 0), (5, 0)]))
    found = carrier.statistics()
    assert (found.recycled_bytes, found.peak_memory_bytes) == (0, 3 * 8192)


@pytest.mark.parametrize("tile_slots", [1500, 300_000])
def test_memory_counts_until_the_system_has_it_back(monkeypatch, tile_slots):
    values = np.ones((4, tile_slots), np.float32)
    tensor = tiled(values, (1, tile_slots), resident=False, memory_limit=3 * tile_slots * 4)
    carrier, seen = tensor.carrier, []
    carrier.promote(TileSet([(0, 0), (1, 0), (2, 0)]))
    for name in ("_discard", "release"):
        real = getattr(CPU, name)

        def watched(self, *arguments, real=real):
            seen.append(carrier.statistics().memory_bytes)
            return real(self, *arguments)

        monkeypatch.setattr(CPU, name, watched)
    carrier.evict(TileSet([(0, 0), (1, 0), (2, 0)]))
    assert seen
    assert set(seen) == {3 * tile_slots * 4}
    assert carrier.statistics().memory_bytes == 0


# Too much


def test_a_request_that_can_never_fit_is_refused_where_it_is_made(make_model):
    model = make_model(memory_limit=3 * TILE)
    model.check(1)
    before, moved = model.snapshot(), statistics(model)
    calls = {
        "project needs 384 bytes at once": lambda: model.project(0, 1, 2, 3),
        "promote_async needs 768 bytes": lambda: model.carrier.promote_async(experts(*range(8))),
        "promote_async needs 384 bytes": lambda: model.carrier.promote(experts(1, 2, 3, 4)),
    }
    for words, call in calls.items():
        with pytest.raises(MemoryError, match=words) as caught:
            call()
        assert "memory_limit=288" in str(caught.value)
    assert model.snapshot() == before
    assert statistics(model) == moved
    assert model.at_rest()


def test_a_refused_projection_leaves_its_destination_alone(make_model):
    model = make_model(memory_limit=TILE)
    destination = CPU(0)
    with pytest.raises(MemoryError):
        model.project(0, 1, destination=destination)
    assert not destination.is_owned()
    assert destination.size() == 0


class Always:
    """A policy with one answer."""

    def __init__(self, **plan):
        self.answer = ResidencyPlan(**plan)

    def plan(self, required, purpose):
        return self.answer


def test_planned_promotions_count(make_model):
    model = make_model(policy=Always(promote=experts(4, 5, 6)), memory_limit=3 * TILE)
    with pytest.raises(MemoryError, match="4 tiles of 96 bytes"):
        model.project(0)
    model.check(4, 5)
    assert model.primary() == [4, 5, 6]


def test_tiles_that_a_policy_passes_by_need_no_room_where_they_land_in_place(make_model):
    model = make_model(policy=Streaming(), memory_limit=TILE)
    model.check(*range(8))
    assert statistics(model).peak_memory_bytes == 0
    assert model.at_rest()


def test_tiles_that_a_policy_passes_by_are_staged_one_by_one_if_need_be(make_model):
    model = make_model(policy=Streaming(), memory_limit=TILE)
    found = model.carrier.project(model.strided(), model.select(*range(8))).wait()
    assert np.array_equal(found.numpy(), model.values[:, [0, 2, 1, 3]])
    assert (statistics(model).peak_memory_bytes, statistics(model).peak_staging_bytes) == (TILE, TILE)
    assert model.at_rest()


def test_staging_that_does_not_fit_beside_what_stays_is_refused(make_model):
    class HalfAndHalf:
        def plan(self, required, purpose):
            rows = required.coordinates
            return ResidencyPlan(promote=TileSet(rows[:2]), evict=TileSet(rows[2:]))

    model = make_model(policy=HalfAndHalf(), memory_limit=2 * TILE)
    with pytest.raises(MemoryError, match="2 tiles of 96 bytes and 96 to stage"):
        model.carrier.project(model.strided(), model.select(*range(8)))
    model.check(*range(8))  # read to where they are wanted, they need no staging
    assert model.primary() == [0, 1]


def test_what_a_policy_evicts_first_makes_room_first(make_model):
    model = make_model(policy=None, memory_limit=3 * TILE)
    policy = Always(evict=experts(2))
    model = make_model(policy=policy, memory_limit=3 * TILE)
    model.carrier.promote(experts(0))
    model.carrier.promote(experts(1))
    model.carrier.promote(experts(2))
    policy.answer = ResidencyPlan(promote=experts(5), evict=experts(2))
    model.check(5)
    assert model.primary() == [0, 1, 5]
    assert statistics(model).evictions == 1


def test_the_limit_comes_before_what_a_policy_retains(make_model):
    policy = Always()
    model = make_model(policy=policy, memory_limit=3 * TILE)
    model.carrier.promote(experts(0, 1, 2))
    policy.answer = ResidencyPlan(retain=experts(0, 1))
    model.check(5)
    assert model.primary() == [0, 1, 5]
    model.check(6, 7)
    assert len(model.primary()) == 3
    assert {6, 7} < set(model.primary())


# Failure


def test_a_full_disk_fails_who_needed_the_room_and_changes_nothing(make_model):
    model = make_model(memory_limit=2 * TILE)
    for expert in (0, 1):
        model.carrier[expert * 24] = model.values[expert, 0, 0] = 5.0
    before, error = model.snapshot(), OSError(errno.ENOSPC, "full")
    for call in (
        lambda: model.project(2),
        lambda: model.carrier.promote_async(experts(3)),
        lambda: model.carrier.set_value(96, 1),
    ):
        with failing_transfers(CPU, FileBacked, error=error):
            with pytest.raises(OSError, match="full") as caught:
                handle = call()
                handle.wait(10)
            assert caught.value is error
        assert model.snapshot() == before
        assert model.at_rest()
    model.check(2)
    model.check(0, 1)


@pytest.mark.parametrize("start", ["project", "promote", "write"])
def test_what_made_room_comes_back_when_the_read_fails(make_model, start):
    """Contract section 6: *leave residency, values, versions and ownership as they were*."""
    model = make_model(memory_limit=2 * TILE)
    model.check(0, 1)
    calls = {
        "project": lambda: model.project(2, 3).wait(10),
        "promote": lambda: model.carrier.promote(experts(2, 3)),
        "write": lambda: model.carrier.set_value(48, 1.0),
    }
    before = model.snapshot()
    with failing_transfers(FileBacked, CPU), pytest.raises(OSError, match="disk"):
        calls[start]()
    assert model.snapshot() == before
    assert model.at_rest()
    model.check(0, 1)
    model.check(2, 3)


def test_no_memory_for_a_slab_is_an_error_like_another(make_model, monkeypatch):
    model = make_model(memory_limit=2 * TILE)
    allocate = CPU.allocate_like

    def scarce(carrier, *arguments, **options):
        raise MemoryError("none left")

    monkeypatch.setattr(CPU, "allocate_like", scarce)
    with pytest.raises(MemoryError, match="none left"):
        model.project(0, 1).wait(10)
    monkeypatch.setattr(CPU, "allocate_like", allocate)
    assert model.at_rest()
    model.check(0, 1)
