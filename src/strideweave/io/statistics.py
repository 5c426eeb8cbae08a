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

    The record is replaced as a whole, so that no reader sees half of a change and no lock is needed.
    """

    def __init__(self) -> None:
        self.now = EngineStatistics()

    def begin(self, nbytes: int) -> None:
        """Count the start of a batch of ``nbytes`` bytes."""
        self.now = replace(self.now, bytes_in_flight=self.now.bytes_in_flight + nbytes)

    def end(self, nbytes: int, spans: int, *, writing: bool, failed: bool) -> None:
        """Count the end of a batch that :meth:`begin` counted."""
        before = self.now
        done = 0 if failed else nbytes
        self.now = EngineStatistics(
            batches=before.batches + 1,
            spans=before.spans + spans,
            bytes_read=before.bytes_read + (0 if writing else done),
            bytes_written=before.bytes_written + (done if writing else 0),
            bytes_in_flight=before.bytes_in_flight - nbytes,
            errors=before.errors + failed,
            persists=before.persists,
            failed_over=before.failed_over,
            refusal=before.refusal,
        )

    def read_at_once(self, nbytes: int, spans: int) -> None:
        """Count a read that ended well in the turn of the loop in which it began."""
        before = self.now
        self.now = EngineStatistics(
            batches=before.batches + 1,
            spans=before.spans + spans,
            bytes_read=before.bytes_read + nbytes,
            bytes_written=before.bytes_written,
            bytes_in_flight=before.bytes_in_flight,
            errors=before.errors,
            persists=before.persists,
            failed_over=before.failed_over,
            refusal=before.refusal,
        )

    def fail_over(self, refusal: str) -> None:
        """Count a call that another engine takes over."""
        self.now = replace(self.now, failed_over=self.now.failed_over + 1, refusal=refusal)

    def persisted(self, *, failed: bool) -> None:
        """Count the end of a call of ``persist``."""
        before = self.now
        self.now = replace(before, errors=before.errors + failed, persists=before.persists + (not failed))
