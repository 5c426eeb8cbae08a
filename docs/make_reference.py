"""Write reference.md from the docstrings of the public names: ``python docs/make_reference.py``.

A test compares the file with what this program makes, so the reference cannot fall behind the code.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import strideweave
from strideweave.carriers import block_device_statistics, cpu, evictable, file_backed, file_parts, lifecycle
from strideweave.carriers.extension import defined
from strideweave.carriers.tiled_evictable import statistics as tiled_statistics
from strideweave.io import files, recycling_pool
from strideweave.io import statistics as io_statistics
from strideweave.runtime import event_loop
from strideweave.store import carrier as store_carrier
from strideweave.store import tile_files
from strideweave.tiles import policy_base

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = Path(__file__).with_name("reference.md")

# Title and the rooms whose public names stand below it, in reading order.
CHAPTERS = (
    ("Tensors", ("tensor", "creation", "tiling")),
    ("Files", ("formats", "store")),
    ("Data types", ("dtype",)),
    ("Layouts", ("layout",)),
    ("Carriers", ("carriers",)),
    ("Tiles and residency", ("carriers.tiled_evictable", "tiles")),
    ("Requests and movement", ("runtime", "carriers.move")),
    ("Operations", ("operations",)),
    ("Gradient mode", ("autograd",)),
    ("Errors", ("errors",)),
)
HEAD = """# Reference

Every public name and the first line of its docstring, and what functions, methods and what you make yourself take;
`help(strideweave.TiledEvictable)` shows the rest, with types, shapes and errors.
Made by `python docs/make_reference.py`; a test keeps it true.
"""

# What statistics() gives, and of whom. These are read, and never made by a caller.
RECORDS = (
    ("`TiledEvictable.statistics()`", tiled_statistics.TiledStatistics),
    ("its `policy`, and `statistics()` of a shipped policy", policy_base.PolicyStatistics),
    ("`statistics()` of any carrier", lifecycle.CarrierStatistics),
    ("`CPU.statistics()`", cpu.CPUStatistics),
    ("`FileBacked.statistics()`", file_backed.FileBackedStatistics),
    ("its `file`", files.FileStatistics),
    ("`Evictable.statistics()`", evictable.EvictableStatistics),
    ("`BlockDeviceCarrier.statistics()`", block_device_statistics.BlockDeviceCarrierStatistics),
    ("`statistics()` of a `DefinedCarrier`", defined.DefinedStatistics),
    ("`statistics()` of the secondary tier of files in place", file_parts.FilePartsStatistics),
    ("`statistics()` of the secondary tier of a store", store_carrier.StoreBackedStatistics),
    ("its `store`", tile_files.TileFilesStatistics),
    ("`strideweave.io.engine.statistics()`", io_statistics.EngineStatistics),
    ("`strideweave.io.recycling.statistics()`", recycling_pool.RecyclingStatistics),
    ("`strideweave.runtime.statistics()`", event_loop.RuntimeStatistics),
)


def home(value: object) -> str:
    """The module below ``strideweave`` that defines a public value."""
    module: str = getattr(value, "__module__", None) or type(value).__module__
    return module.removeprefix("strideweave.")


def chapter_of(value: object) -> str:
    """The title whose longest room holds the value's home."""
    rooms = [(room, title) for title, names in CHAPTERS for room in names]
    inside = [(room, title) for room, title in rooms if f"{home(value)}.".startswith(f"{room}.")]
    if not inside:
        raise LookupError(f"no chapter of the reference holds {home(value)}; add its room to CHAPTERS")
    return max(inside, key=lambda pair: len(pair[0]))[1]


def first_line(value: object) -> str:
    """The summary of a docstring, in Markdown."""
    summary = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return re.sub(r":\w+:`", "`", summary).replace("``", "`").replace("|", "\\|")


def parameters(value: object, *, bound: bool = False) -> str:
    """What a call takes, in parentheses: names and defaults, without types. A method's ``self`` is left out."""
    signature = inspect.signature(cast("Callable[..., object]", value))
    entries = [entry.replace(annotation=inspect.Parameter.empty) for entry in signature.parameters.values()]
    return str(inspect.Signature(entries[bound:]))


