"""Passages as padded blocks of token ids, and a way back to the order they came in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strideweave.demo.wordpiece import WordPiece

__all__ = ["Batch", "make_batches", "passage_count"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some passages of similar length, padded to the longest of them.

    Attributes:
        ids: ``(n, longest)`` int64, ``[PAD]`` after each passage's end.
        mask: ``(n, longest)`` bool, true on the passage's own tokens.
        lengths: ``(n,)`` int64, tokens of each passage.
        rows: ``(n,)`` int64, the place of each passage among all that were batched together.
    """

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Tokens of all passages, padding left out."""
        return int(self.lengths.sum())


def make_batches(
    sentences: Sequence[str], tokenizer: WordPiece, batch_size: int = 32, *, max_tokens: int = 256
) -> list[Batch]:
    """Tokenizes and groups passages, shortest first, ties in their order, so that little is padded.

    Args:
        sentences: the passages; result row ``i`` belongs to ``sentences[i]``.
        tokenizer: makes the ids.
        batch_size: passages per batch; the last one may be smaller.
        max_tokens: longer passages are cut.

    Raises:
        ValueError: no passage was given, or ``batch_size`` is below 1.
    """
    if not sentences:
        raise ValueError("there is nothing to encode: the list of passages is empty")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    encoded = [tokenizer.encode(sentence, max_tokens) for sentence in sentences]
    order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))
    groups = (order[start : start + batch_size] for start in range(0, len(order), batch_size))
    return [_pad([encoded[row] for row in rows], rows, tokenizer.pad_id) for rows in groups]


def passage_count(batches: Sequence[Batch]) -> int:
    """How many passages the batches hold together."""
    return sum(map(len, batches))


def _pad(passages: list[list[int]], rows: list[int], pad_id: int) -> Batch:
    lengths = np.array([len(passage) for passage in passages], dtype=np.int64)
    ids = np.full((len(passages), int(lengths.max())), pad_id, dtype=np.int64)
    for line, passage in zip(ids, passages, strict=True):
        line[: len(passage)] = passage
    mask = np.arange(ids.shape[1]) < lengths[:, None]
    return Batch(ids, mask, lengths, np.array(rows, dtype=np.int64))
