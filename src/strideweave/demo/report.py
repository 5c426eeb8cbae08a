"""The demo's report for people and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strideweave.demo.run import DemoReport

__all__ = ["as_json", "as_text"]

_MIB = 1 << 20


def as_json(report: DemoReport) -> str:
    """The whole report as one JSON object; bytes and seconds are plain numbers."""
    return json.dumps(asdict(report) | {"passed": report.passed}, indent=2)


def as_text(report: DemoReport) -> str:
    """The report as lines of text."""
    return "\n".join(_lines(report))


def _lines(report: DemoReport) -> Iterator[str]:
    yield f"model      {report.model}"
    yield (
        f"text       {report.passages} passages and queries encoded as {report.tokens:,} tokens, "
        f"{report.distinct_tokens:,} distinct"
    )
    for query, matches in groupby(report.matches, key=lambda match: match.query):
        yield ""
        yield f"? {query}"
        for match in matches:
            yield f"  {match.score:.3f}  {match.passage}"
    yield ""
    yield (
        f"on disk    {_mib(report.disk_bytes)} in {report.tiles:,} tiles, of a model of "
        f"{_mib(report.model_bytes)} ({_mib(report.small_bytes)} of biases and position rows stay in RAM)"
    )
    yield (
        f"budget     {_mib(report.budget_bytes)}, peak resident {_mib(report.peak_resident_bytes)}; beside it "
        f"at most {_mib(report.peak_compact_bytes)} of gathered matrices and "
        f"{_mib(report.peak_staging_bytes)} of staging"
    )
    yield (
        f"tiles      {report.tiles_gathered:,} gathered: {report.hits:,} hits, {report.misses:,} misses, "
        f"{report.evictions:,} evictions"
    )
    yield f"read       {_mib(report.bytes_read)}, {report.bytes_read / report.disk_bytes:.0%} of the tile file"
    times = report.times
    yield (
        f"time       {times.total:.1f} s encoding: {times.computing:.1f} s computing, {times.fetching:.1f} s "
        f"reading and gathering, {times.both:.1f} s of it both at once; {report.total_seconds:.1f} s in all"
    )
    if report.cosine_mean is not None and report.cosine_min is not None:
        yield (
            f"experts    {report.experts} of 16 blocks a layer; cosine to the full model "
            f"{report.cosine_mean:.4f} on average, {report.cosine_min:.4f} at worst"
        )
    yield ""
    for check in report.checks:
        yield f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.found}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.2f} MiB"
