"""What is shared of tiles on their way: the passage that announces them, and the memory they are staged in.

Loop thread only. Who waits for a passage and means to read the rows that it staged joins it first and leaves it
when it has read them: staged memory counts until the last reader is done.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.room import Grant

    TileRow = npt.NDArray[np.unsignedinteger]

__all__ = ["Passage", "Staging", "joined"]


class Staging:
    """Memory for tiles that stream past the primary tier, and how many still use it.

    Attributes:
        carrier: the memory.
        nbytes: its size.
        users: the request that made it, and those that read what it left there.
        grant: the part of a memory limit that it was promised, under a limit.
    """

    __slots__ = ("carrier", "grant", "nbytes", "users")

    def __init__(self, carrier: Carrier, nbytes: int, grant: Grant | None) -> None:
        self.carrier = carrier
        self.nbytes = nbytes
        self.users = 1
        self.grant = grant


class Passage:
    """Tiles that a request is fetching, streaming or giving up.

    Attributes:
        done: set when they are at rest again.
        staged: the rows that were read, of tiles that stream, for those who joined.
        readers: how many have joined and not left.
        wanted: the tiles for which they joined.
        staging: what the rows lie in, where that counts as staging.
    """

    __slots__ = ("_emptied", "done", "readers", "staged", "staging", "wanted")

    def __init__(self, staging: Staging | None = None) -> None:
        self.done = anyio.Event()
        self.staged: dict[int, TileRow] = {}
        self.readers = 0
        self.wanted: set[int] = set()
        self.staging = staging
        self._emptied: anyio.Event | None = None

    def stage_in(self, staging: Staging) -> None:
        """The rows will lie here, also for the readers who have joined already."""
        self.staging = staging
        staging.users += self.readers

    def join(self, wanted: Iterable[int]) -> None:
        """Mean to read the staged rows of these tiles."""
        self.readers += 1
        self.wanted.update(wanted)
        if self.staging is not None:
            self.staging.users += 1

    def leave(self, unstage: Callable[[Staging], None]) -> None:
        """Have read them, or given up.

        Args:
            unstage: is told that the staging has a user less.
        """
        self.readers -= 1
        staging = self.staging
        if not self.readers and self.done.is_set():
            self.staged, self.staging = {}, None
        if self._emptied is not None and not self.readers:
            self._emptied.set()
        if staging is not None:
            unstage(staging)

    async def empty(self) -> None:
        """Wait until every reader has left; they wait for nothing but transfers that are under way."""
        if self.readers:
            self._emptied = anyio.Event()
            await self._emptied.wait()


@contextmanager
def joined(
    passages: Mapping[Passage, Sequence[int]], unstage: Callable[[Staging], None]
) -> Iterator[Iterator[Passage]]:
    """Join passages for some of their tiles; each is left when the next is asked for, all when the block ends."""
    rest = list(passages)[::-1]
    for passage in rest:
        passage.join(passages[passage])

    def one_by_one() -> Iterator[Passage]:
        while rest:
            yield rest[-1]
            rest.pop().leave(unstage)

    try:
        yield one_by_one()
    finally:
        while rest:
            rest.pop().leave(unstage)
