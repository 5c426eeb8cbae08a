"""How much memory limits leave to this process: its own, and those of the control groups that it is in."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["memory_limits"]

_GROUPS = Path("/proc/self/cgroup")  # which groups this process is in, one a line
_GROUP_LIMITS = Path("/sys/fs/cgroup")


def memory_limits() -> Iterator[int]:
    """Bytes that limits leave to this process or its container, none where there is no limit."""
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield soft
    for path in _group_limits():
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:  # the root has no limit, and a container does not see the groups that it is in
            continue
        if text.isdecimal():  # else "max"
            yield int(text)


def _group_limits() -> Iterator[Path]:
    """The files that may hold a limit of this process's control groups, each group and those that it is in."""
    try:
        groups = _GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in groups:
        _, kinds, group = line.split(":", 2)
        if "memory" in kinds.split(","):
            root, limit = _GROUP_LIMITS / "memory", "memory.limit_in_bytes"
        elif not kinds:  # the second generation, which has one tree for all kinds
            root, limit = _GROUP_LIMITS, "memory.max"
        else:
            continue
        place = Path(group.lstrip("/"))
        for one in (place, *place.parents):
            yield root / one / limit
