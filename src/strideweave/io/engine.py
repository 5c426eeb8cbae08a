"""What an I/O engine is, and the one place that chooses one.

Three engines ship: ``"uring"`` (Linux, where the kernel lets this process use io_uring), ``"threads"`` (everywhere)
and ``"aiofiles"`` (the same through aiofiles). The environment variable ``STRIDEWEAVE_IO`` names one; one that was
named and cannot run is an error, never another one silently. Where none was named and the system comes to refuse
io_uring later, the threads do the batches that it refuses, and ``statistics()`` counts them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from strideweave.io.aiofiles_engine import AiofilesEngine
from strideweave.io.positioned import FileSpan, ShortFileError, SpanBatch
from strideweave.io.statistics import EngineStatistics
from strideweave.io.thread_engine import ThreadEngine
from strideweave.io.uring import why_unavailable
from strideweave.io.uring_engine import UringEngine
from strideweave.runtime.event_loop import current_runtime, process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from strideweave.io.files import OpenFile

__all__ = [
    "ENGINES",
    "Engine",
    "EngineStatistics",
    "FileSpan",
    "ShortFileError",
    "default_engine",
    "make_engine",
    "statistics",
]

VARIABLE = "STRIDEWEAVE_IO"
"""The environment variable that names an engine; unset or empty leaves the choice to the library."""


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

    def read_at_once(self, batch: SpanBatch) -> bool:
        """Fill the buffers of a small batch that is in the page cache, in the loop, without waiting for anything.

        Returns:
            Whether all are filled; else some may be, whatever the reason, and ``read`` is the way.
        """

    async def write(self, spans: Sequence[FileSpan]) -> None:
        """Write the buffer of every span to its file.

        Raises:
            OSError: the system failed (a full disk, a limit, a read-only file), with the path; the message
                has the offset and both lengths.
            ValueError: a file is closed.

        Of several errors the first is raised, with a note on each other one; spans are then partly written.
        """

    async def persist(self, file: OpenFile) -> None:
        """Return once everything that was written to a file would survive a loss of power.

        That is what calls of ``write`` have written that ended before.

        Raises:
            OSError: the storage failed, with the path; what was written before may be lost.
            ValueError: the file is closed.
        """

    def statistics(self) -> EngineStatistics:
        """Return what was done and what is under way."""

    def close(self) -> None:
        """Take no more batches and let go of threads and descriptors; idempotent."""


ENGINES: Mapping[str, Callable[[], Engine]] = {
    "uring": UringEngine,
    "threads": ThreadEngine,
    "aiofiles": AiofilesEngine,
}
"""What makes each engine, by its name."""


class _Chosen(NamedTuple):
    """The runtime's engine and why it is this one."""

    engine: Engine
    reason: str

    def close(self) -> None:
        """Close the engine with the runtime."""
        self.engine.close()


def make_engine(name: str) -> Engine:
    """Make the engine of that name, or say why it cannot run here.

    Args:
        name: ``"uring"``, ``"threads"`` or ``"aiofiles"``.

    Raises:
        ValueError: there is no engine of that name.
        RuntimeError: it cannot run in this process; the message says why.
    """
    factory = ENGINES.get(name)
    if factory is None:
        raise ValueError(f"{VARIABLE} and its like name one of {', '.join(ENGINES)}; found {name!r}")
    obstacle = why_unavailable() if factory is UringEngine else None
    if obstacle is not None:
        raise RuntimeError(f"the I/O engine {name!r} was asked for and cannot run here: {obstacle}")
    return factory()


def _choose() -> _Chosen:
    asked = os.environ.get(VARIABLE, "")
    if asked:
        return _Chosen(make_engine(asked), f"{VARIABLE}={asked}")
    obstacle = why_unavailable()
    if obstacle is not None:
        return _Chosen(ThreadEngine(), obstacle)
    try:
        return _Chosen(UringEngine(ThreadEngine()), "io_uring works in this process")
    except OSError as error:  # a limit that was reached since the trial
        return _Chosen(ThreadEngine(), f"a ring could not be made: {error}")


def default_engine() -> Engine:
    """Return the runtime's engine, chosen and made at the first call.

    Raises:
        ValueError: ``STRIDEWEAVE_IO`` names no engine.
        RuntimeError: it names one that cannot run here, or the runtime has ended or could not start.
    """
    return current_runtime().service(_choose).engine


def statistics() -> EngineStatistics:
    """Return what the engine of this process has done, which it is and why; starts nothing."""
    chosen = process.find_service(_choose)
    if chosen is None:
        return EngineStatistics()
    found, reason = chosen.engine.statistics(), chosen.reason
    if found.failed_over:
        reason += f"; later the threads took over, batches: {found.failed_over}, since {found.refusal}"
    return replace(found, engine=chosen.engine.name, reason=reason)
