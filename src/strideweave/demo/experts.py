"""A feed-forward layer as sixteen expert blocks, and who decides which of them a passage needs.

Four blocks of the units that say most are always used, as shared experts; the other units are grouped into
twelve by what fires together, and a linear router guesses from a passage's tokens which of these will
matter. A block that is left out is replaced by its mean contribution. All sixteen together are exactly the
dense layer; fewer are an approximation of a model that was never trained to be sparse, to be shown with its
measured loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strideweave.demo.resources import resource

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from strideweave.demo.config import EncoderConfig

    Floats = NDArray[np.float32]

__all__ = ["BLOCKS", "SHARED", "ExpertRouter"]

BLOCKS = 16
SHARED = 4
"""Blocks 0 to 3 of every layer are used by every passage."""


class ExpertRouter:
    """Per layer: the order of the hidden units, the router, and the mean contribution of each block.

    Args:
        permutations: ``(layers, units)``; block ``b`` owns the units at places ``b * size`` and on.
        routers: ``(layers, hidden + 1, 12)``; a token's vector, with a 1 after it, times this guesses how far
            each routed block will be from its mean.
        means: ``(layers, 16, hidden)``, the mean contribution of each block.

    Raises:
        ValueError: the shapes do not belong together, or a permutation names a unit twice.
    """

    def __init__(self, permutations: NDArray[np.integer[Any]], routers: Floats, means: Floats) -> None:
        layers, units = permutations.shape
        hidden = means.shape[-1]
        if units % BLOCKS or means.shape != (layers, BLOCKS, hidden):
            raise ValueError(
                f"{units} units and means of shape {means.shape} do not make {layers} x {BLOCKS} blocks"
            )
        if routers.shape != (layers, hidden + 1, BLOCKS - SHARED):
            raise ValueError(
                f"the routers have shape {routers.shape}; the other arrays ask for "
                f"{(layers, hidden + 1, BLOCKS - SHARED)}"
            )
        if not np.array_equal(
            np.sort(permutations, axis=1), np.broadcast_to(np.arange(units), permutations.shape)
        ):
            raise ValueError(f"every layer's order must name each of the {units} hidden units once")
        self._permutations = permutations.astype(np.int64)
        self._routers = routers.astype(np.float32)
        self._means = means.astype(np.float32)
        self._block_of_unit = np.argsort(self._permutations, axis=1) // (units // BLOCKS)

    @classmethod
    def load(cls, path: Path | None = None) -> ExpertRouter:
        """Reads a router from an ``.npz`` file; ``None`` is the demo's own, for all-MiniLM-L6-v2.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not such a file.
        """
        source = resource("experts.npz") if path is None else path
        with np.load(source, allow_pickle=False) as stored:
            missing = {"permutations", "routers", "means"} - set(stored.files)
            if missing:
                raise ValueError(
                    f"{source} lacks {', '.join(sorted(missing))}; tools/make_experts.py writes such files"
                )
            return cls(stored["permutations"], stored["routers"], stored["means"])

    def save(self, path: Path, **notes: str) -> None:
        """Writes an ``.npz`` file that ``load`` reads; the notes say how it was made."""
        extra = {name: np.array(note) for name, note in notes.items()}
        permutations = self._permutations.astype(np.int16)
        arrays: dict[str, Any] = {
            "permutations": permutations,
            "routers": self._routers,
            "means": self._means,
            **extra,
        }
        np.savez_compressed(path, **arrays)

    def check(self, config: EncoderConfig) -> None:
        """Raises ``ValueError`` unless the router was made for a model of these sizes."""
        own = (*self._permutations.shape, self._means.shape[-1], BLOCKS)
        asked = (config.layers, config.intermediate, config.hidden, config.experts)
        if own != asked:
            raise ValueError(
                f"the router is for (layers, units, hidden, blocks) = {own}, the model has {asked}"
            )

    def permutation(self, layer: int) -> NDArray[np.int64]:
        """``(units,)``: the hidden units in block order."""
        order: NDArray[np.int64] = self._permutations[layer]
        return order

    def mean(self, layer: int) -> Floats:
        """``(16, hidden)``: what each block adds to the output on average."""
        mean: Floats = self._means[layer]
        return mean

    def router(self, layer: int) -> Floats:
        """``(hidden + 1, 12)``: from a token, and a 1, to how far each routed block will be from its mean."""
        router: Floats = self._routers[layer]
        return router

    def choose(self, layer: int, x: Floats, mask: NDArray[np.bool_], k: int) -> NDArray[np.int64]:
        """Which blocks each passage uses.

        Args:
            layer: counted from 0.
            x: ``(n, longest, hidden)``, the input of the layer's feed-forward half.
            mask: ``(n, longest)``, true on the passage's own tokens; the others have no say.
            k: blocks per passage, 5 to 16, the four shared ones counted.

        Returns:
            ``(n, k)`` int64, ascending in each row; the first four columns are the shared blocks.

        Raises:
            ValueError: ``k`` is out of range.
        """
        if not SHARED < k <= BLOCKS:
            raise ValueError(
                f"experts must be {SHARED + 1} to {BLOCKS} ({SHARED} shared and at least 1 routed), got {k}"
            )
        router = self._routers[layer]
        guess = x @ router[:-1] + router[-1]
        # A distance cannot be negative, whatever a linear guess says.
        strength = np.square(np.maximum(guess, 0), dtype=np.float64)
        scores = np.where(mask[:, :, None], strength, 0.0).sum(axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : k - SHARED] + SHARED
        shared = np.broadcast_to(np.arange(SHARED), (len(x), SHARED))
        return np.concatenate([shared, np.sort(best, axis=1)], axis=1)

    def used(self, choice: NDArray[np.int64]) -> NDArray[np.bool_]:
        """``(n, 16)``: true where passage ``n`` uses the block, for a ``choice`` of shape ``(n, k)``."""
        used = np.zeros((len(choice), BLOCKS), dtype=np.bool_)
        np.put_along_axis(used, choice, True, axis=1)
        return used

    def units(self, layer: int, choice: NDArray[np.int64]) -> NDArray[np.bool_]:
        """``(n, units)``: true where the passage uses the hidden unit, in the model's own order of units."""
        return self.used(choice)[:, self._block_of_unit[layer]]

    def fill(self, layer: int, choice: NDArray[np.int64]) -> Floats:
        """``(n, hidden)``: the sum of the mean contributions of the blocks that a passage leaves out."""
        total: Floats = (~self.used(choice)).astype(np.float32) @ self._means[layer]
        return total
