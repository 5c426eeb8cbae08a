"""AwaitResult: the handle of one request, observed from any thread and any event loop.

The handle keeps a list of *wakers*, one per sleeping observer. A waker is a plain callable that never blocks:
it releases the lock a thread sleeps on, or asks the observer's own loop to set an event. Finishing a handle
stores the outcome, then calls the wakers; it never waits for an observer, so an observer whose loop is
blocked, cancelled or closed cannot hold up the runtime.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint, current_token

from strideweave.runtime.locks import holds_short_lock, short_lock
from strideweave.runtime.thread_role import park_daemon_thread, this_thread
from strideweave.runtime.uncopied import Uncopied
from strideweave.runtime.wake_ups import current_task, wake_ups_of

if TYPE_CHECKING:
    from types import TracebackType
    from typing import NoReturn, Self

__all__ = ["AwaitResult", "DroppedAtExit"]

T_co = TypeVar("T_co", covariant=True)

_logger = logging.getLogger("strideweave")


class DroppedAtExit(RuntimeError):  # noqa: N818  an event, told to very few
    """The request was unfinished when its time at the interpreter's end was up."""

    def __init__(self) -> None:
        super().__init__("the request was dropped because the interpreter is exiting")

    def __reduce__(self) -> tuple[type[DroppedAtExit], tuple[()], dict[str, Any]]:
        return type(self), (), self.__dict__


