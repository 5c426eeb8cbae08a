"""Write reference.md from the docstrings of the public names: ``python docs/make_reference.py``.

A test compares the file with what this program makes, so the reference cannot fall behind the code.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from functools import cached_property
from pathlib import Path

import strideweave

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

Every public name and the first line of its docstring; `help(strideweave.TiledEvictable)` shows the rest.
Made by `python docs/make_reference.py`; a test keeps it true.
"""


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
    return summary.replace("``", "`").replace("|", "\\|")


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
    """A row for each public attribute, method and property of a class that its public bases do not have."""
    found = attributes(cls)
    for base in cls.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("strideweave") else ():
            holder = documented(value)
            if holder is None or name.startswith("_") or name in inherited or name in found:
                continue
            call = "" if isinstance(value, property | cached_property) else "()"
            found[name] = f"| `.{name}{call}` | {first_line(holder) or first_line(getattr(cls, name))} |"
    return [found[name] for name in sorted(found)]


def entry(name: str, value: object) -> list[str]:
    """One public name: a heading and its summary, and for a class a table of what it offers."""
    lines = ["", f"### `{name}`", "", first_line(value)]
    if not inspect.isclass(value):
        return lines
    bases = [base for base in value.__mro__[1:] if getattr(strideweave, base.__name__, None) is base]
    inherited = {attribute for base in bases for attribute in dir(base)}
    rows = members(value, inherited)
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
            rows = [f"| `{name}()` | {first_line(value)} |" for name, value in sorted(chapter.items())]
            lines += ["", "| name | what it does |", "| --- | --- |", *rows]
            continue
        for name, value in sorted(chapter.items()):
            lines += entry(name, value)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(reference(), "utf-8")
