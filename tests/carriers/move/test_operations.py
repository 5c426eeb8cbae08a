"""Transfers between every pair of carriers: bits, many spans, checks before any byte moves, failures."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.carriers import CPU, Carrier, FileBacked, Generic
from strideweave.carriers.move import ElementwiseMoveOperation, MoveOperation, Transfer, dispatch_move
from strideweave.carriers.move import operations as operations_module
from strideweave.carriers.move.operations import MemoryToMemory
from strideweave.carriers.move.planning import checked_runs, cut_runs
from strideweave.dtype import DType
from strideweave.errors import ImmutableError, ReleasedError
from strideweave.io import engine as io_engine
from strideweave.io.positioned import ShortFileError
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.task_scope import TaskScope

EMPTY: dict[str, Callable[[DType], Carrier]] = {
    "Generic": lambda dtype: Generic([], dtype=dtype),
    "CPU": lambda dtype: CPU(0, dtype=dtype),
    "FileBacked": lambda dtype: FileBacked(dtype=dtype),
}
PAIRS = list(itertools.product(EMPTY, EMPTY))


def bit_patterns(dtype: DType, count: int, seed: int = 0) -> np.ndarray:
    """Values of every kind that the dtype has: random bits, negative zeros, NaNs with payloads."""
    width = dtype.itemsize
    if width == 1:
        top = 2 if dtype is DType.Bool else 256
        raw = (np.arange(count) % top).astype(np.uint8)
    else:
        raw = np.random.default_rng(seed).integers(0, 256, count * width, dtype=np.uint8)
        raw[: 2 * width] = 0
        raw[width - 1] = 0x80  # negative zero, or the smallest integer
        raw[2 * width : 3 * width] = 0xFF  # a NaN with all payload bits, or -1
        raw[3 * width : 4 * width] = 0xFF
        raw[3 * width] = 0x01
    return raw.view(dtype.numpy)


def holding(kind: str, values: np.ndarray) -> Carrier:
    return EMPTY[kind](DType.from_numpy(values.dtype)).new_like(values)


def raw(carrier: Carrier) -> bytes:
    return carrier._read_slots(0, carrier.size()).tobytes()


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a coroutine function in the runtime's loop, as a request does."""
    scope = TaskScope("test")
    try:
        return scope.start(AwaitResult(), function, *arguments).wait(60)
    finally:
        scope.close()


def transfer(transfers: Sequence[Transfer]) -> Any:
    operation = dispatch_move(type(transfers[0].source), type(transfers[0].destination))
    return run(operation().transfer, transfers)


@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_bit_survives_every_pair(pair: tuple[str, str], dtype: DType) -> None:
    """Rule: *bytes move, not values*."""
    values = bit_patterns(dtype, 300)
    source, destination = holding(pair[0], values), EMPTY[pair[1]](dtype).allocate_like(320)
    assert transfer([Transfer(source, 0, destination, 7, 300)]) is None
    expected = np.zeros(320, dtype.numpy)
    expected[7:307] = values
    assert raw(destination) == expected.tobytes()
    assert raw(source) == values.tobytes()
    assert (source.version, destination.version) == (0, 0)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_batch_of_many_spans_lands_where_it_should(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_module, "STAGING_BYTES", 10_000)
    values = bit_patterns(DType.Float32, 64_000)
    source, destination = holding(pair[0], values), EMPTY[pair[1]](DType.Float32).allocate_like(64_000)
    order = np.random.default_rng(5).permutation(640)
    spans = [Transfer(source, int(k) * 100, destination, i * 100, 100) for i, k in enumerate(order)]
    transfer(spans)
    assert raw(destination) == values.reshape(640, 100)[order].tobytes()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_large_batch_goes_through_worker_threads_whole(pair: tuple[str, str]) -> None:
    values = bit_patterns(DType.Int64, 1 << 20)
    source, destination = holding(pair[0], values), EMPTY[pair[1]](DType.Int64).allocate_like(1 << 20)
    half = 1 << 19
    transfer([Transfer(source, 0, destination, half, half), Transfer(source, half, destination, 0, half)])
    assert raw(destination) == np.roll(values.view(np.int64), half).tobytes()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_spans_of_no_slots_and_empty_batches_move_nothing(pair: tuple[str, str]) -> None:
    source, destination = holding(pair[0], np.ones(4, np.float32)), holding(pair[1], np.zeros(4, np.float32))
    assert transfer([Transfer(source, 4, destination, 0, 0), Transfer(source, 0, destination, 4, 0)]) is None
    assert run(dispatch_move(type(source), type(destination))().transfer, []) is None
    assert raw(destination) == bytes(16)


