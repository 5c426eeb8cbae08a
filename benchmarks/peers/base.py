"""What every peer has in common: what it needs, what it says of itself, and the cases that it takes part in."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.dataset import Dataset, cached_share, drop_cache, sync_tree
from benchmarks.memory import page_aligned
from benchmarks.method import FRESH, Method
from benchmarks.task import Picks, Task

__all__ = ["Peer"]


class Peer:
    """A library, or a way of doing it without one.

    A subclass takes part in a case by a method of the case's name that takes the task and returns contenders.

    Attributes:
        modules: what must be importable.
        programs: what must be on the path.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    programs: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.stack = ExitStack()  # what a task opened

    def obstacle(self) -> str | None:
        """Why it cannot run here; None where it can."""
        missing = [
            f"{name} is not installed" for name in self.modules if importlib.util.find_spec(name) is None
        ]
        missing += [f"{name} is not on the path" for name in self.programs if shutil.which(name) is None]
        return "; ".join(missing) or None

    def facts(self) -> dict[str, str]:
        """Versions and settings for the report, once a task was opened."""
        return {name: _version(name) for name in self.modules}

    def open(self, task: Task) -> list[Method]:
        """Get everything ready and give the contenders of a task; none where the peer does not take part."""
        make: Callable[[Task], list[Method]] | None = getattr(self, task.case, None)
        methods = [] if make is None else make(task)
        return [method for method in methods if method.brief or not task.brief]

    def close(self) -> None:
        """Let go of everything that a task opened."""
        self.stack.close()

    def scratch(self, task: Task, name: str) -> Path:
        """A place in the task's folder that goes with the task."""
        path = Path(task.folder) / name
        self.stack.callback(_remove, path)
        return path

    @staticmethod
    def opening(task: Task, name: str, run: Callable[[Picks], Any], *, cold: bool) -> Method:
        """A contender that goes from the data set's path to the tiles each time."""
        path = Dataset(task).path

        def prepare(_: Picks) -> None:
            if cold:
                drop_cache([path])

        return Method(name, FRESH, run, prepare, cached=lambda: cached_share([path]))

    def saving(
        self, task: Task, name: str, file: str, save: Callable[[Path, Any], Any], load: Callable[[Path], Any]
    ) -> Method:
        """A contender that saves an array where nothing is, and has it on the device when it is done."""
        data, path = Dataset(task), self.scratch(task, file)
        values = page_aligned(task.tiles, task.tile_bytes)

        def prepare(picks: Picks) -> None:
            _remove(path)
            data.read(picks, values)

        def run(_: Picks) -> None:
            save(path, values)
            sync_tree(path)

        return Method(name, "", run, prepare, found=lambda _, __: load(path))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "from its source tree"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
