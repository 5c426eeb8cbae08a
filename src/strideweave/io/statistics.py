"""What an engine has done, as one record that is always consistent."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["EngineStatistics", "EngineTally"]


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What an I/O engine has done and has under way.

    Attributes:
        batches: calls of ``read`` and ``write`` that ended, well or not.
        spans: spans that these calls were given.
        bytes_read: bytes of the reads that ended well.
        bytes_written: bytes of the writes that ended well.
        bytes_in_flight: bytes of the calls that have not ended.
        errors: calls that failed.
        engine: the name of the engine, in the record of a process; empty before one was chosen.
        reason: why it is this one.
        persists: calls of ``persist`` that ended well.
        failed_over: calls that another engine had to do, because the system refused this one after its start.
        refusal: why it did so the last time; empty before the first.
    """

    batches: int = 0
    spans: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_in_flight: int = 0
    errors: int = 0
    engine: str = ""
    reason: str = ""
    persists: int = 0
    failed_over: int = 0
    refusal: str = ""


class EngineTally:
    """Keeps an engine's statistics; changed by the engine's loop only, readable from any thread.

    What batches have moved is replaced as a whole, so that no reader sees half of a change and no lock is needed. The
    record is made where somebody asks for it, since that takes longer than counting.
    """

    def __init__(self) -> None:
        self._moved = (0, 0, 0, 0, 0, 0)  # batches and spans, bytes read, written and in flight, errors
        self._persists = (0, 0)  # calls that ended well, and that failed
        self._others = EngineStatistics()  # what happens seldom

    @property
    def now(self) -> EngineStatistics:
        """The record of this moment."""
        batches, spans, read, written, in_flight, errors = self._moved
        persists, failures = self._persists
        return replace(
            self._others,
            batches=batches,
            spans=spans,
            bytes_read=read,
            bytes_written=written,
            bytes_in_flight=in_flight,
            errors=errors + failures,
            persists=persists,
        )

    def begin(self, nbytes: int) -> None:
        """Count the start of a batch of ``nbytes`` bytes."""
        batches, spans, read, written, in_flight, errors = self._moved
        self._moved = batches, spans, read, written, in_flight + nbytes, errors

    def end(self, nbytes: int, spans: int, *, writing: bool, failed: bool) -> None:
        """Count the end of a batch that :meth:`begin` counted."""
        batches, before, read, written, in_flight, errors = self._moved
        if failed:
            errors += 1
        elif writing:
            written += nbytes
        else:
            read += nbytes
        self._moved = batches + 1, before + spans, read, written, in_flight - nbytes, errors

    def read_at_once(self, nbytes: int, spans: int) -> None:
        """Count a read that ended well in the turn of the loop in which it began."""
        batches, before, read, written, in_flight, errors = self._moved
        self._moved = batches + 1, before + spans, read + nbytes, written, in_flight, errors

    def fail_over(self, refusal: str) -> None:
        """Count a call that another engine takes over."""
        self._others = replace(self._others, failed_over=self._others.failed_over + 1, refusal=refusal)

    def persisted(self, *, failed: bool) -> None:
        """Count the end of a call of ``persist``."""
        persists, failures = self._persists
        self._persists = persists + (not failed), failures + failed
