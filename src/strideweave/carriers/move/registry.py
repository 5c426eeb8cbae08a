"""Which operation moves values between which two carrier classes.

Keyed by the exact pair of classes: there is no fallback for subclasses or for pairs that nobody registered,
so that a slow path is never taken silently. A class of your own can register ``ElementwiseMoveOperation``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from strideweave.carriers.base import Carrier
from strideweave.carriers.block_device import BlockDeviceCarrier
from strideweave.carriers.cpu import CPU
from strideweave.carriers.file_backed import FileBacked
from strideweave.carriers.file_parts import FileParts
from strideweave.carriers.generic import Generic
from strideweave.carriers.metal import Metal
from strideweave.carriers.move.file_parts import FilePartsToFile, FilePartsToMemory
from strideweave.carriers.move.operations import (
    FileToFile,
    FileToMemory,
    MemoryToFile,
    MemoryToMemory,
    MoveOperation,
)
from strideweave.flags import as_flag
from strideweave.runtime.locks import short_lock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Pair = tuple[type[Carrier], type[Carrier]]

__all__ = [
    "dispatch_move",
    "register_move_operation",
    "registered_move_operation",
    "replace_routes",
    "unregister_move_operation",
]

# Changed under short_lock, which no forked child finds held; read without it.
_operations: dict[tuple[type[Carrier], type[Carrier]], type[MoveOperation]] = {
    (Generic, Generic): MemoryToMemory,
    (Generic, CPU): MemoryToMemory,
    (Generic, FileBacked): MemoryToFile,
    (CPU, Generic): MemoryToMemory,
    (CPU, CPU): MemoryToMemory,
    (CPU, FileBacked): MemoryToFile,
    (FileBacked, Generic): FileToMemory,
    (FileBacked, CPU): FileToMemory,
    (FileBacked, FileBacked): FileToFile,
    # The processor shares the memory of MLX, so Metal is memory like any other.
    (Metal, Generic): MemoryToMemory,
    (Metal, CPU): MemoryToMemory,
    (Metal, Metal): MemoryToMemory,
    (Metal, FileBacked): MemoryToFile,
    (Generic, Metal): MemoryToMemory,
    (CPU, Metal): MemoryToMemory,
    (FileBacked, Metal): FileToMemory,
    # An extent of a device is a file like any other: it has a descriptor and an offset.
    (BlockDeviceCarrier, Generic): FileToMemory,
    (BlockDeviceCarrier, CPU): FileToMemory,
    (BlockDeviceCarrier, Metal): FileToMemory,
    (BlockDeviceCarrier, FileBacked): FileToFile,
    (BlockDeviceCarrier, BlockDeviceCarrier): FileToFile,
    (Generic, BlockDeviceCarrier): MemoryToFile,
    (CPU, BlockDeviceCarrier): MemoryToFile,
    (Metal, BlockDeviceCarrier): MemoryToFile,
    (FileBacked, BlockDeviceCarrier): FileToFile,
    # Files in place are read part by part; what is like them is a spill file, which is written as one.
    (FileParts, Generic): FilePartsToMemory,
    (FileParts, CPU): FilePartsToMemory,
    (FileParts, Metal): FilePartsToMemory,
    (FileParts, FileBacked): FilePartsToFile,
    (FileParts, BlockDeviceCarrier): FilePartsToFile,
    (FileParts, FileParts): FilePartsToFile,
    (Generic, FileParts): MemoryToFile,
    (CPU, FileParts): MemoryToFile,
    (Metal, FileParts): MemoryToFile,
    (FileBacked, FileParts): FileToFile,
    (BlockDeviceCarrier, FileParts): FileToFile,
}


def dispatch_move(source_class: type[Carrier], destination_class: type[Carrier]) -> type[MoveOperation]:
    """Return the operation class that moves values between two exact carrier classes.

    Args:
        source_class: class of the carriers that are read.
        destination_class: class of the carriers that are written.

    Raises:
        TypeError: an argument is not a carrier class.
        NotImplementedError: nothing is registered for this pair.
    """
    key = _pair(source_class, destination_class)
    found = _operations.get(key)
    if found is None:
        raise NotImplementedError(
            f"no move operation is registered from {source_class.__name__} to {destination_class.__name__}; "
            "register_move_operation registers one, such as ElementwiseMoveOperation for two classes whose single "
            "slots are read and written at once, or move by way of a CPU carrier"
        )
    return found


def register_move_operation(
    source_class: type[Carrier], destination_class: type[Carrier], operation_class: type[MoveOperation]
) -> None:
    """Register the operation class for an ordered pair of exact carrier classes, for the whole process.

    Args:
        source_class: class of the carriers that are read.
        destination_class: class of the carriers that are written.
        operation_class: made without arguments for every use.

    Raises:
        TypeError: an argument is not a carrier class, or ``operation_class`` no MoveOperation class.
        ValueError: an operation is registered for this pair already.
    """
    key = _pair(source_class, destination_class)
    _require_operation(operation_class)
    with short_lock:
        _add(key, operation_class)


def unregister_move_operation(
    source_class: type[Carrier], destination_class: type[Carrier]
) -> type[MoveOperation]:
    """Remove the operation class of an ordered pair and return it.

    Raises:
        TypeError: an argument is not a carrier class.
        KeyError: nothing is registered for this pair.
    """
    key = _pair(source_class, destination_class)
    with short_lock:
        if key not in _operations:
            names = f"{source_class.__name__} to {destination_class.__name__}"
            raise KeyError(f"no move operation is registered from {names}")
        return _operations.pop(key)


@contextmanager
def registered_move_operation(
    source_class: type[Carrier],
    destination_class: type[Carrier],
    operation_class: type[MoveOperation],
    *,
    replace: bool = False,
) -> Iterator[None]:
    """Have an operation class registered for the length of a ``with`` block, for the whole process.

    Args:
        source_class: class of the carriers that are read.
        destination_class: class of the carriers that are written.
        operation_class: made without arguments for every use.
        replace: take the place of the operation that is registered, which comes back after the block.

    Raises:
        TypeError: as ``register_move_operation``.
        ValueError: an operation is registered for this pair already, and ``replace`` is false.
    """
    replace = as_flag(replace, "replace")
    key = _pair(source_class, destination_class)
    _require_operation(operation_class)
    with short_lock:
        before = _operations.get(key)
        if replace:
            _operations[key] = operation_class
        else:
            _add(key, operation_class)
    try:
        yield
    finally:
        with short_lock:
            if before is None:
                _operations.pop(key, None)
            else:
                _operations[key] = before


def replace_routes(old: Mapping[Pair, type[MoveOperation]], new: Mapping[Pair, type[MoveOperation]]) -> None:
    """Register the moves of a carrier's definition in place of an earlier one's, all of them or none.

    Raises:
        ValueError: a pair has a move that is not the earlier definition's; nothing has changed.
    """
    with short_lock:
        for key in new:
            if key not in old:
                _check_vacant(key)
        for key in old:
            _operations.pop(key, None)
        _operations.update(new)


def _add(key: Pair, operation_class: type[MoveOperation]) -> None:
    _check_vacant(key)
    _operations[key] = operation_class


def _check_vacant(key: Pair) -> None:
    present = _operations.get(key)
    if present is not None:
        raise ValueError(
            f"{present.__name__} is registered from {key[0].__name__} to {key[1].__name__} already; "
            "unregister it first, or use registered_move_operation with replace=True"
        )


def _pair(source_class: object, destination_class: object) -> tuple[type[Carrier], type[Carrier]]:
    for found in (source_class, destination_class):
        if not (isinstance(found, type) and issubclass(found, Carrier)):
            raise TypeError(f"moves are registered for carrier classes, found {found!r}")
    return source_class, destination_class  # type: ignore[return-value]


def _require_operation(operation_class: object) -> None:
    if not (isinstance(operation_class, type) and issubclass(operation_class, MoveOperation)):
        raise TypeError(f"a subclass of MoveOperation is needed, found {operation_class!r}")