@pytest.mark.parametrize("up", [True, False], ids=["upwards", "downwards"])
@pytest.mark.parametrize("slots", [10, 1000, 300_000])
def test_carriers_that_share_memory_or_a_file_may_overlap(
    slots: int, up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large move goes in pieces, and none may write over what another has still to read."""
    monkeypatch.setattr(operations_module, "STAGING_BYTES", 1000)
    monkeypatch.setattr(operations_module, "INLINE_BYTES", 1000)
    monkeypatch.setattr(operations_module, "LARGEST_JOB", 1000)
    values = np.arange(slots + 7, dtype=np.int32)
    low, high = values[:slots].copy(), values[7:].copy()
    path = tmp_path / "shared"
    values.tofile(path)
    files = [
        FileBacked.open(path, dtype=DType.Int32, offset=offset, size=slots, mutable=True)
        for offset in (0, 28)
    ]
    memory = [CPU.from_numpy(values[:slots]), CPU.from_numpy(values[7:])]
    for lower, higher in (memory, files):
        source, destination = (lower, higher) if up else (higher, lower)
        transfer([Transfer(source, 0, destination, 0, slots)])
        assert raw(destination) == (low if up else high).tobytes()


def test_one_batch_may_name_several_carriers() -> None:
    sources = [holding("CPU", np.full(8, k, np.int16)) for k in range(3)]
    files = [FileBacked(dtype=DType.Int16).allocate_like(12) for _ in range(2)]
    transfer([Transfer(source, 0, file, 4 * k, 4) for k, source in enumerate(sources) for file in files])
    back = CPU(24, dtype=DType.Int16)
    transfer([Transfer(file, 0, back, 12 * k, 12) for k, file in enumerate(files)])
    assert back.numpy().tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2] * 2


@pytest.mark.parametrize("kind", ["CPU", "Generic", "FileBacked"])
def test_values_beyond_two_gibibytes_are_reached(kind: str) -> None:
    start = (5 << 30) // 8 + 3
    tall = FileBacked(dtype=DType.Int64).allocate_like(start + 10)
    values = bit_patterns(DType.Int64, 7)
    source, back = holding(kind, values), EMPTY[kind](DType.Int64).allocate_like(9)
    transfer([Transfer(source, 0, tall, start + 2, 7)])
    transfer([Transfer(tall, start + 1, back, 0, 9)])
    assert raw(back) == bytes(8) + values.tobytes() + bytes(8)
    assert tall.statistics().occupied_bytes < 1 << 20


def test_neighbouring_spans_become_one_system_call() -> None:
    source, destination = holding("CPU", np.arange(400, dtype=np.float32)), FileBacked().allocate_like(400)
    transfer([Transfer(source, 10 * k, destination, 10 * k, 10) for k in range(40)])
    file = destination.statistics().file
    assert (file.writes, file.bytes_written) == (1, 1600)


def test_a_whole_batch_is_one_engine_call() -> None:
    source, destination = FileBacked().allocate_like(400), CPU(400)
    before = io_engine.statistics()
    transfer([Transfer(source, 20 * k, destination, 10 * k, 10) for k in range(20)])
    after = io_engine.statistics()
    assert (after.batches, after.spans) == (before.batches + 1, before.spans + 20)
    assert after.bytes_read == before.bytes_read + 800


# Spans


@given(st.data())
def test_runs_copy_exactly_the_slots_of_their_transfers(data: st.DataObject) -> None:
    source, destination = Generic(range(50), dtype=DType.UInt8), Generic([255] * 50, dtype=DType.UInt8)
    transfers = []
    for _ in range(data.draw(st.integers(0, 8))):
        slots = data.draw(st.integers(0, 50))
        starts = st.integers(0, 50 - slots)
        transfers.append(Transfer(source, data.draw(starts), destination, data.draw(starts), slots))
    runs = checked_runs(transfers)
    assert [(i + k, j + k) for _, i, _, j, slots in runs for k in range(slots)] == [
        (t.source_start + k, t.destination_start + k) for t in transfers for k in range(t.slots)
    ]
    for earlier, later in itertools.pairwise(runs):
        joined = earlier.source_start + earlier.slots, earlier.destination_start + earlier.slots
        assert joined != (later.source_start, later.destination_start)
    most = data.draw(st.integers(1, 60))
    groups = list(cut_runs(runs, most))
    assert all(0 < sum(r.slots for r in group) <= most for group in groups)
    assert [s for r in itertools.chain(*groups) for s in range(r.source_start, r.source_start + r.slots)] == [
        s for r in runs for s in range(r.source_start, r.source_start + r.slots)
    ]


def test_cutting_respects_the_width_of_a_slot() -> None:
    carrier = CPU(100, dtype=DType.Float64)
    groups = list(cut_runs([Transfer(carrier, 0, carrier, 50, 5), Transfer(carrier, 10, carrier, 70, 3)], 20))
    assert [[run.slots for run in group] for group in groups] == [[2], [2], [1, 1], [2]]


# Checks


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize(
    ("source_start", "destination_start", "slots"),
    [(-1, 0, 2), (0, -1, 2), (0, 0, -1), (4, 0, 2), (0, 6, 3), (6, 0, 0), (0, 9, 0), (0, 0, 1 << 62)],
)
def test_a_span_outside_of_its_carrier_is_refused_before_any_byte_moves(
    pair: tuple[str, str], source_start: int, destination_start: int, slots: int
) -> None:
    source, destination = holding(pair[0], np.ones(5, np.int8)), holding(pair[1], np.zeros(8, np.int8))
    good = Transfer(source, 0, destination, 0, 5)
    with pytest.raises(ValueError, match=rf"{pair[0]} with 5 slots .*{pair[1]} with 8 slots"):
        transfer([good, Transfer(source, source_start, destination, destination_start, slots)])
    assert raw(destination) == bytes(8)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_different_dtypes_are_refused_with_both_names(pair: tuple[str, str]) -> None:
    source, destination = holding(pair[0], np.ones(5, np.float32)), holding(pair[1], np.zeros(5, np.int32))
    with pytest.raises(TypeError, match=rf"{pair[0]} is Float32, the destination {pair[1]} is Int32"):
        transfer([Transfer(source, 0, destination, 0, 5)])
    assert raw(destination) == bytes(20)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("role", [0, 1])
def test_a_released_carrier_is_refused(pair: tuple[str, str], role: int) -> None:
    carriers = [holding(kind, np.ones(5, np.int8)) for kind in pair]
    carriers[role].release()
    with pytest.raises(ReleasedError):
        transfer([Transfer(carriers[0], 0, carriers[1], 0, 0)])


def test_what_is_no_carrier_is_refused() -> None:
    with pytest.raises(TypeError, match="destination of a transfer must be a Carrier, found ndarray"):
        run(MemoryToMemory().transfer, [Transfer(CPU(1), 0, np.zeros(1), 0, 1)])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 0, 4)],
        [(0, 2, 4)],
        [(2, 0, 4)],
        [(0, 10, 4), (8, 0, 3)],
        [(0, 10, 2), (10, 0, 2)],
        [(15, 3, 1), (3, 16, 1)],
    ],
)
def test_slots_that_one_batch_reads_and_writes_are_refused(
    kind: str, spans: list[tuple[int, int, int]]
) -> None:
    carrier = holding(kind, np.arange(20, dtype=np.int8))
    before = raw(carrier)
    with pytest.raises(ValueError, match=rf"of a {kind} .* overlap"):
        transfer([Transfer(carrier, source, carrier, destination, n) for source, destination, n in spans])
    assert raw(carrier) == before


@pytest.mark.parametrize("kind", EMPTY)
def test_a_carrier_may_move_slots_inside_itself(kind: str) -> None:
    carrier = holding(kind, np.arange(20, dtype=np.int8))
    transfer([Transfer(carrier, 0, carrier, 10, 5), Transfer(carrier, 5, carrier, 15, 5)])
    assert list(raw(carrier)) == [*range(10), *range(10)]


# Privilege and refusal


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_owned_and_immutable_carriers_are_moved_for_their_owner(pair: tuple[str, str]) -> None:
    """Contract: *an operation may read and write the owned carriers it is handed*."""
    source = EMPTY[pair[0]](DType.Float32).new_like([1.0, 2.0], mutable=False)
    destination = EMPTY[pair[1]](DType.Float32).new_like([0.0, 0.0], mutable=False)
    owner = object()
    source._claim(owner)
    destination._claim(owner)
    transfer([Transfer(source, 0, destination, 0, 2)])
    assert (destination[0], destination[1], destination.version) == (1.0, 2.0, 0)


@pytest.mark.parametrize("kind", EMPTY)
def test_a_file_that_is_open_for_reading_only_is_refused_before_any_byte_moves(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "kept").write_bytes(b"abcd")
    kept = FileBacked.open(tmp_path / "kept", dtype=DType.UInt8)
    other = FileBacked(dtype=DType.UInt8).allocate_like(4)
    source = holding(kind, np.full(4, 7, np.uint8))
    with pytest.raises(PermissionError, match="open for reading only") as caught:
        transfer([Transfer(source, 0, other, 0, 4), Transfer(source, 0, kept, 0, 4)])
    assert caught.value.filename == str(tmp_path / "kept")
    assert raw(other) == bytes(4)
    assert (tmp_path / "kept").read_bytes() == b"abcd"


@pytest.mark.parametrize("kind", EMPTY)
def test_read_only_memory_is_refused_before_any_byte_moves(kind: str) -> None:
    array = np.zeros(4, np.uint8)
    array.flags.writeable = False
    other, fixed = CPU(4, dtype=DType.UInt8), CPU.from_numpy(array)
    source = holding(kind, np.full(4, 7, np.uint8))
    with pytest.raises(ImmutableError, match="read-only memory"):
        transfer([Transfer(source, 0, other, 0, 4), Transfer(source, 0, fixed, 0, 4)])
    assert (raw(other), raw(fixed)) == (bytes(4), bytes(4))


# Storage that fails


@pytest.mark.parametrize("kind", EMPTY)
def test_a_truncated_file_fails_the_move_with_its_path(kind: str, tmp_path: Path) -> None:
    np.arange(100, dtype=np.int32).tofile(tmp_path / "numbers")
    source = FileBacked.open(tmp_path / "numbers", dtype=DType.Int32)
    destination = holding(kind, np.zeros(100, np.int32))
    os.truncate(tmp_path / "numbers", 100)
    with pytest.raises(ShortFileError, match=r"400 bytes were wanted at offset 0, got 100") as caught:
        transfer([Transfer(source, 0, destination, 0, 100)])
    assert caught.value.path == str(tmp_path / "numbers")
    assert io_engine.statistics().bytes_in_flight == 0


def test_a_full_disk_fails_the_move_with_the_path_and_both_lengths(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import resource
        from strideweave.carriers import CPU, FileBacked
        from strideweave.carriers.move import Transfer, dispatch_move
        from strideweave.runtime import AwaitResult, TaskScope
        full = FileBacked().allocate_like(10_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        scope = TaskScope("test")
        try:
            operation = dispatch_move(CPU, FileBacked)()
            scope.start(AwaitResult(), operation.transfer, [Transfer(CPU(9000), 0, full, 0, 9000)]).wait()
        except OSError as error:
            print(error.errno, error.filename == full.path, error.strerror)
    """)
    # -B: a module that it compiled would be cut off by the limit too, and stay so.
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", program],
        env={**os.environ, "STRIDEWEAVE_SPILL_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{errno.EFBIG} True ")
    assert "36000 bytes were to be written at offset 0, got 8192" in done.stdout


