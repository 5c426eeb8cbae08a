"""What must never be committed: paths of one machine, hosts of registries, marks of unfinished work."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each pattern is written so that it does not match itself: this file is one of those it reads.
UNWANTED = {
    "a path of one machine": re.compile(
        r"(?<![\w.~])/(?:ro[o]t|wo[r]k|ho[m]e/\w+|Us[e]rs/\w+|fa[r]m|mn[t])/[\w.]|[A-Z]:\\\\?Us[e]rs"
    ),
    "a registry's host": re.compile(
        r"py[p]i\.org|pythonhost[e]d\.org|npm[j]s\.org|deb[i]an\.org|crates[.]io|--(?:extra-)?ind[e]x-url"
    ),
    "an unfinished mark": re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X]|HA[C]K)\b"),
}


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def lines_of_text(path: Path) -> list[str]:
    """The lines of a text file; none for a binary file, or for one deleted but not yet committed."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    return [] if b"\0" in content else content.decode("utf-8").splitlines()


@pytest.mark.parametrize("kind", UNWANTED)
def test_tracked_files_are_free_of(kind: str):
    files = tracked_files()
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in files
        for number, line in enumerate(lines_of_text(path), start=1)
        if UNWANTED[kind].search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("a path of one machine", "open('/{}/somebody/data.bin')".format("home")),
        ("a path of one machine", "cd /{}/main".format("work")),
        ("a registry's host", "pip install -i https://{}.org/simple".format("pypi")),
        ("an unfinished mark", "# {}: later".format("TO" + "DO")),
    ],
)
def test_the_patterns_find_what_they_name(kind: str, line: str):
    assert UNWANTED[kind].search(line)
