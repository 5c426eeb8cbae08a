"""Transfers that fail, or wait, when a test says so."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strideweave.carriers.move.registry import dispatch_move, registered_move_operation
from strideweave.flags import as_flag
from strideweave.runtime.await_result import AwaitResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.move.operations import Transfer

__all__ = ["Faults", "Hold", "failing_transfers", "held_transfers"]


@dataclass(slots=True)
class Faults:
    """What became of the transfers of one class pair.

    Attributes:
        left: batches that are still to fail; a test may set it again.
        calls: batches that began.
        failed: batches that were made to fail.
    """

    left: int
    calls: int = 0
    failed: int = 0


@contextmanager
def failing_transfers(
    source_class: type[Carrier],
    destination_class: type[Carrier],
    *,
    times: int = 1,
    error: BaseException | None = None,
    after: bool = False,
) -> Iterator[Faults]:
    """Make the next batches of transfers between two exact classes fail; later ones work again.

    Args:
        source_class: class of the carriers that are read.
        destination_class: class of the carriers that are written.
        times: how many batches fail.
        error: what they raise; None raises an ``OSError`` that says that the disk is full.
        after: fail when the values were copied already, instead of before.

    Raises:
        NotImplementedError: no move is registered for the pair.
    """
    after = as_flag(after, "after")
    real = dispatch_move(source_class, destination_class)
    faults = Faults(times)
    raised = error or OSError(errno.ENOSPC, "a test has filled the disk")

    class Failing(real):  # type: ignore[misc, valid-type]  # a class that is only known now
        """The registered operation, which fails when it is told to."""

        async def transfer(self, transfers: Sequence[Transfer]) -> Sequence[Carrier] | None:
            """Copy all spans, or fail."""
            faults.calls += 1
            doomed = faults.left > 0
            if doomed:
                faults.left -= 1
                faults.failed += 1
            if doomed and not after:
                raise raised
            answer: Sequence[Carrier] | None = await super().transfer(transfers)
            if doomed:
                raise raised
            return answer

    with registered_move_operation(source_class, destination_class, Failing, replace=True):
        yield faults


@dataclass(slots=True)
class Hold:
    """A gate in front of the transfers of one class pair; closed at first.

    Attributes:
        entered: ends when the first batch has come to the gate.
    """

    entered: AwaitResult[None] = field(default_factory=AwaitResult)
    _opened: AwaitResult[None] = field(default_factory=AwaitResult)

    def open(self) -> None:
        """Let every batch through from here on."""
        self._opened._finish()

    async def pass_through(self) -> None:
        """Say that a batch has come, and wait until the gate is open."""
        self.entered._finish()
        await self._opened


@contextmanager
def held_transfers(source_class: type[Carrier], destination_class: type[Carrier]) -> Iterator[Hold]:
    """Make batches of transfers between two exact classes wait, before they copy, until the gate is open.

    The gate opens at the end of the block at the latest.

    Args:
        source_class: class of the carriers that are read.
        destination_class: class of the carriers that are written.

    Raises:
        NotImplementedError: no move is registered for the pair.
    """
    real = dispatch_move(source_class, destination_class)
    hold = Hold()

    class Held(real):  # type: ignore[misc, valid-type]  # a class that is only known now
        """The registered operation, behind a gate."""

        async def transfer(self, transfers: Sequence[Transfer]) -> Sequence[Carrier] | None:
            """Copy all spans once the gate is open."""
            await hold.pass_through()
            answer: Sequence[Carrier] | None = await super().transfer(transfers)
            return answer

    try:
        with registered_move_operation(source_class, destination_class, Held, replace=True):
            yield hold
    finally:
        hold.open()
