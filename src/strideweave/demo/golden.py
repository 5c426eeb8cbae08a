"""Thirty-two pinned sentences and what the reference implementation makes of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strideweave.demo.resources import resource

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Golden", "load_golden"]


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """Embeddings made once by sentence-transformers with PyTorch (``tools/make_golden.py``).

    Attributes:
        sentences: plain ones, and some that a tokenizer stumbles over; one is cut at 256 tokens.
        embeddings: ``(32, 384)`` float32, unit vectors.
        tokens: ``(32,)`` int32, tokens of each sentence, markers included.
        versions: the versions that made them, as JSON.
    """

    sentences: tuple[str, ...]
    embeddings: NDArray[np.float32]
    tokens: NDArray[np.int32]
    versions: str


def load_golden(sentences: Path | None = None, arrays: Path | None = None) -> Golden:
    """Reads the pinned sentences and their embeddings.

    Args:
        sentences: one sentence per line; ``None`` is the file that ships with the demo.
        arrays: the ``.npz`` file that belongs to it; ``None`` likewise.

    Raises:
        ValueError: the two files do not belong together.
    """
    text_file, array_file = sentences or resource("sentences.txt"), arrays or resource("golden.npz")
    raw = text_file.read_bytes()
    with np.load(array_file, allow_pickle=False) as stored:
        if hashlib.sha256(raw).hexdigest() != str(stored["sentences_sha256"]):
            raise ValueError(
                f"{array_file} was made for other sentences than {text_file} holds; make it again"
            )
        return Golden(
            tuple(raw.decode("utf-8").splitlines()),
            stored["embeddings"],
            stored["tokens"],
            str(stored["versions"]),
        )
