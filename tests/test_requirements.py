"""Every requirement of the two specifications has a test that names it, and so has every scenario.

A test names a requirement in its docstring, or its module does in the module's: *the requirement's name*, as the
specification writes it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CARRIER_COMPOSITION = (
    "Evictable construction validates a complete two-tier hierarchy",
    "Construction failure leaves ownership unchanged",
    "The hierarchy exposes current tier identities",
    "Child ownership makes retained aliases externally read-only",
    "Composite mutability is captured from the primary",
    "Promoted state is required for public data access and execution",
    "Eviction moves complete storage into the secondary tier",
    "Promotion restores fresh primary-class storage",
    "Residency transitions are failure-atomic",
    "Transitions preserve logical version identity",
    "Evictable factories preserve the hierarchy pattern",
    "Evictable results retain composition ownership",
    "Release ends the whole hierarchy lifecycle",
)

TILED_CARRIER_COMPOSITION = (
    "TiledEvictable owns one flat logical storage extent",
    "Tensor Layout compatibility preserves exact carrier tile footprints",
    "TileSelection is an ordered Cartesian product",
    "Project eagerly returns a completion handle for a compact Tensor",
    "Projection is an autograd-visible gather",
    "Residency state is independent of executable selection shape",
    "Residency remains valid while tiled work needs it",
    "A direct tiled operand means the full logical Tensor",
    "Gather preserves public TileSelection ordering",
    "Scatter is the asynchronous projection counterpart",
    "Scatter participates in autograd",
    "Residency requests use arbitrary immutable tile sets",
    "Residency transitions have asynchronous and blocking forms",
    "Residency policy can optimize but cannot define correctness",
    "Tiled release ends all owned residency",
)

REQUIREMENTS = CARRIER_COMPOSITION + TILED_CARRIER_COMPOSITION

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


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_a_test_names_the_requirement(name: str) -> None:
    assert name in DOCSTRINGS, "no test's docstring names this requirement"


@pytest.mark.parametrize("name", CARRIER_SCENARIOS + TILED_SCENARIOS)
def test_a_test_names_the_scenario(name: str) -> None:
    assert f"*{name}*" in DOCSTRINGS, "no test's docstring names this scenario"


def test_the_tables_hold_every_requirement() -> None:
    assert (len(CARRIER_COMPOSITION), len(TILED_CARRIER_COMPOSITION)) == (13, 15)
    assert len(CARRIER_SCENARIOS) == len(set(CARRIER_SCENARIOS)) == 19
    assert len(TILED_SCENARIOS) == len(set(TILED_SCENARIOS)) == 32


def test_a_name_that_no_test_carries_would_be_found() -> None:
    assert "The carrier makes coffee" not in DOCSTRINGS
