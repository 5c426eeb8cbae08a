"""Whether results require gradients: a switch that each thread and each task has for itself.

The switch is one context variable that holds a stack. A block pushes and pops; nothing is stored in the
objects that open a block, so one object may be used by many threads and tasks at once.
"""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from strideweave.flags import as_flag

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator
    from types import TracebackType

__all__ = ["NoGrad", "SetGradEnabled", "is_grad_enabled", "no_grad", "set_grad_enabled"]

F = TypeVar("F", bound="Callable[..., Any]")

_modes: ContextVar[tuple[bool, ...]] = ContextVar("strideweave_gradient_modes", default=(True,))


def is_grad_enabled() -> bool:
    """Whether operations of this thread and task give results that require gradients."""
    return _modes.get()[-1]


@overload
def no_grad() -> NoGrad: ...
@overload
def no_grad(function: F) -> F: ...
def no_grad(function: F | None = None) -> NoGrad | F:
    """Switch gradients off for a block or a function, in this thread and task only.

    ``with no_grad():`` guards a block; ``@no_grad`` and ``@no_grad()`` guard a function, an ``async``
    function, a generator or an asynchronous generator. A guarded generator has the switch off while its
    body runs, not while its consumer does.

    Raises:
        TypeError: something that is not callable was to be decorated.
    """
    return NoGrad() if function is None else NoGrad()(function)


def set_grad_enabled(mode: bool) -> SetGradEnabled:
    """Switch gradients on or off from here on; as a context manager, restore the former mode at its end.

    The call itself switches, so ``set_grad_enabled(False)`` works as a plain statement too.

    Raises:
        TypeError: ``mode`` is not a bool.
    """
    return SetGradEnabled(mode)


class NoGrad:
    """What ``no_grad()`` gives: a reusable context manager and decorator."""

    __slots__ = ()

    def __enter__(self) -> None:
        _modes.set((*_modes.get(), False))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _modes.set(_modes.get()[:-1])

    def __call__(self, function: F) -> F:
        """Guard a function of any of the four kinds."""
        if not callable(function):
            raise TypeError(f"no_grad decorates functions, found {type(function).__name__}")
        guards = (
            (inspect.isasyncgenfunction, _guard_async_generator),
            (inspect.iscoroutinefunction, _guard_coroutine),
            (inspect.isgeneratorfunction, _guard_generator),
        )
        guard = next((guard for is_kind, guard in guards if is_kind(function)), _guard_call)
        return cast("F", functools.wraps(function)(guard(function)))


class SetGradEnabled:
    """What ``set_grad_enabled(mode)`` gives: a context manager whose end restores the former mode."""

    __slots__ = ("_former",)

    def __init__(self, mode: bool) -> None:
        enabled = as_flag(mode, "mode")
        self._former = is_grad_enabled()
        _replace(enabled)

    def __enter__(self) -> None:
        """The switch was set by the constructor already."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _replace(self._former)


def _replace(mode: bool) -> None:
    _modes.set((*_modes.get()[:-1], mode))


def _guard_call(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **options: Any) -> Any:
        with NoGrad():
            return function(*args, **options)

    return guarded


def _guard_coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    async def guarded(*args: Any, **options: Any) -> Any:
        with NoGrad():
            return await function(*args, **options)

    return guarded


def _guard_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **options: Any) -> Generator[Any, Any, Any]:
        body = function(*args, **options)
        step, value = body.send, None
        while True:
            try:
                with NoGrad():
                    item = step(value)
            except StopIteration as end:
                return end.value
            step, value = body.send, None
            try:
                value = yield item
            except GeneratorExit:
                with NoGrad():
                    body.close()
                raise
            except BaseException as error:  # whatever the consumer throws belongs to the body
                step, value = body.throw, error

    return guarded


def _guard_async_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    async def guarded(*args: Any, **options: Any) -> AsyncGenerator[Any, Any]:
        body = function(*args, **options)
        step, value = body.asend, None
        while True:
            try:
                with NoGrad():
                    item = await step(value)
            except StopAsyncIteration:
                return
            step, value = body.asend, None
            try:
                value = yield item
            except GeneratorExit:
                with NoGrad():
                    await body.aclose()
                raise
            except BaseException as error:  # whatever the consumer throws belongs to the body
                step, value = body.athrow, error

    return guarded
