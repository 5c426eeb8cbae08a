"""Every requirement of the two specifications has a test that names it.

A test names a requirement in its docstring, or its module does in the module's: *the requirement's name*, as the
specification writes it. A requirement whose part of the library does not exist yet is marked so here, and the mark
has to go as soon as a test names it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

BUILT = True
NOT_YET = False

CARRIER_COMPOSITION = {
    "Evictable construction validates a complete two-tier hierarchy": BUILT,
    "Construction failure leaves ownership unchanged": BUILT,
    "The hierarchy exposes current tier identities": BUILT,
    "Child ownership makes retained aliases externally read-only": BUILT,
    "Composite mutability is captured from the primary": BUILT,
    "Promoted state is required for public data access and execution": BUILT,
    "Eviction moves complete storage into the secondary tier": BUILT,
    "Promotion restores fresh primary-class storage": BUILT,
    "Residency transitions are failure-atomic": BUILT,
    "Transitions preserve logical version identity": BUILT,
    "Evictable factories preserve the hierarchy pattern": BUILT,
    "Evictable results retain composition ownership": BUILT,
    "Release ends the whole hierarchy lifecycle": BUILT,
}

TILED_CARRIER_COMPOSITION = {
    "TiledEvictable owns one flat logical storage extent": BUILT,
    "Tensor Layout compatibility preserves exact carrier tile footprints": BUILT,
    "TileSelection is an ordered Cartesian product": BUILT,
    "Project eagerly returns a completion handle for a compact Tensor": BUILT,
    "Projection is an autograd-visible gather": BUILT,
    "Residency state is independent of executable selection shape": BUILT,
    "Residency remains valid while tiled work needs it": BUILT,
    "A direct tiled operand means the full logical Tensor": BUILT,
    "Gather preserves public TileSelection ordering": BUILT,
    "Scatter is the asynchronous projection counterpart": BUILT,
    "Scatter participates in autograd": BUILT,
    "Residency requests use arbitrary immutable tile sets": BUILT,
    "Residency transitions have asynchronous and blocking forms": BUILT,
    "Residency policy can optimize but cannot define correctness": BUILT,
    "Tiled release ends all owned residency": BUILT,
}

REQUIREMENTS = CARRIER_COMPOSITION | TILED_CARRIER_COMPOSITION

# The scenarios of the two; each is a situation of its own, so each has a test of its own.
CARRIER_SCENARIOS = (
    "Construct a promoted hierarchy",
    "Reject mismatched tier dtypes",
    "Fail while claiming the secondary",
    "Fail while freezing hierarchy capabilities",
    "Inspect initial tiers",
    "Read but do not mutate an owned tier alias",
    "Mutate through the owner",
    "Preserve an immutable hierarchy",
    "Block access while evicted",
    "Evict into existing secondary storage",
    "Provision an undersized secondary",
    "Promote an evicted hierarchy",
    "Fail eviction without changing residency",
    "Fail promotion without changing residency",
    "Round-trip residency without mutation",
    "Allocate a fresh hierarchy",
    "Own an allocating result",
    "Release both tiers",
    "Destroy without release",
)

TILED_SCENARIOS = (
    "Promote one expert tile",
    "Accept a within-tile permutation",
    "Reject one logical tile spanning physical tiles",
    "Reject aliasing or incomplete tile coverage",
    "Reject tile-coordinate remapping",
    "Select three experts in router order",
    "Include every recombined corner",
    "Enumerate a multi-axis selection first-mode-fastest",
    "Overlap projection with computation",
    "Observe a completed projection repeatedly",
    "Keep the full Tensor unchanged",
    "Backpropagate through project then operation",
    "Accumulate overlapping projections",
    "Cache unrelated tiles",
    "Eviction races with execution",
    "Execute on a partially resident full Tensor",
    "Reject a pending projection operand",
    "Execute on an explicitly projected Tensor",
    "Gather a permuted selection",
    "Gather a multi-axis selection",
    "Scatter a compact result",
    "Project after replace scatter",
    "Reject a compact shape mismatch",
    "Differentiate replace scatter",
    "Represent a non-product cache set",
    "Prefetch without changing autograd",
    "Evict a selected dirty tile set",
    "Refuse hidden waiting on external transition",
    "Run backward without a policy",
    "Skip an unreachable branch",
    "Reject an invalid policy result before execution",
    "Release after completed tiled work",
)


def docstrings_of_tests() -> str:
    """The docstrings of all tests, and of the modules, classes and functions that hold them, as one line."""
    texts = []
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == Path(__file__):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts += [
            ast.get_docstring(node) or ""
            for node in ast.walk(tree)
            if isinstance(node, kinds) and getattr(node, "name", "test").lower().startswith("test")
        ]
    return re.sub(r"\s+", " ", "\n".join(texts))


DOCSTRINGS = docstrings_of_tests()


@pytest.mark.parametrize("name", [name for name, state in REQUIREMENTS.items() if state is BUILT])
def test_a_test_names_the_requirement(name: str) -> None:
    assert name in DOCSTRINGS, "no test's docstring names this requirement"


@pytest.mark.parametrize("name", [name for name, state in REQUIREMENTS.items() if state is NOT_YET])
def test_what_is_marked_as_not_yet_built_is_not_named(name: str) -> None:
    assert name not in DOCSTRINGS, "a test names it now: mark it as built"


@pytest.mark.parametrize("name", CARRIER_SCENARIOS + TILED_SCENARIOS)
def test_a_test_names_the_scenario(name: str) -> None:
    assert f"*{name}*" in DOCSTRINGS, "no test's docstring names this scenario"


def test_the_tables_hold_every_requirement() -> None:
    assert (len(CARRIER_COMPOSITION), len(TILED_CARRIER_COMPOSITION)) == (13, 15)
    assert len(CARRIER_SCENARIOS) == len(set(CARRIER_SCENARIOS)) == 19
    assert len(TILED_SCENARIOS) == len(set(TILED_SCENARIOS)) == 32


def test_a_name_that_no_test_carries_would_be_found() -> None:
    assert "The carrier makes coffee" not in DOCSTRINGS
