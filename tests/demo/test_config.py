"""Sizes and names of the encoder."""

import json
from dataclasses import asdict
from math import prod

import pytest

from strideweave.demo.config import EncoderConfig, layer_names, weight_shapes

MINILM = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "num_hidden_layers": 6,
    "hidden_size": 384,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
}


def write(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def test_the_published_description_is_the_default(tmp_path):
    assert EncoderConfig.from_json(write(tmp_path, MINILM)) == EncoderConfig()


def test_derived_sizes():
    config = EncoderConfig()
    assert (config.head_size, config.block) == (32, 96)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type 't5'; only 'bert'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'; only 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "only 'absolute'"),
        ({"num_attention_heads": 7}, r"hidden \(384\) must be a multiple of heads \(7\)"),
        ({"intermediate_size": 1000}, r"intermediate \(1000\) must be a multiple of experts \(16\)"),
    ],
)
def test_another_kind_of_model_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        EncoderConfig.from_json(write(tmp_path, MINILM | change))


@pytest.mark.parametrize("missing", sorted(MINILM.keys() - {"model_type", "hidden_act"}))
def test_a_description_without_a_size_is_refused(tmp_path, missing):
    rest = {key: value for key, value in MINILM.items() if key != missing}
    with pytest.raises(ValueError, match=f"lacks '{missing}'"):
        EncoderConfig.from_json(write(tmp_path, rest))


@pytest.mark.parametrize(("content", "message"), [("{", "not a model description in JSON"), ("[]", "a list")])
def test_a_file_that_is_no_description_is_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        EncoderConfig.from_json(write(tmp_path, content))


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match=r"max_tokens \(256\) exceeds the 100 positions"):
        EncoderConfig(positions=100)


def test_every_weight_has_one_name_and_the_published_size():
    shapes = weight_shapes(EncoderConfig())
    assert len(shapes) == 5 + 6 * 16
    assert sum(map(prod, shapes.values())) == 22_713_216 - (384 * 384 + 384)  # all but the pooler
    for layer in range(6):
        assert set(asdict(layer_names(layer)).values()) <= shapes.keys()
