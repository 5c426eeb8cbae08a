"""The shape of the house, read from the source: who imports whom, what starts, what is public."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "strideweave"

# From the ground up. A module may import from its own room and from rooms below it.
ROOMS = (
    "errors",
    "flags",
    "dtype",
    "layout",
    "runtime",
    "io",
    "tiles",
    "operations",
    "autograd",
    "tensor",
    "carriers",
    "tiling",
    "store",
    "formats",
    "creation",
    "strideweave",  # the public names; nothing below imports them
    "testing",
    "demo",
    "cli",
    "__main__",
)
# The one room with floors of its own. What stands in no row shares the floor of the plain carriers.
CARRIERS = (
    "array_views",
    "view_operations",
    "lifecycle",
    "slots",
    "base",
    "dependent",
    "numpy_special",
    "numpy_kernels",
    "numpy_operations",
    "scattering",
    "memory",
    "metal_arrays",
    "metal_kernels",
    "metal_operations",
    "",
    "move",
    "extension",
    "evictable_operations",
    "evictable",
    "tiled_evictable",
    "carriers",
)

# Everything else at module level is read-only: here live the runtime's one loop, its locks, its mark on
# threads that must not wait, and the move registry.
STATEFUL = {
    "strideweave.carriers.move.registry",
    "strideweave.runtime.await_result",
    "strideweave.runtime.event_loop",
    "strideweave.runtime.locks",
}
MUTABLE_CALLS = frozenset(
    [
        "Condition",
        "Counter",
        "Event",
        "Lock",
        "OrderedDict",
        "RLock",
        "WeakKeyDictionary",
        "WeakSet",
        "WeakValueDictionary",
        "allocate_lock",
        "bytearray",
        "count",
        "defaultdict",
        "deque",
        "dict",
        "list",
        "local",
        "set",
    ]
)
MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
READ_ONLY_TYPES = re.compile(r"(Final\[)?(Mapping|Sequence|frozenset|tuple)\[")

# Importing the command line imports its optional libraries, so the program says what is missing.
COMMAND_LINE = ("strideweave.__main__", "strideweave.cli")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Imported(NamedTuple):
    """One import statement's target, and where it stands."""

    name: str
    line: int
    in_function: bool


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imports(module: str) -> Iterator[Imported]:
    """What runs at import or in a function; annotations' imports under TYPE_CHECKING are left out."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def visit(node: ast.AST, in_function: bool) -> Iterator[Imported]:
        for child in ast.iter_child_nodes(node):
            if is_type_checking(child):
                yield from visit(ast.Module(body=child.orelse, type_ignores=[]), in_function)
            elif isinstance(child, ast.Import):
                yield from (Imported(alias.name, child.lineno, in_function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package[: len(package) - child.level + 1] if child.level else []
                origin = ".".join([*above, *([child.module] if child.module else [])])
                for alias in child.names:
                    inner = f"{origin}.{alias.name}"
                    yield Imported(inner if inner in MODULES else origin, child.lineno, in_function)
            else:
                yield from visit(child, in_function or isinstance(child, (*FUNCTIONS, ast.Lambda)))

    yield from visit(TREES[module], False)


def is_own(name: str) -> bool:
    return name == "strideweave" or name.startswith("strideweave.")


def floor(module: str) -> tuple[int, int]:
    """The height of a module: its room, and inside the carriers' room its floor."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else "strideweave"
    if room not in ROOMS:
        pytest.fail(f"{module} stands in no room; name its room in ROOMS and in docs/architecture.md")
    if room != "carriers":
        return ROOMS.index(room), 0
    inner = parts[2] if len(parts) > 2 else "carriers"
    return ROOMS.index(room), CARRIERS.index(inner if inner in CARRIERS else "")


def optional_modules() -> set[str]:
    """Import names of the optional libraries, from the extras that pyproject.toml declares."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    names = {re.split(r"[\[<>=!~; ]", requirement)[0] for group in extras.values() for requirement in group}
    return {name.replace("-", "_") for name in names} - {"strideweave"}


def test_imports_point_down_the_layers():
    upward = [
        f"{module}:{found.line} imports {found.name}"
        for module in MODULES
        for found in imports(module)
        if is_own(found.name) and floor(found.name) > floor(module)
    ]
    assert upward == []


def drawn_files() -> set[str]:
    """The files in the picture of docs/architecture.md, whose folders end in a slash."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    picture = page.split("```text\nsrc/strideweave/\n")[1].split("```")[0]
    drawn: set[str] = set()
    folders: list[str] = []
    for line in picture.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        del folders[depth - 1 :]
        for name in re.split(r"\s{2,}", line.strip())[0].split(" "):
            if name.endswith("/"):
                folders.append(name)
            else:
                drawn.add("".join(folders) + name)
    return drawn


