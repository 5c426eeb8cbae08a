"""Train a small mixture of experts whose weights are larger than the memory that they may take.

Sixteen experts look at scikit-learn's handwritten digits; a router sends each digit to two of them. The experts'
weights live on disk, in a tiled tensor with a hard memory limit of half their size. A step projects the experts
that its digits need, four at a time, computes with each four while the next are read, and parks what came out
in tiles that may go to disk too (scatter), from where it is projected again for the sum. Gradients flow back
through both, the experts' gradient is tiled like the weights, and the update writes whole tiles (assign).

The same model is then trained with all weights in memory, from the same seed. The program fails where the two
differ by more than half a point of accuracy, or where the experts or their gradient took more memory than the limit.
The digits come with scikit-learn: ``pip install scikit-learn``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import strideweave as sw

EXPERTS, CLASSES, PIXELS, WIDTH = 16, 10, 64, 64
CHOSEN = 2  # experts of each digit
TOGETHER = 4  # experts that are computed at once
TILE = (1, PIXELS, WIDTH)  # one expert
TILE_BYTES = 4 * PIXELS * WIDTH
LIMIT = EXPERTS // 2 * TILE_BYTES
BATCH, HELD_OUT = 64, 450
RATE = 0.5  # of learning; falls to nothing by the end

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


def parameter(values: Floats) -> sw.Tensor:
    """A tensor in memory that gets a gradient."""
    return sw.from_numpy(values.astype(np.float32))


def constant(values: Floats) -> sw.Tensor:
    """A tensor in memory that gets none."""
    return sw.from_numpy(values).detach()


class InMemory:
    """The experts as one plain tensor: what the tiled ones are compared with."""

    def __init__(self, weights: Floats) -> None:
        self.weights = parameter(weights)

    def mix(self, x: sw.Tensor, gates: sw.Tensor, _used: Sequence[int]) -> sw.Tensor:
        """The experts' answers to ``(n, PIXELS)``, weighted by ``(n, EXPERTS)``: ``(n, WIDTH)``."""
        answers = sw.relu(x @ self.weights) * gates.T.unsqueeze(2)
        return sw.reduce_sum(answers, axis=0)

    def update(self, rate: float, _used: Sequence[int]) -> None:
        """One step down the gradient."""
        descend(self.weights, rate)


class Tiled:
    """The experts in tiles of one expert each, on disk, half of them in memory at the most."""

    def __init__(self, weights: Floats) -> None:
        self.weights = sw.tiled(weights, TILE, resident=False, memory_limit=LIMIT)
        self.carrier = self.weights.carrier
        self.peak = 0

    def mix(self, x: sw.Tensor, gates: sw.Tensor, used: Sequence[int]) -> sw.Tensor:
        """As ``InMemory.mix``, for the experts that are used."""
        shelf = self.shelf(len(x.numpy()))
        groups = in_groups(used)
        coming = self.project(groups[0])
        parked = []
        for number, group in enumerate(groups):
            weights = coming.wait()
            if number + 1 < len(groups):
                coming = self.project(groups[number + 1])  # is read while these four compute
            share = sw.gather(gates.T, sw.asarray(group)).unsqueeze(2)
            answers = sw.relu(x @ weights) * share
            selection = shelf.carrier.select({0: group})
            parked.append((selection, shelf.carrier.scatter(answers, shelf, selection)))
        mixed: sw.Tensor | None = None
        for selection, handle in parked:
            full = handle.wait()
            answers = full.carrier.project(full, selection).wait()
            summed = sw.reduce_sum(answers, axis=0)
            mixed = summed if mixed is None else mixed + summed
        return mixed

    def update(self, rate: float, used: Sequence[int]) -> None:
        """One step down the gradient, for the experts that were used; the others have none."""
        gradient = self.weights.grad
        with sw.no_grad():
            for group in in_groups(used):
                selection = self.carrier.select({0: group})
                steps = gradient.carrier.project(gradient, selection)
                weights = self.carrier.project(self.weights, selection)
                self.carrier.assign(weights.wait() - rate * steps.wait(), self.weights, selection).wait()
        for carrier in (self.carrier, gradient.carrier):
            self.peak = max(self.peak, carrier.statistics().peak_memory_bytes)
        self.weights.grad = None
        gradient.carrier.release()

    def project(self, group: Sequence[int]) -> sw.AwaitProjection:
        """Start reading the weights of some experts."""
        return self.carrier.project(self.weights, self.carrier.select({0: group}))

    def shelf(self, count: int) -> sw.Tensor:
        """A tiled tensor without values: what the experts said about ``count`` digits finds its place in its like."""
        carrier = sw.TiledEvictable(
            sw.CPU(0),
            sw.FileBacked(),
            (EXPERTS, 1, 1),
            (1, count, WIDTH),
            memory_limit=TOGETHER * 4 * count * WIDTH,
        )
        return sw.Tensor(carrier, 0, sw.row_major(EXPERTS, count, WIDTH), requires_grad=False)


