"""The engine of aiofiles: that of worker threads, with aiofiles to carry a call to them and back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiofiles.os

from strideweave.io.thread_engine import ThreadEngine

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AiofilesEngine"]


class AiofilesEngine(ThreadEngine):
    """Reads and writes batches of spans in threads; see ``ThreadEngine``.

    Attributes:
        name: ``"aiofiles"``.
    """

    name = "aiofiles"

    def _hop(self, work: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.ensure_future(_call(work, executor=self._pool))


def _run(work: Callable[[], None]) -> None:
    work()


_call = aiofiles.os.wrap(_run)
