"""Checks in another process than the test's."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

CHILD_SECONDS = 60
"""A child that hangs is killed."""


def in_a_forked_child(check: Callable[[], bool | None]) -> bool:
    """Whether a check that says nothing but what it asserts passes in a forked child, or is true there."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(CHILD_SECONDS)
            found = check()
            status = 0 if found is None or found else 2
        except BaseException:  # to the terminal, and not into the test run, of which this is a copy
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
