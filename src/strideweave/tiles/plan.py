"""What one data request does about residency: a pure function of what it requires and what the policy says.

Spec: *Residency policy can optimize but cannot define correctness*; contract for what it leaves
open. The plan names tiles only; which of them are missing is looked up when the request runs, because other
requests may fetch or drop tiles in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strideweave.tiles.coordinates import NO_ORDINALS
from strideweave.tiles.policy import ResidencyPlan, ResidencyPolicy

if TYPE_CHECKING:
    import numpy.typing as npt

    from strideweave.tiles.grid import TileGrid
    from strideweave.tiles.selection import TileSet

    Ordinals = npt.NDArray[np.int64]

__all__ = ["RequestPlan", "plan_request"]


class RequestPlan(NamedTuple):
    """Tiles by what a request does with them; every field holds distinct ordinals.

    Attributes:
        required: the tiles whose values the request needs, in the request's order.
        passing: required tiles that do not stay: those missing stream past the primary tier, those resident
            are evicted when the request no longer needs them.
        extra: tiles to make primary before the request consumes values, though it does not need them.
        retain: tiles that stay primary until the request is terminal, where they are primary; required ones
            do so anyway.
        early: tiles that the request does not need and that are evicted before anything is fetched, so that
            a policy's bound holds at every instant.
        reads: False for a request that only holds the required tiles, which need no value then: what the policy
            promotes of them is extra.
    """

    required: Ordinals
    passing: Ordinals = NO_ORDINALS
    extra: Ordinals = NO_ORDINALS
    retain: Ordinals = NO_ORDINALS
    early: Ordinals = NO_ORDINALS
    reads: bool = True

    @property
    def staying(self) -> Ordinals:
        """The required tiles that have to be primary and stay, in the request's order."""
        if not self.reads:
            return NO_ORDINALS
        if not len(self.passing):
            return self.required
        if self.passing is self.required:
            return NO_ORDINALS
        return self.required[~self.is_passing()]

    def is_passing(self) -> npt.NDArray[np.bool_]:
        """Tell for each required tile whether it does not stay."""
        if self.passing is self.required:
            return np.ones(len(self.required), np.bool_)
        return np.isin(self.required, self.passing)


def plan_request(
    policy: ResidencyPolicy | None,
    grid: TileGrid,
    required: Ordinals,
    tiles: TileSet,
    purpose: str,
    *,
    reads: bool = True,
) -> RequestPlan:
    """Ask the policy, check its answer and sort it by what the request has to do.

    Without a policy every required tile that is missing is promoted and stays.

    Args:
        policy: the carrier's policy, or None.
        grid: the carrier's grid.
        required: the ordinals that the request needs, in its own order.
        tiles: the same tiles as a set, for the policy.
        purpose: ``"operation"``, ``"projection"``, ``"scatter"`` or ``"backward"``.
        reads: whether the request reads the required tiles.

    Raises:
        TypeError: the policy returned something other than a ResidencyPlan.
        ValueError: the plan names tiles that are not in the grid.
    """
    if policy is None:
        return RequestPlan(required, reads=reads)
    answer: object = policy.plan(tiles, purpose)
    if not isinstance(answer, ResidencyPlan):
        raise TypeError(
            f"{type(policy).__name__}.plan() for {purpose} returned {type(answer).__name__}; "
            "a policy returns a ResidencyPlan"
        )
    # Policies hand the very set they were given back wherever all of it has one fate: the quick way.
    promote, retain, evict = (
        NO_ORDINALS if part is tiles else part.bind(grid)
        for part in (answer.promote, answer.retain, answer.evict)
    )
    passing, early = (required, evict) if answer.evict is tiles else _split(evict, required)
    if reads:
        _, extra = _split(promote, required)
    else:
        extra = required if answer.promote is tiles else promote
    return RequestPlan(required, passing=passing, extra=extra, retain=retain, early=early, reads=reads)


def _split(tiles: Ordinals, required: Ordinals) -> tuple[Ordinals, Ordinals]:
    """The tiles that are required, and those that are not."""
    if not len(tiles):
        return tiles, tiles
    inside = np.isin(tiles, required)
    return tiles[inside], tiles[~inside]
