"""Checks in another process than the test's."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_a_forked_child(check: Callable[[], bool]) -> bool:
    """Whether a check is true in a forked child."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
