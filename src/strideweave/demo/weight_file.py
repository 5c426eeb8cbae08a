"""A model file on disk, read one tensor or a few rows at a time."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Self

from strideweave.demo.config import weight_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from strideweave.demo.config import EncoderConfig

__all__ = ["FileDigest", "WeightFile"]


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file's SHA-256 beside the published one.

    Attributes:
        path: the file.
        found: hexadecimal digest of its bytes.
        expected: the published digest.
    """

    path: Path
    found: str
    expected: str

    @property
    def matches(self) -> bool:
        """Whether the bytes are the published ones."""
        return self.found == self.expected

    @classmethod
    def of(cls, path: Path, expected: str) -> FileDigest:
        """Hashes a file; reads it through once, a few KiB at a time."""
        with path.open("rb") as file:
            return cls(path, hashlib.file_digest(file, "sha256").hexdigest(), expected)


class WeightFile(ABC):
    """What every source of weights shares: names, shapes, bounds, digests.

    Args:
        path: the model file.
        vocabulary: the ``vocab.txt`` that goes with it.
        config: the sizes that every tensor is checked against.
        description: a line for people.
        published: file -> its published SHA-256.
    """

    def __init__(
        self,
        path: Path,
        vocabulary: Path,
        config: EncoderConfig,
        description: str,
        published: Mapping[Path, str],
    ) -> None:
        self.path = path
        self.vocabulary = vocabulary
        self.config = config
        self.description = description
        self._published = dict(published)
        self._shapes = weight_shapes(config)

    @property
    def names(self) -> tuple[str, ...]:
        """The weights the encoder uses, bottom to top."""
        return tuple(self._shapes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all those weights as float32 (90,261,504 for all-MiniLM-L6-v2, 86.1 MiB)."""
        return 4 * sum(map(prod, self._shapes.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """The extents of a weight.

        Raises:
            KeyError: the encoder has no such weight.
        """
        try:
            return self._shapes[name]
        except KeyError:
            raise KeyError(
                f"the encoder has no weight {name!r}; layer_names() and EmbeddingNames list them"
            ) from None

    def read(self, name: str) -> NDArray[np.float32]:
        """The whole weight as a new array.

        Raises:
            KeyError: the encoder has no such weight.
            ValueError: the source is closed.
        """
        return self._read(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start`` to ``stop`` (excluded) along the first axis as a new array; reads nothing else.

        Raises:
            KeyError: the encoder has no such weight.
            IndexError: not ``0 <= start <= stop <= rows``.
            ValueError: the source is closed.
        """
        rows = self.shape(name)[0]
        if not 0 <= start <= stop <= rows:
            raise IndexError(f"rows {start}:{stop} of {name} were asked, it has 0:{rows}")
        return self._read(name, start, stop)

    def checksums(self) -> tuple[FileDigest, ...]:
        """The digests of the model file and the vocabulary beside the published ones; reads both through."""
        return tuple(FileDigest.of(path, expected) for path, expected in self._published.items())

    @abstractmethod
    def _read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """``read_rows`` with valid arguments."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the file; afterwards reading raises ``ValueError``. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