def test_the_picture_of_the_architecture_shows_every_module():
    files = {path.relative_to(PACKAGE) for path in MODULES.values()}
    present = {file.as_posix() for file in files if file.name != "__init__.py"}
    assert sorted(present - drawn_files()) == [], "these are missing from the picture"
    assert sorted(drawn_files() - present - {"py.typed"}) == [], "these are in the picture only"


def test_the_rule_sees_an_upward_import():
    assert floor("strideweave.tiles.grid") < floor("strideweave.tensor") < floor("strideweave.carriers.base")
    assert floor("strideweave.carriers.cpu") < floor("strideweave.carriers.move.registry")
    assert floor("strideweave.carriers.move.registry") < floor("strideweave.carriers.tiled_evictable.carrier")
    assert (
        floor("strideweave.carriers.tiled_evictable") < floor("strideweave.creation") < floor("strideweave")
    )


def test_modules_import_each_other_without_cycles():
    graph = {
        module: {found.name for found in imports(module) if found.name in MODULES} - {module}
        for module in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_imports_inside_functions_are_for_optional_libraries_only():
    optional = optional_modules()
    hidden = [
        f"{module}:{found.line} imports {found.name}"
        for module in MODULES
        for found in imports(module)
        if found.in_function
        and found.name.partition(".")[0] not in optional
        and (module, found.name) != COMMAND_LINE
    ]
    assert hidden == []


def test_optional_libraries_are_never_imported_by_the_library_itself():
    optional = optional_modules()
    needed = [
        f"{module}:{found.line} imports {found.name}"
        for module in MODULES
        for found in imports(module)
        if floor(module) <= floor("strideweave")
        and not found.in_function
        and found.name.partition(".")[0] in optional
    ]
    assert needed == []


def module_level_assignments(tree: ast.Module) -> Iterator[tuple[str, str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), "", node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), ast.unparse(node.annotation), node.value


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2].partition("[")[0] in MUTABLE_CALLS
    return isinstance(value, MUTABLE_DISPLAYS)


@pytest.mark.parametrize("module", sorted(MODULES.keys() - STATEFUL))
def test_modules_hold_no_mutable_state(module: str):
    tree = TREES[module]
    mutable = [
        name
        for name, annotation, value in module_level_assignments(tree)
        if name != "__all__" and is_mutable(value) and not READ_ONLY_TYPES.match(annotation)
    ]
    rebinds = [f"line {node.lineno}: global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert mutable + rebinds == []


def public_definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """The classes, functions and methods that a reader may use; what stands inside functions is private."""
    for child in getattr(node, "body", []):
        if isinstance(child, (ast.ClassDef, *FUNCTIONS)) and not child.name.startswith("_"):
            yield f"{prefix}.{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child, f"{prefix}.{child.name}")


def is_documented_elsewhere(node: ast.AST) -> bool:
    """Overloads and setters: the implementation and the getter have the docstring."""
    marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
    return any(mark.endswith(("overload", ".setter", ".deleter")) for mark in marks)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_everything_public_has_a_docstring(module: str):
    documented = [(module, TREES[module]), *public_definitions(TREES[module], module)]
    missing = [
        name for name, node in documented if not ast.get_docstring(node) and not is_documented_elsewhere(node)
    ]
    assert missing == []


def constants_then_classes(name: str) -> tuple[bool, bool, str]:
    """The order of import sorters, beside the plain one: CONSTANTS, then Classes, then functions."""
    return not name.isupper(), not name[0].isupper(), name


@pytest.mark.parametrize("module", sorted(MODULES))
def test_what_a_module_exports_is_sorted_and_there(module: str):
    home = importlib.import_module(module)
    exported = list(getattr(home, "__all__", []))
    assert len(exported) == len(set(exported))
    assert exported in (sorted(exported), sorted(exported, key=constants_then_classes))
    assert [name for name in exported if not hasattr(home, name)] == []


def test_every_public_name_says_what_it_is():
    strideweave = importlib.import_module("strideweave")
    assert strideweave.__all__
    undocumented = [name for name in strideweave.__all__ if not inspect.getdoc(getattr(strideweave, name))]
    assert undocumented == []


def test_importing_starts_nothing():
    program = """
import asyncio, sys, threading
import strideweave
assert threading.active_count() == 1, threading.enumerate()
assert asyncio.events._get_running_loop() is None
assert not {"rich", "typer", "matplotlib", "mlx", "safetensors", "trio"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
