"""Movement: how spans of slots get from one carrier to another, and which operation does it for whom."""

from strideweave.carriers.move.operations import ElementwiseMoveOperation, MoveOperation, Transfer
from strideweave.carriers.move.registry import (
    dispatch_move,
    register_move_operation,
    registered_move_operation,
    unregister_move_operation,
)
from strideweave.carriers.move.request import AwaitMove, move, move_async
from strideweave.runtime.await_result import AwaitResult

__all__ = [
    "AwaitMove",
    "AwaitResult",
    "ElementwiseMoveOperation",
    "MoveOperation",
    "Transfer",
    "dispatch_move",
    "move",
    "move_async",
    "register_move_operation",
    "registered_move_operation",
    "unregister_move_operation",
]
