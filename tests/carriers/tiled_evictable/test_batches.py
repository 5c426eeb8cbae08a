"""Large sets of tiles move in batches, and still as a whole or not at all."""

import pytest

from strideweave import CPU, FileBacked
from strideweave.carriers.move import dispatch_move, registered_move_operation
from strideweave.carriers.tiled_evictable import transfers


@pytest.fixture(autouse=True)
def batches_of_three(monkeypatch):
    monkeypatch.setattr(transfers, "_BATCH_TILES", 3)


@pytest.fixture
def fail_second_batch():
    """Let the second transfer between two classes fail; gives the sizes of all batches."""
    sizes: list[int] = []

    def install(source, destination):
        real = dispatch_move(source, destination)

        class FailsOnce(real):
            async def transfer(self, transfers):
                sizes.append(len(transfers))
                if len(sizes) == 2:
                    raise OSError("the second batch failed")
                return await super().transfer(transfers)

        return registered_move_operation(source, destination, FailsOnce, replace=True)

    install.sizes = sizes
    return install


def test_a_promotion_that_fails_in_its_second_batch_leaves_nothing_primary(make_model, fail_second_batch):
    """Contract section 6: *later failures leave residency, values, versions and ownership as they were*."""
    model = make_model()
    before = model.snapshot()
    with fail_second_batch(FileBacked, CPU):
        with pytest.raises(OSError, match="second batch"):
            model.carrier.promote(model.select(*range(8)))
        assert fail_second_batch.sizes == [3, 3]
        assert model.snapshot() == before
        assert model.at_rest()
        model.carrier.promote(model.select(*range(8)))
    assert fail_second_batch.sizes[2:] == [3, 3, 2]
    model.check(*range(8))


def test_an_eviction_that_fails_in_its_second_batch_leaves_everything_primary_and_dirty(
    make_model, fail_second_batch
):
    """Contract section 6: *later failures leave residency, values, versions and ownership as they were*."""
    model = make_model("primary")
    before = model.snapshot()
    with fail_second_batch(CPU, FileBacked):
        with pytest.raises(OSError, match="second batch"):
            model.carrier.evict(model.select(*range(8)))
        assert fail_second_batch.sizes == [3, 3]
        assert model.snapshot() == before
        assert model.at_rest()
        model.carrier.evict(model.select(*range(8)))
    assert model.primary() == []
    assert model.at_rest()
    model.check(*range(8))


def test_a_projection_that_fails_in_its_second_batch_changes_nothing(make_model, fail_second_batch):
    """Contract section 6: *later failures leave residency, values, versions and ownership as they were*."""
    model = make_model()
    before = model.snapshot()
    with fail_second_batch(FileBacked, CPU), pytest.raises(OSError, match="second batch"):
        model.project(*range(8)).wait()
    assert model.snapshot() == before
    assert model.at_rest()


def test_a_batch_is_bounded_in_bytes_too(make_model, monkeypatch, control_moves):
    model = make_model()
    monkeypatch.setattr(transfers, "_BATCH_BYTES", 2 * model.carrier.statistics().tile_bytes)
    moves = control_moves(FileBacked, CPU)
    model.carrier.promote(model.select(*range(5)))
    assert moves.calls == [2, 2, 1]
