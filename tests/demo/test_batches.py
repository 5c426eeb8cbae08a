"""Padding, and the way back to the given order."""

import numpy as np
import pytest

from strideweave.demo.batches import make_batches, passage_count

PASSAGES = ["the river reads one tile", "bread", "a stone.", "the old tiles", "new"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_every_passage_is_in_one_batch_with_its_own_tokens(tiny_tokenizer, size):
    batches = make_batches(PASSAGES, tiny_tokenizer, size)
    assert passage_count(batches) == len(PASSAGES)
    assert sorted(np.concatenate([batch.rows for batch in batches])) == list(range(len(PASSAGES)))
    for batch in batches:
        assert len(batch) <= size
        for row, ids, mask, length in zip(batch.rows, batch.ids, batch.mask, batch.lengths, strict=True):
            assert ids[mask].tolist() == tiny_tokenizer.encode(PASSAGES[row])
            assert length == mask.sum()
            assert (ids[~mask] == tiny_tokenizer.pad_id).all()


def test_short_passages_come_first_and_ties_keep_their_order(tiny_tokenizer):
    batches = make_batches(PASSAGES, tiny_tokenizer, 2)
    assert [batch.rows.tolist() for batch in batches] == [[1, 4], [2, 3], [0]]
    assert [batch.ids.shape for batch in batches] == [(2, 3), (2, 6), (1, 7)]
    assert [batch.tokens for batch in batches] == [6, 11, 7]


def test_long_passages_are_cut(tiny_tokenizer):
    (batch,) = make_batches(PASSAGES, tiny_tokenizer, 8, max_tokens=4)
    assert batch.ids.shape == (5, 4)


@pytest.mark.parametrize(
    ("passages", "size", "message"), [([], 1, "list of passages is empty"), (["a"], 0, "at least 1, got 0")]
)
def test_nothing_to_do_is_refused(tiny_tokenizer, passages, size, message):
    with pytest.raises(ValueError, match=message):
        make_batches(passages, tiny_tokenizer, size)
