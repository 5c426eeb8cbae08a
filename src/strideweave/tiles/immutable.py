"""The base of the room's values: attributes are set by the constructor and by caches of derived facts."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Immutable"]


class Immutable:
    """An object that refuses assignment from outside; subclasses declare ``__slots__``."""

    __slots__ = ()

    def _set(self, **attributes: object) -> None:
        # Single slot stores: a cache filled by two threads at once ends with one of two equal values.
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}; make a new one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot delete {name!r}")
