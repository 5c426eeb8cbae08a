"""``TiledEvictable``: one logical array whose tiles live in a fast or a slow tier, each by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from strideweave.carriers.tiled_evictable.assignment import start_assignment
from strideweave.carriers.tiled_evictable.gradient import check_gradient, copy_gradient, sum_gradients
from strideweave.carriers.tiled_evictable.hierarchy import TileHierarchy
from strideweave.carriers.tiled_evictable.move_admission import TileMove, begin_move
from strideweave.carriers.tiled_evictable.moved_gradient import gradient_of_moved
from strideweave.carriers.tiled_evictable.projection import AwaitProjection, start_projection
from strideweave.carriers.tiled_evictable.residency import AwaitResidency, TiledResidencyFacet
from strideweave.carriers.tiled_evictable.scatter import start_scatter
from strideweave.carriers.tiled_evictable.slots import read_slot, read_slots, write_slot
from strideweave.tiles.ledger import LedgerEntry

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.move.request import AwaitMove
    from strideweave.layout import Layout
    from strideweave.runtime.await_result import AwaitResult
    from strideweave.tensor import Tensor
    from strideweave.tiles.policy import ResidencyPolicy
    from strideweave.tiles.selection import TileSelection, TileSet

__all__ = ["TiledEvictable"]


class TiledEvictable(TileHierarchy):
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

    def __init__(  # of its own, so that what Python says about arguments names a public class
        self,
        primary: Carrier,
        secondary: Carrier,
        grid_shape: Iterable[int],
        tile_shape: Iterable[int],
        *,
        residency_policy: ResidencyPolicy | None = None,
        memory_limit: int | None = None,
    ) -> None:
        super().__init__(
            primary,
            secondary,
            grid_shape,
            tile_shape,
            residency_policy=residency_policy,
            memory_limit=memory_limit,
        )

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
        move one meets a conflict. What unfinished work is about to make dirty is not written. Over a read-only
        secondary tier, such as a file opened without ``mutable=True``, tiles are written to a spill beside it, and
        the file stays as it is.

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
                grid, or the destination is too small or lies in the memory of a tier.
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

    # What carriers of this class do for others

    def _check_tier(self) -> None:
        raise NotImplementedError(
            "a TiledEvictable is no tier of another composite, which could not tell its tiles apart"
        )

    def _begin_move(self, other: type[Carrier], *, reads: bool) -> None:
        self._moving = TileMove(LedgerEntry("move"))
        begin_move(self, self._moving, other, reads=reads)

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

    def _check_gradient(self, tensor: Tensor, gradient: Tensor) -> None:
        check_gradient(self, gradient)

    def _sum_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        return sum_gradients(x, y)

    def _copy_gradient(self, gradient: Tensor) -> Tensor:
        return copy_gradient(gradient)
