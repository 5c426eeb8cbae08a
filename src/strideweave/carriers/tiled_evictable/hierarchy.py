"""Two tiers and a grid: what a tiled carrier is made of, where its tiles are, and how another one like it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from strideweave.carriers.dependent import DependentCarrier, check_distinct, check_free
from strideweave.carriers.lifecycle import check_slot_count
from strideweave.carriers.move.registry import dispatch_move
from strideweave.carriers.tiled_evictable.adopted import AdoptedStore
from strideweave.carriers.tiled_evictable.memory_limit import check_memory_limit, warm_bytes
from strideweave.carriers.tiled_evictable.slabs import SlabStore
from strideweave.carriers.tiled_evictable.statistics import TiledStatistics
from strideweave.carriers.tiled_evictable.store import PrimaryStore, SecondaryStore
from strideweave.carriers.tiled_evictable.tiers import bind_policy, check_tiers, starting_location
from strideweave.carriers.tiled_evictable.traffic import TileTraffic
from strideweave.carriers.tiled_evictable.unwritten import unwritten_tiles, warn_unwritten
from strideweave.layout.int_tuple import as_integer
from strideweave.tensor import Tensor
from strideweave.tiles.gather import CompactGeometry
from strideweave.tiles.grid import TileGrid
from strideweave.tiles.ledger import LedgerEntry
from strideweave.tiles.one_carrier import begin_serving, end_serving
from strideweave.tiles.residency import Location
from strideweave.tiles.selection import TileSelection, TileSet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from typing import Self

    import numpy as np
    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.dtype import DType
    from strideweave.runtime.await_result import AwaitResult
    from strideweave.tiles.grid import TilePlacement
    from strideweave.tiles.policy import ResidencyPolicy
    from strideweave.tiles.residency import TileState

__all__ = ["TileHierarchy"]

H = TypeVar("H", bound="AwaitResult[Any]")

RECYCLE_BYTES = 8 << 20  # primary storage kept warm for the next tiles, at the most


def _nothing() -> None:
    """What a request does at its end when it holds nothing but tiles."""


class TileHierarchy(DependentCarrier):
    """A flat array over two tiers, cut into tiles, without the requests that move them.

    ``TiledEvictable``, which is the one class of this kind, says what the arguments are and what is refused.
    """

    def __init__(
        self,
        primary: Carrier,
        secondary: Carrier,
        grid_shape: Iterable[int],
        tile_shape: Iterable[int],
        *,
        residency_policy: ResidencyPolicy | None = None,
        memory_limit: int | None = None,
    ) -> None:
        primary, secondary = check_distinct(primary, secondary)
        check_free(primary, secondary)
        check_tiers(primary, secondary)
        grid = TileGrid(cast("Any", grid_shape), cast("Any", tile_shape))  # which makes tuples of them
        starting_location(primary, secondary, grid)
        itemsize = primary.dtype().itemsize
        limit = check_memory_limit(memory_limit, grid.tile_size * itemsize, primary.size() * itemsize)
        classes = (type(primary), type(secondary))
        dispatch_move(*classes)
        dispatch_move(*reversed(classes))
        mutable, writable = primary.is_mutable(), secondary.is_mutable()
        super().__init__(grid.slot_count, dtype=primary.dtype(), mutable=mutable)
        bind_policy(residency_policy, grid, primary.dtype())
        self._primary, self._secondary = primary, secondary
        self._policy = residency_policy
        self._process = os.getpid()
        self._lost = 0  # dirty tiles of a released carrier, that nobody was warned of
        self._placed: tuple[object, int, TilePlacement] | None = None
        self._compacted: tuple[TilePlacement, tuple[int, ...], CompactGeometry] | None = None
        with self._owning(primary, secondary):
            start = starting_location(primary, secondary, grid)  # again: an empty tier may have been filled
            kind = AdoptedStore if start is Location.PRIMARY else SlabStore
            recycle = RECYCLE_BYTES if limit is None else warm_bytes(limit, grid.tile_size * itemsize)
            self._recycle_bytes = min(RECYCLE_BYTES, recycle)
            store: PrimaryStore = kind(primary, grid, self._recycle_bytes, exact=limit is not None)
            self._traffic = TileTraffic(
                grid,
                prototype=primary,
                primary=store,
                secondary=SecondaryStore(secondary, grid, writable=writable),
                classes=classes,
                start=start,
                memory_limit=limit,
            )
            begin_serving(residency_policy, self)

    def release(self) -> None:
        """Give the storage of both tiers back; what is dirty is lost. A second call does nothing.

        ``flush()`` before it writes dirty tiles to the secondary tier. Where that is a file or a store that stays, and
        dirty tiles are lost after all, a ``RuntimeWarning`` says how many.

        Raises:
            OwnershipError: a composite or an unfinished request owns the carrier.
            PendingWorkError: requests of this carrier are unfinished; nothing was released.
        """
        super().release()
        with self._traffic.lock:
            lost, self._lost = self._lost, 0  # of two threads that release, one warns
        warn_unwritten(lost, "released")  # last, for a filter may make an error of the warning

    def __del__(self) -> None:
        traffic = self.__dict__.get("_traffic")  # not there if the constructor has raised
        unwritten = (
            unwritten_tiles(traffic.table, self._secondary, self._process) if traffic is not None else 0
        )
        super().__del__()
        warn_unwritten(unwritten, "dropped without release()")

    # Geometry and tiers

    @property
    def primary(self) -> Carrier:
        """The fast tier that was given to the constructor."""
        return self._primary

    @property
    def secondary(self) -> Carrier:
        """The slow tier that was given to the constructor."""
        return self._secondary

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Tiles along each axis."""
        return self._traffic.grid.grid_shape

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Elements along each axis of one tile."""
        return self._traffic.grid.tile_shape

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Elements along each axis of a full Tensor: ``grid_shape * tile_shape``."""
        return self._traffic.grid.logical_shape

    @property
    def residency_policy(self) -> ResidencyPolicy | None:
        """The policy that was given to the constructor."""
        return self._policy

    @property
    def memory_limit(self) -> int | None:
        """The most bytes that tiles may take in memory; None without a limit."""
        budget = self._traffic.budget
        return None if budget is None else budget.memory_limit

    # Residency

    @property
    def primary_tiles(self) -> TileSet:
        """The tiles whose value is in the primary tier."""
        return self._tiles_at(Location.PRIMARY)

    @property
    def secondary_tiles(self) -> TileSet:
        """The tiles whose value only the secondary tier has."""
        return self._tiles_at(Location.SECONDARY)

    @property
    def valid_tiles(self) -> TileSet:
        """The tiles that have a value."""
        self._require_live()
        with self._traffic.lock:
            return self._tile_set(self._traffic.table.valid())

    @property
    def dirty_tiles(self) -> TileSet:
        """The tiles whose value only the primary tier has."""
        self._require_live()
        with self._traffic.lock:
            return self._tile_set(self._traffic.table.dirty())

    def tile_state(self, coordinate: Iterable[int]) -> TileState:
        """Where one tile is, whether it has a value, and whether only the primary tier has it.

        Args:
            coordinate: an integer for each axis of the grid.

        Raises:
            ReleasedError: the carrier was released.
            TypeError: ``coordinate`` is not an iterable of integers.
            ValueError: it has another rank than the grid, or is out of range.
        """
        self._require_live()
        ordinal = int(TileSet([coordinate]).bind(self._traffic.grid)[0])
        with self._traffic.lock:
            return self._traffic.table.state(ordinal)

    def select(self, axes: Mapping[int, Iterable[int]]) -> TileSelection:
        """Make the selection of the named axes in the caller's order, every other axis full.

        Args:
            axes: for each named axis of the grid, the tile coordinates to take there.

        Raises:
            TypeError: ``axes`` is not a mapping, an axis is not an integer, or its coordinates are not integers.
            ValueError: an axis is out of range, or its coordinates are empty, repeated or out of range.
        """
        grid = self._traffic.grid
        if not isinstance(axes, (dict, Mapping)):  # dict first: asking an abstract class takes longer
            raise TypeError(
                f"axes must be a mapping such as {{0: [7, 2, 19]}}, tiles for each named axis; "
                f"found {type(axes).__name__}"
            )
        rank = len(grid.grid_shape)
        named = {as_integer(axis, "an axis"): coordinates for axis, coordinates in axes.items()}
        for axis in named:
            if not 0 <= axis < rank:
                raise ValueError(f"axis {axis} is not in the grid {grid.grid_shape} of rank {rank}")
        return TileSelection._of_grid(grid, named)

    # The common surface

    def new_like(self, values: Iterable[Any], *, mutable: bool = True, dtype: DType | None = None) -> Self:
        """Make a fresh carrier of the same geometry and tier kinds whose primary tier holds ``values``.

        The result has no policy.

        Raises:
            ValueError: not exactly one value for each slot.
        """
        fresh = super().new_like(values, mutable=mutable, dtype=dtype)
        if not (fresh._primary.size() or fresh._secondary.size()):
            fresh.release()
            raise ValueError(
                f"this geometry has a value for each of {self._traffic.grid.slot_count} slots, found none; "
                "TiledEvictable(...) over two empty tiers starts without values"
            )
        return fresh

    def allocate_like(
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> Self:
        """Make a fresh carrier of the same geometry and tier kinds whose primary tier is allocated.

        Raises:
            TypeError: ``size`` is not an integer.
            ValueError: ``size`` is not the number of slots of the grid.
        """
        slots = self._traffic.grid.slot_count
        if check_slot_count(size) != slots:
            raise ValueError(
                f"this geometry has {slots} slots, not {size}; make a TiledEvictable of another grid"
            )
        return super().allocate_like(size, mutable=mutable, dtype=dtype, empty=empty)

    def statistics(self) -> TiledStatistics:  # type: ignore[override]  # a record of its own, not the common one
        """A frozen record of residency, memory, work under way and traffic since construction."""
        policy = getattr(self._policy, "statistics", None)
        return TiledStatistics.of(
            self._traffic,
            recycle_limit_bytes=self._recycle_bytes,
            pending_requests=self._statistics_fields()["pending"],
            policy=policy() if policy is not None else None,
        )

    # Internal

    @property
    def _compute_class(self) -> type[Carrier]:
        return type(self._primary)

    def _place(self, tensor: object) -> TilePlacement:
        """Check that a Tensor is a full Tensor of this carrier, and say how its elements lie in a tile."""
        self._require_live()
        if not isinstance(tensor, Tensor):
            hint = "; wait() for the handle first" if hasattr(tensor, "wait") else ""
            raise TypeError(f"tensor must be a Tensor, found {type(tensor).__name__}{hint}")
        if tensor.carrier is not self:
            raise TypeError(
                f"tensor is backed by another {type(tensor.carrier).__name__}; "
                "call the method of the carrier that backs it, tensor.carrier"
            )
        placed = self._placed  # the same Layout object comes again with every request
        if placed is not None and placed[0] is tensor.layout and placed[1] == tensor.offset:
            return placed[2]
        placement = self._traffic.grid.place(tensor.layout, tensor.offset)
        self._placed = (tensor.layout, tensor.offset, placement)
        return placement

    def _geometry(self, placement: TilePlacement, selection: TileSelection) -> CompactGeometry:
        """Say where the tiles of a selection go in its compact array."""
        last = self._compacted  # which tiles were selected does not matter, only how many on each axis
        if last is not None and last[0] is placement and last[1] == selection.compact_grid_shape:
            return last[2]
        geometry = CompactGeometry.of(self._traffic.grid, placement, selection)
        self._compacted = (placement, selection.compact_grid_shape, geometry)
        return geometry

    def _start_work(
        self,
        handle: H,
        kind: str,
        enter: Callable[[LedgerEntry], None],
        work: Callable[[LedgerEntry], Awaitable[Any]],
        *,
        then: Callable[[], None] = _nothing,
    ) -> H:
        """Admit a request and start its task; whatever becomes of it, its tiles become free.

        Args:
            handle: the request's fresh handle.
            kind: its name, for messages.
            enter: admits its entry, under the lock; what it raises is raised here, and nothing has changed then.
            work: the coroutine function that does it, given its entry.
            then: also to be run when the request ends, or has not been admitted; must not block.
        """
        entry = LedgerEntry(kind)

        def leave() -> None:
            self._traffic.leave(entry)
            then()

        return self._scope.start(handle, work, entry, enter=partial(enter, entry), cleanup=leave)

    @contextmanager
    def _covering(self, kind: str, ordinals: npt.NDArray[np.int64]) -> Iterator[LedgerEntry]:
        """Cover tiles of a carrier that only the running request knows, as a residency request does."""
        traffic, entry = self._traffic, LedgerEntry(kind)
        try:
            with traffic.lock:
                traffic.cover(entry, ordinals)
            yield entry
        finally:
            traffic.leave(entry)

    def _free_storage(self) -> None:
        end_serving(self._policy, self)
        self._traffic.primary.release()
        self._traffic.secondary.release()
        with self._traffic.lock:
            self._lost += unwritten_tiles(self._traffic.table, self._secondary, self._process)
            self._traffic.table.clear()  # also for whoever counts later, such as the request that released it
            self._traffic.counters.note_released()
        super()._free_storage()

    def _adopt_like(self, values: npt.NDArray[Any], dtype: DType) -> Self:
        return self._compose(self._primary._adopt_like(values, dtype))

    def _fresh(self, start: Location) -> Self:
        """Make a fresh hierarchy of the same geometry and tier kinds, both tiers empty, without a policy.

        Args:
            start: ``Location.NONE`` for tiles without a value, ``Location.IMPLICIT`` for zeros without storage.
        """
        fresh = self._compose(self._primary._empty_like(self.dtype()))
        fresh._traffic.primary.take_scratch()  # most gradients and many results are gone after a step
        if start is Location.IMPLICIT:
            fresh._traffic.table.begin_implicit()
        return fresh

    def _compose(self, primary: Carrier, secondary: Carrier | None = None) -> Self:
        """A carrier of this geometry around another primary tier, and an empty secondary one unless it is given.

        It has the same memory limit. Values of the primary tier that do not fit start in the secondary tier.
        """
        grid, dtype, limit = self._traffic.grid, primary.dtype(), self.memory_limit
        if secondary is None:
            secondary = self._secondary.allocate_like(0, mutable=True, dtype=dtype)
        if limit is not None and primary.size() * dtype.itemsize > limit:
            secondary.release()
            secondary = self._secondary._adopt_like(primary._bytes().view(dtype.numpy), dtype)
            primary = primary.allocate_like(0, mutable=primary.is_mutable(), dtype=dtype)
        return type(self)(primary, secondary, grid.grid_shape, grid.tile_shape, memory_limit=limit)

    def _tiles_at(self, location: Location) -> TileSet:
        self._require_live()
        with self._traffic.lock:
            return self._tile_set(self._traffic.table.located(location))

    def _tile_set(self, ordinals: npt.NDArray[np.int64]) -> TileSet:
        return TileSet._from_ordinals(self._traffic.grid, ordinals)
