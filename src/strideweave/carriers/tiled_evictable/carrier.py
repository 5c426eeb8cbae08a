"""``TiledEvictable``: one logical array whose tiles live in a fast or a slow tier, each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np

from strideweave.carriers.dependent import DependentCarrier, check_distinct, check_free
from strideweave.carriers.lifecycle import check_slot_count
from strideweave.carriers.move.registry import dispatch_move
from strideweave.carriers.tiled_evictable.adopted import AdoptedStore
from strideweave.carriers.tiled_evictable.assignment import start_assignment
from strideweave.carriers.tiled_evictable.gradient import check_gradient, copy_gradient, sum_gradients
from strideweave.carriers.tiled_evictable.memory_limit import check_memory_limit, warm_bytes
from strideweave.carriers.tiled_evictable.move_admission import TileMove, begin_move
from strideweave.carriers.tiled_evictable.moved_gradient import gradient_of_moved
from strideweave.carriers.tiled_evictable.projection import AwaitProjection, start_projection
from strideweave.carriers.tiled_evictable.residency import AwaitResidency, TiledResidencyFacet
from strideweave.carriers.tiled_evictable.scatter import start_scatter
from strideweave.carriers.tiled_evictable.slabs import SlabStore
from strideweave.carriers.tiled_evictable.slots import read_slot, read_slots, write_slot
from strideweave.carriers.tiled_evictable.statistics import TiledStatistics
from strideweave.carriers.tiled_evictable.store import PrimaryStore, SecondaryStore
from strideweave.carriers.tiled_evictable.traffic import TileTraffic
from strideweave.errors import ImmutableError
from strideweave.layout.int_tuple import as_integer
from strideweave.tensor import Tensor
from strideweave.tiles.gather import CompactGeometry
from strideweave.tiles.grid import TileGrid
from strideweave.tiles.one_carrier import begin_serving, end_serving
from strideweave.tiles.policy import ResidencyPolicy, check_and_bind
from strideweave.tiles.residency import Location, TileState
from strideweave.tiles.selection import TileSelection, TileSet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from typing import NoReturn, Self

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.move.request import AwaitMove
    from strideweave.dtype import DType
    from strideweave.layout import Layout
    from strideweave.runtime.await_result import AwaitResult
    from strideweave.tiles.grid import TilePlacement
    from strideweave.tiles.ledger import LedgerEntry


__all__ = ["TiledEvictable", "bind_policy"]

H = TypeVar("H", bound="AwaitResult[Any]")

RECYCLE_BYTES = 8 << 20  # primary storage kept warm for the next tiles, at the most


def _nothing() -> None:
    """What a request does at its end when it holds nothing but tiles."""


class TiledEvictable(DependentCarrier):
    """A carrier cut into equal tiles that move between a primary and a secondary tier one by one.

    Tile ``k``, counted first-mode-fastest over ``grid_shape``, owns the slots ``[k * P, (k + 1) * P)`` with
    ``P`` the product of ``tile_shape``. At most one of the tiers holds values, then one for every slot, and
    it is adopted in place: tiles that start in the secondary tier are clean, tiles that start in the primary
    tier are dirty. With two empty tiers every tile starts without a value.

    Both tiers are owned from then on; retained aliases may read them and nothing else. A secondary tier that
    holds the values may be read-only: it stays untouched, and what is written goes to a spill beside it.

    Spec: *TiledEvictable owns one flat logical storage extent*; *Residency state is independent of executable
    selection shape*.

    Args:
        primary: the fast tier, in memory (CPU, Metal or Generic). Its exact class is the compute class.
        secondary: the slow tier; moves must be registered between the two classes in both directions.
        grid_shape: tiles along each axis, integers of at least 1.
        tile_shape: elements along each axis of one tile, integers of at least 1.
        residency_policy: decides what stays primary; None promotes what is required and leaves it.
        memory_limit: bytes that tiles may take in memory at any instant, those being fetched, staged or kept warm
            counted; least recently used tiles leave for others. None is no limit. What is projected, and
            destinations, are the caller's and do not count.

    Raises:
        TypeError: a tier is no Carrier, the primary tier is not in memory, the dtypes differ, a shape is not
            made of integers, the policy has no method ``plan``, or the limit is not an integer.
        ValueError: the tiers are one object, both hold values, or one holds another number of values than the
            grid has slots; the limit is less than a tile, or than the values that the primary tier holds; or the
            policy serves another carrier.
        RuntimeError: a tier is released, owned or, where it must take values, immutable.
        NotImplementedError: no move is registered between the classes.
        MemoryError: there is no room for the bookkeeping of so many tiles.
    """

    _slots_do_io = True
    _dispatch_priority = 1  # beside a dense operand, it is this class that knows how to read tiles
    _moving: TileMove | None = None  # the move that has claimed it
    _gives_views = False  # a raw tiled Tensor takes the operations of its own specification only
    _operation_hint = "project the tiles that it needs with project(), whose result takes every operation"

    def __init_subclass__(cls, **_: Any) -> NoReturn:
        raise TypeError("TiledEvictable is final; compose it instead of subclassing it")

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
        _check_kinds(primary, secondary)
        grid = TileGrid(cast("Any", grid_shape), cast("Any", tile_shape))  # which makes tuples of them
        _starting_location(primary, secondary, grid)
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
        self._placed: tuple[object, int, TilePlacement] | None = None
        self._compacted: tuple[TilePlacement, tuple[int, ...], CompactGeometry] | None = None
        self._own(primary, secondary)
        complete = False
        try:
            start = _starting_location(primary, secondary, grid)  # again: an empty tier may have been filled
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
            complete = True
        finally:
            if not complete:
                self._give_back()

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
        if not isinstance(
            axes, (dict, Mapping)
        ):  # the usual class first: asking an abstract one takes longer
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

    def promote_async(self, tiles: TileSet | TileSelection) -> AwaitResidency:
        """Start making every tile of a set primary, all of them or none.

        Spec: *Residency transitions have asynchronous and blocking forms*.

        Args:
            tiles: the tiles; a selection counts as its tile set.

        Returns:
            A handle that is done when every tile is primary; done at once when they all are already.

        Raises:
            ReleasedError: the carrier was released.
            TypeError: ``tiles`` is neither a TileSet nor a TileSelection.
            ValueError: its rank or a coordinate does not fit the grid.
            InvalidTileError: a tile has no value yet.
            TileConflictError: unfinished work fetches, moves or covers one of the tiles.
            MemoryError: the set could never fit the memory limit.
        """
        return TiledResidencyFacet(self).promote_async(tiles)

    def evict_async(self, tiles: TileSet | TileSelection, *, durable: bool = False) -> AwaitResidency:
        """Start moving every tile of a set out of the primary tier, dirty values to the secondary tier first.

        All of the set leaves or none of it. Its memory goes back to the system, save what is recycled
        (``statistics().recycled_bytes``) and what a caller owns.

        Spec: *Residency transitions have asynchronous and blocking forms*.

        Args:
            tiles: the tiles; a selection counts as its tile set.
            durable: be done only when their values would survive a loss of power, also of tiles that have left
                before; see ``flush_async``.

        Returns:
            A handle that is done when no tile is primary; done at once when none is already, unless durability is
            asked for.

        Raises:
            ReleasedError: the carrier was released.
            TypeError: ``tiles`` is neither a TileSet nor a TileSelection, or ``durable`` no bool.
            ValueError: its rank or a coordinate does not fit the grid.
            InvalidTileError: a tile has no value yet.
            TileConflictError: unfinished work needs, moves or covers one of the tiles.
        """
        return TiledResidencyFacet(self).evict_async(tiles, durable=durable)

    def promote(self, tiles: TileSet | TileSelection) -> None:
        """``promote_async(tiles).wait()``: blocks the calling thread."""
        TiledResidencyFacet(self).promote(tiles)

    def evict(self, tiles: TileSet | TileSelection, *, durable: bool = False) -> None:
        """``evict_async(tiles, durable=durable).wait()``: blocks the calling thread."""
        TiledResidencyFacet(self).evict(tiles, durable=durable)

    def flush_async(self, *, durable: bool = False) -> AwaitResult[None]:
        """Start writing every tile that is dirty now to the secondary tier; it stays primary and becomes clean.

        All of them become clean or none does. Requests that read share the tiles meanwhile; what would change or
        move one meets a conflict. What unfinished work is about to make dirty is not written.

        With ``durable`` everything that the secondary tier holds by then, what was evicted or planned to leave
        before included, survives a loss of power: an ``fdatasync`` of its file or device. A spill file is gone with
        its process all the same, a tier in memory is as durable as memory is, and one of a class of your own as
        its writes are. A tile counts as clean only once it is durable.

        Args:
            durable: whether to wait for the storage itself, instead of the system's cache.

        Returns:
            The handle, whose value is None; done at once where there is nothing to do.

        Raises:
            ReleasedError: the carrier was released.
            TypeError: ``durable`` is no bool.
            TileConflictError: an unfinished residency request or write covers one of the dirty tiles.

        The handle raises what the storage raised, such as the ``OSError`` of a full disk; every tile that was dirty
        is still primary and dirty then.
        """
        return TiledResidencyFacet(self).flush_async(durable=durable)

    def flush(self, *, durable: bool = False) -> None:
        """``flush_async(durable=durable).wait()``: blocks the calling thread."""
        TiledResidencyFacet(self).flush(durable=durable)

    # Projection

    def project(
        self, tensor: Tensor, selection: TileSelection, destination: Carrier | None = None
    ) -> AwaitProjection:
        """Start gathering the selected tiles into one compact dense Tensor, and return its handle.

        Axis ``i`` of the result has ``len(selection.per_axis[i]) * tile_shape[i]`` elements, in the
        selection's order. Its Layout is dense and follows the order inside a source tile, so whole tiles
        stay contiguous where a flat Layout can say it. Values and dtype are the source's, bit for bit.

        Spec: *Project eagerly returns a completion handle for a compact Tensor*.

        Args:
            tensor: a full Tensor backed by this very carrier, its Layout tile-footprint compatible.
            selection: which tiles, axis by axis; ``select`` makes one.
            destination: a carrier of the compute class to write to from slot 0; an empty one is allocated to
                the compact size. It belongs to the request until that is terminal, its version advances once,
                and after a failure its values are what they were. None allocates a fresh one.

        Returns:
            The handle; ``wait()`` or ``await`` gives the compact Tensor, the same object each time.

        Raises:
            ReleasedError: the carrier or the destination was released.
            TypeError: not a Tensor, one of another carrier, not a TileSelection, or a destination of another
                class or dtype.
            ValueError: the Tensor's Layout is not tile-footprint compatible, the selection does not fit the
                grid, or the destination is too small.
            RuntimeError: the destination is owned or not publicly mutable.
            InvalidTileError: a selected tile has no value yet.
            TileConflictError: an unfinished residency request covers one of the tiles.
            MemoryError: the tiles that are to be primary for it could never fit the memory limit.
        """
        return start_projection(self, tensor, selection, destination)

    # Scatter and whole writes

    def scatter(  # type: ignore[override]  # the asynchronous counterpart of project, not the write of plain carriers
        self,
        compact: Tensor,
        template: Tensor,
        selection: TileSelection,
        reduction: Literal["replace", "add"] = "replace",
    ) -> AwaitMove:
        """Start making a fresh full Tensor with the values of a compact one at the selected tiles.

        The result has the shape, Layout, dtype, geometry and tier kinds of ``template``, on a fresh carrier without
        a policy. Its selected tiles are valid, dirty and primary, the others have no value; its version is 1.
        Neither input changes. ``"replace"`` keeps every bit of ``compact`` and reads nothing of ``template``;
        ``"add"`` adds as the operation ``add`` does, promotes the tiles of ``template`` that are missing and leaves
        them there. With a policy, that decides; its purpose is ``"scatter"``.

        Until the request is terminal, ``compact``'s carrier belongs to it: it may be read and nothing else.

        The gradient of ``compact`` is the cotangent at the selected tiles. So is that of a template that was added
        to; one that was replaced gets none.

        Spec: *Scatter is the asynchronous projection counterpart*; *Scatter participates in autograd*.

        Args:
            compact: a Tensor on a carrier of the compute class, with the shape that ``project`` would give and any
                Layout.
            template: a full Tensor backed by this very carrier, its Layout tile-footprint compatible.
            selection: which tiles, axis by axis.
            reduction: ``"replace"`` or ``"add"``.

        Returns:
            The handle; ``wait()`` or ``await`` gives the full Tensor, the same object each time.

        Raises:
            ReleasedError: this carrier or compact's was released.
            TypeError: not a Tensor, a compact one of another class or dtype, a template of another carrier, or
                not a TileSelection.
            ValueError: the template's Layout is not tile-footprint compatible, the selection does not fit the grid,
                compact has another shape, or there is no such reduction.
            OwnershipError: compact's carrier is owned by a composite or an unfinished request.
            InvalidTileError: a tile that is added to has no value yet.
            TileConflictError: an unfinished residency request or write covers one of the tiles.
            MemoryError: the tiles of the template that are to be primary for it could never fit the memory limit.
        """
        return start_scatter(self, compact, template, selection, reduction)

    def assign(self, compact: Tensor, tensor: Tensor, selection: TileSelection) -> AwaitResult[None]:
        """Start giving the selected tiles of a full Tensor new values in place, all of them or none.

        It is one public write of whole tiles, such as the step of an optimizer: the version advances once, a graph
        that saved the tensor becomes stale, and nothing is differentiated. Afterwards the tiles are valid, dirty
        and primary, wherever and whatever they were before; nothing is fetched for it and no policy is asked.

        Until the request is terminal, ``compact``'s carrier belongs to it: it may be read and nothing else.

        Args:
            compact: the values, as for ``scatter``.
            tensor: a full Tensor backed by this very carrier, its Layout tile-footprint compatible.
            selection: which tiles, axis by axis.

        Returns:
            The handle, whose value is None.

        Raises:
            ReleasedError: this carrier or compact's was released.
            OwnershipError, ImmutableError: this carrier refuses public writes, or compact's is owned.
            TypeError, ValueError: as ``scatter``.
            TileConflictError: unfinished work needs, moves or covers one of the tiles.
            MemoryError: the tiles together could never fit the memory limit; write fewer at a time.
        """
        return start_assignment(self, compact, tensor, selection)

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
        traffic = self._traffic
        fields = self._statistics_fields()
        policy = getattr(self._policy, "statistics", None)
        policy_statistics = policy() if policy is not None else None
        with traffic.lock:
            counters, ledger = traffic.counters, traffic.ledger
            return TiledStatistics(
                tile_count=traffic.grid.tile_count,
                tile_bytes=traffic.tile_bytes,
                resident_tiles=traffic.table.resident_count,
                resident_bytes=counters.reserved_tiles * traffic.tile_bytes,
                peak_resident_bytes=counters.peak_tiles * traffic.tile_bytes,
                dirty_tiles=len(traffic.table.dirty()),
                recycled_bytes=traffic.primary.recycled_bytes,
                recycle_limit_bytes=self._recycle_bytes,
                staging_bytes=counters.staging_bytes,
                peak_staging_bytes=counters.peak_staging_bytes,
                aside_bytes=counters.aside_bytes,
                peak_aside_bytes=counters.peak_aside_bytes,
                memory_limit_bytes=self.memory_limit,
                memory_bytes=traffic.memory_bytes,
                peak_memory_bytes=counters.peak_memory_bytes,
                waiting_requests=0 if traffic.budget is None else traffic.budget.waiting,
                in_flight_bytes=counters.in_flight_bytes,
                pinned_tiles=int(np.count_nonzero((ledger.needed > 0) | ledger.changing | ledger.moving)),
                pending_requests=fields["pending"],
                put_off_evictions=len(counters.put_off),
                hits=counters.hits,
                misses=counters.misses,
                shared=counters.shared,
                streamed=counters.streamed,
                promotions=counters.promotions,
                evictions=counters.evictions,
                failed_evictions=counters.failed_evictions,
                bytes_read=counters.bytes_read,
                bytes_written=counters.bytes_written,
                policy=policy_statistics,
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
        enter: Callable[[], LedgerEntry],
        work: Callable[[LedgerEntry], Awaitable[Any]],
        *,
        then: Callable[[], None] = _nothing,
    ) -> H:
        """Admit a request and start its task; whatever becomes of it, its tiles become free.

        Args:
            handle: the request's fresh handle.
            enter: admits it, under the lock; what it raises is raised here, and nothing has changed then.
            work: the coroutine function that does it, given its entry.
            then: also to be run when an admitted request ends; must not block.
        """
        admitted: list[LedgerEntry] = []

        def leave() -> None:
            self._traffic.leave(admitted[0])
            then()

        return self._scope.start(
            handle,
            lambda: work(admitted[0]),
            enter=lambda: admitted.append(enter()),
            cleanup=leave,
        )

    @contextmanager
    def _covering(self, kind: str, ordinals: npt.NDArray[np.int64]) -> Iterator[LedgerEntry]:
        """Cover tiles of a carrier that only the running request knows, as a residency request does."""
        traffic = self._traffic
        with traffic.lock:
            entry = traffic.cover(kind, ordinals)
        try:
            yield entry
        finally:
            traffic.leave(entry)

    def _check_tier(self) -> None:
        raise NotImplementedError(
            "a TiledEvictable is no tier of another composite, which could not tell its tiles apart"
        )

    def _begin_move(self, other: type[Carrier], *, reads: bool) -> None:
        self._moving = begin_move(self, other, reads=reads)

    async def _undo_move(self) -> None:
        if self._moving is not None:
            await self._moving.undo(self._traffic)

    def _finish_move(self) -> None:
        moving, self._moving = self._moving, None
        if moving is not None:
            self._traffic.leave(moving.entry)

    def _gradient_of_moved(self, offset: int, layout: Layout, cotangent: Tensor) -> Tensor:
        return gradient_of_moved(self, offset, layout, cotangent)

    def _load_slot(self, i: int) -> bool | int | float:
        return read_slot(self, i)

    def _store_slot(self, i: int, value: npt.NDArray[Any]) -> None:
        write_slot(self, i, value)

    def _read_slots(self, start: int, slots: int) -> npt.NDArray[Any]:
        self._require_live()
        return read_slots(self, start, slots)

    def _free_storage(self) -> None:
        end_serving(self._policy, self)
        self._traffic.primary.release()
        self._traffic.secondary.release()
        with self._traffic.lock:
            self._traffic.table.clear()  # also for whoever counts later, such as the request that released it
            self._traffic.counters.note_released()
        super()._free_storage()

    def _adopt_like(self, values: npt.NDArray[Any], dtype: DType) -> Self:
        return self._compose(self._primary._adopt_like(values, dtype))

    def _check_gradient(self, tensor: Tensor, gradient: Tensor) -> None:
        check_gradient(self, gradient)

    def _sum_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        return sum_gradients(x, y)

    def _copy_gradient(self, gradient: Tensor) -> Tensor:
        return copy_gradient(gradient)

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


def bind_policy(policy: object, grid: TileGrid, dtype: DType) -> None:
    """Check a policy, and tell one that wants to know what its tiles are.

    Raises:
        TypeError: it has no method ``plan``, or is a class and no object.
        ValueError: it serves a carrier, or was bound to tiles of another size before.
    """
    check_and_bind(policy, grid, grid.tile_size * dtype.itemsize, "residency_policy")


def _check_kinds(primary: Carrier, secondary: Carrier) -> None:
    if primary.dtype() is not secondary.dtype():
        raise TypeError(
            f"the primary tier holds {primary.dtype().name} and the secondary {secondary.dtype().name}; "
            "both tiers must have one dtype"
        )
    if secondary.size() == 0 and not secondary.is_mutable():
        raise ImmutableError("the secondary tier is empty and immutable, so it could never keep a tile")
    try:
        primary._bytes()
    except NotImplementedError:
        raise TypeError(
            f"the primary tier computes, so it must be in memory; {type(primary).__name__} is not"
        ) from None


def _starting_location(primary: Carrier, secondary: Carrier, grid: TileGrid) -> Location:
    sizes = (primary.size(), secondary.size())
    if all(sizes):
        raise ValueError(
            f"both tiers hold values ({sizes[0]} and {sizes[1]} slots); at most one of them may, "
            "so that every tile has one value"
        )
    for name, size in zip(("primary", "secondary"), sizes, strict=True):
        if size not in (0, grid.slot_count):
            raise ValueError(
                f"the {name} tier holds {size} values; the grid {grid.grid_shape} of tiles {grid.tile_shape} "
                f"has {grid.slot_count} slots"
            )
    if sizes[0]:
        return Location.PRIMARY
    return Location.SECONDARY if sizes[1] else Location.NONE
