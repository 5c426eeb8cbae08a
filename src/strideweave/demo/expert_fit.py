"""Finds the expert blocks of an encoder from real text, once; ``tools/make_experts.py`` stores what it finds.

Per layer: the 4 x 96 hidden units whose contributions vary most become the shared blocks; the others are grouped
into twelve equal clusters of units that are active in the same passages; a ridge regression from a token's vector to
the size of each cluster's deviation from its mean is the router.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strideweave.demo.config import layer_names
from strideweave.demo.experts import BLOCKS, SHARED, ExpertRouter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strideweave.demo.batches import Batch
    from strideweave.demo.dense import DenseEncoder

    Floats = NDArray[np.float32]

__all__ = ["equal_clusters", "fit_experts"]

_ROUNDS = 15  # of the clustering, at most; it settles in fewer
_RIDGE = 1e-3  # added to the mean square of each input
_TINY = 1e-9  # keeps lengths and sums of nothing from being divided by


def fit_experts(encoder: DenseEncoder, batches: Sequence[Batch], *, seed: int = 0) -> ExpertRouter:
    """Splits every feed-forward layer into 16 blocks and fits their router.

    Takes one dense pass over the batches (about 10,000 tokens are enough) and a few seconds for the rest; the hidden
    units of one layer are in memory at a time, 6 KiB per token.

    Args:
        encoder: the model with all its weights.
        batches: real text, of the kinds the router shall tell apart.
        seed: of the clustering's first centres; the same seed gives the same blocks.
    """
    starts = np.cumsum([0, *np.concatenate([batch.lengths for batch in batches])[:-1]])
    states = [encoder.embed(batch) for batch in batches]
    orders, routers, means = [], [], []
    for layer in range(encoder.config.layers):
        states = [encoder.attend(layer, x, batch.mask) for x, batch in zip(states, batches, strict=True)]
        tokens = np.concatenate([x[batch.mask] for x, batch in zip(states, batches, strict=True)])
        inner = encoder.hidden(layer, tokens)
        mean = inner.mean(axis=0)
        inner -= mean
        down = encoder.weight(layer_names(layer).down)
        order = _order(inner, down, starts, np.random.default_rng([seed, layer]))
        orders.append(order)
        blocks = order.reshape(BLOCKS, -1)
        means.append(np.stack([down[:, block] @ mean[block] for block in blocks]))
        routers.append(_router(tokens, inner, down, blocks[SHARED:]))
        states = [encoder.feed_forward(layer, x) for x in states]
    return ExpertRouter(np.stack(orders), np.stack(routers), np.stack(means))


def _order(
    inner: Floats, down: Floats, starts: NDArray[np.int64], random: np.random.Generator
) -> NDArray[np.int64]:
    """The units of one layer in block order, given what they deviate from their means per token."""
    passages: Floats = np.add.reduceat(np.square(inner), starts, axis=0)
    strength = passages.sum(axis=0) * np.square(down).sum(axis=0)
    strongest = np.argsort(-strength, kind="stable")
    size = inner.shape[1] // BLOCKS
    shared, others = strongest[: SHARED * size], np.sort(strongest[SHARED * size :])
    activity = np.sqrt(passages[:, others]).T
    activity -= activity.mean(axis=1, keepdims=True)
    activity /= np.linalg.norm(activity, axis=1, keepdims=True) + np.float32(_TINY)
    cluster = equal_clusters(activity, BLOCKS - SHARED, random)
    return np.concatenate([shared, others[np.argsort(cluster, kind="stable")]])


def equal_clusters(points: Floats, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Spherical k-means into clusters of equal size.

    Args:
        points: ``(points, width)`` unit vectors; their number is a multiple of ``count``.
        count: how many clusters.
        random: chooses the first centres.

    Returns:
        ``(points,)`` cluster numbers.
    """
    centres = _first_centres(points, count, random)
    best, best_labels = -np.inf, np.zeros(len(points), dtype=np.int64)
    for _ in range(_ROUNDS):
        similarity = points @ centres.T
        labels = _assign(similarity)
        total = float(np.take_along_axis(similarity, labels[:, None], axis=1).sum())
        if total <= best * (1 + 1e-6):
            break
        best, best_labels = total, labels
        centres = np.stack([points[labels == number].mean(axis=0) for number in range(count)])
        centres /= np.linalg.norm(centres, axis=1, keepdims=True) + np.float32(_TINY)
    return best_labels


def _first_centres(points: Floats, count: int, random: np.random.Generator) -> Floats:
    """Points far from each other, by chance in proportion to the squared distance (k-means++)."""
    chosen = [int(random.integers(len(points)))]
    distance = np.square(points - points[chosen[0]]).sum(axis=1, dtype=np.float64)
    while len(chosen) < count:
        weight = distance + _TINY  # where all points are the same, any of them will do
        chosen.append(int(random.choice(len(points), p=weight / weight.sum())))
        distance = np.minimum(distance, np.square(points - points[chosen[-1]]).sum(axis=1, dtype=np.float64))
    return points[chosen]


def _assign(similarity: Floats) -> NDArray[np.int64]:
    """Each point to a cluster, the best pairs first, until every cluster holds its equal share."""
    points, count = similarity.shape
    labels = np.full(points, -1, dtype=np.int64)
    room = [points // count] * count
    for pair in np.argsort(-similarity, axis=None, kind="stable").tolist():
        point, cluster = divmod(pair, count)
        if labels[point] < 0 and room[cluster]:
            labels[point] = cluster
            room[cluster] -= 1
    return labels


def _router(tokens: Floats, inner: Floats, down: Floats, blocks: NDArray[np.int64]) -> Floats:
    """``(hidden + 1, blocks)``: ridge regression from a token to how far each block is from its mean."""
    sizes = np.stack([np.linalg.norm(inner[:, block] @ down[:, block].T, axis=1) for block in blocks], axis=1)
    inputs = np.concatenate([tokens, np.ones((len(tokens), 1), np.float32)], axis=1).astype(np.float64)
    square = inputs.T @ inputs
    free = np.arange(tokens.shape[1])  # the constant is not held back
    square[free, free] += _RIDGE * len(tokens)
    return np.linalg.solve(square, inputs.T @ sizes).astype(np.float32)
