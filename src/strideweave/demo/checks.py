"""What must hold before the demo may call itself a success."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strideweave.demo.golden import load_golden
from strideweave.demo.onnx_weights import Int8OnnxWeights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from strideweave.demo.batches import Batch
    from strideweave.demo.dense import DenseEncoder
    from strideweave.demo.experts import ExpertRouter
    from strideweave.demo.weights import ModelWeights

    Floats = NDArray[np.float32]

__all__ = ["TOLERANCE", "Check", "Reference", "check_budget", "check_digests", "check_golden"]

TOLERANCE = 1e-5
"""The most that any number of a unit vector may differ from the reference."""

_INT8_COSINE = 0.995  # what the int8 weights keep of the published ones; they cannot meet the tolerance


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold.

    Attributes:
        name: what was looked at.
        passed: whether it holds.
        found: what was found, for people.
    """

    name: str
    passed: bool
    found: str


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The dense model in memory, on the same batches and, with experts, the same routes.

    Attributes:
        dense: the encoder in plain NumPy.
        batches: what was encoded.
        router: the router of the expert blocks, if they were used.
        experts: blocks each passage used; None for all.
        routes: the blocks that were chosen, by layer and batch.
    """

    dense: DenseEncoder
    batches: Sequence[Batch]
    router: ExpertRouter | None
    experts: int | None
    routes: Mapping[tuple[int, int], NDArray[np.int64]]

    def check(self, vectors: Floats) -> Check:
        """Compare with the dense pass over the same weights."""
        if self.experts is None:
            expected = self.dense.encode(self.batches)
        else:
            expected = self.dense.encode(
                self.batches, experts=self.experts, router=self.router, routes=self.routes
            )
        same = "" if self.experts is None else ", same expert blocks"
        return _close(f"deviation from the dense NumPy pass{same}", vectors, expected)

    def cosine_to_dense(self, vectors: Floats) -> tuple[float, float]:
        """Mean and smallest cosine to the full dense model, which uses every block."""
        cosines = np.sum(vectors * self.dense.encode(self.batches), axis=1, dtype=np.float64)
        return float(cosines.mean()), float(cosines.min())


def check_digests(weights: ModelWeights) -> list[Check]:
    """Compare the model's files with the published ones."""
    return [
        Check(
            f"sha256 of {digest.path.name}",
            digest.matches,
            digest.found if digest.matches else f"{digest.found}, published {digest.expected}",
        )
        for digest in weights.checksums()
    ]


def check_budget(peak: int, budget: int) -> Check:
    """Compare the most that was resident with the budget, both in bytes."""
    return Check("peak resident bytes within the budget", peak <= budget, f"{peak:,} of {budget:,}")


def check_golden(vectors: Floats, weights: ModelWeights) -> Check:
    """Compare the pinned sentences with what sentence-transformers made of them."""
    expected = load_golden().embeddings
    if isinstance(weights, Int8OnnxWeights):
        lowest = float(np.sum(vectors * expected, axis=1).min())
        return Check(
            f"cosine of {len(expected)} golden embeddings, int8 weights",
            lowest >= _INT8_COSINE,
            f"{lowest:.5f}",
        )
    return _close(f"deviation from {len(expected)} golden embeddings", vectors, expected)


def _close(name: str, vectors: Floats, expected: Floats) -> Check:
    deviation = float(np.abs(vectors - expected).max())
    return Check(name, deviation <= TOLERANCE, f"{deviation:.1e}, at most {TOLERANCE:.0e}")
