"""What composites have in common: they own other carriers, all of them or none, and give them back."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from strideweave.carriers.base import Carrier
from strideweave.errors import OwnershipError, ReleasedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from strideweave.dtype import DType

__all__ = ["DependentCarrier", "check_distinct", "check_free", "free_storages"]


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
            EvictedError: one is a composite that was evicted; its owner could not have it promoted.
        """
        complete = False
        try:
            for carrier in carriers:
                carrier._claim(self._token)
                carrier._bearer()  # from here on nobody can evict it any more
            self._children += carriers
            complete = True
        finally:
            if not complete:
                for carrier in carriers:
                    carrier._abandon(self._token)

    @contextmanager
    def _owning(self, *carriers: Carrier) -> Iterator[None]:
        """Claim carriers as ``_own`` does, for the rest of a constructor: where that raises, they are let go again."""
        self._own(*carriers)
        complete = False
        try:
            yield
            complete = True
        finally:
            if not complete:
                self._give_back()

    def _retire(self, *carriers: Carrier) -> list[Carrier]:
        """End children, all of them or none, and forget them; those that had ended already are passed over.

        Returns:
            Those whose storage the caller frees with ``free_storages`` once no lock is held.

        Raises:
            PendingWorkError: somebody is reading one of them; nothing has changed.
        """
        with self._lock:
            leaving = [carrier for carrier in carriers if not carrier.is_released()]
            for carrier in leaving:
                carrier._require_idle()
            for carrier in leaving:
                carrier._mark_released()
            self._children = [child for child in self._children if not child.is_released()]
        return leaving

    def _give_back(self) -> None:
        """Let every child go, unreleased; takes no lock, for finalizers call it."""
        children = self.__dict__.get("_children", [])  # a failed construction may have none
        self._children = []
        for child in children:
            child._abandon(self._token)

    def _require_idle(self) -> None:
        super()._require_idle()
        for child in self._children:
            child._require_idle()

    def _mark_released(self) -> None:
        super()._mark_released()
        for child in self._children:
            child._mark_released()

    def _free_storage(self) -> None:
        free_storages(self._children)
        self._children = []

    def __del__(self) -> None:
        self._give_back()
        super().__del__()


def free_storages(carriers: Iterable[Carrier]) -> None:
    """Free the storage of ended carriers, of every one even if another's fails."""
    with ExitStack() as stack:
        for carrier in carriers:
            stack.callback(carrier._free_storage)


def check_distinct(primary: object, secondary: object) -> tuple[Carrier, Carrier]:
    """Check that two objects are carriers, and not the same one.

    Raises:
        TypeError: one is no Carrier.
        ValueError: they are one object.
    """
    for name, tier in (("primary", primary), ("secondary", secondary)):
        if not isinstance(tier, Carrier):
            raise TypeError(f"{name} must be a Carrier, found {type(tier).__name__}")
    if primary is secondary or not (isinstance(primary, Carrier) and isinstance(secondary, Carrier)):
        raise ValueError("primary and secondary are the same carrier; a hierarchy needs two")
    return primary, secondary


def check_free(primary: Carrier, secondary: Carrier) -> None:
    """Check that two carriers may be claimed as the tiers of one composite.

    Raises:
        ReleasedError, OwnershipError: one is released or owned.
        EvictedError: one is a composite whose values are not at hand; nobody could promote it any more.
        NotImplementedError: one is of a class that is no tier.
    """
    for name, tier in (("primary", primary), ("secondary", secondary)):
        if tier.is_released():
            raise ReleasedError(f"the {name} tier was released; pass a live carrier")
        if tier.is_owned():
            raise OwnershipError(
                f"the {name} tier is owned by a composite or a request; pass one that is free"
            )
        tier._bearer()
        tier._check_tier()
