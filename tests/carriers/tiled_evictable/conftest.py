"""Tiled carriers over every kind of tier, moves that stop at a gate, and moves that fail on demand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import numpy as np
import pytest

from strideweave import CPU, FileBacked, Generic, Tensor, TiledEvictable
from strideweave.carriers.move import dispatch_move, registered_move_operation
from strideweave.carriers.tiled_evictable.traffic import TileTraffic
from strideweave.dtype import DType
from strideweave.layout import Layout, row_major
from strideweave.runtime.event_loop import process

EXPERTS, ROWS, COLUMNS = 8, 4, 6
TILE_BYTES = ROWS * COLUMNS * 4


@dataclass
class Model:
    """A tiled carrier of experts, its full Tensor, and the values it must hold."""

    carrier: TiledEvictable
    tensor: Tensor
    values: np.ndarray

    def select(self, *experts: int):
        return self.carrier.select({0: experts})

    def project(self, *experts: int, **options):
        return self.carrier.project(self.tensor, self.select(*experts), **options)

    def strided(self) -> Tensor:
        """The full Tensor with the rows of a tile in another order than its slots, so that tiles come apart."""
        return Tensor(self.carrier, 0, Layout((EXPERTS, (2, 2), COLUMNS), (ROWS * COLUMNS, (12, 6), 1)))

    def check(self, *experts: int) -> None:
        assert np.array_equal(self.project(*experts).wait().numpy(), self.values[list(experts)])

    def primary(self) -> list[int]:
        return [coordinate[0] for coordinate in self.carrier.primary_tiles.coordinates]

    def dirty(self) -> list[int]:
        return [coordinate[0] for coordinate in self.carrier.dirty_tiles.coordinates]

    def idle(self) -> bool:
        """Nothing pending, nothing pinned, no bytes in flight or staged."""
        found = self.carrier.statistics()
        return (
            found.pending_requests == found.pinned_tiles == found.in_flight_bytes == found.staging_bytes == 0
            and found.resident_bytes == found.resident_tiles * found.tile_bytes
            and found.waiting_requests == found.aside_bytes == 0
            and found.memory_bytes == found.resident_bytes + found.recycled_bytes
            and (found.memory_limit_bytes is None or found.peak_memory_bytes <= found.memory_limit_bytes)
        )

    def at_rest(self) -> bool:
        """Idle, and no eviction was put off and forgotten."""
        return self.idle() and not self.carrier.statistics().put_off_evictions

    def snapshot(self) -> tuple:
        """Everything that a refused or failed request must leave alone."""
        carrier = self.carrier
        return (
            carrier.primary_tiles,
            carrier.secondary_tiles,
            carrier.dirty_tiles,
            carrier.version,
            carrier.is_owned(),
            carrier.primary.is_owned(),
            carrier.secondary.is_owned(),
        )


def expert_values(dtype: DType = DType.Float32) -> np.ndarray:
    return np.arange(EXPERTS * ROWS * COLUMNS).reshape(EXPERTS, ROWS, COLUMNS).astype(dtype.numpy)


@pytest.fixture(autouse=True)
def no_task_leaves_anything_under_way(monkeypatch) -> Iterator[None]:
    """What ``_come_to_rest`` would tidy up after a cut-off request, no request may leave that ran to its end."""
    parent, tidy = os.getpid(), TileTraffic._come_to_rest
    left = []

    def come_to_rest(self):
        counters = self.counters
        found = (
            dict(self._passages),
            counters.in_flight_bytes,
            counters.staging_bytes,
            counters.reserved_tiles - self.table.resident_count,
            counters.leaving_bytes,
            *([] if self.budget is None else self.budget.promised),
        )
        if any(found) and os.getpid() == parent:
            left.append(found)
        tidy(self)

    monkeypatch.setattr(TileTraffic, "_come_to_rest", come_to_rest)
    yield
    assert left == []


@pytest.fixture
def make_model() -> Iterator[Callable[..., Model]]:
    """Make a model whose tiles start in the secondary tier (or, ``start="primary"``, in the primary)."""
    made: list[TiledEvictable] = []

    def make(
        start: str = "secondary",
        *,
        primary: type = CPU,
        secondary: type = FileBacked,
        policy=None,
        mutable: bool = True,
        dtype: DType = DType.Float32,
        keep: bool = True,
        memory_limit: int | None = None,
    ) -> Model:
        values = expert_values(dtype)

        def empty(kind):
            return (
                Generic([], dtype=dtype)
                if kind is Generic
                else (CPU(0, dtype=dtype) if kind is CPU else FileBacked(dtype=dtype))
            )

        fast, slow = empty(primary), empty(secondary)
        if start == "primary":
            fast = fast.new_like(values.ravel(), mutable=mutable)
        elif start == "secondary":
            slow = slow.new_like(values.ravel())
        carrier = TiledEvictable(
            fast,
            slow,
            (EXPERTS, 1, 1),
            (1, ROWS, COLUMNS),
            residency_policy=policy,
            memory_limit=memory_limit,
        )
        if keep:  # else it goes when the test lets go of it
            made.append(carrier)
        return Model(carrier, Tensor(carrier, 0, row_major(EXPERTS, ROWS, COLUMNS)), values)

    yield make
    for carrier in made:
        carrier.release()


@dataclass
class Moves:
    """The moves between two carrier classes, under the test's control."""

    calls: list[int] = field(default_factory=list)  # transfers of each batch
    slots: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)
    fail_when: Callable = lambda transfers: True
    gates: dict[int, threading.Event] = field(default_factory=dict)  # by the first slot of a batch's source
    answer: Callable | None = None

    def open(self) -> None:
        """Let every batch through, once all requests that were made before have begun."""
        runtime = process.runtime
        # The loop takes what is posted in order; a request takes some turns more until it waits for another's tile.
        for _ in range(0 if runtime is None or not runtime.is_open else 5):
            reached = threading.Event()
            runtime.post(reached.set)
            assert reached.wait(60), "the runtime's loop is stuck"
        self.gate.set()

    def wait_until_entered(self) -> None:
        assert self.entered.wait(10), "no transfer began"


@pytest.fixture
def control_moves() -> Iterator[Callable[..., Moves]]:
    """Put every transfer of a class pair behind a gate (open at first), count it, fail it on demand."""
    with ExitStack() as stack:

        def control(source: type, destination: type) -> Moves:
            moves = Moves()
            moves.gate.set()
            real = dispatch_move(source, destination)

            class Controlled(real):
                async def transfer(self, transfers):
                    moves.calls.append(len(transfers))
                    moves.entered.set()
                    await anyio.to_thread.run_sync(moves.gate.wait)
                    if transfers[0].source_start in moves.gates:
                        await anyio.to_thread.run_sync(moves.gates[transfers[0].source_start].wait)
                    if moves.failures and moves.fail_when(transfers):
                        raise moves.failures.pop(0)
                    await super().transfer(transfers)
                    moves.slots += sum(transfer.slots for transfer in transfers)
                    return moves.answer(transfers) if moves.answer else None

            stack.callback(moves.gate.set)
            stack.enter_context(registered_move_operation(source, destination, Controlled, replace=True))
            return moves

        yield control
