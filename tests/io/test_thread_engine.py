"""The engine: batches, pieces, cancellation, errors, what it counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strideweave.io import piecework, thread_engine
from strideweave.io.aiofiles_engine import AiofilesEngine
from strideweave.io.engine import EngineStatistics
from strideweave.io.files import OpenFile
from strideweave.io.positioned import FileSpan, read_spans
from strideweave.io.thread_engine import ThreadEngine
from strideweave.runtime.thread_role import waiting_is_forbidden
from strideweave.runtime.workers import worker_count

MIB = 1 << 20
CONTENT = np.random.default_rng(11).integers(0, 256, 8 * MIB, dtype=np.uint8)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> OpenFile:
    path = tmp_path_factory.mktemp("engine") / "big.bin"
    path.write_bytes(CONTENT.tobytes())
    return OpenFile.open(path)


@pytest.fixture
def engine() -> Iterator[ThreadEngine]:
    engine = ThreadEngine()
    yield engine
    engine.close()


def spans_of(file: OpenFile, ranges: list[tuple[int, int]]) -> list[FileSpan]:
    return [FileSpan(file, start, np.zeros(stop - start, np.uint8)) for start, stop in ranges]


def tiles_of(file: OpenFile, order: list[int], nbytes: int) -> list[FileSpan]:
    return spans_of(file, [(k * nbytes, (k + 1) * nbytes) for k in order])


class Gate:
    """A blocking move that tells when it has begun and goes on when it is let."""

    def __init__(self, real: Callable[[object], None]) -> None:
        self.real = real
        self.begun = threading.Event()
        self.open = threading.Event()
        self.threads: set[str] = set()

    def __call__(self, spans: object) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.open.wait(30)
        self.real(spans)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 70_000), min_size=1, max_size=50), workers=st.integers(1, 4))
def test_pieces_hold_every_byte_once_in_order(sizes: list[int], workers: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piecework, "SMALLEST_PIECE", 4096)
        patch.setattr(piecework, "LARGEST_PIECE", 16384)
        patch.setattr(piecework, "SMALLEST_SHARED_SPAN", 64)
        memory = np.zeros(sum(sizes), np.uint8)
        spans, start = [], 0
        for size in sizes:
            spans.append(FileSpan(None, start, memory[start : start + size]))  # type: ignore[arg-type]
            start += size
        pieces = piecework.cut_in_pieces(spans, start, workers)
    at = 0
    for span in (span for piece in pieces for span in piece):
        assert span.offset == at
        assert np.shares_memory(span.buffer, memory[at : at + span.buffer.nbytes])
        at += span.buffer.nbytes
    assert at == start
    if workers > 1 and start >= 8192 and start >= 64 * len(sizes):
        assert all(sum(span.buffer.nbytes for span in piece) <= 16384 for piece in pieces)
    else:
        assert len(pieces) == 1


@pytest.fixture
def submitted(engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the engine hands to its worker threads."""
    calls: list[object] = []
    real = engine._pool.post

    def post(call: Callable[[], object]) -> None:
        calls.append(call)
        real(call)

    monkeypatch.setattr(engine._pool, "post", post)
    return calls


def test_a_batch_makes_at_most_one_hop_per_worker(
    big: OpenFile, engine: ThreadEngine, submitted: list[object]
) -> None:
    asyncio.run(engine.read(tiles_of(big, list(range(128)), 65536)))
    assert len(submitted) == worker_count()


@pytest.mark.parametrize(("count", "nbytes"), [(20, 65536), (512, 16384), (2048, 1024)])
def test_batches_that_are_small_or_of_small_spans_take_one_worker(
    big: OpenFile, engine: ThreadEngine, submitted: list[object], count: int, nbytes: int
) -> None:
    asyncio.run(engine.read(tiles_of(big, list(range(count)), nbytes)))
    assert len(submitted) == 1


def test_a_small_batch_in_the_page_cache_is_read_without_a_worker(
    big: OpenFile, engine: ThreadEngine, submitted: list[object]
) -> None:
    spans = tiles_of(big, [3, 1, 2], 16384)
    asyncio.run(engine.read(spans))
    assert [span.buffer.tobytes() for span in spans] == [
        CONTENT[k * 16384 : (k + 1) * 16384].tobytes() for k in (3, 1, 2)
    ]
    assert submitted == []
    assert engine.statistics() == EngineStatistics(1, 3, 3 * 16384, 0, 0, 0)


def test_what_is_not_in_the_page_cache_is_left_to_a_worker(
    big: OpenFile, engine: ThreadEngine, submitted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_engine, "read_cached_spans", lambda spans: (read_spans(spans[:2]), 2)[1])
    spans = tiles_of(big, [3, 1, 2], 16384)
    before = big.statistics()
    asyncio.run(engine.read(spans))
    assert spans[2].buffer.tobytes() == CONTENT[2 * 16384 : 3 * 16384].tobytes()
    assert len(submitted) == 1
    assert big.statistics().bytes_read == before.bytes_read + 3 * 16384
    assert engine.statistics() == EngineStatistics(1, 3, 3 * 16384, 0, 0, 0)


