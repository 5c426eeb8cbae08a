"""What a batch of transfers comes to: checked before any byte moves, neighbours joined, cut into copies."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from strideweave.carriers.base import Carrier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strideweave.carriers.move.operations import Transfer

__all__ = ["Run", "checked_runs", "cut_runs"]


class Run(NamedTuple):
    """Slots that follow each other in both carriers; the same fields as a Transfer, at least one slot."""

    source: Carrier
    source_start: int
    destination: Carrier
    destination_start: int
    slots: int


def checked_runs(transfers: Sequence[Transfer]) -> list[Run]:
    """Check every transfer of a batch and join those that continue the one before.

    Transfers of no slots are checked and left out.

    Raises:
        TypeError: a source or destination is no carrier, or the dtypes of a pair differ.
        ReleasedError: a carrier was released.
        ValueError: a span does not lie within its carrier, or slots of one carrier are both read and written.
    """
    runs: list[Run] = []
    source: Carrier | None = None
    destination: Carrier | None = None
    self_moves = False
    source_end = destination_end = source_size = destination_size = -1
    for transfer in transfers:
        if transfer.source is not source or transfer.destination is not destination:
            source, destination = transfer.source, transfer.destination
            _check_pair(source, destination)
            source_size, destination_size = source.size(), destination.size()
            source_end = destination_end = -1
            self_moves = self_moves or source is destination
        start, at, slots = transfer.source_start, transfer.destination_start, transfer.slots
        if slots < 0 or not (0 <= start <= source_size - slots and 0 <= at <= destination_size - slots):
            raise _outside(transfer, source_size, destination_size)
        if not slots:
            continue
        if start == source_end and at == destination_end:
            runs[-1] = runs[-1]._replace(slots=runs[-1].slots + slots)
        else:
            runs.append(Run(source, start, destination, at, slots))
        source_end, destination_end = start + slots, at + slots
    if self_moves:
        _check_overlaps([run for run in runs if run.source is run.destination])
    return runs


def cut_runs(runs: Sequence[Run], most: int) -> Iterator[list[Run]]:
    """Cut runs into groups of at most ``most`` bytes each, in order; ``most`` must have room for a slot."""
    group: list[Run] = []
    room = most
    for run in runs:
        source, start, destination, at, left = run
        width = source.dtype().itemsize
        while left * width > room:
            slots = room // width
            if slots:
                group.append(Run(source, start, destination, at, slots))
                start, at, left = start + slots, at + slots, left - slots
            yield group
            group, room = [], most
        group.append(Run(source, start, destination, at, left))
        room -= left * width
    if group:
        yield group


def _check_pair(source: Carrier, destination: Carrier) -> None:
    for carrier, role in ((source, "source"), (destination, "destination")):
        if not isinstance(carrier, Carrier):
            raise TypeError(f"the {role} of a transfer must be a Carrier, found {type(carrier).__name__}")
        carrier._require_live()
    if source.dtype() is not destination.dtype():
        raise TypeError(
            "a transfer copies bytes, so both carriers must have one dtype: the source "
            f"{type(source).__name__} is {source.dtype().name}, the destination "
            f"{type(destination).__name__} is {destination.dtype().name}"
        )


def _outside(transfer: Transfer, source_size: int, destination_size: int) -> ValueError:
    def place(carrier: Carrier, start: int, size: int) -> str:
        return f"[{start}, {start + transfer.slots}) of a {type(carrier).__name__} with {size} slots"

    source = place(transfer.source, transfer.source_start, source_size)
    destination = place(transfer.destination, transfer.destination_start, destination_size)
    return ValueError(f"a transfer of slots {source} to slots {destination} reaches beyond one of them")


def _check_overlaps(runs: list[Run]) -> None:
    """Refuse slots that runs inside one carrier both read and write: the order would decide the outcome."""
    runs.sort(key=lambda run: id(run.source))
    for _, same in groupby(runs, key=lambda run: id(run.source)):
        inside = list(same)
        reads = sorted((run.source_start, run.source_start + run.slots) for run in inside)
        writes = sorted((run.destination_start, run.destination_start + run.slots) for run in inside)
        place = 0
        for start, stop in reads:
            while place < len(writes) and writes[place][1] <= start:
                place += 1
            if place < len(writes) and writes[place][0] < stop:
                first, last = writes[place]
                raise ValueError(
                    f"slots [{start}, {stop}) of a {type(inside[0].source).__name__} are the source of a "
                    f"transfer and slots [{first}, {last}) of it the destination of one in the same batch; "
                    "they overlap"
                )
