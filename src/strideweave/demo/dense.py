"""The same encoder with every weight in memory and nothing but NumPy: what the tiled one is compared with.

It shares no arithmetic with the library on purpose. Forward pass as published for BERT (Devlin et al., 2018)
with mean pooling and unit length (Reimers and Gurevych, 2019).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strideweave.demo.batches import passage_count
from strideweave.demo.config import EmbeddingNames, layer_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from strideweave.demo.batches import Batch
    from strideweave.demo.experts import ExpertRouter
    from strideweave.demo.weights import ModelWeights

    Floats = NDArray[np.float32]

__all__ = ["DenseEncoder", "gelu"]

# erf(x) = x * P(x^2) / Q(x^2) on [-4, 4], relative error 2e-9 (a weighted least-squares fit at Chebyshev
# points); beyond 4 erf is 1 to 2e-8. Highest power first.
_ERF_END = 4.0
_ERF_TOP = (
    -1.3201534071375243e-08,
    4.684622706285671e-06,
    3.7960481766654625e-04,
    3.849668610342105e-03,
    5.431702468217575e-02,
    1.8520498779898376e-01,
    1.1283791693738698e00,
)
_ERF_BOTTOM = (
    6.310914219410501e-05,
    1.3075761654523122e-03,
    1.5462189892764292e-02,
    1.1395903892562227e-01,
    4.974670606326917e-01,
    1.0,
)
_CHUNK = 16_384  # values at a time: the temporaries below stay in the processor's cache


class DenseEncoder:
    """all-MiniLM-L6-v2, or any BERT of its kind, in float32.

    Args:
        weights: every one of them is read and kept.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self.config = weights.config
        self._weights = {name: weights.read(name) for name in weights.names}

    def encode(
        self,
        batches: Sequence[Batch],
        *,
        experts: int | None = None,
        router: ExpertRouter | None = None,
        routes: Mapping[tuple[int, int], NDArray[np.int64]] | None = None,
    ) -> Floats:
        """One unit vector per passage.

        Args:
            batches: what ``make_batches`` gave.
            experts: expert blocks that each passage uses in each layer; ``None`` is the plain model.
            router: chooses the blocks and stands in for the others; needed with ``experts``.
            routes: ``(layer, batch number)`` -> ``(n, experts)`` blocks to use instead of the router's own
                choice, so that programs whose sums differ in the last bit can be compared on equal blocks.

        Returns:
            ``(passages, hidden)`` float32; row ``i`` belongs to passage ``i`` as given to ``make_batches``.

        Raises:
            ValueError: ``experts`` without ``router``, or out of the router's range.
        """
        if experts is not None and router is None:
            raise ValueError(f"experts={experts} needs a router: ExpertRouter.load()")
        result = np.empty((passage_count(batches), self.config.hidden), dtype=np.float32)
        for number, batch in enumerate(batches):
            x = self.embed(batch)
            for layer in range(self.config.layers):
                x = self.attend(layer, x, batch.mask)
                if experts is None or router is None:
                    x = self.feed_forward(layer, x)
                    continue
                choice = (
                    routes[layer, number]
                    if routes is not None
                    else router.choose(layer, x, batch.mask, experts)
                )
                x = self.feed_forward(layer, x, router.units(layer, choice), router.fill(layer, choice))
            result[batch.rows] = _pool(x, batch.mask)
        return result

    def embed(self, batch: Batch) -> Floats:
        """``(n, longest, hidden)``: the sum of word, position and type rows, normalised."""
        names = EmbeddingNames()
        x = self._weights[names.words][batch.ids]
        x += self._weights[names.types][0]
        x += self._weights[names.positions][: batch.ids.shape[1]]
        return self._normalise(x, names.norm_weight, names.norm_bias)

    def attend(self, layer: int, x: Floats, mask: NDArray[np.bool_]) -> Floats:
        """Self-attention of one layer with its residual and LayerNorm; same shape as ``x``."""
        names, config = layer_names(layer), self.config
        count, longest, _ = x.shape

        def heads(name: str, bias: str) -> Floats:
            split = self._affine(x, name, bias).reshape(count, longest, config.heads, config.head_size)
            return split.transpose(0, 2, 1, 3)

        query, key = heads(names.query, names.query_bias), heads(names.key, names.key_bias)
        value = heads(names.value, names.value_bias)
        scores: Floats = query @ key.transpose(0, 1, 3, 2)
        scores *= np.float32(config.head_size**-0.5)
        scores += np.where(mask, np.float32(0), np.float32(-np.inf))[:, None, None, :]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        joined: Floats = (scores @ value).transpose(0, 2, 1, 3).reshape(x.shape)
        mixed = self._affine(joined, names.attention_output, names.attention_output_bias)
        mixed += x
        return self._normalise(mixed, names.attention_norm_weight, names.attention_norm_bias)

    def hidden(self, layer: int, x: Floats) -> Floats:
        """``(n, longest, intermediate)``: what the hidden units of the feed-forward layer say."""
        names = layer_names(layer)
        return gelu(self._affine(x, names.up, names.up_bias))

    def feed_forward(
        self, layer: int, x: Floats, units: NDArray[np.bool_] | None = None, fill: Floats | None = None
    ) -> Floats:
        """The feed-forward half of one layer with its residual and LayerNorm; same shape as ``x``.

        Args:
            layer: counted from 0.
            x: ``(n, longest, hidden)``.
            units: ``(n, intermediate)``, the hidden units that each passage uses; the others count as 0.
            fill: ``(n, hidden)``, added in place of what the unused units would have said.
        """
        names = layer_names(layer)
        inner = self.hidden(layer, x)
        if units is not None:
            inner *= units[:, None, :]
        out = self._affine(inner, names.down, names.down_bias)
        if fill is not None:
            out += fill[:, None, :]
        out += x
        return self._normalise(out, names.output_norm_weight, names.output_norm_bias)

    def weight(self, name: str) -> Floats:
        """A weight as the encoder holds it; not to be written to."""
        return self._weights[name]

    def _affine(self, x: Floats, name: str, bias: str) -> Floats:
        weight = self._weights[name]
        # One product over all tokens: a stack of small ones takes NumPy down a slower road.
        out: Floats = x.reshape(-1, x.shape[-1]) @ weight.T
        out += self._weights[bias]
        return out.reshape(*x.shape[:-1], weight.shape[0])

    def _normalise(self, x: Floats, weight: str, bias: str) -> Floats:
        """LayerNorm over the last axis, in place."""
        x -= x.mean(axis=-1, keepdims=True)
        variance = np.square(x).mean(axis=-1, keepdims=True)
        x /= np.sqrt(variance + np.float32(self.config.epsilon))
        x *= self._weights[weight]
        x += self._weights[bias]
        return x


