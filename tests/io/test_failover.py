"""What happens where the kernel refuses io_uring once it has worked: threads take over, or it is an error."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from strideweave.io import engine as engine_module
from strideweave.io import uring
from strideweave.io.engine import make_engine
from strideweave.io.files import OpenFile
from strideweave.io.positioned import FileSpan, ShortFileError
from strideweave.io.thread_engine import ThreadEngine
from strideweave.io.uring import why_unavailable
from strideweave.io.uring_batch import RefusedError
from strideweave.io.uring_engine import UringEngine

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=f"no io_uring: {why_unavailable()}")

CONTENT = np.random.default_rng(13).integers(0, 256, 2 << 20, dtype=np.uint8)
CODES = [errno.EPERM, errno.ENOMEM, errno.ENOSYS]


@pytest.fixture(params=[False, True], ids=["through the cache", "past the cache"])
def file(request, tmp_path):
    path = tmp_path / "content.bin"
    path.write_bytes(CONTENT.tobytes())
    return OpenFile.open(path, writable=True, direct=request.param)


@pytest.fixture
def refuse(monkeypatch):
    """Have the kernel refuse every entry into a ring but the first ones, until told to stop."""

    def begin(code, after=0):
        real, entered = uring.system_call, [0]
        patch = pytest.MonkeyPatch()

        def call(number, *arguments):
            if number == 426:
                entered[0] += 1
                if entered[0] > after:
                    raise OSError(code, os.strerror(code))
            return real(number, *arguments)

        patch.setattr(uring, "system_call", call)
        patches.append(patch)
        return patch.undo

    patches = []
    yield begin
    for patch in patches:
        patch.undo()


@pytest.fixture
def engine():
    made = UringEngine(ThreadEngine())
    made._read_cached = lambda spans: 0  # so that the ring is asked for what is in the page cache too
    yield made
    made.close()


def aligned(nbytes):
    memory = np.zeros(nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + nbytes]


def batch_of(file, nbytes=8192):
    """Every second piece of the file, so that none follows another."""
    memory = aligned(len(CONTENT))
    return [FileSpan(file, at, memory[at : at + nbytes]) for at in range(0, len(CONTENT), 2 * nbytes)]


def check(spans):
    for _, offset, buffer in spans:
        assert np.array_equal(buffer, CONTENT[offset : offset + buffer.nbytes])


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("after", [0, 1])
def test_threads_do_what_the_kernel_refuses(engine, refuse, file, code, after):
    stop = refuse(code, after)
    batches = [batch_of(file, nbytes) for nbytes in (8192, 16384, 32768)]

    async def main():
        await asyncio.gather(*[engine.read(batch) for batch in batches])
        await engine.write(batches[0])
        await engine.persist(file)

    asyncio.run(main())
    for batch in batches:
        check(batch)
    found = engine.statistics()
    taken = len(batches) + 2 - found.failed_over  # the kernel had some before it refused
    assert taken in ((0,) if after == 0 else (0, 1))
    assert errno.errorcode[code] in found.refusal
    assert (found.batches, found.errors, found.persists, found.bytes_in_flight) == (4, 0, 1, 0)
    assert found.bytes_read == 3 << 20
    assert (engine._ring.in_flight, engine._ring.queued) == (0, 0)
    stop()
    again = batch_of(file)
    asyncio.run(engine.read(again))
    check(again)
    assert engine.statistics().failed_over == found.failed_over  # each batch tries the ring first


def test_the_threads_own_error_is_the_error(engine, refuse, file):
    refuse(errno.EPERM)
    spans = [*batch_of(file), FileSpan(file, len(CONTENT) - 10, np.zeros(4096, np.uint8))]
    with pytest.raises(ShortFileError):
        asyncio.run(engine.read(spans))
    found = engine.statistics()
    assert (found.failed_over, found.errors, found.bytes_in_flight) == (1, 1, 0)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_an_engine_that_was_asked_for_is_not_replaced(refuse, file, code):
    engine = make_engine("uring")
    engine._read_cached = lambda spans: 0
    refuse(code)
    for attempt in (lambda: engine.read(batch_of(file)), lambda: engine.persist(file)):
        with pytest.raises(RefusedError, match="takes no more of this io_uring") as caught:
            asyncio.run(attempt())
        assert (caught.value.errno, caught.value.filename) == (code, file.path)
    found = engine.statistics()
    assert (found.failed_over, found.errors, found.persists, found.refusal) == (0, 2, 0, "")
    engine.close()


def test_only_an_engine_that_nobody_named_has_a_replacement(monkeypatch):
    monkeypatch.setenv("STRIDEWEAVE_IO", "uring")
    named = engine_module._choose()
    monkeypatch.setenv("STRIDEWEAVE_IO", "")
    chosen = engine_module._choose()
    assert named.engine._fallback is None
    assert isinstance(chosen.engine._fallback, ThreadEngine)
    named.close()
    chosen.close()


PROGRAM = """
import ctypes, os, struct, sys
import numpy as np
import strideweave as sw
from strideweave.io import engine
from strideweave.runtime.await_result import AwaitResult
from strideweave.runtime.event_loop import current_runtime

def forbid():  # seccomp(2): io_uring_enter (426) answers EPERM in this thread from now on
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, 426), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    words = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(words)))
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0)
    over._finish(ctypes.get_errno() if refused else 0)

values = np.arange(1 << 20, dtype=np.float32)
slow = sw.FileBacked().new_like(values)
carrier = sw.TiledEvictable(sw.CPU(0), slow, (16, 1), (1, 1 << 16))
carrier.promote(sw.TileSet([(0, 0)]))
before = engine.statistics()
assert (before.engine, before.failed_over) == ("uring", 0), before
over = AwaitResult()
current_runtime().post(forbid)
if over.wait(10):
    print("no filter")
    sys.exit()
tensor = sw.Tensor(carrier, 0, sw.row_major(16, 1 << 16))
for row in range(16):
    os.posix_fadvise(slow._file()[0].fd, 0, 0, os.POSIX_FADV_DONTNEED)
    found = carrier.project(tensor, carrier.select({0: [row]})).wait(20).numpy().ravel()
    assert (found == values.reshape(16, -1)[row]).all()
carrier[0] = 5.0
carrier.evict(carrier.select({}), durable=True)
assert carrier[0] == 5.0
found = engine.statistics()
assert found.failed_over > 0 and found.errors == 0 and found.bytes_in_flight == 0, found
print(found.engine, "|", found.reason)
"""


def test_a_filter_that_comes_later(tmp_path):
    """A real seccomp filter on the thread that has the ring, as a container's manager may put one there."""
    environment = os.environ | {"STRIDEWEAVE_IO": "", "STRIDEWEAVE_SPILL_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    if done.stdout == "no filter\n":
        pytest.skip("this system lets a process install no filter")
    assert done.stdout.startswith(
        "uring | io_uring works in this process; later the threads took over, batches: "
    )
    assert "EPERM" in done.stdout
