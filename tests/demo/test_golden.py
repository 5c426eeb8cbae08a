"""The pinned sentences and their embeddings belong together."""

import numpy as np
import pytest

from strideweave.demo.golden import load_golden
from strideweave.demo.resources import resource


def test_golden_embeddings_are_unit_vectors_of_the_pinned_sentences(tokenizer):
    golden = load_golden()
    assert len(golden.sentences) == len(set(golden.sentences)) == 32
    assert golden.embeddings.shape == (32, 384)
    assert golden.embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(golden.embeddings, axis=1), 1, rtol=1e-6)
    assert [len(tokenizer.encode(sentence)) for sentence in golden.sentences] == golden.tokens.tolist()
    assert golden.tokens.max() == 256  # one of them is cut
    assert "sentence-transformers" in golden.versions


def test_changed_sentences_are_noticed(tmp_path):
    changed = tmp_path / "sentences.txt"
    changed.write_bytes(resource("sentences.txt").read_bytes() + b"One more.\n")
    with pytest.raises(ValueError, match="made for other sentences"):
        load_golden(sentences=changed)


def test_a_missing_data_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"'absent\.npz' is missing"):
        resource("absent.npz")
