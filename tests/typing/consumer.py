"""What a user's type checker sees; mypy reads this file, nothing runs it.

Each ``assert_type`` pins an inferred type; each ``type: ignore`` stands where a mistake must be found, since
the strict mode reports an ignore that ignores nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import strideweave as sw
from strideweave.carriers.extension import (
    CarrierDefinition,
    DefinedCarrier,
    StorageProvider,
    carrier_definition,
    register_carrier,
)


def tensors(values: NDArray[np.float32]) -> None:
    tensor = sw.asarray(values)
    assert_type(tensor, sw.Tensor)
    assert_type(tensor + 1.0, sw.Tensor)
    assert_type(2 * tensor, sw.Tensor)
    assert_type(-tensor @ tensor.T, sw.Tensor)
    assert_type(sw.matmul(tensor, tensor), sw.Tensor)
    assert_type(tensor.shape, tuple[int, ...])
    assert_type(tensor.dtype, sw.DType)
    assert_type(tensor.numpy(), NDArray[Any])
    assert_type(tensor.carrier, sw.Carrier)
    assert_type(sw.row_major(2, 3).compose(sw.Layout(6, 1)), sw.Layout)
    sw.asarray(values, dtype="float32")  # type: ignore[arg-type]
    sw.LRU(16)  # type: ignore[arg-type]


def carriers() -> None:
    assert_type(sw.CPU(4).new_like([1, 2]), sw.CPU)
    assert_type(sw.FileBacked().size(), int)
    assert_type(sw.Generic([1.0])[0], bool | int | float)
    assert_type(sw.FileBacked.open("weights.bin", dtype=sw.DType.Float32), sw.FileBacked)
    sw.CPU("four")  # type: ignore[arg-type]


async def requests(carrier: sw.TiledEvictable, tensor: sw.Tensor) -> None:
    selection = carrier.select({0: [1, 2]})
    assert_type(selection, sw.TileSelection)
    handle = carrier.project(tensor, selection)
    assert_type(handle, sw.AwaitProjection)
    assert_type(await handle, sw.Tensor)
    assert_type(handle.wait(timeout=1.0), sw.Tensor)
    assert_type(await asyncio.gather(handle, carrier.promote_async(selection)), tuple[sw.Tensor, None])
    assert_type(await asyncio.wait_for(handle, 1.0), sw.Tensor)
    assert_type(carrier.primary_tiles, sw.TileSet)
    general: sw.AwaitResult[object] = handle
    awaitable: Awaitable[sw.Tensor] = handle
    del general, awaitable
    compact = await handle
    assert_type(carrier.scatter(compact, tensor, selection, "add"), sw.AwaitMove)
    assert_type(await carrier.scatter(compact, tensor, selection), sw.Tensor)
    assert_type(carrier.assign(compact, tensor, selection), sw.AwaitResult[None])
    carrier.scatter(compact, tensor, selection, "mean")  # type: ignore[arg-type]
    sw.add(handle, 1.0)  # type: ignore[arg-type]
    carrier.project(handle, selection)  # type: ignore[arg-type]


class KeepNothing:
    """A policy is anything with ``plan``; no base class is needed."""

    def plan(self, required: sw.TileSet, purpose: str) -> sw.ResidencyPlan:
        return sw.ResidencyPlan(evict=required)


class NoPlan:
    """Not a policy."""


def policies() -> None:
    policy: sw.ResidencyPolicy = KeepNothing()
    sw.TiledEvictable(sw.CPU(0), sw.FileBacked(), (4,), (8,), residency_policy=policy)
    sw.TiledEvictable(sw.CPU(0), sw.FileBacked(), (4,), (8,), residency_policy=sw.LRU(max_tiles=2))
    sw.TiledEvictable(sw.CPU(0), sw.FileBacked(), (4,), (8,), residency_policy=NoPlan())  # type: ignore[arg-type]
    recorder = sw.TraceRecorder(sw.S3FIFO(max_bytes=64), "run.trace")
    sw.TiledEvictable(sw.CPU(0), sw.FileBacked(), (4,), (8,), residency_policy=recorder)
    assert_type(recorder.trace, sw.Trace)
    assert_type(sw.replay(sw.Trace.load("run.trace"), policy), sw.ReplayReport)
    sw.replay(recorder, policy)  # type: ignore[arg-type]
    sw.TraceRecorder(NoPlan())  # type: ignore[arg-type]
    with recorder as same:
        assert_type(same, sw.TraceRecorder)


class InArrays(StorageProvider):
    """Slots in arrays."""

    def allocate(self, slots: int, dtype: sw.DType) -> NDArray[Any]:
        return np.zeros(slots, dtype.numpy)

    def read(self, storage: NDArray[Any], start: int, slots: int) -> NDArray[Any]:
        return storage[start : start + slots]

    def write(self, storage: NDArray[Any], start: int, values: NDArray[Any]) -> None:
        storage[start : start + len(values)] = values


class Kept(DefinedCarrier):
    """A carrier class of one's own."""


def definitions() -> None:
    register_carrier(CarrierDefinition(Kept, storage=InArrays()))
    assert_type(carrier_definition(Kept), CarrierDefinition | None)
    assert_type(Kept(4).new_like([1, 2]), Kept)
    assert_type(sw.move(sw.asarray([1.0]), Kept(dtype=sw.DType.Float64)), sw.Tensor)
    CarrierDefinition(InArrays)  # type: ignore[arg-type]
    register_carrier(Kept)  # type: ignore[arg-type]


def conflicts(error: sw.TileConflictError) -> None:
    assert_type(error.tiles, sw.TileSet)
    assert_type(error.holder, str)
    assert_type(error.free, sw.AwaitResult[None])


@sw.no_grad()
def decorated(value: int) -> int:
    return value


assert_type(decorated(1), int)
