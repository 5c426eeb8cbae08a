"""What copy.copy, copy.deepcopy and pickle do with every public object: an equal value, or a clear refusal."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import strideweave as sw
from boxed import Boxed
from strideweave.runtime.await_result import DroppedAtExit

WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}

VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)


@pytest.fixture(params=list(WAYS))
def copied(request):
    return WAYS[request.param]


@pytest.fixture
def tensor():
    with sw.tiled(VALUES, (1, 4)).carrier as carrier:
        yield sw.Tensor(carrier, 0, sw.row_major(4, 4))


def block_device(directory):
    return sw.BlockDevice(directory / "device", size=1 << 20)


def opened_store(directory, mode):
    pytest.importorskip("xxhash")
    sw.save_tiled(sw.tiled(VALUES, (1, 4)), directory / "store")
    return sw.open_tiled(directory / "store", mode=mode)


def tiled_projection(_):
    source = sw.tiled(VALUES, (1, 4))
    handle = source.carrier.project(source, source.carrier.select({0: [1]}))
    handle.wait()
    return handle


HOLDERS = {
    "Tensor": lambda _: sw.asarray([1.0, 2.0]),
    "tiled Tensor": lambda _: sw.tiled(VALUES, (1, 4)),
    "Generic": lambda _: sw.Generic([1.0]),
    "CPU": lambda _: sw.CPU(4),
    "CPU over an array": lambda _: sw.CPU.from_numpy(VALUES.ravel()),
    "FileBacked": lambda _: sw.FileBacked(),
    "Evictable": lambda _: sw.Evictable(sw.CPU(4), sw.FileBacked()),
    "TiledEvictable": lambda _: sw.tiled(VALUES, (1, 4)).carrier,
    "BlockDevice": block_device,
    "BlockDeviceCarrier": lambda directory: block_device(directory).allocate(4),
    "a carrier of the user's": lambda _: Boxed([1.0]),
    "store": lambda directory: opened_store(directory, "r"),
    "store's carrier": lambda directory: opened_store(directory, "r+").carrier,
    "store's tier": lambda directory: opened_store(directory, "r+").carrier.secondary,
    "AwaitResult": lambda _: sw.AwaitResult(),
    "AwaitProjection": tiled_projection,
    "AwaitResidency": lambda _: sw.AwaitResidency.completed(),
    "AwaitMove": lambda _: sw.AwaitMove(),
    "grad_fn": lambda _: sw.add(sw.asarray([1.0]), sw.asarray([2.0])).grad_fn,
    "TraceRecorder": lambda _: sw.TraceRecorder(sw.KeepResident()),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_holds_storage_or_is_a_handle_is_not_copied(name, copied, tmp_path):
    holder = HOLDERS[name](tmp_path)
    with pytest.raises(TypeError, match="cannot be copied or pickled; "):
        copied(holder)


def test_a_facet_refers_to_its_carrier_and_is_not_taken_from_it(tensor):
    facet = tensor.carrier.require_facet(sw.TiledResidencyFacet)
    copy.copy(facet).evict_async(tensor.carrier.primary_tiles).wait()
    assert not tensor.carrier.primary_tiles
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a TiledEvictable cannot be copied or pickled"):
            way(facet)


def recorded(_):
    recorder = sw.TraceRecorder(sw.KeepResident())
    source = sw.tiled(VALUES, (1, 4), residency_policy=recorder)
    source.carrier.project(source, source.carrier.select({0: [1]})).wait()
    return recorder.trace


VALUE_OBJECTS = {
    "DType": lambda _: sw.DType.BFloat16,
    "Shape": lambda _: sw.Shape(4, (2, 2)),
    "Stride": lambda _: sw.Stride(1, (4, 8)),
    "Layout": lambda _: sw.Layout((4, (2, 2)), (1, (4, 8))),
    "TileSelection": lambda carrier: carrier.select({0: [2, 1]}),
    "TileSet": lambda carrier: carrier.primary_tiles,
    "TileState": lambda carrier: carrier.tile_state((0, 0)),
    "ResidencyPlan": lambda carrier: sw.ResidencyPlan(carrier.primary_tiles),
    "statistics": lambda carrier: carrier.statistics(),
    "capability": lambda carrier: carrier.operation_capabilities("add"),
    "policy statistics": lambda _: sw.LRU(max_tiles=2).statistics(),
    "TraceRequest": lambda carrier: recorded(carrier).requests[0],
    "Trace": recorded,
    "ReplayReport": lambda carrier: sw.replay(recorded(carrier), sw.LRU(max_tiles=2)),
}


@pytest.mark.parametrize("name", VALUE_OBJECTS)
def test_a_value_is_equal_to_its_copy(name, copied, tensor):
    value = VALUE_OBJECTS[name](tensor.carrier)
    other = copied(value)
    assert type(other) is type(value)
    assert other == value


def test_a_selection_that_came_from_elsewhere_selects_the_same(copied, tensor):
    selection = copied(tensor.carrier.select({0: [2, 1]}))
    with sw.no_grad():
        assert (tensor.carrier.project(tensor, selection).wait().numpy() == VALUES[[2, 1]]).all()


ERRORS = {
    "ReleasedError": sw.ReleasedError("gone"),
    "EvictedError": sw.EvictedError("evicted"),
    "OwnershipError": sw.OwnershipError("owned"),
    "ImmutableError": sw.ImmutableError("immutable"),
    "InvalidTileError": sw.InvalidTileError("invalid"),
    "StaleGraphError": sw.StaleGraphError("stale"),
    "PendingWorkError": sw.PendingWorkError("pending", pending=3),
    "FormatError": sw.FormatError("wrong", path="a", tensor="t", tile=(1, 2), offset=8, wanted=1, found=2),
    "FileChangedError": sw.FileChangedError("shrank", path="a"),
    "DamagedTileError": sw.DamagedTileError(
        path="a", tile=(1,), ordinal=1, offset=8, wanted="0f", found="f0"
    ),
    "DroppedAtExit": DroppedAtExit(),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_arrives_as_it_was_raised(name, copied):
    error = ERRORS[name]
    error.__notes__ = ["seen by a worker"]
    other = copied(error)
    assert type(other) is type(error)
    assert (str(other), other.args, other.__dict__) == (str(error), error.args, error.__dict__)


def test_a_conflict_arrives_without_the_handle_of_its_process(copied, tensor):
    carrier = tensor.carrier
    error = sw.TileConflictError(
        "conflict", tiles=carrier.primary_tiles, holder="evict", free=sw.AwaitResult()
    )
    other = copied(error)
    assert (str(other), other.tiles, other.holder) == ("conflict", carrier.primary_tiles, "evict")
    with pytest.raises(RuntimeError, match="this error is a copy"):
        other.free.wait(1)
    assert not error.free.done


def test_every_public_error_is_in_the_table():
    public = {name for name in sw.__all__ if name.endswith("Error")}
    assert public == set(ERRORS) - {"DroppedAtExit"} | {"TileConflictError"}
