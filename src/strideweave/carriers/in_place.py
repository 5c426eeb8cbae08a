"""What carriers have in common whose values lie where somebody has put them: others like them are spill files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strideweave.carriers.base import Carrier
from strideweave.carriers.file_backed import FileBacked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strideweave.dtype import DType

__all__ = ["InPlaceCarrier"]


class InPlaceCarrier(Carrier):
    """Storage of a shape that only who made it can make, such as a checkpoint or a store."""

    def new_like(  # type: ignore[override]  # another class: there is no second file of this kind to write to
        self, values: Iterable[Any], *, mutable: bool = True, dtype: DType | None = None
    ) -> FileBacked:
        """Write ``values`` to a fresh spill file. Works after release too.

        Raises:
            TypeError, OverflowError, ValueError, OSError: as ``FileBacked.new_like``.
        """
        return FileBacked(dtype=self._dtype).new_like(values, mutable=mutable, dtype=dtype)

    def allocate_like(  # type: ignore[override]  # as new_like
        self, size: int, *, mutable: bool = True, dtype: DType | None = None, empty: bool = False
    ) -> FileBacked:
        """Make a carrier on a fresh sparse spill file. Works after release too.

        Raises:
            TypeError, ValueError, OSError: as ``FileBacked.allocate_like``.
        """
        return FileBacked(dtype=self._dtype).allocate_like(size, mutable=mutable, dtype=dtype, empty=empty)
