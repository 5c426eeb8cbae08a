"""All big matrices of the encoder in one file of equal tiles, in the order in which a layer needs them.

Every matrix is stored as rows of ``hidden`` numbers: the word embeddings row by row, attention matrices as
published (one row an output), the feed-forward matrices by hidden unit, ``down`` transposed, so that an
expert block is a run of rows in both. Sixteen rows are a tile; the file is simply the row-major matrix of
all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strideweave.demo.config import EmbeddingNames, layer_names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from strideweave.demo.config import EncoderConfig
    from strideweave.demo.experts import ExpertRouter
    from strideweave.demo.weights import ModelWeights

__all__ = ["TILE_ROWS", "Rows", "TileFile", "write_tile_file"]

TILE_ROWS = 16
_PIECE_ROWS = 2048  # rows of the embedding table held at once while the file is written


@dataclass(frozen=True, slots=True)
class Rows:
    """A run of rows in the file, a whole number of tiles.

    Attributes:
        first: the first row.
        count: how many rows.
    """

    first: int
    count: int

    @property
    def tiles(self) -> range:
        """The tile coordinates of the rows along axis 0."""
        return range(self.first // TILE_ROWS, (self.first + self.count) // TILE_ROWS)

    def part(self, index: int, count: int) -> Rows:
        """The ``index``-th stretch of ``count`` rows."""
        return Rows(self.first + index * count, count)


@dataclass(frozen=True, slots=True)
class TileFile:
    """Where each matrix lies.

    Attributes:
        path: the file.
        config: the sizes of the encoder.
    """

    path: Path
    config: EncoderConfig

    @property
    def rows(self) -> int:
        """Rows of the whole file."""
        return self._layers_begin + self.config.layers * self._layer_rows

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.rows * self.config.hidden * 4

    @property
    def words(self) -> Rows:
        """The word embeddings, padded to whole tiles with rows of zeros."""
        return Rows(0, self._layers_begin)

    def attention(self, layer: int) -> Rows:
        """Query, key, value and output matrix of a layer, one after the other, ``hidden`` rows each."""
        return Rows(self._layers_begin + layer * self._layer_rows, 4 * self.config.hidden)

    def up(self, layer: int) -> Rows:
        """The first feed-forward matrix, one row a hidden unit, in block order."""
        return Rows(self.attention(layer).first + 4 * self.config.hidden, self.config.intermediate)

    def down(self, layer: int) -> Rows:
        """The second feed-forward matrix, transposed: one row a hidden unit, in block order."""
        return Rows(self.up(layer).first + self.config.intermediate, self.config.intermediate)

    @property
    def _layers_begin(self) -> int:
        return -(-self.config.vocabulary // TILE_ROWS) * TILE_ROWS

    @property
    def _layer_rows(self) -> int:
        return 4 * self.config.hidden + 2 * self.config.intermediate


def write_tile_file(weights: ModelWeights, path: Path, router: ExpertRouter | None = None) -> TileFile:
    """Write the big matrices, holding one of them at a time.

    Args:
        weights: the model.
        path: the file to make.
        router: gives the order of the hidden units in blocks; None keeps the model's own order.

    Returns:
        The map of the file.

    Raises:
        ValueError: the model's sizes are not whole tiles.
        OSError: the file cannot be written.
    """
    config = weights.config
    if config.hidden % TILE_ROWS or config.block % TILE_ROWS:
        raise ValueError(
            f"a hidden size of {config.hidden} and blocks of {config.block} units do not fall into tiles of "
            f"{TILE_ROWS} rows"
        )
    tile_file = TileFile(path, config)
    with path.open("wb") as file:
        for piece in _pieces(weights, tile_file, router):
            np.ascontiguousarray(piece, "<f4").tofile(file)
    if path.stat().st_size != tile_file.nbytes:
        raise OSError(f"{path} has {path.stat().st_size} bytes instead of {tile_file.nbytes}")
    return tile_file


def _pieces(
    weights: ModelWeights, tile_file: TileFile, router: ExpertRouter | None
) -> Iterator[NDArray[np.float32]]:
    config = weights.config
    for start in range(0, config.vocabulary, _PIECE_ROWS):
        yield weights.read_rows(EmbeddingNames().words, start, min(start + _PIECE_ROWS, config.vocabulary))
    yield np.zeros((tile_file.words.count - config.vocabulary, config.hidden), np.float32)
    for layer in range(config.layers):
        names = layer_names(layer)
        for name in (names.query, names.key, names.value, names.attention_output):
            yield weights.read(name)
        order = slice(None) if router is None else router.permutation(layer)
        yield weights.read(names.up)[order]
        yield weights.read(names.down).T[order]
