"""Reading ahead: nothing is advised while all is cached, everything behind the first miss is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from strideweave.io import read_ahead
from strideweave.io.files import OpenFile
from strideweave.io.positioned import FileSpan, ShortFileError, read_spans
from strideweave.io.read_ahead import read_spans_ahead

CONTENT = np.random.default_rng(13).integers(0, 256, 1 << 20, dtype=np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> OpenFile:
    CONTENT.tofile(tmp_path / "content.bin")
    return OpenFile.open(tmp_path / "content.bin", writable=True)


def tiles_of(file: OpenFile, order: Sequence[int], nbytes: int) -> list[FileSpan]:
    return [FileSpan(file, k * nbytes, np.zeros(nbytes, np.uint8)) for k in order]


def assert_filled(spans: list[FileSpan]) -> None:
    for span in spans:
        assert np.array_equal(span.buffer, CONTENT[span.offset : span.offset + span.buffer.nbytes])


def test_nothing_is_advised_while_everything_is_in_the_page_cache(file: OpenFile) -> None:
    advised: list[FileSpan] = []
    spans = tiles_of(file, [5, 1, 9], 4096)
    read_spans_ahead(spans, advise=advised.append)
    assert_filled(spans)
    assert advised == []


@pytest.mark.parametrize("cached", [0, 1, 99, 100])
def test_everything_from_the_first_miss_on_is_advised_once_before_it_is_read(
    file: OpenFile, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 10 * 4096)
    advised: list[FileSpan] = []
    ahead: list[int] = []

    def read(spans: Sequence[FileSpan]) -> None:
        assert all(any(span is known for known in advised) for span in spans)
        read_spans(spans)
        done.extend(spans)
        ahead.append(len(advised) - len(done))

    def read_cached(spans: Sequence[FileSpan]) -> int:
        read_spans(spans[:cached])
        return cached

    done: list[FileSpan] = []
    monkeypatch.setattr(read_ahead, "read_spans", read)
    spans = tiles_of(file, np.random.default_rng(1).permutation(100).tolist(), 4096)
    read_spans_ahead(spans, read_cached=read_cached, advise=advised.append)
    assert_filled(spans)
    assert [id(span) for span in advised] == [id(span) for span in spans[cached:]]
    assert max(ahead, default=0) == (10 if cached < 90 else 0)


def test_a_cold_file_is_read_right(file: OpenFile) -> None:
    os.fsync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    spans = tiles_of(file, np.random.default_rng(2).permutation(256).tolist(), 4096)
    read_spans_ahead(spans)
    assert_filled(spans)
    assert file.statistics().bytes_read == 1 << 20


def test_advice_that_the_system_refuses_does_not_fail_the_read(tmp_path: Path) -> None:
    device = OpenFile.open("/dev/zero", any_kind=True)
    spans = [FileSpan(device, 0, np.ones(100, np.uint8))]
    read_spans_ahead(spans, read_cached=lambda _: 0)
    assert not spans[0].buffer.any()


def test_an_error_behind_the_first_miss_names_what_it_should(file: OpenFile) -> None:
    file.truncate(5000)
    with pytest.raises(ShortFileError, match=r"4096 bytes .*offset 4096, got 904"):
        read_spans_ahead(tiles_of(file, [0, 1], 4096)[1:], read_cached=lambda _: 0)
