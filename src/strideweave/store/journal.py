"""The journal of a store: what is about to be written in place, so that it can be written again.

An entry is a head, then the numbers of its tiles, their checksums, and their new contents. Every entry since the
last retirement of the journal is in it, in the order in which they were written, so replaying all of them in this
order gives the newest contents. A tile of an entry counts if the head has its own checksum right and the content
has the tile's. Whatever else is there was not finished, and nothing of it was written in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strideweave.io.positioned import FileSpan, ShortFileError, read_spans
from strideweave.store.checksums import checksum_function

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from strideweave.io.files import OpenFile

    Ordinals = npt.NDArray[np.int64]
    Sums = npt.NDArray[np.uint64]

__all__ = ["JournalEntry", "JournaledTile", "entry_head", "newest_tiles", "scan"]

_MAGIC = int.from_bytes(b"SWjrnl01", "little")
_HEAD = np.dtype(
    [
        ("magic", "<u8"),
        ("store", "<u8"),
        ("sequence", "<u8"),
        ("tiles", "<u8"),
        ("tile_bytes", "<u8"),
        ("checksum", "<u8"),
    ]
)


class JournaledTile(NamedTuple):
    """Where the journal has a tile's content.

    Attributes:
        offset: its first byte in the journal.
        checksum: what the content must have.
    """

    offset: int
    checksum: int


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry whose head is right.

    Attributes:
        sequence: its number, which grows from entry to entry.
        start: its first byte in the journal.
        ordinals: its tiles.
        sums: their checksums.
        tile_bytes: bytes of each.
    """

    sequence: int
    start: int
    ordinals: Ordinals
    sums: Sums
    tile_bytes: int

    @property
    def contents(self) -> int:
        """The first byte of the contents."""
        return self.start + _HEAD.itemsize + 16 * len(self.ordinals)

    @property
    def end(self) -> int:
        """The byte behind the entry."""
        return self.contents + len(self.ordinals) * self.tile_bytes

    def tiles(self) -> Iterator[tuple[int, JournaledTile]]:
        """Each tile and where its content is."""
        for place, (ordinal, checksum) in enumerate(
            zip(self.ordinals.tolist(), self.sums.tolist(), strict=True)
        ):
            yield ordinal, JournaledTile(self.contents + place * self.tile_bytes, checksum)


def entry_head(
    identity: str, sequence: int, ordinals: Ordinals, sums: Sums, tile_bytes: int
) -> npt.NDArray[np.uint8]:
    """The bytes of an entry before its contents.

    Args:
        identity: the store's.
        sequence: the entry's number.
        ordinals: its tiles.
        sums: the checksums of their contents.
        tile_bytes: bytes of each.
    """
    head = np.zeros(1, _HEAD)
    head["magic"], head["store"], head["sequence"] = _MAGIC, int(identity, 16), sequence
    head["tiles"], head["tile_bytes"] = len(ordinals), tile_bytes
    lists = np.concatenate((ordinals.astype("<u8").view(np.uint8), sums.astype("<u8").view(np.uint8)))
    head["checksum"] = _head_checksum(head, lists)
    return np.concatenate((head.view(np.uint8), lists))


def scan(file: OpenFile, identity: str, tile_bytes: int, tile_count: int) -> Iterator[JournalEntry]:
    """Read the heads of the entries that are wholly there, in order; blocks.

    The first one that is not ends the journal: a torn tail, or what a failed write has left.

    Args:
        file: the journal.
        identity: the store's; an entry of another store ends the journal.
        tile_bytes: bytes of a tile.
        tile_count: tiles of the store.

    Raises:
        OSError: the system failed.
    """
    place, last, size = 0, -1, file.size()
    while place + _HEAD.itemsize <= size:
        head = np.zeros(1, _HEAD)
        if not _filled(file, place, head.view(np.uint8)):
            return
        count = int(head["tiles"][0])
        known = (int(head["magic"][0]), int(head["store"][0]), int(head["tile_bytes"][0]))
        end = place + _HEAD.itemsize + count * (16 + tile_bytes)
        if known != (_MAGIC, int(identity, 16), tile_bytes) or not count or end > size:
            return
        lists = np.zeros(16 * count, np.uint8)
        if not _filled(file, place + _HEAD.itemsize, lists):
            return
        sequence = int(head["sequence"][0])
        if int(head["checksum"][0]) != _head_checksum(head, lists) or sequence <= last:
            return
        ordinals = lists[: 8 * count].view("<i8").astype(np.int64)
        if ordinals.min() < 0 or ordinals.max() >= tile_count:
            return
        yield JournalEntry(
            sequence, place, ordinals, lists[8 * count :].view("<u8").astype(np.uint64), tile_bytes
        )
        place, last = end, sequence


def newest_tiles(
    file: OpenFile, identity: str, tile_bytes: int, tile_count: int
) -> tuple[dict[int, list[JournaledTile]], int]:
    """Where the journal has each of its tiles, the newest last, and the number of its last entry; blocks."""
    found: dict[int, list[JournaledTile]] = {}
    last = 0
    for entry in scan(file, identity, tile_bytes, tile_count):
        last = entry.sequence
        for ordinal, tile in entry.tiles():
            found.setdefault(ordinal, []).append(tile)
    return found, last


def _filled(file: OpenFile, offset: int, buffer: npt.NDArray[np.uint8]) -> bool:
    """Read bytes; False where the journal was retired meanwhile."""
    try:
        read_spans([FileSpan(file, offset, buffer)])
    except ShortFileError:
        return False
    return True


def _head_checksum(head: npt.NDArray[np.void], lists: npt.NDArray[np.uint8]) -> int:
    bare = head.copy()
    bare["checksum"] = 0
    return checksum_function()(np.concatenate((bare.view(np.uint8), lists)))
