"""What a BERT sentence encoder looks like, and what its weights are called."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["EmbeddingNames", "EncoderConfig", "LayerNames", "layer_names", "weight_shapes"]

_EXPECTED: Mapping[str, str] = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The sizes of an encoder; the defaults are those of all-MiniLM-L6-v2.

    Attributes:
        layers: transformer layers.
        hidden: width of a token's vector.
        heads: attention heads; ``hidden`` is a multiple of it.
        intermediate: hidden units of one feed-forward layer; a multiple of ``experts``.
        vocabulary: rows of the word-embedding table.
        positions: rows of the position table.
        epsilon: what LayerNorm adds to the variance.
        max_tokens: tokens per passage, markers included; the rest is cut off.
        experts: blocks that a feed-forward layer is cut into.
    """

    layers: int = 6
    hidden: int = 384
    heads: int = 12
    intermediate: int = 1536
    vocabulary: int = 30_522
    positions: int = 512
    epsilon: float = 1e-12
    max_tokens: int = 256
    experts: int = 16

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.intermediate % self.experts:
            raise ValueError(
                f"intermediate ({self.intermediate}) must be a multiple of experts ({self.experts})"
            )
        if self.max_tokens > self.positions:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) exceeds the {self.positions} positions of the model"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def block(self) -> int:
        """Hidden units of one expert block."""
        return self.intermediate // self.experts

    @classmethod
    def from_json(cls, path: Path) -> EncoderConfig:
        """Reads the ``config.json`` that stands beside a Hugging Face model.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not JSON, lacks a size, or describes another kind of model.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not a model description in JSON: {error}") from error
        if not isinstance(found, dict):
            kind = type(found).__name__
            raise ValueError(f"{path} is not a model description: a {kind}, not an object")  # noqa: TRY004
        for key, expected in _EXPECTED.items():
            if found.get(key, expected) != expected:
                raise ValueError(f"{path} describes {key} {found[key]!r}; only {expected!r} is implemented")
        try:
            return cls(
                layers=int(found["num_hidden_layers"]),
                hidden=int(found["hidden_size"]),
                heads=int(found["num_attention_heads"]),
                intermediate=int(found["intermediate_size"]),
                vocabulary=int(found["vocab_size"]),
                positions=int(found["max_position_embeddings"]),
                epsilon=float(found["layer_norm_eps"]),
                max_tokens=min(256, int(found["max_position_embeddings"])),
            )
        except KeyError as error:
            raise ValueError(f"{path} lacks {error.args[0]!r}, which a BERT description has") from error


@dataclass(frozen=True, slots=True)
class EmbeddingNames:
    """The names of the tables and of the LayerNorm at the bottom of the model."""

    words: str = "embeddings.word_embeddings.weight"
    positions: str = "embeddings.position_embeddings.weight"
    types: str = "embeddings.token_type_embeddings.weight"
    norm_weight: str = "embeddings.LayerNorm.weight"
    norm_bias: str = "embeddings.LayerNorm.bias"


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The names of one layer's weights.

    Matrices are ``(out, in)``, so that they act as ``x @ weight.T + bias``.
    """

    query: str
    query_bias: str
    key: str
    key_bias: str
    value: str
    value_bias: str
    attention_output: str
    attention_output_bias: str
    attention_norm_weight: str
    attention_norm_bias: str
    up: str
    up_bias: str
    down: str
    down_bias: str
    output_norm_weight: str
    output_norm_bias: str


def layer_names(layer: int) -> LayerNames:
    """The names of layer ``layer``, counted from 0, as the published checkpoint writes them."""
    prefix = f"encoder.layer.{layer}"
    attention, output = f"{prefix}.attention", f"{prefix}.output"
    return LayerNames(
        query=f"{attention}.self.query.weight",
        query_bias=f"{attention}.self.query.bias",
        key=f"{attention}.self.key.weight",
        key_bias=f"{attention}.self.key.bias",
        value=f"{attention}.self.value.weight",
        value_bias=f"{attention}.self.value.bias",
        attention_output=f"{attention}.output.dense.weight",
        attention_output_bias=f"{attention}.output.dense.bias",
        attention_norm_weight=f"{attention}.output.LayerNorm.weight",
        attention_norm_bias=f"{attention}.output.LayerNorm.bias",
        up=f"{prefix}.intermediate.dense.weight",
        up_bias=f"{prefix}.intermediate.dense.bias",
        down=f"{output}.dense.weight",
        down_bias=f"{output}.dense.bias",
        output_norm_weight=f"{output}.LayerNorm.weight",
        output_norm_bias=f"{output}.LayerNorm.bias",
    )


def weight_shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight the encoder uses (the pooler is not used), bottom to top."""
    hidden, inner = config.hidden, config.intermediate
    bottom = EmbeddingNames()
    shapes: dict[str, tuple[int, ...]] = {
        bottom.words: (config.vocabulary, hidden),
        bottom.positions: (config.positions, hidden),
        bottom.types: (2, hidden),
        bottom.norm_weight: (hidden,),
        bottom.norm_bias: (hidden,),
    }
    for layer in range(config.layers):
        name = layer_names(layer)
        for matrix, bias in (
            (name.query, name.query_bias),
            (name.key, name.key_bias),
            (name.value, name.value_bias),
            (name.attention_output, name.attention_output_bias),
        ):
            shapes[matrix], shapes[bias] = (hidden, hidden), (hidden,)
        shapes[name.attention_norm_weight] = shapes[name.attention_norm_bias] = (hidden,)
        shapes[name.up], shapes[name.up_bias] = (inner, hidden), (inner,)
        shapes[name.down], shapes[name.down_bias] = (hidden, inner), (hidden,)
        shapes[name.output_norm_weight] = shapes[name.output_norm_bias] = (hidden,)
    return shapes
