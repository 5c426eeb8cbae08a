"""Equal pieces of memory that lie in several arrays, copied together by one NumPy call.

Copying them one by one takes the interpreter's lock once for each, and two threads that do so wait for each other.
``numpy.take`` copies rows of one array and lets go of the lock for all of them; and memory is one array, if one looks
at all that lies between the first piece and the last.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.io.buffers import address_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from numpy.typing import NDArray

    Order = NDArray[np.int64]

__all__ = ["ScatteredMemory"]

_SHORTEST_ROW = 1024  # bytes; shorter rows are copied at a fraction of the speed
_LONG_ROW = 16 * 1024  # bytes; from here on it makes little difference
_LONGEST_ROW = 256 * 1024  # bytes; longer ones gain nothing, and the C library copies them otherwise


class _Range:
    """What NumPy asks where an array lies; keeps alive whom the memory belongs to."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


class ScatteredMemory:
    """Equal pieces of memory, which are read only.

    The array that spans them never leaves this object: what lies between the pieces belongs to somebody else, or is
    not there at all, so only rows of the pieces may ever be looked at. Made by ``of``.
    """

    __slots__ = ("_firsts", "_per_piece", "_range")

    def __init__(self, memory: NDArray[Any], firsts: Order, per_piece: int) -> None:
        self._range = memory
        self._firsts = firsts  # the first row of each piece
        self._per_piece = per_piece

    @classmethod
    def of(cls, addresses: Order, nbytes: int, dtype: np.dtype[Any], owner: object) -> Self | None:
        """Find rows that all pieces consist of.

        Args:
            addresses: where each piece begins, at least one.
            nbytes: of each piece, a multiple of the item's size.
            dtype: of the pieces.
            owner: is kept alive, and has to keep the memory of the pieces.

        Returns:
            None where there are no such rows that are long enough to be copied quickly.
        """
        low, high = int(addresses.min()), int(addresses.max())
        offsets = addresses - low
        common = int(np.bitwise_or.reduce(offsets)) | nbytes
        width = min(common & -common, _LONGEST_ROW)  # the largest power of two that divides them all
        if width < min(nbytes, _LONG_ROW) and nbytes <= _LONGEST_ROW and not (offsets % nbytes).any():
            width = nbytes
        if low % dtype.itemsize or width < min(nbytes, _SHORTEST_ROW):
            return None  # NumPy would make a copy of what is not aligned, in which the gaps are
        interface = {
            "version": 3,
            "data": (low, True),
            "shape": ((high - low + nbytes) // width, width // dtype.itemsize),
            "typestr": dtype.str,
        }
        return cls(np.asarray(_Range(interface, owner)), offsets // width, nbytes // width)

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._firsts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the pieces."""
        return self._range.dtype

    @property
    def piece_slots(self) -> int:
        """Items of one piece."""
        return self._per_piece * int(self._range.shape[1])

    def copy(self, order: Order | None, out: NDArray[Any]) -> None:
        """Copy pieces to one array, each behind the one before.

        Args:
            order: which pieces; None for all of them.
            out: contiguous, of the same type, and as large as they are together.

        Raises:
            IndexError: there is no such piece. Nothing was copied.
            ValueError: ``out`` has another size. Nothing was copied.
        """
        firsts = self._firsts if order is None else self._firsts[order]
        self._copy(firsts, 0, len(firsts) * self._per_piece, out)

    def jobs(self, order: Order | None, out: NDArray[Any], job_bytes: int) -> list[Callable[[], None]]:
        """Split ``copy`` into independent calls of about ``job_bytes`` each, for worker threads.

        Raises:
            IndexError: there is no such piece. No job is made.
        """
        firsts, width = self._firsts if order is None else self._firsts[order], self._range.shape[1]
        count = len(firsts) * self._per_piece
        step = max(1, job_bytes // (width * self.dtype.itemsize))
        return [
            partial(
                self._copy,
                firsts,
                start,
                min(start + step, count),
                out[start * width : (start + step) * width],
            )
            for start in range(0, count, step)
        ]

    def _copy(self, firsts: Order, start: int, stop: int, out: NDArray[Any]) -> None:
        """Copy some of the rows of pieces that begin with these."""
        rows = firsts[start:stop]
        if self._per_piece > 1:
            piece, rest = np.divmod(np.arange(start, stop), self._per_piece)
            rows = firsts[piece] + rest
        first = address_of(self._range)
        if len(rows) and first < address_of(out) < first + self._range.nbytes:
            # NumPy takes all that lies between the pieces for the source, and would buffer the output.
            np.concatenate([self._range[row] for row in rows.tolist()], out=out, casting="no")
            return
        # 'raise', the default, would buffer it too; these rows are there.
        self._range.take(rows, 0, out.reshape(stop - start, self._range.shape[1]), "clip")
