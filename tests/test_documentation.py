"""The documents tell the truth: their programs run, their links lead somewhere, the reference is complete.

Each page is one program: its ``python`` fences run in order and share a namespace. A fence marked ``output``
right after one holds exactly what that snippet prints.
"""

from __future__ import annotations

import re
import runpy
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\[]*\]\((?P<target>[^()\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<title>.+?) *$", re.MULTILINE)


class Fence(NamedTuple):
    """One fenced block: its language, its text and the line of the page on which the text starts."""

    language: str
    body: str
    line: int


def fences(page: Path) -> list[Fence]:
    text = page.read_text("utf-8")
    return [
        Fence(match["info"].strip(), match["body"], text.count("\n", 0, match.start("body")) + 1)
        for match in FENCE.finditer(text)
    ]


def program(page: Path) -> Iterator[tuple[Fence, str | None]]:
    """The page's snippets, each with the output that the page promises for it."""
    for block, after in pairwise([*fences(page), None]):
        if block is not None and block.language == "python":
            yield block, after.body if after is not None and after.language == "output" else None


def without_fences(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as the usual renderers of Markdown make them."""
    seen: Counter[str] = Counter()
    for match in HEADING.finditer(without_fences(page)):
        title = LINK.sub(lambda link: link[0][1 : link[0].index("]")], match["title"])
        seen[re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")] += 1
    return {f"{slug}-{number}" if number else slug for slug, count in seen.items() for number in range(count)}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if any(program(page))], ids=name_of)
def test_the_programs_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for snippet, promised in program(page):
        padded = "\n" * (snippet.line - 1) + snippet.body  # so that a traceback names the line of the page
        exec(compile(padded, str(page), "exec"), namespace)
        printed = capsys.readouterr().out
        if promised is not None:
            assert printed == promised, f"{name_of(page)}:{snippet.line} prints something else"


def test_the_pages_that_teach_have_programs():
    taught = {name_of(page) for page in PAGES if any(program(page))}
    assert {"README.md", "docs/guide.md"} <= taught


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_internal_links_lead_somewhere(page: Path):
    broken = []
    for match in LINK.finditer(without_fences(page)):
        path, _, fragment = match["target"].partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(match["target"])
    assert broken == []


def test_every_document_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        targets = (match["target"].partition("#")[0] for match in LINK.finditer(without_fences(page)))
        waiting += [(page.parent / target).resolve() for target in targets if target and ":" not in target]
    assert {page.resolve() for page in PAGES} - reached == set()


def test_the_reference_is_what_the_docstrings_say():
    made = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["reference"]()
    assert (ROOT / "docs" / "reference.md").read_text("utf-8") == made, "run python docs/make_reference.py"