class AwaitResult(Uncopied, Awaitable[T_co], Generic[T_co]):
    """The handle of one request, which ends in exactly one outcome: a value or an exception.

    Contract: *every observation returns the same object or raises the same exception object;
    cancelling an awaiter or dropping the handle never cancels the request.* A handle may be observed any
    number of times, from any number of threads and asyncio, uvloop or trio loops, before and after it is
    done.

    Subclasses need no constructor arguments.
    """

    __slots__ = ("__weakref__", "_done", "_exception", "_traceback", "_value", "_wakers")

    _instead = "it is the handle of one request: call wait() or await it, and pass on what that gives"

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._exception: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._wakers: list[Callable[[], object]] = []

    @classmethod
    def completed(cls, value: Any = None) -> Self:
        """Make a handle that is done already.

        Args:
            value: what every observation returns.
        """
        handle = cls()
        handle._finish(value)
        return handle

    @classmethod
    def failed(cls, exception: BaseException) -> Self:
        """Make a handle that has failed already.

        Args:
            exception: what every observation raises.

        Raises:
            TypeError: it is none.
        """
        if not isinstance(exception, BaseException):
            raise TypeError(f"exception must be an exception, found {exception!r}")
        handle = cls()
        handle._finish(exception=exception)
        return handle

    @property
    def done(self) -> bool:
        """Whether the request has ended, with a value or an exception. Never blocks."""
        return self._done

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                hint = ""
            elif name == "add_done_callback":  # what asyncio.wait asks of everything it is given
                hint = "; asyncio.ensure_future(handle) makes a future of it"
            else:
                hint = "; this is the handle of a request, call wait() or await it first"
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self
            )

    def __repr__(self) -> str:
        if not self._done:
            state = "pending"
        elif self._exception is None:
            state = "done"
        else:
            state = f"failed: {self._exception!r}"
        return f"<{type(self).__name__} {state}>"

    def wait(self, timeout: float | None = None) -> T_co:
        """Block the calling thread until the request ends.

        Inside a running event loop this blocks that loop, and completes.

        Args:
            timeout: seconds to wait at most; None waits without limit, zero or less only looks.

        Returns:
            The request's value, the same object for every observation.

        Raises:
            TimeoutError: the time is up. The request goes on; wait again, or await the handle.
            TypeError: ``timeout`` is no number.
            ValueError: it is NaN.
            RuntimeError: called inside the runtime thread or one of its workers, where it would deadlock. It raises
                there whether or not the request has ended, so that the mistake shows on the first run. Also called
                in a signal handler or a finalizer that interrupted this library where waiting would deadlock.
            BaseException: what the request raised, the same object for every observation.
        """
        if this_thread.waiting_forbidden:
            raise RuntimeError(
                "AwaitResult.wait() inside the runtime would deadlock; await the handle instead"
            )
        if timeout is not None:  # also where nobody has to wait, so that a mistake shows on the first run
            _check_timeout(timeout)
        if not self._done and holds_short_lock():
            raise RuntimeError(
                "AwaitResult.wait() in a signal handler, or a finalizer, that interrupted StrideWeave at work would "
                "deadlock; have the handler set a flag, and wait after it"
            )
        if not self._done and not self._block(timeout):
            raise TimeoutError(
                f"the request is unfinished after {timeout} s and goes on; wait again or await the handle"
            )
        try:
            if self._exception is not None:
                self._raise()
            value: T_co = self._value
            return value
        finally:
            del self  # a raised exception keeps this frame: no cycle handle -> exception -> frame -> handle

    def __await__(self) -> Generator[Any, Any, T_co]:
        """Wait in the caller's event loop (asyncio, uvloop or trio); see ``wait`` for what comes out.

        A finished handle still lets the loop run once, so that a server that only meets finished requests
        stays responsive.
        """
        try:
            if self._done:
                yield from checkpoint().__await__()
            else:
                yield from self._sleep()
            if self._exception is not None:
                self._raise()
            value: T_co = self._value
            return value
        finally:
            del self  # as in wait()

    def _raise(self) -> NoReturn:
        """Raise the exception of a failed handle."""
        exception: BaseException = self._exception or RuntimeError("the request has not failed")
        if isinstance(exception, DroppedAtExit):
            park_daemon_thread()
        try:
            # With the stored traceback: a bare raise would append this observation's frames to the last ones.
            raise exception.with_traceback(self._traceback)
        finally:
            del self, exception  # as in wait()

    def _block(self, timeout: float | None) -> bool:
        """Sleep in the calling thread until the handle is done; False when the time is up first."""
        gate = threading.Lock()
        gate.acquire()
        if not self._add_waker(gate.release):
            return True
        try:
            if timeout is None:
                return gate.acquire()  # Ctrl-C interrupts this
            if gate.acquire(timeout=float(min(max(timeout, 0.0), threading.TIMEOUT_MAX))):
                return True
            return self._done  # it may have ended at this very moment
        finally:
            if not self._done:
                self._discard_waker(gate.release)

    def _sleep(self) -> Generator[Any, Any, None]:
        """Sleep in the calling task until the handle is done."""
        # Both kinds of loop have one entry that any thread may call and that never blocks. The portable
        # anyio.from_thread.run_sync() waits for the target loop, so a blocked observer would block the
        # runtime.
        task = current_task()
        asleep: Callable[[], Generator[Any, Any, None]]
        if task is not None:  # a bare future: an anyio.Event costs several times as much
            loop = task.get_loop()
            del task  # its cancellation keeps this frame: no cycle task -> exception -> frame -> task
            future: asyncio.Future[None] = loop.create_future()
            waker = partial(wake_ups_of(loop).wake, future)
            asleep = future.__await__
        else:
            event = anyio.Event()
            waker = partial(_wake_trio, current_token().native_token, event.set)
            asleep = partial(_wait_for, event)
        if not self._add_waker(waker):
            yield from checkpoint().__await__()
            return
        try:
            yield from asleep()
        finally:
            if not self._done:
                self._discard_waker(waker)  # cancelled, or the coroutine was closed; the request goes on

    def _finish(self, value: Any = None, exception: BaseException | None = None) -> bool:
        """End the request and wake every observer. Any thread may call this; only the first call counts.

        Returns:
            False when the handle was done before, and nothing changed.
        """
        settled = self._settle(value, exception)
        if settled:
            self._wake()
        return settled

    def _settle(self, value: Any = None, exception: BaseException | None = None) -> bool:
        """Store the outcome without waking anybody; False when there was one already."""
        with short_lock:
            if self._done:
                return False
            self._value = value
            if exception is not None:
                self._exception = exception = _storable(exception)
                self._traceback = exception.__traceback__
            self._done = True  # last: whoever reads True without the lock finds the outcome complete
        return True

    def _wake(self) -> None:
        """Call every waker once; a waker that fails must not leave the others asleep."""
        wakers = self._wakers
        while wakers:
            try:
                waker = wakers.pop()
            except IndexError:  # an observer took the last one back meanwhile
                return
            try:
                waker()
            except Exception:  # whatever it is, it belongs to one observer and must not reach the others
                _logger.exception("an observer of a finished request could not be woken")

    def _add_waker(self, waker: Callable[[], object]) -> bool:
        """Have ``waker`` called once, by the finishing thread, when the handle is done.

        Returns:
            False when the handle is done already and ``waker`` will not be called.
        """
        # No lock: append, remove and pop are atomic, and a waker that is gone from the list has been claimed.
        self._wakers.append(waker)
        return not (self._done and self._discard_waker(waker))

    def _discard_waker(self, waker: Callable[[], object]) -> bool:
        """Take a waker back; False when it was called already, or is about to be."""
        try:
            self._wakers.remove(waker)
        except ValueError:
            return False
        return True


def _check_timeout(timeout: object) -> None:
    """Refuse what is no number of seconds; one may be infinite, or negative."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(
            f"timeout must be a number of seconds or None, found {timeout!r} of type {type(timeout).__name__}"
        )
    if timeout != timeout:  # noqa: PLR0124  NaN; math.isnan does not take every integer
        raise ValueError("timeout must be a number of seconds or None, found NaN")


def _wait_for(event: anyio.Event) -> Generator[Any, Any, None]:
    return event.wait().__await__()


def _wake_trio(token: Any, wake: Callable[[], None]) -> None:
    """Ask an observer's loop to call ``wake`` soon; a loop that has ended has nobody left to wake."""
    try:
        token.run_sync_soon(wake)
    except RuntimeError:  # trio.RunFinishedError
        return


def _storable(exception: BaseException) -> BaseException:
    """Replace the exceptions that an event loop or a generator takes for its own signals.

    Raised in an awaiting task, they would look like the cancellation of that task, or like its return.
    """
    if isinstance(exception, (asyncio.CancelledError, StopIteration, GeneratorExit)):
        kind = type(exception).__name__
        replacement = RuntimeError(f"the request was ended by {kind} inside the runtime")
        replacement.__cause__ = exception
        return replacement.with_traceback(exception.__traceback__)
    return exception
