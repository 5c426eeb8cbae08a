"""Moves from and to composites: through the carriers that hold their values at the moment."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from strideweave.carriers.move.operations import MoveOperation, run_transfers
from strideweave.carriers.move.registry import dispatch_move

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strideweave.carriers.move.operations import Transfer

__all__ = ["MoveThroughTiers"]


class MoveThroughTiers(MoveOperation):
    """Replaces each composite by the carrier that bears its values, and hands on to the move of those classes."""

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans; see :meth:`MoveOperation.transfer`.

        Raises:
            EvictedError: a composite's values are not in its primary tier.
            NotImplementedError: no move is registered between the bearing classes.
            RuntimeError: that move returned other carriers than the destinations.
        """
        inner = [
            transfer._replace(source=transfer.source._bearer(), destination=transfer.destination._bearer())
            for transfer in transfers
        ]
        for (source, destination), batch in groupby(
            inner, key=lambda transfer: (type(transfer.source), type(transfer.destination))
        ):
            await run_transfers(dispatch_move(source, destination), list(batch))
