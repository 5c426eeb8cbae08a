"""What there is once: a holder of storage, of a file or of a graph, and the handle of a request."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["Uncopied"]


class Uncopied:
    """The base of what can be neither copied nor pickled: two would give back, or settle, the same thing twice.

    Python copies any object attribute by attribute unless it is told not to. A subclass that knows how to make its
    like has a ``__reduce__`` of its own.
    """

    __slots__ = ()

    #: What to do in place of a copy, the end of the message.
    _instead: ClassVar[str]

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Refuse.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; {self._instead}")
