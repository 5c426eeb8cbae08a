"""`TraceRecorder`: a policy that passes every question on to another, and writes down what was asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from strideweave.runtime.locks import short_lock
from strideweave.tiles.one_carrier import OneCarrier, begin_serving, end_serving
from strideweave.tiles.policy import check_and_bind, check_policy
from strideweave.tiles.residency_plan import NO_TILES, ResidencyPlan
from strideweave.tiles.selection import TileSet
from strideweave.tiles.trace import Trace, TraceRequest

if TYPE_CHECKING:
    import os
    from types import TracebackType
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray

    from strideweave.tiles.grid import TileGrid
    from strideweave.tiles.policy import ResidencyPolicy

__all__ = ["TraceRecorder"]


class TraceRecorder(OneCarrier):
    """Record the purpose and the required tiles of every request that another policy plans.

    Give it to a carrier in the place of that policy. It serves one carrier. As a context manager it saves
    the trace to ``path`` at the end of the block, after an exception too. Requests that start at once from
    several threads are recorded in the order in which their plans were made. Requests of which no policy is
    asked, ``promote`` and ``evict``, are not in a trace, nor are those that the policy refuses.

    Args:
        policy: decides; None promotes what is required and keeps it. For operations and backward passes that is
            more than a carrier without a policy keeps: those leave residency as they found it there.
        path: where ``save`` writes, and the end of a ``with`` block; its folder must exist.

    Raises:
        TypeError: ``policy`` has no method ``plan``, or is a class and no object.
        FileNotFoundError: ``path`` lies in a folder that does not exist.
    """

    def __init__(
        self, policy: ResidencyPolicy | None = None, path: str | os.PathLike[str] | None = None
    ) -> None:
        check_policy(policy, "policy")
        self._policy = policy
        self._path = None if path is None else Path(path)
        # Before the run that is to be recorded, not after it.
        if self._path is not None and not self._path.parent.is_dir():
            raise FileNotFoundError(f"the folder of {self._path} does not exist; make it first")
        self._bound: tuple[TileGrid, int] | None = None
        # The sets themselves would keep coordinates that somebody has made.
        self._asked: list[tuple[str, NDArray[np.int64]]] = []

    @property
    def policy(self) -> ResidencyPolicy | None:
        """The policy that decides."""
        return self._policy

    @property
    def trace(self) -> Trace:
        """What was recorded so far.

        Raises:
            RuntimeError: no carrier has told its grid yet.
        """
        with short_lock:
            asked = list(self._asked)
        grid, tile_bytes = self._geometry()
        requests = tuple(
            [TraceRequest(purpose, TileSet._from_ordinals(grid, tiles)) for purpose, tiles in asked]
        )
        return Trace(grid.grid_shape, grid.tile_shape, tile_bytes, requests)

    def bind(self, grid: TileGrid, tile_bytes: int) -> None:
        """Learn the geometry of the carrier that is being constructed, and tell the policy.

        Args:
            grid: the carrier's tile grid.
            tile_bytes: the bytes of one tile.

        Raises:
            ValueError: requests of an earlier carrier are recorded, the recorder or the policy serves a carrier
                that is not released, or the policy other tiles.
        """
        with short_lock:
            self._require_free()
            if self._asked:
                raise ValueError(
                    f"{self!r} has recorded {len(self._asked)} requests of another carrier; "
                    "make one recorder for each carrier"
                )
        check_and_bind(self._policy, grid, tile_bytes, "policy")
        with short_lock:
            self._bound = (grid, tile_bytes)

    def plan(self, required: TileSet, purpose: str) -> ResidencyPlan:
        """Let the policy decide, and record the request unless it raised.

        Raises:
            TypeError: ``required`` is not a `TileSet`.
            ValueError: ``required`` does not fit the carrier's grid.
            RuntimeError: no carrier has told its grid yet.
        """
        if not isinstance(required, TileSet):
            raise TypeError(f"required must be a TileSet, not {type(required).__name__}")
        tiles = required.bind(self._geometry()[0])
        policy = self._policy
        if policy is None:
            plan = ResidencyPlan._disjoint(required, NO_TILES, NO_TILES)
        else:
            plan = policy.plan(required, purpose)
        with short_lock:
            self._asked.append((purpose, tiles))
        return plan

    def statistics(self) -> Any:
        """The statistics of the policy that decides; None where it has none."""
        statistics = getattr(self._policy, "statistics", None)
        return None if statistics is None else statistics()

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write what was recorded so far to a trace file.

        Args:
            path: where to; None is the path that was given to the constructor.

        Raises:
            ValueError: no path was given, here or there.
            RuntimeError: no carrier has told its grid yet.
            OSError: the file cannot be written.
        """
        target = self._path if path is None else path
        if target is None:
            raise ValueError("where to? Give save(), or the recorder, a path")
        self.trace.save(target)

    def _begin_serving(self, carrier: object) -> None:
        with short_lock:
            self._require_free(carrier)  # before the policy serves a carrier that this does not
            begin_serving(self._policy, carrier)
            super()._begin_serving(carrier)

    def _end_serving(self, carrier: object) -> None:
        end_serving(self._policy, carrier)
        super()._end_serving(carrier)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception there may be nothing to save, and the exception matters more.
        if self._path is not None and (self._bound is not None or error is None):
            self.save()

    def __repr__(self) -> str:
        return f"TraceRecorder({'' if self._policy is None else repr(self._policy)})"

    def _geometry(self) -> tuple[TileGrid, int]:
        bound = self._bound
        if bound is None:
            raise RuntimeError(f"{self!r} does not know the tiles yet; give it to a tiled carrier first")
        return bound
