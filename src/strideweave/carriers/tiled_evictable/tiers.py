"""What two carriers must be to become the tiers of a tiled one, and what its policy must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strideweave.errors import ImmutableError
from strideweave.tiles.policy import check_and_bind
from strideweave.tiles.residency import Location

if TYPE_CHECKING:
    from strideweave.carriers.base import Carrier
    from strideweave.dtype import DType
    from strideweave.tiles.grid import TileGrid

__all__ = ["bind_policy", "check_tiers", "starting_location"]


def bind_policy(policy: object, grid: TileGrid, dtype: DType) -> None:
    """Check a policy, and tell one that wants to know what its tiles are.

    Raises:
        TypeError: it has no method ``plan``, or is a class and no object.
        ValueError: it serves a carrier, or was bound to tiles of another size before.
    """
    check_and_bind(policy, grid, grid.tile_size * dtype.itemsize, "residency_policy")


def check_tiers(primary: Carrier, secondary: Carrier) -> None:
    """Check that two free carriers fit together, the one to compute and the other to keep.

    Raises:
        TypeError: the dtypes differ, or the primary tier is not in memory.
        ImmutableError: the secondary tier is empty and could never take a value.
    """
    if primary.dtype() is not secondary.dtype():
        raise TypeError(
            f"the primary tier holds {primary.dtype().name} and the secondary {secondary.dtype().name}; "
            "both tiers must have one dtype"
        )
    if secondary.size() == 0 and not secondary.is_mutable():
        raise ImmutableError("the secondary tier is empty and immutable, so it could never keep a tile")
    try:
        primary._bytes()
    except NotImplementedError:
        raise TypeError(
            f"the primary tier computes, so it must be in memory; {type(primary).__name__} is not"
        ) from None


def starting_location(primary: Carrier, secondary: Carrier, grid: TileGrid) -> Location:
    """Which tier holds the values of every tile at the start; ``Location.NONE`` where there are none yet.

    Raises:
        ValueError: both tiers hold values, or one holds another number than the grid has slots.
    """
    sizes = (primary.size(), secondary.size())
    if all(sizes):
        raise ValueError(
            f"both tiers hold values ({sizes[0]} and {sizes[1]} slots); at most one of them may, "
            "so that every tile has one value"
        )
    for name, size in zip(("primary", "secondary"), sizes, strict=True):
        if size not in (0, grid.slot_count):
            raise ValueError(
                f"the {name} tier holds {size} values; the grid {grid.grid_shape} of tiles {grid.tile_shape} "
                f"has {grid.slot_count} slots"
            )
    if sizes[0]:
        return Location.PRIMARY
    return Location.SECONDARY if sizes[1] else Location.NONE
