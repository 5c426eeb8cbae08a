"""What the figures were measured on; nothing that tells whose machine it is."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

__all__ = ["commit", "facts", "load"]


def facts(scratch: Path) -> dict[str, str]:
    """Describe the machine and the file system that was measured."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "processors": f"{os.cpu_count()}, of which this process may use {len(_usable())}",
        "memory": f"{_memory() / (1 << 30):.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "file system": _file_system(scratch),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "transparent huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def commit() -> str:
    """Which version of this repository was measured."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=12")
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=60
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def load() -> str:
    """How busy the machine is, as the system tells: the mean number of processes of the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def _usable() -> set[int] | range:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _file_system(folder: Path) -> str:
    """The type of the innermost mount that holds a folder."""
    place, found = folder.resolve(), ("", "unknown")
    for line in _read("/proc/self/mounts").splitlines():
        _, mount, kind, *_ = line.split()
        if place.is_relative_to(mount) and len(mount) >= len(found[0]):
            found = mount, kind
    return found[1]


def _field(path: str, name: str) -> str:
    for line in _read(path).splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""