def gelu(x: Floats) -> Floats:
    """``x * Phi(x)`` with the exact normal distribution, correct to float32's last bit or two; a new array.

    Worked out in float64, a chunk at a time.
    """
    result = np.empty_like(x, order="C")
    flat, out = np.ascontiguousarray(x).reshape(-1), result.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        values = flat[start : start + _CHUNK]
        scaled = values.astype(np.float64) * 2**-0.5
        end = np.abs(scaled) >= _ERF_END
        signs = np.sign(scaled[end])
        square = np.minimum(scaled * scaled, _ERF_END**2)
        scaled *= _polynomial(_ERF_TOP, square)
        scaled /= _polynomial(_ERF_BOTTOM, square)
        scaled[end] = signs
        scaled += 1.0
        scaled *= values
        scaled *= 0.5
        out[start : start + _CHUNK] = scaled
    return result


def _polynomial(coefficients: tuple[float, ...], x: NDArray[np.float64]) -> NDArray[np.float64]:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total


def _pool(x: Floats, mask: NDArray[np.bool_]) -> Floats:
    """The mean of each passage's own tokens, at unit length."""
    own = mask[:, :, None]
    mean = np.where(own, x, np.float32(0)).sum(axis=1) / own.sum(axis=1).astype(np.float32)
    unit: Floats = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    return unit
