"""What composites have in common: they own other carriers, all of them or none, and give them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strideweave.carriers.base import Carrier
from strideweave.errors import OwnershipError, ReleasedError

if TYPE_CHECKING:
    from strideweave.dtype import DType

__all__ = ["DependentCarrier", "check_tiers"]


class DependentCarrier(Carrier):
    """A carrier whose storage is other carriers that it owns exclusively.

    Ownership shows as a token of its own, not as the composite itself: an alias of a child that somebody keeps
    must not keep the composite alive. A composite that is destroyed without ``release()`` gives its children
    back unreleased.

    Spec: *Child ownership makes retained aliases externally read-only*; *Release ends the whole hierarchy
    lifecycle*.
    """

    def __init__(self, size: int, *, dtype: DType, mutable: bool) -> None:
        super().__init__(size, dtype=dtype, mutable=mutable)
        self._token = object()
        self._children: list[Carrier] = []

    def _own(self, *carriers: Carrier) -> None:
        """Claim carriers, all of them or none.

        Raises:
            ReleasedError, OwnershipError, PendingWorkError: one of them cannot be claimed.
        """
        claimed: list[Carrier] = []
        complete = False
        try:
            for carrier in carriers:
                carrier._claim(self._token)
                claimed.append(carrier)
            complete = True
        finally:
            if not complete:
                for carrier in claimed:
                    carrier._relinquish(self._token)
        self._children += claimed

    def _disown(self, carrier: Carrier) -> None:
        """Release a child and forget it."""
        self._children = [child for child in self._children if child is not carrier]
        carrier._release_as(self._token)

    def _free_storage(self) -> None:
        children, self._children = self._children, []
        for child in children:
            child._release_as(self._token)

    def __del__(self) -> None:
        for child in self.__dict__.get("_children", ()):  # a failed construction may have none
            child._abandon(self._token)
        super().__del__()


def check_tiers(primary: object, secondary: object) -> tuple[Carrier, Carrier]:
    """Check that two objects may become the tiers of one composite.

    Raises:
        TypeError: one is no Carrier.
        ValueError: they are one object.
        ReleasedError, OwnershipError: one is released or owned.
    """
    for name, tier in (("primary", primary), ("secondary", secondary)):
        if not isinstance(tier, Carrier):
            raise TypeError(f"{name} must be a Carrier, found {type(tier).__name__}")
    if primary is secondary or not (isinstance(primary, Carrier) and isinstance(secondary, Carrier)):
        raise ValueError("primary and secondary are the same carrier; a hierarchy needs two")
    for name, tier in (("primary", primary), ("secondary", secondary)):
        if tier.is_released():
            raise ReleasedError(f"the {name} tier was released; pass a live carrier")
        if tier.is_owned():
            raise OwnershipError(
                f"the {name} tier is owned by a composite or a request; pass one that is free"
            )
    return primary, secondary
