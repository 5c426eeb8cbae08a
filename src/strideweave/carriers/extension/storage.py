"""Storage that somebody else provides: what they write, and what stands between them and a carrier."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.errors import ReleasedError
from strideweave.runtime.locks import short_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from strideweave.dtype import DType

__all__ = ["ProvidedStorage", "StorageProvider"]

_logger = logging.getLogger("strideweave")


class StorageProvider(ABC):
    """Where the slots of a carrier class lie: plain functions, which may block.

    They are called in worker threads, or in the thread of a caller that reads or writes a single slot or releases
    the carrier, and never in the runtime's loop. Calls for one storage never overlap; those for several do. What
    a function raises reaches whoever waits for the request, as it is.

    One provider serves all carriers of a class, so what belongs to one carrier belongs into its storage.
    """

    def supports_dtype(self, dtype: DType) -> bool:
        """Whether slots of this type can be stored; all of them, unless overridden. Must not block."""
        return True

    @abstractmethod
    def allocate(self, slots: int, dtype: DType) -> Any:
        """Make storage for ``slots`` slots that all read zero.

        Called when the slots of a carrier are first read or written, not when the carrier is made.

        Args:
            slots: how many, at least one.
            dtype: their type.

        Returns:
            Whatever the other functions are to be given as ``storage``.
        """

    @abstractmethod
    def read(self, storage: Any, start: int, slots: int) -> Any:
        """Give the values of the slots ``[start, start + slots)``.

        Args:
            storage: from ``allocate``.
            start: the first slot.
            slots: how many, at least one; 8 MiB of them at the most where a carrier is read by a move.

        Returns:
            A 1-D array of ``slots`` elements of the dtype, or an object with as many bytes as these have, such as
            ``bytes``. It is copied before the next call.
        """

    @abstractmethod
    def write(self, storage: Any, start: int, values: NDArray[Any]) -> None:
        """Take the values of the slots that begin at ``start``.

        Args:
            storage: from ``allocate``.
            start: the first slot.
            values: a read-only contiguous 1-D array of the dtype, at least one element, to be copied: its memory is
                somebody else's again when the call returns.
        """

    def free(self, storage: Any) -> None:
        """Give the storage back; called once, and not in a forked child that inherited it."""
        del storage


class ProvidedStorage:
    """The storage of one carrier: allocated when it is first used, by one caller at a time, freed once.

    Args:
        provider: whose functions it calls.
        dtype: type of the slots.
        slots: how many.
        owner: the carrier's class name, for messages.
    """

    __slots__ = (
        "_allocated_in",
        "_dtype",
        "_freed",
        "_lock",
        "_owner",
        "_provider",
        "_slots",
        "_storage",
        "bytes_read",
        "bytes_written",
        "is_allocated",
        "reads",
        "writes",
    )

    def __init__(self, provider: StorageProvider, dtype: DType, slots: int, owner: str) -> None:
        self._provider = provider
        self._dtype = dtype
        self._slots = slots
        self._owner = owner
        self._storage: Any = None
        self.is_allocated = self._freed = False
        self._allocated_in = 0  # the process
        self._lock = (os.getpid(), threading.Lock())
        self.reads = self.writes = self.bytes_read = self.bytes_written = 0

    def read(self, start: int, values: NDArray[Any]) -> None:
        """Read as many slots as ``values`` has elements, an array of the dtype; blocks.

        Raises:
            TypeError, ValueError: the provider gave something else than so many values of the dtype.
            ReleasedError: the storage was freed.
            Exception: the provider's own.
        """
        slots = len(values)
        with self._turn(f"reading slots [{start}, {start + slots})"):
            # Copied before the next call, which may use the provider's memory again.
            values[...] = self._checked(self._provider.read(self._storage, start, slots), slots)
            self.reads += 1
            self.bytes_read += values.nbytes

    def write(self, start: int, values: NDArray[Any]) -> None:
        """Write slots; blocks.

        Raises:
            ReleasedError: the storage was freed.
            Exception: the provider's own; what these slots hold is unspecified then.
        """
        given = np.ascontiguousarray(values).view()
        given.flags.writeable = False
        with self._turn(f"writing slots [{start}, {start + len(given)})"):
            self._provider.write(self._storage, start, given)
            self.writes += 1
            self.bytes_written += given.nbytes

    def free(self) -> None:
        """Give the storage back, once; a forked child leaves its parent's storage alone."""
        with self._own_lock():
            freed, self._freed = self._freed, True
            if freed or not self.is_allocated:
                return
            storage, self._storage, self.is_allocated = self._storage, None, False
            if self._allocated_in == os.getpid():
                self._provider.free(storage)

    def free_or_log(self) -> None:
        """Give the storage back where nobody could be told of an error."""
        try:
            self.free()
        except Exception:  # any: it is the provider's
            _logger.exception("the storage of a %s could not be freed", self._owner)

    @contextmanager
    def _turn(self, doing: str) -> Iterator[None]:
        """Wait for the calls before this one, see to it that there is storage, and name what fails."""
        with self._own_lock():
            if self._freed:
                raise ReleasedError(f"this {self._owner} was released; its values are gone")
            try:
                if not self.is_allocated:
                    self._storage = self._provider.allocate(self._slots, self._dtype)
                    self.is_allocated, self._allocated_in = True, os.getpid()
                yield
            except Exception as error:  # any: it stays what it is
                error.add_note(f"{type(self._provider).__name__} failed in {doing} of a {self._owner}")
                raise

    def _own_lock(self) -> threading.Lock:
        """The lock that lets one call in at a time; a fork may have left the parent's locked for ever."""
        if self._lock[0] != os.getpid():
            with short_lock:
                if self._lock[0] != os.getpid():
                    self._lock = (os.getpid(), threading.Lock())
        return self._lock[1]

    def _checked(self, found: Any, slots: int) -> NDArray[Any]:
        dtype = self._dtype.numpy
        name = f"{type(self._provider).__name__}.read"
        if isinstance(found, np.ndarray):
            if found.dtype != dtype:
                raise TypeError(f"{name} returned an array of {found.dtype}, wanted {dtype}")
            if found.shape != (slots,):
                raise ValueError(f"{name} returned an array of shape {found.shape}, wanted ({slots},)")
            return found
        try:
            raw = memoryview(found)
        except TypeError:
            kind = type(found).__name__
            raise TypeError(f"{name} returned a {kind}, wanted an array of {dtype} or bytes") from None
        if raw.nbytes != slots * dtype.itemsize:
            wanted = slots * dtype.itemsize
            raise ValueError(f"{name} returned {raw.nbytes} bytes, wanted {wanted} for {slots} slots")
        return np.frombuffer(raw.cast("B"), dtype)
