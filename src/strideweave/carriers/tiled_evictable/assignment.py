"""``carrier.assign``: whole tiles of a carrier get new values in place, as one public write.

Contract, the conflict table: a write meets unfinished work on any of its tiles, and raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strideweave.carriers.tiled_evictable.filling import TileWriter
from strideweave.carriers.tiled_evictable.scatter import check_compact
from strideweave.carriers.tiled_evictable.tile_values import CompactValues
from strideweave.runtime.await_result import AwaitResult

if TYPE_CHECKING:
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.tensor import Tensor
    from strideweave.tiles.ledger import LedgerEntry
    from strideweave.tiles.selection import TileSelection

__all__ = ["start_assignment"]


def start_assignment(
    carrier: TiledEvictable, compact: Tensor, tensor: Tensor, selection: TileSelection
) -> AwaitResult[None]:
    """Validate an assignment, admit it and start its task; see ``TiledEvictable.assign``."""
    carrier._require_mutable()
    check_compact(carrier, compact, tensor, selection, "tensor")
    carrier._traffic.check_fits("assign", len(selection), 0)
    work = _Assignment(carrier, compact, tensor, selection, object())
    return carrier._start_work(AwaitResult(), "assign", work.enter, work.run, then=work.let_go)


@dataclass(slots=True, eq=False)
class _Assignment:
    """One assignment, from its admission through the runtime's loop; it keeps its carriers alive."""

    carrier: TiledEvictable
    compact: Tensor
    tensor: Tensor
    selection: TileSelection
    token: object

    def enter(self, entry: LedgerEntry) -> None:
        """Take compact and the tiles, or raise; under the lock."""
        carrier = self.carrier
        carrier._require_mutable()  # again: somebody may own it by now
        self.compact.carrier._claim(self.token)
        carrier._traffic.cover(entry, self.selection.bind(carrier._traffic.grid))
        carrier._begin_write(self.token)  # nobody may claim it meanwhile

    def let_go(self) -> None:
        """Give back what was taken of compact, and end the write; the version advanced together with the tiles."""
        self.compact.carrier._abandon(self.token)
        self.carrier._end_write(self.token)

    async def run(self, entry: LedgerEntry) -> None:
        """Write the tiles, all of them or none."""
        carrier = self.carrier
        grid, placement = carrier._traffic.grid, carrier._place(self.tensor)
        values = await CompactValues.of(grid, placement, self.selection, self.compact, beside=carrier.primary)
        await TileWriter(carrier, entry).write(self.selection.bind(grid), values, "replace")
