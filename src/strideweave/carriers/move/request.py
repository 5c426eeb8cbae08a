"""``move`` and ``move_async``: a tensor's storage goes to another carrier, and the old carrier ends.

Contract. Until the transfer has succeeded nothing is published and the source lives; afterwards the
source is released.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from strideweave.autograd.graph import Node, attach
from strideweave.autograd.mode import is_grad_enabled
from strideweave.carriers.base import Carrier
from strideweave.carriers.move.operations import Transfer, run_transfers
from strideweave.carriers.move.registry import dispatch_move
from strideweave.errors import OwnershipError, PendingWorkError, ReleasedError
from strideweave.layout import row_major
from strideweave.runtime.await_result import AwaitResult
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from strideweave.carriers.move.operations import MoveOperation
    from strideweave.layout import Layout

__all__ = ["AwaitMove", "move", "move_async"]

_logger = logging.getLogger("strideweave")


class AwaitMove(AwaitResult[Tensor]):
    """The completion handle of one move, or of one scatter to tiles; its value is the Tensor that comes out.

    Not a Tensor itself: operations refuse it, call ``wait()`` or await it first.
    """

    __slots__ = ()


def move(tensor: Tensor, destination: Carrier) -> Tensor:
    """``move_async(tensor, destination).wait()``: blocks the calling thread."""
    return move_async(tensor, destination).wait()


def move_async(tensor: Tensor, destination: Carrier) -> AwaitMove:
    """Start moving all slots of a tensor's carrier to another carrier, and return the handle.

    Slot ``i`` of the source becomes slot ``i`` of the destination, bit for bit; the Tensor that comes out has
    the same Layout and offset. The destination's version advances once, and the source is released. Until the
    move ends both carriers belong to it: they may be read and nothing else. After a failure the source is what
    it was; the destination's values are unspecified then, so its version has advanced all the same if the
    transfer had begun. The gradient crosses back: it arrives on a fresh carrier of the source's class, tiled as the
    source where that is tiled.

    A tiled source is read tile by tile, wherever they are, and every tile of it must have a value. The tiles of a
    tiled destination become primary and dirty, or go to its secondary tier, clean, where it has a policy or they
    do not all fit its memory limit.

    Args:
        tensor: a Tensor on a live, unowned carrier.
        destination: another live, publicly mutable carrier of the same dtype with at least as many slots, or an
            empty one that can be allocated.

    Returns:
        The handle; its value is the Tensor on the destination.

    Raises:
        TypeError: not a Tensor, not a Carrier, or another dtype.
        ReleasedError: the source or the destination was released.
        OwnershipError: the source is owned.
        ValueError: source and destination are one carrier, or the destination is too small.
        RuntimeError: the destination is owned or not publicly mutable, the source has unfinished work, or one of
            them is evicted.
        NotImplementedError: no move is registered for the two classes.
        InvalidTileError, TileConflictError: a tiled source has tiles without a value, or other work meets the tiles
            of a tiled source or destination; RuntimeErrors both.
    """
    source = _check_source(tensor)
    operation = _check_destination(source, destination)
    wanted = tensor.requires_grad and is_grad_enabled()
    work = _Move(tensor, source, destination, operation, object(), wanted)
    return destination._scope.start(AwaitMove(), work.run, enter=work.enter, cleanup=work.let_go)


def _check_source(tensor: object) -> Carrier:
    if not isinstance(tensor, Tensor):
        hint = "; wait() for the handle first" if isinstance(tensor, AwaitResult) else ""
        raise TypeError(f"move takes a Tensor, found {type(tensor).__name__}{hint}")
    source = tensor.carrier
    if source.is_released():
        raise ReleasedError("the tensor's carrier was released; there is nothing to move")
    if source.is_owned():
        raise OwnershipError("the tensor's carrier is owned by a composite or an unfinished request")
    return source


def _check_destination(source: Carrier, destination: object) -> type[MoveOperation]:
    if not isinstance(destination, Carrier):
        raise TypeError(f"destination must be a Carrier, found {type(destination).__name__}")
    if destination is source:
        raise ValueError("the destination is the carrier that the tensor stands on already")
    destination._require_mutable()
    if destination.dtype() is not source.dtype():
        raise TypeError(
            f"the tensor holds {source.dtype().name} and the destination {destination.dtype().name}; "
            "a move keeps the dtype"
        )
    operation = dispatch_move(type(source), type(destination))
    if destination.size() < source.size() and not destination._can_allocate():
        raise ValueError(
            f"the destination has {destination.size()} slots, the source {source.size()}; pass a larger carrier, "
            "or an empty one to be allocated"
        )
    pending = source._statistics_fields()["pending"]
    if pending:
        raise PendingWorkError(
            f"the tensor's carrier has unfinished requests: {pending}; wait for their handles first",
            pending=pending,
        )
    for carrier in (source, destination):
        carrier._bearer()  # EvictedError where a composite has to be promoted first
    return operation


@dataclass(slots=True, eq=False)
class _Move:
    """One move, from its admission through the runtime's loop."""

    tensor: Tensor
    source: Carrier
    destination: Carrier
    operation: type[MoveOperation]
    token: object
    requires_grad: bool
    moving: list[Carrier] = field(default_factory=list)  # those that know of it

    def enter(self) -> None:
        """Claim both carriers and tell them, or raise; ``let_go`` undoes what was interrupted."""
        source, destination = self.source, self.destination
        source._claim(self.token)
        destination._claim(self.token)
        for carrier, other in ((source, destination), (destination, source)):
            self.moving.append(carrier)
            carrier._begin_move(type(other), reads=carrier is source)

    async def run(self) -> Tensor:
        """Transfer all slots, then publish and release the source."""
        source, destination = self.source, self.destination
        if destination.size() < source.size():
            destination._allocate_in_place(source.size())
        complete = False
        try:
            await run_transfers(self.operation, [Transfer(source, 0, destination, 0, source.size())])
            complete = True
        finally:  # a failure may have changed values too, and graphs that saved them must notice
            destination._advance_version(self.token)
            if not complete:
                await source._undo_move()
        try:
            source._release_as(self.token)  # the last thing that can be refused
        except Exception:
            if not source.is_released():
                raise
            _logger.exception("the storage that a move left could not be freed")  # but the values have moved
        moved = Tensor._of(destination, self.tensor.offset, self.tensor.layout, self.requires_grad)
        if self.requires_grad:
            pullback = partial(_bring_back, source, self.tensor.offset, self.tensor.layout)
            attach(moved, Node("move", (self.tensor,), pullback))
        return moved

    def let_go(self) -> None:
        """Give back what was taken of both carriers, on every path; a released source is left as it is."""
        for carrier in self.moving:
            carrier._finish_move()
        self.source._abandon(self.token)
        self.destination._abandon(self.token)


def _bring_back(source: Carrier, offset: int, layout: Layout, cotangent: Tensor) -> tuple[Tensor]:
    """Bring a copy of a cotangent to the source's class; blocks.

    It becomes what the source's class makes of it, or lies row-major in its shape on a fresh carrier.
    """
    own = source._gradient_of_moved(offset, layout, cotangent)
    if own is not None:
        return (own,)
    carrier, plain = cotangent.carrier, row_major(cotangent.shape)
    if cotangent.layout != plain:
        values = cotangent.numpy(copy=True).reshape(-1)
        return (Tensor._of(source._adopt_like(values, cotangent.dtype), 0, plain, False),)
    fresh = source._allocate_result(cotangent.size)
    operation = dispatch_move(type(carrier), type(fresh))
    transfers = [Transfer(carrier, cotangent.offset, fresh, 0, cotangent.size)]
    fresh._scope.start(AwaitResult[None](), run_transfers, operation, transfers).wait()
    return (Tensor._of(fresh, 0, plain, False),)
