"""A batch of transfers: checked before any byte moves, neighbours joined, cut into what a worker takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, overload

from strideweave.carriers.base import Carrier

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Transfer", "TransferBatch", "TransferBlock", "checked_blocks", "checked_runs", "cut_runs"]

_FEW_STARTS = 64  # up to this many, Python's numbers are compared in less time than two reductions take


class Transfer(NamedTuple):
    """A span of slots to copy from one carrier to another of the same dtype.

    Attributes:
        source: carrier that is read.
        source_start: its first slot.
        destination: carrier that is written.
        destination_start: its first slot.
        slots: how many.
    """

    source: Carrier
    source_start: int
    destination: Carrier
    destination_start: int
    slots: int


class TransferBlock(NamedTuple):
    """Many transfers of one length between two carriers, as arrays instead of objects.

    Attributes:
        source: carrier that is read.
        source_starts: first slot of each transfer there.
        destination: carrier that is written.
        destination_starts: first slot of each transfer there.
        slots: slots of every transfer.
    """

    source: Carrier
    source_starts: NDArray[np.int64]
    destination: Carrier
    destination_starts: NDArray[np.int64]
    slots: int


class TransferBatch(Sequence[Transfer]):
    """A batch in blocks, for operations that take them as they are; to others a sequence like any.

    Args:
        blocks: the blocks, in order.
    """

    def __init__(self, blocks: Sequence[TransferBlock]) -> None:
        self.blocks = blocks
        self._count = sum([len(block.source_starts) for block in blocks])

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Transfer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Transfer]: ...

    def __getitem__(self, index: int | slice) -> Transfer | list[Transfer]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Transfer]:
        for block in self.blocks:
            source, starts, destination, places, slots = block
            for start, at in zip(starts.tolist(), places.tolist(), strict=True):
                yield Transfer(source, start, destination, at, slots)


def checked_blocks(batch: TransferBatch) -> Sequence[TransferBlock]:
    """Check every transfer of a batch in blocks, none of which stays within one carrier.

    Raises:
        TypeError, ReleasedError, ValueError: as ``checked_runs``.
    """
    for block in batch.blocks:
        _check_pair(block.source, block.destination)
        if block.slots < 0 or not (
            _lie_within(block.source_starts, block.source.size() - block.slots)
            and _lie_within(block.destination_starts, block.destination.size() - block.slots)
        ):
            checked_runs(list(TransferBatch([block])))  # finds the one that does not, and says so
    return batch.blocks


def _lie_within(starts: NDArray[np.int64], last: int) -> bool:
    if len(starts) > _FEW_STARTS:
        return last >= 0 and bool(starts.view("uint64").max() <= last)  # negative ones are large then
    found = starts.tolist()
    return not found or (min(found) >= 0 and max(found) <= last)


def checked_runs(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Check every transfer of a batch and join those that continue the one before.

    Transfers of no slots are checked and left out.

    Raises:
        TypeError: a source or destination is no carrier, or the dtypes of a pair differ.
        ReleasedError: a carrier was released.
        ValueError: a span does not lie within its carrier, or slots of one carrier are both read and written.
    """
    runs: list[Transfer] = []
    first: Transfer | None = None  # of the transfers that are being joined
    length = 0
    source: Carrier | None = None
    destination: Carrier | None = None
    self_moves = False
    source_end = destination_end = source_size = destination_size = -1
    for transfer in transfers:
        from_, start, to, at, slots = transfer
        if from_ is not source or to is not destination:
            source, destination = from_, to
            _check_pair(source, destination)
            source_size, destination_size = source.size(), destination.size()
            source_end = destination_end = -1
            self_moves = self_moves or source is destination
        if slots < 0 or not (0 <= start <= source_size - slots and 0 <= at <= destination_size - slots):
            raise _outside(transfer, source_size, destination_size)
        if not slots:
            continue
        if start == source_end and at == destination_end:
            length += slots
        else:
            runs += _run(first, length)
            first, length = transfer, slots
        source_end, destination_end = start + slots, at + slots
    runs += _run(first, length)
    if self_moves:
        _check_overlaps([run for run in runs if run.source is run.destination])
    return runs


def cut_runs(runs: Sequence[Transfer], most: int) -> Iterator[list[Transfer]]:
    """Cut runs into groups of at most ``most`` bytes each, in order; ``most`` must have room for a slot."""
    group: list[Transfer] = []
    room = most
    for run in runs:
        source, start, destination, at, left = run
        width = source.dtype().itemsize
        while left * width > room:
            slots = room // width
            if slots:
                group.append(Transfer(source, start, destination, at, slots))
                start, at, left = start + slots, at + slots, left - slots
            yield group
            group, room = [], most
        group.append(Transfer(source, start, destination, at, left))
        room -= left * width
    if group:
        yield group


def _run(first: Transfer | None, length: int) -> tuple[Transfer, ...]:
    """Turn joined transfers into one of ``length`` slots; there are none before the first."""
    if first is None:
        return ()
    return (first if first.slots == length else first._replace(slots=length),)


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


def _check_overlaps(runs: list[Transfer]) -> None:
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
