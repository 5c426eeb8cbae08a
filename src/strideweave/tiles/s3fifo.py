"""`S3FIFO`: a policy that a scan over all tiles cannot flush.

Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction",
SOSP 2023, algorithm 1. What comes for the first time enters a small queue; only what is required again on
its way through that queue, or soon after, reaches the main one. A scan passes through the small queue and
leaves the main one alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Never

from strideweave.tiles.policy_base import BoundedPolicy, Key

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from strideweave.tiles.residency_plan import ResidencyPlan
    from strideweave.tiles.selection import TileSet

__all__ = ["S3FIFO"]

_SMALL_SHARE = 10  # the small queue's share of the bound is one in this many
_MOST_USES = 3  # what two bits count to


class S3FIFO(BoundedPolicy):
    """Keep what is required again and again, up to a bound; what is required once passes through.

    New tiles enter a small queue of a tenth of the bound. A tile that is required twice more on its way
    through it moves on to the main queue; any other leaves, and is remembered by number for a while: required
    again in that time, it enters the main queue at once. At the end of the main queue a tile that was
    required meanwhile goes round again, up to three times. Nothing leaves while there is room.

    A plan requires a set. Its tiles count as required in ascending order, none of those that are resident
    leaves in that plan, and a tile that would come and go within it streams past the primary tier. So a
    request larger than the bound streams the rest, and takes from others no more than a scan would. A plan
    costs time in proportion to its tiles, on the average over the plans. A bound of 0 tiles, or of fewer bytes
    than one tile has, streams everything.

    Args:
        max_tiles: the most tiles to keep resident; or
        max_bytes: the most bytes of tiles to keep resident. The carrier tells the size of a tile (``bind``).

    Raises:
        TypeError: the bound is not an integer, or has no name.
        ValueError: not exactly one bound is given, or it is negative.
    """

    def __init__(self, *unnamed: Never, max_tiles: int | None = None, max_bytes: int | None = None) -> None:
        super().__init__(*unnamed, max_tiles=max_tiles, max_bytes=max_bytes)
        self._queues = _Queues()

    def _forget(self) -> None:
        self._queues = _Queues()

    def _resident_count(self) -> int:
        return len(self._queues)

    def _decide(self, required: TileSet, keys: Sequence[Key]) -> ResidencyPlan:
        capacity, queues = self._bounded(), self._queues
        missing: list[Key] = []
        known: list[Key] = []
        for key in keys:
            (known if queues.use(key) else missing).append(key)
        left = queues.admit(missing, set(known), capacity) if missing else []
        kept: list[Key] = []
        streamed: list[Key] = []
        for key in missing:
            (kept if key in queues else streamed).append(key)
        # What came and left within this plan was never resident.
        never = set(streamed)
        victims = [key for key in left if key not in never]
        return self._plan(required, kept, known, victims, streamed)


class _Queues:
    """The three queues, the next to leave first in each; resident tiles carry the number of their uses."""

    def __init__(self) -> None:
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()  # numbers of tiles that left the small queue
        # The present plan: what may not leave, what was passed over for that reason, and what left.
        self._needed: AbstractSet[Key] = frozenset()
        self._small_kept: list[tuple[Key, int]] = []
        self._main_kept: list[tuple[Key, int]] = []
        self._left: list[Key] = []
        self._small_share = self._main_share = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._small_kept) + len(self._main) + len(self._main_kept)

    def __contains__(self, key: Key) -> bool:
        return key in self._small or key in self._main

    def use(self, key: Key) -> bool:
        """Count a use of a resident tile; tell whether it is one."""
        for queue in (self._small, self._main):
            uses = queue.get(key)
            if uses is not None:
                queue[key] = min(uses + 1, _MOST_USES)
                return True
        return False

    def admit(self, missing: Sequence[Key], needed: AbstractSet[Key], capacity: int) -> list[Key]:
        """Let tiles in, one after the other, and others out to make room.

        Args:
            missing: tiles that are not resident.
            needed: resident tiles that may not leave.
            capacity: the most tiles that may be resident; never fewer than are.

        Returns:
            The tiles that left, some of them perhaps among ``missing``; where the needed ones take all the
            room, none of ``missing`` was let in.
        """
        self._small_share = -(-capacity // _SMALL_SHARE)
        self._main_share = capacity - self._small_share
        self._needed, self._left = needed, []
        for key in missing:
            if len(needed) == capacity:
                self._remember(key)
                continue
            while len(self) >= capacity:
                self._make_room()
            if key in self._ghosts:
                del self._ghosts[key]
                self._main[key] = 0
            else:
                self._small[key] = 0
        for queue, kept in ((self._small, self._small_kept), (self._main, self._main_kept)):
            while kept:  # back to where they were
                key, queue[key] = kept.pop()
                queue.move_to_end(key, last=False)
        self._needed = frozenset()
        return self._left

    def _make_room(self) -> None:
        """Let one tile out, or at least move those on that deserve it, so that the next call lets one out."""
        if len(self._small) + len(self._small_kept) >= self._small_share and self._leave_small():
            return
        if not self._leave_main():
            self._leave_small()

    def _leave_small(self) -> bool:
        """Let a tile out of the small queue, moving what was required again to the main one on the way."""
        while self._small:
            key, uses = self._small.popitem(last=False)
            if key in self._needed:
                # Looked at once in a plan, however many tiles are let in.
                self._small_kept.append((key, uses))
            elif uses > 1:
                self._main[key] = 0
                if len(self._main) + len(self._main_kept) > self._main_share and self._leave_main():
                    return True
            else:
                self._remember(key)
                self._left.append(key)
                return True
        return False

    def _leave_main(self) -> bool:
        """Let a tile out of the main queue; one that was required meanwhile goes round again instead."""
        while self._main:
            key, uses = self._main.popitem(last=False)
            if key in self._needed:
                self._main_kept.append((key, uses))
            elif uses > 0:
                self._main[key] = uses - 1
            else:
                self._left.append(key)
                return True
        return False

    def _remember(self, key: Key) -> None:
        """Keep the number of a tile that was required once; as many as the main queue has tiles."""
        self._ghosts[key] = None
        self._ghosts.move_to_end(key)
        while len(self._ghosts) > self._main_share:
            self._ghosts.popitem(last=False)