def test_writes_are_never_made_by_the_loop(
    tmp_path: Path, engine: ThreadEngine, submitted: list[object]
) -> None:
    asyncio.run(engine.write([FileSpan(OpenFile.create(tmp_path / "new"), 0, CONTENT[:10])]))
    assert len(submitted) == 1


def test_workers_refuse_to_wait_for_a_handle(
    big: OpenFile, engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(thread_engine, "read_spans_ahead", lambda _: seen.append(waiting_is_forbidden()))
    asyncio.run(engine.read(spans_of(big, [(0, 2 * MIB)])))
    assert set(seen) == {True}


@pytest.mark.parametrize("how", ["task.cancel", "anyio scope"])
def test_a_cancelled_batch_returns_only_when_no_thread_touches_its_buffers(
    big: OpenFile, engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = Gate(thread_engine.read_spans_ahead)
    monkeypatch.setattr(thread_engine, "read_spans_ahead", gate)
    spans = tiles_of(big, list(range(512)), 16384)

    async def reading() -> None:
        await engine.read(spans)

    async def main() -> None:
        if how == "task.cancel":
            task = asyncio.ensure_future(reading())
            cancel = task.cancel
        else:
            scope = anyio.CancelScope()

            async def scoped() -> None:
                with scope:
                    await reading()

            task = asyncio.ensure_future(scoped())
            cancel = scope.cancel
        await asyncio.to_thread(gate.begun.wait)
        for _ in range(3):
            cancel()
            await asyncio.sleep(0)
            assert not task.done()
        assert engine.statistics().bytes_in_flight == 8 * MIB
        gate.open.set()
        await asyncio.wait([task])
        assert task.cancelled() == (how == "task.cancel")

    asyncio.run(main())
    for k, span in enumerate(spans):
        assert np.array_equal(span.buffer, CONTENT[k * 16384 : (k + 1) * 16384])
    assert engine.statistics().bytes_in_flight == 0


def test_buffers_live_until_the_read_is_over(
    big: OpenFile, engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(thread_engine.read_spans_ahead)
    monkeypatch.setattr(thread_engine, "read_spans_ahead", gate)
    sums: list[int] = []

    async def main() -> None:
        root = np.zeros(2 * MIB, np.uint8)
        task = asyncio.ensure_future(engine.read([FileSpan(big, 0, root[:])]))
        await asyncio.to_thread(gate.begun.wait)
        again = root[:]
        del root
        gate.open.set()
        await task
        sums.append(int(again.sum()))

    asyncio.run(main())
    assert sums == [int(CONTENT[: 2 * MIB].sum())]


def test_after_an_error_the_remaining_pieces_are_skipped(
    big: OpenFile, engine: ThreadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def failing(piece: list[FileSpan]) -> None:
        taken.append(piece)
        raise OSError(5, "Input/output error", big.path)

    monkeypatch.setattr(thread_engine, "read_spans_ahead", failing)
    with pytest.raises(OSError, match="Input/output error"):
        asyncio.run(engine.read(tiles_of(big, list(range(8)), MIB)))
    assert 1 <= len(taken) <= worker_count()


@pytest.mark.parametrize("moment", ["before its first step", "while all threads are busy", "at work"])
def test_a_batch_ends_when_what_carries_it_to_the_threads_is_cancelled_cancel(moment: str) -> None:
    engine = AiofilesEngine()
    gate = Gate(lambda _: None)

    async def main() -> None:
        here = asyncio.current_task()
        busy = [engine._pool.submit(gate.open.wait, 30) for _ in range(worker_count())]
        if moment != "while all threads are busy":
            gate.open.set()
            await asyncio.wait([asyncio.wrap_future(each) for each in busy])
            gate.open.clear()
        batch = asyncio.create_task(engine._have_done([lambda: gate([])]))
        await asyncio.sleep(0)
        if moment == "at work":
            await asyncio.to_thread(gate.begun.wait, 30)
        elif moment == "while all threads are busy":
            await asyncio.sleep(0)  # its first step
        for hop in asyncio.all_tasks() - {here, batch}:
            hop.cancel()
        if moment == "at work":
            await asyncio.wait([batch], timeout=0.05)
            assert not batch.done()
            gate.open.set()
        with pytest.raises(RuntimeError, match="to a thread was cancelled"):
            await asyncio.wait_for(batch, 30)
        gate.open.set()

    asyncio.run(main())
    engine.close()
    assert gate.begun.is_set() is (moment == "at work")
