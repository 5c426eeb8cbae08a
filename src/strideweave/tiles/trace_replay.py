"""`replay`: what a policy would have done about the requests of a trace, without a carrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strideweave.tiles.plan import plan_request
from strideweave.tiles.policy import check_and_bind
from strideweave.tiles.trace import Trace

if TYPE_CHECKING:
    from strideweave.tiles.plan import RequestPlan
    from strideweave.tiles.policy import ResidencyPolicy

__all__ = ["ReplayReport", "replay"]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What became of the requests of a trace; counts of tiles unless said otherwise.

    Attributes:
        requests: the number of requests.
        required: tiles required, each request's counted anew.
        hits: required tiles that were resident when their request began.
        misses: required tiles that were not.
        streamed: of the misses, those that passed the primary tier by.
        extra: tiles promoted although the request did not require them.
        evictions: resident tiles that a plan evicted.
        peak_resident: the most tiles that were resident at one instant.
        resident: tiles resident at the end.
        bytes_read: bytes that the slow tier would have had to give: of the misses and of ``extra``.
    """

    requests: int
    required: int
    hits: int
    misses: int
    streamed: int
    extra: int
    evictions: int
    peak_resident: int
    resident: int
    bytes_read: int

    @property
    def hit_rate(self) -> float:
        """The share of the required tiles that were resident, 0 to 1; 0 when none was required."""
        return self.hits / self.required if self.required else 0.0


def replay(trace: Trace, policy: ResidencyPolicy | None) -> ReplayReport:
    """Ask a policy about the requests of a trace, one after the other, and keep the books.

    Residency follows from the plans alone, by the rules by which a carrier carries them out. At the beginning
    every tile lies in the slow tier and has a value. Each request is over before the next begins, so what
    requests at the same time share, or put off, does not show. Neither does what else a trace does not tell:
    writes, that a scatter which replaces tiles reads none, that an operation may look at a tile more than once.

    Args:
        trace: the requests.
        policy: a fresh one: it is told the trace's grid, and remembers what it has decided. None keeps
            everything.

    Raises:
        TypeError: ``trace`` is no `Trace`, ``policy`` is no policy, or a plan is no `ResidencyPlan`.
        ValueError: the policy serves a carrier, or served other tiles before, or a plan does not fit the grid. A note
            on an error about a plan, or on one that the policy raised, names the request.
    """
    if not isinstance(trace, Trace):
        raise TypeError(
            f"trace must be a Trace, found {type(trace).__name__}; Trace.load(path) reads one from a file"
        )
    check_and_bind(policy, trace.grid, trace.tile_bytes, "policy")
    primary = _Primary(trace.grid.tile_count)
    for number, request in enumerate(trace.requests, start=1):
        required = request.tiles.bind(trace.grid)
        try:
            plan = plan_request(policy, trace.grid, required, request.tiles, request.purpose)
        except Exception as error:  # whatever the policy raises
            error.add_note(f"request {number} of the trace, {request.purpose} of {len(required)} tiles")
            raise
        primary.carry_out(plan)
    return ReplayReport(
        requests=len(trace.requests),
        required=primary.hits + primary.misses,
        hits=primary.hits,
        misses=primary.misses,
        streamed=primary.streamed,
        extra=primary.extra,
        evictions=primary.evictions,
        peak_resident=primary.peak,
        resident=primary.count,
        bytes_read=(primary.misses + primary.extra) * trace.tile_bytes,
    )


class _Primary:
    """A primary tier without memory."""

    def __init__(self, tile_count: int) -> None:
        self.resident = np.zeros(tile_count, np.bool_)
        self.count = self.peak = 0
        self.hits = self.misses = self.streamed = self.extra = self.evictions = 0

    def carry_out(self, plan: RequestPlan) -> None:
        """Do what a carrier does about one request that nothing else disturbs."""
        self._evict(plan.early)
        there = self.resident[plan.required]
        passing = plan.is_passing()
        self.hits += int(np.count_nonzero(there))
        self.misses += int(np.count_nonzero(~there))
        self.streamed += int(np.count_nonzero(passing & ~there))
        self._fetch(plan.required[~there & ~passing])
        absent = plan.extra[~self.resident[plan.extra]]
        self.extra += len(absent)
        self._fetch(absent)
        self.peak = max(self.peak, self.count)
        self._evict(plan.passing)

    def _fetch(self, absent: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        self.resident[absent] = True
        self.count += len(absent)

    def _evict(self, tiles: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        leaving = int(np.count_nonzero(self.resident[tiles]))
        self.resident[tiles] = False
        self.count -= leaving
        self.evictions += leaving
