"""What carriers in files have in common: single slots, runs of them, and values written at once."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strideweave.carriers.base import Carrier
from strideweave.carriers.memory import slots_from
from strideweave.errors import PendingWorkError
from strideweave.io.engine import default_engine
from strideweave.io.positioned import FileSpan, read_spans, write_spans
from strideweave.runtime.await_result import AwaitResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from contextlib import AbstractContextManager
    from typing import Self

    from numpy.typing import NDArray

    from strideweave.dtype import DType
    from strideweave.io.files import OpenFile

__all__ = ["FileCarrier"]


class FileCarrier(Carrier):
    """Storage at offsets of an open file; subclasses say which file and where, and how storage comes and goes."""

    _slots_do_io: ClassVar[bool] = True

    @abstractmethod
    def _file(self) -> tuple[OpenFile, int]:
        """The open file and the byte offset of slot 0; ReleasedError after release."""

    def new_like(self, values: Iterable[Any], *, mutable: bool = True, dtype: DType | None = None) -> Self:
        """Write ``values`` to fresh storage of this kind. Works after release too; not for the runtime's thread.

        Raises:
            TypeError: ``values`` is not an iterable of real numbers, or ``dtype`` no DType.
            OverflowError: an integer does not fit the dtype.
            ValueError: NaN was to become an integer.
            OSError, MemoryError: there is no room for them, or they could not be written, such as on a full
                disk; no storage is kept then.
        """
        chosen = self._dtype if dtype is None else dtype
        self.supports_storage_dtype(chosen)
        slots = np.ascontiguousarray(slots_from(values, chosen))
        carrier = self.allocate_like(len(slots), mutable=mutable, dtype=chosen, empty=True)
        written = False
        try:
            carrier._write_slots(slots)
            written = True
        finally:
            if not written:  # nobody has the carrier that owns this storage
                # Interrupted, the write goes on; it holds the carrier, which gives the storage back after it.
                with suppress(PendingWorkError):
                    carrier.release()
        return carrier

    def _load_slot(self, i: int) -> bool | int | float:
        slot = np.empty(1, self._dtype.numpy)
        read_spans([self._span(i, slot)])
        return self._dtype.to_python(slot[0])

    def _store_slot(self, i: int, value: NDArray[Any]) -> None:
        write_spans([self._span(i, value.reshape(1))])

    def _read_slots(self, start: int, slots: int) -> NDArray[Any]:
        values = np.empty(slots, self._dtype.numpy)
        span = self._span(start, values)
        self._scope.start(AwaitResult[None](), self._move, default_engine().read, span).wait()
        return values

    def _write_slots(self, values: NDArray[Any]) -> None:
        """Write contiguous values of the dtype from slot 0 on; waits for I/O."""
        if len(values):
            span = self._span(0, values)
            self._scope.start(AwaitResult[None](), self._move, default_engine().write, span).wait()

    async def _move(self, move: Callable[[list[FileSpan]], Awaitable[None]], span: FileSpan) -> None:
        """Read or write a span.

        A method, because the request then keeps the carrier: whoever waits may be interrupted and let go of it, and
        nobody else may be given its storage before the system has come to an end with it.
        """
        await move([span])

    async def _persist(self) -> None:
        if self.size():
            file, _ = self._file()
            await default_engine().persist(file)

    def _writing_durably(self) -> AbstractContextManager[None]:
        return self._file()[0].writing_durably() if self.size() else nullcontext()

    def _span(self, start: int, slots: NDArray[Any]) -> FileSpan:
        file, base = self._file()
        return FileSpan(file, base + start * self._dtype.itemsize, slots.view(np.uint8))
