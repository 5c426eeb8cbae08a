"""The blocking loops: merging, resuming, caps, errors that name everything."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strideweave.io import positioned
from strideweave.io.files import FileStatistics, OpenFile
from strideweave.io.positioned import (
    FileSpan,
    ShortFileError,
    read_cached_spans,
    read_spans,
    write_spans,
)

CONTENT = np.random.default_rng(7).integers(0, 256, 5000, dtype=np.uint8)


class Recorder:
    """A system call that does the real thing, at most `limit` bytes at once, and remembers its calls."""

    def __init__(self, real: Callable[..., int], limit: int | None = None) -> None:
        self.real = real
        self.limit = limit
        self.calls: list[tuple[int, int, int]] = []  # offset, buffers, bytes asked for

    def __call__(self, fd: int, buffers: list[np.ndarray], offset: int) -> int:
        self.calls.append((offset, len(buffers), sum(buffer.nbytes for buffer in buffers)))
        if self.limit is None:
            return self.real(fd, buffers, offset)
        left, front = self.limit, []
        for buffer in buffers:
            front.append(buffer[:left])
            left -= front[-1].nbytes
        return self.real(fd, front, offset)


@pytest.fixture
def file(tmp_path: Path) -> OpenFile:
    path = tmp_path / "content.bin"
    path.write_bytes(CONTENT.tobytes())
    return OpenFile.open(path, writable=True)


def spans_of(file: OpenFile, ranges: list[tuple[int, int]]) -> list[FileSpan]:
    return [FileSpan(file, start, np.zeros(stop - start, np.uint8)) for start, stop in ranges]


def test_spans_are_filled_from_their_offsets_in_one_call_each(file: OpenFile) -> None:
    spans = spans_of(file, [(4000, 5000), (0, 10), (100, 101)])
    call = Recorder(os.preadv)
    read_spans(spans, call)
    for span in spans:
        assert np.array_equal(span.buffer, CONTENT[span.offset : span.offset + span.buffer.nbytes])
    assert [offset for offset, _, _ in call.calls] == [4000, 0, 100]
    assert file.statistics() == FileStatistics(bytes_read=1011, reads=3)


def test_spans_that_follow_each_other_in_the_file_share_one_call(file: OpenFile) -> None:
    spans = spans_of(file, [(0, 10), (10, 30), (30, 31), (40, 50), (50, 60)])
    call = Recorder(os.preadv)
    read_spans(spans, call)
    assert call.calls == [(0, 3, 31), (40, 2, 20)]
    assert np.array_equal(np.concatenate([span.buffer for span in spans[:3]]), CONTENT[:31])


def test_neighbours_in_different_files_are_not_merged(file: OpenFile, tmp_path: Path) -> None:
    other = OpenFile.create(tmp_path / "other", size=100)
    call = Recorder(os.preadv)
    spans = spans_of(file, [(0, 10)]) + spans_of(other, [(10, 20)])
    read_spans(spans, call)
    assert len(call.calls) == 2
    assert not spans[1].buffer.any()
    assert (file.statistics().reads, other.statistics().reads) == (1, 1)


def test_written_bytes_land_at_their_offsets_and_nowhere_else(file: OpenFile) -> None:
    spans = [
        FileSpan(file, offset, np.full(size, 9, np.uint8)) for offset, size in ((0, 3), (3, 4), (4998, 5))
    ]
    call = Recorder(os.pwritev)
    write_spans(spans, call)
    expected = np.concatenate([CONTENT, np.zeros(3, np.uint8)])
    expected[:7] = expected[4998:] = 9
    assert Path(file.path).read_bytes() == expected.tobytes()
    assert call.calls == [(0, 2, 7), (4998, 1, 5)]
    assert file.statistics() == FileStatistics(bytes_written=12, writes=2)


@pytest.mark.parametrize("ranges", [[], [(10, 10)], [(0, 0), (0, 0)]])
def test_nothing_to_move_calls_nothing(file: OpenFile, ranges: list[tuple[int, int]]) -> None:
    call = Recorder(os.preadv)
    read_spans(spans_of(file, ranges), call)
    assert call.calls == []


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 5000), min_size=2, max_size=12),
    limit=st.integers(1, 700),
    cap=st.integers(1, 900),
    most=st.integers(1, 4),
)
def test_short_calls_are_resumed_wherever_they_stop(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], limit: int, cap: int, most: int
) -> None:
    path = tmp_path_factory.mktemp("short") / "content.bin"
    path.write_bytes(CONTENT.tobytes())
    file = OpenFile.open(path, writable=True)
    points = sorted(cuts)
    ranges = list(itertools.pairwise(points))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positioned, "MAX_CALL_BYTES", cap)
        patch.setattr(positioned, "MAX_BUFFERS", most)
        spans = spans_of(file, ranges)
        call = Recorder(os.preadv, limit)
        read_spans(spans, call)
        assert np.array_equal(np.concatenate([s.buffer for s in spans]), CONTENT[points[0] : points[-1]])
        assert all(asked <= cap and buffers <= most for _, buffers, asked in call.calls)
        copy = OpenFile.create(path.with_name("copy"), size=5000)
        call = Recorder(os.pwritev, limit)
        write_spans([FileSpan(copy, span.offset, span.buffer) for span in spans], call)
        assert all(asked <= cap and buffers <= most for _, buffers, asked in call.calls)
    expected = np.zeros(5000, np.uint8)
    expected[points[0] : points[-1]] = CONTENT[points[0] : points[-1]]
    assert Path(copy.path).read_bytes() == expected.tobytes()


def test_more_buffers_than_one_call_takes_are_spread_over_calls(tmp_path: Path) -> None:
    file = OpenFile.create(tmp_path / "many")
    count = 2 * positioned.MAX_BUFFERS + 3
    data = np.arange(count, dtype=np.uint16)
    pieces = [data[i : i + 1].view(np.uint8) for i in range(count)]
    write_spans([FileSpan(file, 2 * i, piece) for i, piece in enumerate(pieces)])
    back = np.zeros(count, np.uint16)
    read_spans([FileSpan(file, 2 * i, back[i : i + 1].view(np.uint8)) for i in range(count)])
    assert np.array_equal(back, data)
    assert file.statistics() == FileStatistics(2 * count, 2 * count, 3, 3)


def test_a_call_broken_by_a_signal_is_repeated(file: OpenFile) -> None:
    interruptions = iter([True, True, False])

    def interrupted(fd: int, buffers: list[np.ndarray], offset: int) -> int:
        if next(interruptions):
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        return os.preadv(fd, buffers, offset)

    spans = spans_of(file, [(5, 25)])
    read_spans(spans, interrupted)
    assert np.array_equal(spans[0].buffer, CONTENT[5:25])


@pytest.mark.parametrize(("start", "stop", "got"), [(4990, 5010, 10), (5000, 5001, 0), (6000, 6001, 0)])
def test_a_file_that_ends_early_is_an_error_with_path_offset_and_both_lengths(
    file: OpenFile, start: int, stop: int, got: int
) -> None:
    with pytest.raises(ShortFileError, match=rf"{stop - start} bytes .*offset {start}, got {got}") as caught:
        read_spans(spans_of(file, [(start, stop)]))
    error = caught.value
    assert (error.path, error.offset, error.wanted, error.got) == (file.path, start, stop - start, got)
    assert file.path in str(error)
    assert file.statistics().bytes_read == got


def test_a_file_truncated_while_open_is_a_short_file(file: OpenFile) -> None:
    os.truncate(file.path, 100)
    with pytest.raises(ShortFileError, match=r"200 bytes .*offset 50, got 50"):
        read_spans(spans_of(file, [(50, 250)]))


def test_a_full_disk_names_the_path_the_offset_and_both_lengths() -> None:
    file = OpenFile.open("/dev/full", writable=True, any_kind=True)
    with pytest.raises(OSError, match=r"No space left.*4096 bytes .*offset 8192, got 0") as caught:
        write_spans([FileSpan(file, 8192, np.ones(4096, np.uint8))])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")
    assert file.statistics() == FileStatistics()


def test_a_file_size_limit_stops_a_write_half_way_and_says_how_far_it_came(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import resource, sys
        import numpy as np
        from strideweave.io.files import OpenFile
        from strideweave.io.positioned import FileSpan, write_spans
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        file = OpenFile.create(sys.argv[1])
        try:
            write_spans([FileSpan(file, at, np.ones(n, np.uint8)) for at, n in ((0, 4096), (4096, 8192))])
        except OSError as error:
            print(error.errno, error.filename, error.strerror)
    """)
    path = tmp_path / "limited"
    # -B: a module that it compiled would be cut off by the limit too, and stay so.
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(f"{errno.EFBIG} {path} ")
    assert "12288 bytes were to be written at offset 0, got 10000" in done.stdout
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 10_000