def documented(value: object) -> object | None:
    """What carries the docstring of a class attribute: a method or a property; None for anything else."""
    if isinstance(value, classmethod | staticmethod):
        return value.__func__
    if isinstance(value, cached_property):
        return value.func
    return value if inspect.isfunction(value) or isinstance(value, property) else None


def attributes(cls: type) -> dict[str, str]:
    """A row for each attribute that a docstring lists: the fields of a record, what an error carries."""
    section = re.search(
        r"^Attributes:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(cls) or "", re.MULTILINE | re.DOTALL
    )
    if section is None:
        return {}
    entries = textwrap.dedent(section[1]).replace("\n    ", " ").splitlines()
    named = (entry.partition(": ") for entry in entries)
    return {
        name: f"| `.{name}` | {text[:1].upper()}{text[1:].replace('``', '`')} |" for name, _, text in named
    }


def members(cls: type, inherited: set[str]) -> list[str]:
    """A row for each public attribute, method and property of a class that its public bases do not have.

    What the docstring lists comes first, in its order, for one line often goes on from the line before.
    """
    listed, found = attributes(cls), dict[str, str]()
    for base in cls.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("strideweave") else ():
            holder = documented(value)
            if holder is None or name.startswith("_") or name in inherited or name in listed | found:
                continue
            is_value = isinstance(value, property | cached_property)
            call = "" if is_value else parameters(holder, bound=not isinstance(value, staticmethod))
            found[name] = f"| `.{name}{call}` | {first_line(holder) or first_line(getattr(cls, name))} |"
    return [*listed.values(), *(found[name] for name in sorted(found))]


def entry(name: str, value: object, origin: str = "") -> list[str]:
    """One name: a heading, what it takes if it is called and its summary, and for a class a table of what it offers."""
    made = inspect.isclass(value) and re.search(r"^Args:$", inspect.getdoc(value) or "", re.MULTILINE)
    called = ["", f"`{name}{parameters(value)}`"] if made or inspect.isfunction(value) else []
    lines = ["", f"### `{name}`", *called, "", first_line(value) + origin]
    if not inspect.isclass(value):
        return lines
    named = [
        *(getattr(strideweave, public) for public in strideweave.__all__),
        *(record for _, record in RECORDS),
    ]
    bases = [base for base in value.__mro__[1:] if base in named]
    inherited = {attribute for base in bases for attribute in dir(base)}
    rows = [*attributes(value).values()] if origin else members(value, inherited)
    if issubclass(value, Exception):
        builtin = next(base for base in value.__mro__ if base.__module__ == "builtins")
        lines += ["", f"A `{builtin.__name__}`."]
    if bases:
        links = ", ".join(f"[`{base.__name__}`](#{base.__name__.lower()})" for base in bases)
        lines += ["", f"Everything of {links}{', and' if rows else '.'}"]
    if rows:
        lines += ["", "| member | what it is |", "| --- | --- |", *rows]
    return lines


def reference() -> str:
    """The whole page."""
    public = {name: getattr(strideweave, name) for name in strideweave.__all__}
    lines = [HEAD.rstrip("\n")]
    for title, _ in CHAPTERS:
        chapter = {name: value for name, value in public.items() if chapter_of(value) == title}
        if not chapter:
            continue
        lines += ["", f"## {title}"]
        if all(inspect.isfunction(value) for value in chapter.values()):
            rows = [
                f"| `{name}{parameters(value)}` | {first_line(value)} |"
                for name, value in sorted(chapter.items())
            ]
            lines += ["", "| name | what it does |", "| --- | --- |", *rows]
            continue
        for name, value in sorted(chapter.items()):
            lines += entry(name, value)
    lines += [
        "",
        "## Statistics",
        "",
        "Frozen records; those without a name in `strideweave` are only ever given.",
    ]
    for source, record in RECORDS:
        lines += entry(record.__name__, record, f" From {source}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(reference(), "utf-8")
