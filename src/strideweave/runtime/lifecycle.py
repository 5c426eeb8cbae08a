"""The end of the interpreter, and fork.

*At the end of the interpreter* unfinished requests get up to five seconds (contract). Two hooks
take part, because no single one is enough. ``threading``'s exit hook runs first, while new threads can still
be started, and it is the only one that runs in every kind of multiprocessing child. But user threads may
still run then and use the loop, so this hook only waits. ``atexit`` runs after those threads have been
joined: it waits for what they started since, drops what is left without a word, and stops the loop. A
multiprocessing child has no ``atexit`` before Python 3.13, so there the first hook does all of it, in a
thread of its own while user threads are running.

*At a fork* the child inherits a loop without its thread. The loop must not be closed or touched: its selector
and sockets are shared with the parent, whose own loop would go deaf. The child fails the handles it
inherited, keeps the dead loop alive so that nothing finalizes it, and starts its own loop when it needs one.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  its exit hook must come after ours, and they run last-in first-out
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from strideweave.runtime.await_result import DroppedAtExit
from strideweave.runtime.event_loop import process
from strideweave.runtime.locks import settling_lock, short_lock
from strideweave.runtime.thread_role import forbid_waiting, this_thread

if TYPE_CHECKING:
    from strideweave.runtime.await_result import AwaitResult
    from strideweave.runtime.event_loop import EventLoop

__all__ = ["install_hooks"]

EXIT_SECONDS = 5.0
"""How long the end of the interpreter waits for unfinished requests."""

_JOIN_SECONDS = 1.0  # for a loop that has nothing left to do
_STUCK_JOIN_SECONDS = 0.1  # for one that has; it is a daemon thread, the interpreter freezes it


class _Lifecycle:
    """The hooks and what they must remember between them."""

    def __init__(self) -> None:
        self._overdue: set[AwaitResult[Any]] = set()  # unfinished after their five seconds
        self._inherited: list[EventLoop] = []

    def main_thread_ended(self) -> None:
        """Wait for the unfinished requests; in a multiprocessing child, end the runtime too."""
        self._wait_for_requests()
        if not _is_multiprocessing_child():
            return
        here = threading.current_thread()
        running = [thread for thread in threading.enumerate() if not thread.daemon and thread is not here]
        if running:
            closer = threading.Thread(
                target=self._end_after, args=(running,), name="strideweave-exit", daemon=False
            )
            try:
                closer.start()
            except RuntimeError:  # no thread to be had
                self.interpreter_ends()
        else:
            self.interpreter_ends()

    def interpreter_ends(self) -> None:
        """Wait for the unfinished requests, drop the rest quietly, stop the loop and close its services."""
        with process.starting:
            process.ended = True
        runtime = process.runtime
        if runtime is None or not runtime.is_open:
            return
        self._wait_for_requests()
        dropped = False
        for scope in tuple(runtime.scopes):
            dropped = dropped or scope.pending > 0
            scope.fail_pending(DroppedAtExit)
        runtime.ask_to_stop()
        runtime.join(_STUCK_JOIN_SECONDS if dropped else _JOIN_SECONDS)
        runtime.close_services()

    def after_fork_in_child(self) -> None:
        runtime, process.runtime = process.runtime, None
        self._overdue.clear()
        for lock in _FORK_LOCKS:
            if lock.acquire(blocking=False):
                lock.release()
            else:  # Ctrl-C ended the waiting for a thread that there is no more
                lock._at_fork_reinit()  # type: ignore[attr-defined]  # what threading does with its own locks
        forbid_waiting(False)  # a request may have forked; the child's only thread is an ordinary one
        this_thread.put_off = None
        if runtime is None:
            return
        self._inherited.append(runtime)
        runtime.disown()
        for scope in tuple(runtime.scopes):
            scope.lost_in_fork()

    def _end_after(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join()
        self.interpreter_ends()

    def _wait_for_requests(self) -> None:
        """Wait until every request has ended that is unfinished now, or the time is up.

        Requests that these start in turn are waited for too, but not what threads start meanwhile: a daemon
        thread could go on for ever. A request is waited for once: what has had its time gets none at the next
        hook.
        """
        runtime = process.runtime
        if runtime is None or not runtime.is_open:
            return
        deadline = time.monotonic() + EXIT_SECONDS
        waiting = _unfinished(runtime) - self._overdue
        while waiting:
            for handle in waiting:
                try:
                    ended = handle._block(deadline - time.monotonic())
                except KeyboardInterrupt:  # the user does not want to wait
                    ended = False
                if not ended:
                    self._overdue |= _unfinished(runtime)
                    return
            waiting = _unfinished(runtime, nested_only=True) - self._overdue


HOOKS = _Lifecycle()

_FORK_LOCKS = (process.starting, short_lock, settling_lock)
"""What a fork takes, in the opposite order."""


def _unfinished(runtime: EventLoop, *, nested_only: bool = False) -> set[AwaitResult[Any]]:
    return {handle for scope in tuple(runtime.scopes) for handle in scope.unfinished(nested_only=nested_only)}


def _is_multiprocessing_child() -> bool:
    module = sys.modules.get("multiprocessing.process")  # not imported: then this is no child of it
    return module is not None and module.parent_process() is not None


def install_hooks() -> None:
    """Register the hooks; called once, when the package is imported. Starts nothing."""
    for lock in _FORK_LOCKS:
        # Its own methods, which are no Python. Ctrl-C during a fork is raised at the entry of the first hook that is
        # written in Python; that hook does nothing then, and what it would have released stays locked for good.
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    os.register_at_fork(after_in_child=HOOKS.after_fork_in_child)
    atexit.register(HOOKS.interpreter_ends)
    # Not public, but what concurrent.futures and anyio use; without it only multiprocessing children lose
    # requests.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        try:
            register(HOOKS.main_thread_ended)
        except RuntimeError:  # imported while the interpreter is exiting
            return
