"""The int8 fallback: a small ONNX file made here, and the published package."""

import numpy as np
import pytest

from strideweave.demo.config import EmbeddingNames, EncoderConfig, layer_names, weight_shapes
from strideweave.demo.dense import DenseEncoder
from strideweave.demo.golden import load_golden
from strideweave.demo.onnx_weights import Int8OnnxWeights

onnx = pytest.importorskip(
    "onnx", reason="the package onnx is not installed: pip install 'strideweave[demo-int8]'"
)

CONFIG = EncoderConfig(
    layers=1, hidden=16, heads=2, intermediate=32, vocabulary=12, positions=8, max_tokens=8
)
QUANTISED_TABLES = {EmbeddingNames().words, EmbeddingNames().positions}


def int8_model(leave_out=(), unnamed_bias=False):
    """A graph as the exporter writes it, and the float32 weights that it stands for."""
    helper, rng = onnx.helper, np.random.default_rng(3)
    stored, nodes, expected = {}, [], {}
    for number, (name, shape) in enumerate(weight_shapes(CONFIG).items()):
        if name in leave_out:
            continue
        if len(shape) == 1 or name == EmbeddingNames().types:
            expected[name] = stored[f"inner.{name}"] = rng.standard_normal(shape).astype(np.float32)
            continue
        values = rng.integers(-127, 128, shape, dtype=np.int8)
        scale = rng.random((shape[0], 1), dtype=np.float32)
        expected[name] = values * scale
        table = name in QUANTISED_TABLES
        label = f"inner.{name}" if table else f"val_{number}"
        stored[f"{label}_q"] = values if table else np.ascontiguousarray(values.T)
        stored[f"{label}_scale"] = scale if table else np.ascontiguousarray(scale.T)
        nodes.append(helper.make_node("Cast", [f"{label}_q"], [f"{label}_f"], to=onnx.TensorProto.FLOAT))
        nodes.append(helper.make_node("Mul", [f"{label}_f", f"{label}_scale"], [label]))
        if not table:
            bias = f"inner.{name.removesuffix('.weight')}.bias"
            wide = helper.make_node("MatMul", [f"x{shape[1]}", label], [f"product_{number}"])
            added = [f"product_{number}"] * 2 if unnamed_bias else [f"product_{number}", bias]
            nodes += [wide, helper.make_node("Add", added, [f"out_{number}"])]
    inputs = [
        helper.make_tensor_value_info(f"x{width}", onnx.TensorProto.FLOAT, [1, width])
        for width in (CONFIG.hidden, CONFIG.intermediate)
    ]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, [], initializer=tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), expected


@pytest.fixture
def open_model(tmp_path):
    def opener(model, config=CONFIG):
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        return Int8OnnxWeights(path, tmp_path / "vocab.txt", config, "tiny", {})

    return opener


def test_values_are_the_integers_times_their_scale_in_the_checkpoints_own_order(open_model):
    model, expected = int8_model()
    with open_model(model) as weights:
        assert weights.names == tuple(expected)
        for name, array in expected.items():
            found = weights.read(name)
            np.testing.assert_array_equal(found, array)
            assert found.dtype == np.float32
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(weights.read_rows(name, 1, 2), array[1:2])


def test_what_is_read_is_a_copy(open_model):
    with open_model(int8_model()[0]) as weights:
        for name in weights.names:
            weights.read(name)[:] = 7
            assert not (weights.read(name) == 7).all()


def test_a_closed_source_says_so(open_model):
    weights = open_model(int8_model()[0])
    weights.close()
    with pytest.raises(ValueError, match="is closed"):
        weights.read(EmbeddingNames().words)


def test_a_missing_weight_is_named(open_model):
    name = layer_names(0).up
    with pytest.raises(ValueError, match=rf"lacks {name}"):
        open_model(int8_model(leave_out=[name])[0])


def test_a_matrix_that_nothing_names_is_refused(open_model):
    with pytest.raises(ValueError, match="its place in the model is unknown"):
        open_model(int8_model(unnamed_bias=True)[0])


def test_another_size_is_refused(open_model):
    other = EncoderConfig(
        layers=1, hidden=16, heads=2, intermediate=32, vocabulary=13, positions=8, max_tokens=8
    )
    with pytest.raises(ValueError, match=r"is \(12, 16\), the encoder needs \(13, 16\)"):
        open_model(int8_model()[0], other)


@pytest.mark.parametrize("content", [b"", b"junk" * 99])
def test_a_damaged_file_is_refused_with_its_path_and_size(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.onnx is not a readable .* \({len(content)} bytes\)"):
        Int8OnnxWeights(path, path, CONFIG, "tiny", {})


def test_the_published_int8_weights_come_close_to_the_golden_embeddings(
    int8_weights, tokenizer, encode_golden
):
    assert all(digest.matches for digest in int8_weights.checksums())
    found = encode_golden(DenseEncoder(int8_weights), tokenizer)
    cosine = (found * load_golden().embeddings).sum(axis=1)
    assert cosine.min() > 0.995
    assert cosine.mean() > 0.999