def in_groups(used: Sequence[int]) -> list[Sequence[int]]:
    return [used[start : start + TOGETHER] for start in range(0, len(used), TOGETHER)]


def descend(tensor: sw.Tensor, rate: float) -> None:
    """One step down the gradient of a tensor in memory."""
    tensor.numpy(writable=True)[...] -= np.float32(rate) * tensor.grad.numpy()
    tensor.carrier.increment_version()
    tensor.grad = None


@dataclass
class Classifier:
    """A router, experts of either kind, and the layer on top of them."""

    router: sw.Tensor
    experts: InMemory | Tiled
    top: sw.Tensor

    @classmethod
    def make(cls, kind: type[InMemory | Tiled], seed: int) -> Classifier:
        """The same numbers for either kind of experts."""
        rng = np.random.default_rng(seed)
        router = rng.standard_normal((PIXELS, EXPERTS)) * 0.1
        experts = rng.standard_normal((EXPERTS, PIXELS, WIDTH)) * np.sqrt(2 / PIXELS)
        top = rng.standard_normal((WIDTH, CLASSES)) / np.sqrt(WIDTH)
        return cls(parameter(router), kind(experts.astype(np.float32)), parameter(top))

    def logits(self, pixels: Floats) -> tuple[sw.Tensor, Sequence[int]]:
        """What the model says about ``(n, PIXELS)``: ``(n, CLASSES)``; and the experts it asked."""
        x = constant(pixels)
        odds = sw.softmax(x @ self.router)
        best = np.argsort(-odds.numpy(), axis=1, kind="stable")[:, :CHOSEN]
        mask = np.zeros(odds.shape, np.float32)
        np.put_along_axis(mask, best, 1, axis=1)
        chosen = odds * constant(mask)
        gates = chosen / sw.reduce_sum(chosen, axis=1, keepdims=True)
        used = np.unique(best).tolist()
        return self.experts.mix(x, gates, used) @ self.top, used

    def learn(self, pixels: Floats, labels: Labels, rate: float) -> float:
        """One step; gives the loss before it."""
        logits, used = self.logits(pixels)
        shifted = logits - sw.reduce_max(logits, axis=1, keepdims=True).detach()
        log_odds = shifted - sw.log(sw.reduce_sum(sw.exp(shifted), axis=1, keepdims=True))
        wanted = constant(np.eye(CLASSES, dtype=np.float32)[labels])
        loss = -sw.reduce_sum(log_odds * wanted) / len(labels)
        loss.backward()
        self.experts.update(rate, used)
        descend(self.router, rate)
        descend(self.top, rate)
        return loss.item()

    def accuracy(self, pixels: Floats, labels: Labels) -> float:
        """The share of digits that are told right, in percent."""
        with sw.no_grad():
            logits, _ = self.logits(pixels)
        return 100 * float(np.mean(sw.argmax(logits, axis=1).numpy() == labels))


def digits(seed: int) -> tuple[Floats, Labels, Floats, Labels]:
    """Digits and labels to learn from, and others to be asked about."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    pixels, labels = (pixels[order] / 16).astype(np.float32), labels[order]
    return pixels[HELD_OUT:], labels[HELD_OUT:], pixels[:HELD_OUT], labels[:HELD_OUT]


def batches(count: int, epochs: int, seed: int) -> Iterator[tuple[float, NDArray[np.int64]]]:
    """The share of the training that is over, and the next rows."""
    rng = np.random.default_rng(seed + 1)
    for epoch in range(epochs):
        order = rng.permutation(count)
        for start in range(0, count - BATCH + 1, BATCH):
            yield (epoch + start / count) / epochs, order[start : start + BATCH]


def train(kind: type[InMemory | Tiled], epochs: int, seed: int = 0) -> tuple[Classifier, float]:
    """Train a classifier with experts of that kind; gives its accuracy on digits that it has not seen."""
    pixels, labels, asked, answers = digits(seed)
    model = Classifier.make(kind, seed)
    began, loss = time.perf_counter(), 0.0
    for over, rows in batches(len(labels), epochs, seed):
        loss = model.learn(pixels[rows], labels[rows], RATE * (1 - over))
    accuracy = model.accuracy(asked, answers)
    seconds = time.perf_counter() - began
    print(f"{kind.__name__:9} loss {loss:.4f}, accuracy {accuracy:.2f} %, {seconds:.1f} s")
    return model, accuracy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    model, tiled = train(Tiled, epochs)
    _, dense = train(InMemory, epochs)
    experts = model.experts
    found = experts.carrier.statistics()
    print(
        f"experts {EXPERTS * TILE_BYTES:,} bytes, limit {LIMIT:,}, peak {experts.peak:,}; "
        f"{found.bytes_read:,} bytes read, {found.bytes_written:,} written"
    )
    experts.carrier.release()
    if abs(tiled - dense) > 0.5:
        print(f"FAILED: {tiled:.2f} % and {dense:.2f} % differ by more than half a point")
        return 1
    if experts.peak > LIMIT:
        print("FAILED: more memory than the limit")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