# Somebody else's carrier


class Slow(Carrier):
    """Storage that is neither memory nor a file: values in a dictionary."""

    def __init__(self, size: int, dtype: DType = DType.Float32) -> None:
        super().__init__(size, dtype=dtype)
        self.values: dict[int, Any] = {}

    def new_like(self, values: Iterable[Any], *, mutable: bool = True, dtype: DType | None = None) -> Slow:
        raise NotImplementedError

    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> Slow:
        return Slow(size, dtype or self.dtype())

    def _load_slot(self, i: int) -> Any:
        return self.dtype().to_python(self.values.get(i, 0))

    def _store_slot(self, i: int, value: Any) -> None:
        self.values[i] = value

    def _free_storage(self) -> None:
        self.values = {}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("dtype", DType.members(), ids=lambda dtype: dtype.name)
def test_elementwise_moves_values_between_any_two_carriers(kind: str, dtype: DType) -> None:
    values = np.array([1, 0, 1, 1, 0], dtype.numpy)
    there, back = Slow(6, dtype), EMPTY[kind](dtype).allocate_like(5)
    operation = ElementwiseMoveOperation()
    assert run(operation.transfer, [Transfer(holding(kind, values), 0, there, 1, 5)]) is None
    assert run(operation.transfer, [Transfer(there, 0, back, 0, 5)]) is None
    assert raw(back) == np.array([0, *values[:4]], dtype.numpy).tobytes()
    assert (there.version, back.version) == (0, 0)


def test_elementwise_checks_before_it_moves() -> None:
    there = Slow(3)
    with pytest.raises(ValueError, match="Slow with 3 slots"):
        run(
            ElementwiseMoveOperation().transfer,
            [Transfer(CPU(4), 0, there, 0, 1), Transfer(CPU(4), 0, there, 0, 4)],
        )
    assert there.values == {}


def test_memory_operations_serve_any_carrier_in_memory_and_refuse_others() -> None:
    with pytest.raises(NotImplementedError, match="does not live in memory"):
        run(MemoryToMemory().transfer, [Transfer(CPU(1), 0, Slow(1), 0, 1)])


def test_the_hook_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        MoveOperation()  # type: ignore[abstract]
