"""The example that trains: experts in tiles learn what experts in memory learn, within their memory limit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_moe.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("train_moe", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_moe", module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trained(example, monkeypatch):
    """Both models after one epoch of few digits: (module, tiled, dense)."""
    learned = example.digits

    def few(seed):
        pixels, labels, asked, answers = learned(seed)
        return pixels[:320], labels[:320], asked, answers

    monkeypatch.setattr(example, "digits", few)
    (tiled, tiled_accuracy), (dense, dense_accuracy) = (
        example.train(kind, 1) for kind in (example.Tiled, example.InMemory)
    )
    assert abs(tiled_accuracy - dense_accuracy) <= 0.5
    yield example, tiled, dense
    tiled.experts.carrier.release()


def test_tiled_experts_learn_the_same_weights(trained):
    """Project, matmul, scatter and their gradients, step after step, are the plain tensor operations."""
    example, tiled, dense = trained
    experts = tiled.experts
    start = example.Classifier.make(example.InMemory, 0).experts.weights.numpy()
    for first in range(0, example.EXPERTS, 4):
        some = range(first, first + 4)
        learned = experts.project(some).wait().detach().numpy()
        assert np.abs(learned - start[list(some)]).max() > 1e-3
        assert np.allclose(learned, dense.experts.weights.numpy()[list(some)], rtol=0, atol=1e-5)
    assert np.allclose(tiled.router.numpy(), dense.router.numpy(), rtol=0, atol=1e-5)
    assert np.allclose(tiled.top.numpy(), dense.top.numpy(), rtol=0, atol=1e-5)


def test_the_memory_limit_held_and_was_needed(trained):
    example, tiled, _ = trained
    experts = tiled.experts
    statistics = experts.carrier.statistics()
    assert 0 < experts.peak <= example.LIMIT < example.EXPERTS * example.TILE_BYTES
    assert statistics.peak_memory_bytes <= example.LIMIT
    assert statistics.bytes_written > 0
    assert statistics.pending_requests == statistics.pinned_tiles == 0


@pytest.mark.parametrize(
    ("tiled", "dense", "over", "status"),
    [(90.0, 90.5, 0, 0), (90.0, 90.6, 0, 1), (90.6, 90.0, 0, 1), (90.0, 90.0, 1, 1)],
)
def test_a_miss_is_a_non_zero_exit(example, monkeypatch, tiled, dense, over, status, capsys):
    def train(kind, epochs):
        model = example.Classifier.make(kind, 0)
        model.experts.peak = example.LIMIT + over
        return model, tiled if kind is example.Tiled else dense

    monkeypatch.setattr(example, "train", train)
    monkeypatch.setattr(sys, "argv", ["train_moe.py"])
    assert example.main() == status
    assert ("FAILED" in capsys.readouterr().out) == bool(status)
