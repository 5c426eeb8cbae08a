"""The engine on io_uring: short and refused operations, a full ring, forks, and the end of the interpreter."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from strideweave.io import engine as engine_module
from strideweave.io import uring, uring_batch, uring_engine
from strideweave.io.engine import default_engine, make_engine
from strideweave.io.files import OpenFile
from strideweave.io.positioned import FileSpan
from strideweave.io.uring import Ring, why_unavailable
from strideweave.io.uring_batch import COLLECTED_BYTES, PIECE_BYTES
from strideweave.io.uring_engine import UringEngine

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=f"no io_uring: {why_unavailable()}")

MIB = 1 << 20
CONTENT = np.random.default_rng(12).integers(0, 256, 4 * MIB, dtype=np.uint8)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> OpenFile:
    path = tmp_path_factory.mktemp("engine") / "big.bin"
    path.write_bytes(CONTENT.tobytes())
    return OpenFile.open(path)


def tiles_of(file, order, nbytes):
    return [FileSpan(file, k * nbytes, np.zeros(nbytes, np.uint8)) for k in order]


def run(engine, spans, *, writing=False):
    asyncio.run((engine.write if writing else engine.read)(spans))


def check(spans):
    for span in spans:
        assert np.array_equal(span.buffer, CONTENT[span.offset : span.offset + span.buffer.nbytes])


class Tampering(Ring):
    """A ring whose answers are changed on their way."""

    def __init__(self, entries, tamper):
        super().__init__(entries)
        self.tamper, self.answers = tamper, 0

    def reap(self):
        found = super().reap()
        for record in found:
            record["result"] = self.tamper(self.answers, int(record["result"]))
            self.answers += 1
        return found


@pytest.fixture
def tampered(monkeypatch):
    engines = []

    def make(tamper, entries=8):
        monkeypatch.setattr(uring_engine, "Ring", lambda _: Tampering(entries, tamper))
        engine = UringEngine()
        engine._read_cached = lambda spans: 0
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


TAMPERINGS = {
    "a half at a time": lambda count, result: max(1, result // 2) if result > 64 else result,
    "one byte at first": lambda count, result: 1 if count < 20 else result,
    "interrupted": lambda count, result: -errno.EINTR if count % 3 == 0 else result,
    "try again": lambda count, result: -errno.EAGAIN if count < 30 else result,
}


@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS)
@pytest.mark.parametrize("writing", [False, True])
def test_what_moved_less_than_asked_goes_on_where_it_stopped(big, tampered, tmp_path, tamper, writing):
    engine = tampered(tamper)
    if not writing:
        spans = tiles_of(big, range(0, 64, 2), 4096)
        run(engine, spans)
        check(spans)
        return
    file = OpenFile.create(tmp_path / "new")
    run(
        engine,
        [FileSpan(file, k * 4096, CONTENT[k * 4096 : (k + 1) * 4096]) for k in range(64)],
        writing=True,
    )
    assert np.array_equal(np.fromfile(file.path, np.uint8), CONTENT[: 64 * 4096])
    assert file.statistics().bytes_written == 64 * 4096


def test_an_error_tells_path_offset_wanted_and_got(big, tampered):
    answers = iter([1000, -errno.EIO])
    engine = tampered(lambda count, result: next(answers, result))
    with pytest.raises(OSError, match="4096 bytes were to be read at offset 8192, got 1000") as caught:
        run(engine, tiles_of(big, [2], 4096))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, big.path)


def test_after_an_error_what_is_under_way_is_waited_for_and_the_rest_is_left(big, tampered):
    engine = tampered(lambda count, result: -errno.EIO if count == 3 else result)
    spans = tiles_of(big, range(0, 512, 2), 4096)
    with pytest.raises(OSError, match="Input/output error"):
        run(engine, spans)
    assert engine._ring.in_flight == 0
    assert not engine._batches
    assert sum(span.buffer.any() for span in spans) < 100
    spans = tiles_of(big, [0, 5], 4096)
    run(engine, spans)
    check(spans)


def test_a_thousand_errors_make_no_thousand_notes(big, tampered):
    engine = tampered(lambda count, result: -errno.EIO, entries=128)
    with pytest.raises(OSError, match="Input/output error") as caught:
        run(engine, tiles_of(big, range(0, 1000, 2), 4096))
    assert len(caught.value.__notes__) <= 8


def test_an_operation_that_is_answered_try_again_for_ever_leaves_the_loop_to_others(big, tampered):
    refusing = [True]
    engine = tampered(lambda count, result: -errno.EAGAIN if refusing[0] else result)
    spans = tiles_of(big, [0, 2], 1 << 20)

    async def main():
        reading = asyncio.ensure_future(engine.read(spans))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not reading.done()
        refusing[0] = False
        await reading

    asyncio.run(main())
    check(spans)


@pytest.mark.parametrize("entries", [1, 2, 8])
def test_a_small_ring_takes_large_batches_in_turns(big, tampered, entries):
    engine = tampered(lambda count, result: result, entries)
    batches = [tiles_of(big, range(k, 1024, 2), 4096) for k in (0, 1)]

    async def main():
        await asyncio.gather(*(engine.read(batch) for batch in batches))

    asyncio.run(main())
    for batch in batches:
        check(batch)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY])
def test_a_kernel_short_of_memory_is_asked_again(big, tampered, monkeypatch, code):
    engine = tampered(lambda count, result: result)
    real, refusals = uring.system_call, [0]

    def call(number, *arguments):
        if number == 426 and refusals[0] < 5:
            refusals[0] += 1
            raise OSError(code, os.strerror(code))
        return real(number, *arguments)

    monkeypatch.setattr(uring, "system_call", call)
    spans = tiles_of(big, range(0, 64, 2), 4096)
    run(engine, spans)
    check(spans)
    assert refusals == [5]


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY])
@pytest.mark.parametrize("taken", [1, 5])
def test_a_kernel_that_took_a_part_is_asked_again_for_the_rest(big, tampered, monkeypatch, code, taken):
    engine = tampered(lambda count, result: result)
    real, calls = uring.system_call, [0]

    def call(number, fd, count, *arguments):
        calls[0] += 1
        if 1 < calls[0] < 6:
            raise OSError(code, os.strerror(code))
        return real(number, fd, taken if calls[0] == 1 else count, *arguments)

    monkeypatch.setattr(uring, "system_call", call)
    spans = tiles_of(big, range(0, 16, 2), 4096)

    async def main():
        reading = asyncio.ensure_future(engine.read(spans))
        ended, _ = await asyncio.wait([reading], timeout=20)
        while not reading.done():  # so that this test fails, and does not hang
            engine._try_again()
            await asyncio.sleep(0)
        await reading
        return bool(ended)

    assert asyncio.run(main()), "nobody asked again once the answers to the part had come"
    check(spans)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_kernel_that_takes_no_more_ends_the_batches_and_not_the_engine(big, tampered, monkeypatch, after):
    engine = tampered(lambda count, result: result)
    real, calls = uring.system_call, [0]

    def call(number, *arguments):
        calls[0] += number == 426
        if calls[0] > after:
            raise OSError(errno.EPERM, "a filter came")
        return real(number, *arguments)

    batches = [tiles_of(big, range(k, 512, 2), 4096) for k in (0, 1)]

    async def main():
        return await asyncio.gather(*(engine.read(batch) for batch in batches), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(uring, "system_call", call)
        found = asyncio.run(main())
    assert all(isinstance(error, OSError) and "a filter came" in str(error) for error in found)
    assert [error.filename for error in found] == [big.path, big.path]
    assert found[0] is not found[1]  # or each task's traceback and notes would end up in the other's
    assert (engine._ring.in_flight, engine._ring.queued, engine.statistics().bytes_in_flight) == (0, 0, 0)
    run(engine, batches[0])
    check(batches[0])


def test_spans_are_cut_below_what_one_operation_may_move():
    columns = np.array([[3, 10, 4096, 5 << 30], [4, 0, 1 << 40, 7]], np.int64)
    cut = uring_batch._cut(columns)
    assert cut[:, 3].max() == PIECE_BYTES < 0x7FFFF000
    assert len(cut) == (5 << 10) + 1
    first = cut[:-1]
    assert first[:, 3].sum() == 5 << 30
    assert np.array_equal(first[1:, 1], first[:-1, 1] + first[:-1, 3])
    assert np.array_equal(first[:, 2] - 4096, first[:, 1] - 10)
    assert cut[-1].tolist() == [4, 0, 1 << 40, 7]


@pytest.mark.parametrize("pairs", [2, 8])
def test_few_spans_that_follow_each_other_are_moved_as_they_are(big, tampered, pairs):
    """To join them would take longer; of 64, four are few."""
    answers = []
    engine = tampered(lambda count, result: (answers.append(result), result)[1])
    places = [2 * k for k in range(64 - pairs)]
    places = sorted(places + [2 * k + 1 for k in range(pairs)])
    memory = np.zeros(64 * 4096, np.uint8)
    spans = [FileSpan(big, place * 4096, memory[k * 4096 : (k + 1) * 4096]) for k, place in enumerate(places)]
    run(engine, spans)
    assert np.array_equal(memory.reshape(64, -1), CONTENT[: 256 * 4096].reshape(256, -1)[places])
    assert len(answers) == (64 if pairs == 2 else 64 - 2 * pairs)


def test_what_follows_in_file_and_memory_is_one_operation(big, tampered):
    answers = []
    engine = tampered(lambda count, result: (answers.append(result), result)[1])
    memory = np.zeros(256 * 4096, np.uint8)
    spans = [FileSpan(big, k * 4096, memory[k * 4096 : (k + 1) * 4096]) for k in range(256)]
    run(engine, spans)
    assert np.array_equal(memory, CONTENT[: len(memory)])
    assert answers == [MIB]


# Which engine runs


def test_the_variable_names_the_engine(monkeypatch):
    for name in engine_module.ENGINES:
        monkeypatch.setenv("STRIDEWEAVE_IO", name)
        chosen = engine_module._choose()
        assert (chosen.engine.name, chosen.reason) == (name, f"STRIDEWEAVE_IO={name}")
        chosen.close()
    monkeypatch.setenv("STRIDEWEAVE_IO", "carrier pigeon")
    with pytest.raises(ValueError, match="uring, threads, aiofiles; found 'carrier pigeon'"):
        engine_module._choose()


def test_an_engine_that_was_named_and_cannot_run_is_an_error(monkeypatch):
    monkeypatch.setattr(engine_module, "why_unavailable", lambda: "a filter refuses it")
    monkeypatch.setenv("STRIDEWEAVE_IO", "uring")
    with pytest.raises(RuntimeError, match="cannot run here: a filter refuses it"):
        engine_module._choose()
    monkeypatch.setenv("STRIDEWEAVE_IO", "")
    chosen = engine_module._choose()
    assert (chosen.engine.name, chosen.reason) == ("threads", "a filter refuses it")
    chosen.close()


def test_no_room_for_a_ring_falls_back_to_threads(monkeypatch):
    def refuse(fallback):
        raise OSError(errno.ENOMEM, "no locked memory left")

    monkeypatch.delenv("STRIDEWEAVE_IO", raising=False)
    monkeypatch.setattr(engine_module, "UringEngine", refuse)
    chosen = engine_module._choose()
    assert chosen.engine.name == "threads"
    assert "no locked memory left" in chosen.reason
    chosen.close()


def test_the_process_says_which_engine_it_has():
    name = default_engine().name
    found = engine_module.statistics()
    assert found.engine == name
    assert found.reason


def test_make_engine_refuses_what_is_no_engine():
    with pytest.raises(ValueError, match="'nothing'"):
        make_engine("nothing")


# Forks and the end


def in_a_fresh_process(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"STRIDEWEAVE_IO": "uring"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_forked_child_makes_a_ring_of_its_own(big):
    program = """
        import os, sys
        from strideweave import DType, FileBacked, Tensor, row_major
        from strideweave.io.engine import statistics
        carrier = FileBacked.open(sys.argv[1], dtype=DType.UInt8)
        tensor = Tensor(carrier, 0, row_major(carrier.size()))
        first = tensor.numpy().tobytes()
        assert statistics().engine == "uring" and statistics().bytes_read >= carrier.size()
        child = os.fork()
        assert tensor.numpy().tobytes() == first
        if not child:
            assert statistics().bytes_read == carrier.size()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert tensor.numpy().tobytes() == first
        print("fine")
    """
    assert in_a_fresh_process(program, big.path) == "fine\n"


def test_an_operation_under_way_does_not_keep_the_interpreter(tmp_path: Path):
    program = """
        import os
        import numpy as np
        from strideweave.io.engine import default_engine, FileSpan
        from strideweave.io.files import OpenFile
        from strideweave.runtime import lifecycle
        from strideweave.runtime.await_result import AwaitResult
        from strideweave.runtime.task_scope import TaskScope
        lifecycle.EXIT_SECONDS = 0.2
        read_end, _ = os.pipe()
        engine = default_engine()
        engine._read_cached = lambda spans: 0
        span = FileSpan(OpenFile("a pipe", read_end, writable=False), 0, np.zeros(8, np.uint8))
        handle = TaskScope("test").start(AwaitResult(), engine.read, [span])
        while not engine._ring.in_flight:
            pass
        print("fine")
    """
    assert in_a_fresh_process(program) == "fine\n"


def test_an_engine_that_is_closed_while_cached_bytes_are_read_says_so(big):
    engine = UringEngine()

    def close_and_find_nothing(spans):
        engine.close()
        return 0

    engine._read_cached = close_and_find_nothing
    with pytest.raises(RuntimeError, match="closed"):
        run(engine, tiles_of(big, range(2), 4096))
    assert engine.statistics().bytes_in_flight == 0


def test_a_closed_engine_gives_its_descriptors_back():
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    for _ in range(20):
        engine = UringEngine()
        engine.close()
        engine.close()
    assert len({path.name for path in Path("/proc/self/fd").iterdir()} - before) <= 1


@pytest.mark.parametrize(("depth", "most"), [(1, 1), (3, 3), (1000, 32), (None, 32)])
def test_a_file_has_no_more_operations_under_way_than_its_queue_depth(
    tampered, big, monkeypatch, depth, most
):
    file = OpenFile.open(big.path)
    file.queue_depth = depth
    engine = tampered(lambda number, result: result if number % 5 else result // 2, entries=16)
    ring, under_way = engine._ring, []
    prepare = ring.prepare

    def note(entries):
        prepare(entries)
        under_way.append(ring.in_flight)

    monkeypatch.setattr(ring, "prepare", note)
    spans = tiles_of(file, range(0, 256, 2), 4096)
    run(engine, spans)
    check(spans)
    assert ring.answers > len(spans)  # those that moved half were handed over again
    assert min(most, 16) <= max(under_way) <= most


@pytest.fixture
def idle_engine(big):
    """An engine with nothing at the device, and what makes batches for it that are said to be there."""
    engine = UringEngine()

    def under_way(slot, operations, handed_over):
        batch = uring_batch.Batch.moving(tiles_of(big, range(0, 2 * operations, 2), 4096), writing=False)
        batch.begin(slot)
        batch.prepare(SimpleNamespace(prepare=lambda entries: None), handed_over, MIB)
        engine._batches[slot] = batch
        return batch

    yield engine, under_way
    engine._batches.clear()
    engine.close()


def test_answers_are_left_until_they_may_be_all_of_some_batch(idle_engine):
    engine, under_way = idle_engine
    assert not engine._is_enough(0)
    under_way(0, 8, 8)
    assert [engine._is_enough(answers) for answers in (0, 7, 8)] == [False, False, True]
    small = under_way(1, 3, 3)
    assert [engine._is_enough(answers) for answers in (2, 3)] == [False, True]
    small.answer(np.arange(3), np.full(3, 4096))
    del engine._batches[1]
    assert not engine._is_enough(3)


def test_answers_are_taken_early_where_more_is_to_be_handed_over_or_many_wait(idle_engine):
    engine, under_way = idle_engine
    under_way(0, 64, 40)
    assert [engine._is_enough(answers) for answers in (9, 10)] == [False, True]
    for slot in range(1, uring_engine.FEW_BATCHES + 1):
        under_way(slot, 8, 8)
    assert [engine._is_enough(answers) for answers in (0, 1)] == [False, True]


def test_answers_are_taken_as_they_come_where_the_ring_had_no_room(idle_engine):
    engine, under_way = idle_engine
    engine._waiting.append(under_way(0, 64, 64))
    assert [engine._is_enough(answers) for answers in (0, 1)] == [False, True]
    engine._waiting.clear()


@pytest.mark.parametrize(
    ("nbytes", "calls"),
    [
        (4096, [16, 48]),
        (COLLECTED_BYTES, [32, 32]),
    ],
)
def test_an_idle_device_gets_the_first_of_many_small_operations_at_once(big, monkeypatch, nbytes, calls):
    engine = UringEngine()
    engine._read_cached = lambda spans: 0
    handed_over = []
    spans = [FileSpan(big, 0, np.zeros(nbytes, np.uint8)) for _ in range(64)]
    prepare = engine._ring.prepare

    def note(entries):
        handed_over.append(len(entries))
        prepare(entries)

    monkeypatch.setattr(engine._ring, "prepare", note)
    run(engine, spans)
    assert handed_over == calls
    engine.close()


def test_a_large_batch_leaves_turns_to_the_other_tasks_of_its_loop(big, monkeypatch):
    monkeypatch.setattr(uring_engine, "TURN_BYTES", 64 << 10)
    engine = UringEngine()
    engine._read_cached = lambda spans: 0
    spans = tiles_of(big, range(0, 512, 2), 4096)
    turns = 0

    async def main():
        nonlocal turns
        reading = asyncio.ensure_future(engine.read(spans))
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        await reading

    asyncio.run(main())
    check(spans)
    assert turns >= 256 * 4096 // (64 << 10) // 2  # an event may come between, with a turn of its own
    asyncio.run(engine.read(spans))  # in another loop, whatever the last one had left to do
    engine.close()
