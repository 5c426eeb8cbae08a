"""A directory that is made beside the place where it is to be, and put there in one step."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["exchange", "remove_tree"]

# <fcntl.h>, <linux/fs.h>
_HERE = -100
_EXCHANGE = 2
_CANNOT = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


def _find_renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


_RENAMEAT2 = _find_renameat2()


def exchange(one: str, other: str) -> None:
    """Have two directories take each other's place, in one step where the system can do that.

    Elsewhere ``other`` is away for an instant, under the name of ``one`` with ``.old`` at its end; a process that
    is killed then leaves it there.

    Raises:
        OSError: the system refused; both are where they were.
    """
    if _RENAMEAT2 is not None:
        if _RENAMEAT2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in _CANNOT:
            raise OSError(code, os.strerror(code), other)
    aside = f"{one}.old"
    Path(other).rename(aside)
    try:
        Path(one).rename(other)
    except OSError:
        Path(aside).rename(other)
        raise
    Path(aside).rename(one)


def remove_tree(path: str) -> None:
    """Remove a directory that nobody needs any more, as far as that is possible."""
    with suppress(OSError):
        shutil.rmtree(path)
