"""Exceptions that come from outside, as Ctrl-C does, at every place where one can come."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any, TypeAlias

__all__ = ["Interruption", "interrupted_everywhere"]


class Interruption(BaseException):
    """What a signal handler might raise."""


# After these the interpreter looks for signals, as a part of them. It does not between any two instructions: what
# enters a ``with`` block, for example, is one step with what follows it.
_LOOKS_FOR_SIGNALS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"})


# Up to the RESUME that looks for signals, of functions and of generators.
_BEGINS_A_FRAME = frozenset({"COPY_FREE_VARS", "MAKE_CELL", "RESUME", "RETURN_GENERATOR", "POP_TOP", "NOP"})

_Instruction: TypeAlias = "tuple[str, int | None]"


class _Interrupter:
    """Raises in the calling thread when as many such places have been passed."""

    def __init__(self, places: int) -> None:
        self._caller = sys._getframe(1)
        self.left = places
        self.at: str | None = None
        self._last: dict[FrameType, _Instruction] = {}

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        """The trace function of every frame."""
        back = frame.f_back
        in_finalizer = back is not self._caller and back is not None and back.f_trace is None
        if in_finalizer or frame.f_code.co_name == "__del__":  # what a finalizer raises goes nowhere
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            self._pass(frame)
        elif event == "return":
            self._last.pop(frame, None)
        return self.trace

    def forget(self) -> None:
        """Let go of the frames, which do not tell of their end once something was raised here, and of their values."""
        self._last.clear()

    def _pass(self, frame: FrameType) -> None:
        code = frame.f_code
        now = _instructions(code)[frame.f_lasti]
        last, self._last[frame] = self._last.get(frame), now
        # What is raised here belongs to the instruction that comes now. Where that has another handler than the one
        # before, which a signal would have interrupted, it says nothing: at the end of a ``with`` block, for example.
        # Where the first one that is traced is no part of a frame's beginning, a RESUME came before it.
        interruptible = (
            now[0] not in _BEGINS_A_FRAME
            if last is None
            else last[0] in _LOOKS_FOR_SIGNALS and last[1] == now[1]
        )
        # What has no line is the compiler's own.
        if self.at is None and interruptible and frame.f_lineno is not None:
            self.left -= 1
            if self.left == 0:
                self.at = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
                raise Interruption(self.at)


@cache
def _instructions(code: CodeType) -> dict[int, _Instruction]:
    """Each instruction by its place: its name, and where its exceptions go."""
    table = dis.Bytecode(code).exception_entries
    return {
        one.offset: (
            one.opname,
            next((entry.target for entry in table if entry.start <= one.offset < entry.end), None),
        )
        for one in dis.get_instructions(code)
    }


def interrupted_everywhere(begin: Callable[[], Callable[[], object]], *, every: int = 1) -> Iterator[str]:
    """Interrupt a call at its first place, once more at its second, and so on, until it ends untouched.

    Args:
        begin: prepares the next call, and gives it.
        every: how many places to go on each time, in calls that have very many.

    Yields:
        Where it was interrupted, each time.
    """
    places = 0
    while True:
        places += every
        call, interrupter = begin(), _Interrupter(places)
        sys.settrace(interrupter.trace)
        try:
            call()
        except Interruption:
            pass
        finally:
            sys.settrace(None)
            interrupter.forget()
        if interrupter.at is None:
            return
        yield interrupter.at
