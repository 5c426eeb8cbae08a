"""The moves that come with a ``StorageProvider``: to and from memory and files, a batch in one worker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.carriers.extension.defined import DefinedCarrier
from strideweave.carriers.move.operations import MoveOperation, Transfer, writable_bytes
from strideweave.carriers.move.planning import checked_runs, cut_runs
from strideweave.io.positioned import FileSpan, read_spans, write_spans
from strideweave.runtime.workers import run_jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strideweave.carriers.base import Carrier

__all__ = ["ProviderMove"]

PIECE_BYTES = 8 << 20
"""What is handed to a provider, or asked of one, at once."""


class ProviderMove(MoveOperation):
    """Copies spans between carriers of which at least one has a provider, all in one hop to a worker thread.

    The provider's functions are called one after the other, run by run, in pieces of at most 8 MiB.
    """

    async def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy all spans; see :meth:`MoveOperation.transfer`.

        Raises:
            ImmutableError: a destination stands on read-only memory.
            Exception: what a provider raised, with a note that names the call.
        """
        runs = checked_runs(transfers)
        for destination in {run.destination for run in runs}:
            _require_writable(destination)
        if runs:
            await run_jobs([partial(_copy, list(cut_runs(runs, PIECE_BYTES)))])


def _copy(groups: list[list[Transfer]]) -> None:
    for group in groups:
        for source, start, destination, at, slots in group:
            memory = None if isinstance(destination, DefinedCarrier) else _memory(destination)
            if memory is not None:
                _read(source, start, memory[at : at + slots])
            else:
                _write(destination, at, _values(source, start, slots))


def _read(carrier: Carrier, start: int, values: NDArray[Any]) -> None:
    """Read as many slots as ``values`` has elements; blocks."""
    if isinstance(carrier, DefinedCarrier):
        carrier._storage().read(start, values)
        return
    memory = _memory(carrier)
    if memory is not None:
        values[...] = memory[start : start + len(values)]
    else:
        read_spans([_span(carrier, start, values)])


def _values(carrier: Carrier, start: int, slots: int) -> NDArray[Any]:
    """The values of some slots, which may share memory with the carrier; blocks."""
    memory = None if isinstance(carrier, DefinedCarrier) else _memory(carrier)
    if memory is not None:
        return memory[start : start + slots]
    values = np.empty(slots, carrier.dtype().numpy)
    _read(carrier, start, values)
    return values


def _write(carrier: Carrier, start: int, values: NDArray[Any]) -> None:
    """Write slots of a carrier that is not in memory; blocks."""
    if isinstance(carrier, DefinedCarrier):
        carrier._storage().write(start, values)
    else:
        write_spans([_span(carrier, start, np.ascontiguousarray(values))])


def _memory(carrier: Carrier) -> NDArray[Any] | None:
    """All slots as an array of the dtype, which copies bit by bit; None for a carrier in a file."""
    try:
        return carrier._bytes().view(carrier.dtype().numpy)
    except NotImplementedError:
        return None


def _span(carrier: Carrier, start: int, values: NDArray[Any]) -> FileSpan:
    file, base = carrier._file()
    return FileSpan(file, base + start * carrier.dtype().itemsize, values.view(np.uint8))


def _require_writable(carrier: Carrier) -> None:
    """Refuse read-only memory and files before anything moves."""
    if isinstance(carrier, DefinedCarrier):
        return
    try:
        writable_bytes(carrier)
    except NotImplementedError:
        carrier._file()[0].require_writable()