def test_a_write_through_a_read_only_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"abc")
    file = OpenFile.open(tmp_path / "kept")
    with pytest.raises(PermissionError, match="open for reading only") as caught:
        write_spans([FileSpan(file, 0, np.ones(1, np.uint8))])
    assert caught.value.filename == str(tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == b"abc"


def test_a_write_that_makes_no_progress_ends(file: OpenFile) -> None:
    with pytest.raises(OSError, match=r"took no more bytes.*got 0"):
        write_spans(spans_of(file, [(0, 4)]), lambda *_: 0)


def test_a_closed_file_is_refused(file: OpenFile) -> None:
    spans = spans_of(file, [(0, 4)])
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        read_spans(spans)


def test_closing_during_a_call_lets_that_call_finish_on_its_own_file(file: OpenFile, tmp_path: Path) -> None:
    number = file.fd

    def closing(fd: int, buffers: list[np.ndarray], offset: int) -> int:
        file.close()
        taken = os.open(tmp_path / "stranger", os.O_RDWR | os.O_CREAT)
        assert taken != number, "the number was given away while the call used it"
        os.close(taken)
        return os.preadv(fd, buffers, offset)

    spans = spans_of(file, [(0, 4)])
    read_spans(spans, closing)
    assert np.array_equal(spans[0].buffer, CONTENT[:4])


def test_a_read_into_read_only_memory_is_refused_by_the_call(file: OpenFile) -> None:
    buffer = np.zeros(4, np.uint8)
    buffer.flags.writeable = False
    with pytest.raises((TypeError, ValueError, BufferError)):
        read_spans([FileSpan(file, 0, buffer)])
    assert not buffer.any()


def test_spans_in_the_page_cache_are_read_without_waiting(file: OpenFile) -> None:
    spans = spans_of(file, [(4000, 5000), (0, 10), (10, 20)])
    assert read_cached_spans(spans) == 3
    for span in spans:
        assert np.array_equal(span.buffer, CONTENT[span.offset : span.offset + span.buffer.nbytes])
    assert file.statistics() == FileStatistics(bytes_read=1020, reads=2)
    assert read_cached_spans([]) == 0


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_reading_from_the_page_cache_stops_where_it_would_have_to_wait(file: OpenFile, code: int) -> None:
    def partly_cached(fd: int, buffers: list[np.ndarray], offset: int) -> int:
        if offset >= 2100:
            raise OSError(code, os.strerror(code))
        return os.preadv(fd, [buffers[0][: 2100 - offset]], offset)

    spans = spans_of(file, [(0, 100), (4000, 4100), (100, 200)])
    assert read_cached_spans(spans, partly_cached) == 1
    assert read_cached_spans(spans_of(file, [(0, 100), (2000, 2200), (0, 100)]), partly_cached) == 1
    assert read_cached_spans(spans_of(file, [(3000, 3001)]), partly_cached) == 0
    assert file.statistics().bytes_read == 200, "what will be read again is counted then"


def test_a_short_file_is_an_error_from_the_page_cache_too(file: OpenFile) -> None:
    with pytest.raises(ShortFileError, match=r"20 bytes .*offset 4990, got 10"):
        read_cached_spans(spans_of(file, [(4990, 5010)]))


def test_what_is_read_past_the_page_cache_is_not_looked_for_in_it(tmp_path):
    path = tmp_path / "both.bin"
    path.write_bytes(bytes(range(256)) * 32)
    cached, direct = OpenFile.open(path), OpenFile.open(path, direct=True)
    if not direct.is_direct:
        pytest.skip(direct.direct_obstacle)
    spans = [FileSpan(file, 0, np.zeros(100, np.uint8)) for file in (cached, direct, cached)]
    assert read_cached_spans(spans) in (0, 1)  # 0 where the system has no such call
    assert read_cached_spans(spans[1:]) == 0
    assert direct.statistics().reads == 0
    assert cached.statistics().reads <= 1


@pytest.mark.parametrize("writing", [False, True])
def test_a_device_with_larger_blocks_than_the_alignment_is_served_through_the_page_cache(tmp_path, writing):
    path = tmp_path / "large-blocks.bin"
    path.write_bytes(bytes(8192) if writing else CONTENT[:4096].tobytes() * 2)
    file = OpenFile.open(path, writable=True, direct=True)
    if not file.is_direct:
        pytest.skip(file.direct_obstacle)
    real, refused = os.pwritev if writing else os.preadv, []

    def call(number: int, buffers: list[np.ndarray], offset: int) -> int:
        if number == file.descriptor().direct:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(number, buffers, offset)

    memory = np.zeros(8192, np.uint8)
    start = -memory.__array_interface__["data"][0] % 4096
    buffer = memory[start : start + 4096]
    buffer[:] = CONTENT[:4096] if writing else 0
    (write_spans if writing else read_spans)([FileSpan(file, 4096, buffer)], call)
    assert np.array_equal(buffer, CONTENT[:4096])
    assert path.read_bytes()[4096:] == CONTENT[:4096].tobytes()
    assert set(refused) == {4096}
