"""What an I/O engine is, and the one place that chooses one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from strideweave.io.aiofiles_engine import AiofilesEngine
from strideweave.io.positioned import FileSpan, ShortFileError
from strideweave.io.statistics import EngineStatistics
from strideweave.runtime.event_loop import current_runtime, process

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Engine", "EngineStatistics", "FileSpan", "ShortFileError", "default_engine", "statistics"]


class Engine(Protocol):
    """Moves batches of bytes between files and memory, for tasks of the runtime's loop.

    Both methods keep the buffers alive, and return only when nothing touches them any more, also when the
    awaiting task is cancelled meanwhile. Spans may lie in several files and must not overlap in memory;
    writes of one call to the same bytes of a file land in an unspecified order.
    """

    @property
    def name(self) -> str:
        """What the engine is called in records and tables."""

    async def read(self, spans: Sequence[FileSpan]) -> None:
        """Fill the buffer of every span from its file.

        Raises:
            ShortFileError: a file ended early (an ``EOFError`` with path, offset, wanted and got).
            OSError: the system failed, with the path; the message has the offset and both lengths.
            ValueError: a file is closed.

        Of several errors the first is raised, with a note on each other one; buffers are then partly filled.
        """

    async def write(self, spans: Sequence[FileSpan]) -> None:
        """Write the buffer of every span to its file.

        Raises:
            OSError: the system failed (a full disk, a limit, a read-only file), with the path; the message
                has the offset and both lengths.
            ValueError: a file is closed.

        Of several errors the first is raised, with a note on each other one; spans are then partly written.
        """

    def statistics(self) -> EngineStatistics:
        """Return what was done and what is under way."""


def default_engine() -> Engine:
    """Return the runtime's engine, made at the first call.

    Raises:
        RuntimeError: the runtime has ended or could not start.
    """
    return current_runtime().service(AiofilesEngine)


def statistics() -> EngineStatistics:
    """Return what the engine of this process has done; starts nothing."""
    engine = None if process.runtime is None else process.runtime.find_service(AiofilesEngine)
    return EngineStatistics() if engine is None else engine.statistics()
