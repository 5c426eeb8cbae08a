"""Large sets of tiles move in batches, and still as a whole or not at all."""

import asyncio

import anyio
import pytest
from anyio.lowlevel import checkpoint

from strideweave import CPU, FileBacked, Streaming
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


@pytest.mark.parametrize("policy", [None, Streaming()])
def test_the_next_batch_is_under_way_beside_the_first_whose_end_a_failure_waits_for(make_model, policy):
    """Contract section 6: *The exception is the original one, never an exception group*."""
    model = make_model(policy=policy)
    before, seen = model.snapshot(), []
    real = dispatch_move(FileBacked, CPU)

    class SecondFails(real):
        async def transfer(self, transfers):
            seen.append(len(transfers))
            if len(seen) == 2:
                second.set()
                raise OSError("the second batch failed")
            with anyio.fail_after(10):
                await second.wait()
            for _ in range(3):  # the second one has failed by now
                await checkpoint()
            await super().transfer(transfers)
            seen.append("filled")

    second = anyio.Event()
    failing = registered_move_operation(FileBacked, CPU, SecondFails, replace=True)
    with failing, pytest.raises(OSError, match="second batch"):
        model.project(*range(8)).wait()
    assert seen == [3, 3, "filled"]
    assert model.snapshot() == before
    assert model.at_rest()


def test_a_batch_that_ends_as_cancelled_is_no_success(make_model):
    model = make_model(policy=Streaming())
    real = dispatch_move(FileBacked, CPU)

    class Cancelled(real):
        async def transfer(self, transfers):
            raise asyncio.CancelledError

    ending = registered_move_operation(FileBacked, CPU, Cancelled, replace=True)
    with ending, pytest.raises(RuntimeError, match="ended by CancelledError"):
        model.project(*range(8)).wait()
    assert model.at_rest()


def test_a_batch_is_bounded_in_bytes_too(make_model, monkeypatch, control_moves):
    model = make_model()
    monkeypatch.setattr(transfers, "_BATCH_BYTES", 2 * model.carrier.statistics().tile_bytes)
    moves = control_moves(FileBacked, CPU)
    model.carrier.promote(model.select(*range(5)))
    assert moves.calls == [2, 2, 1]
