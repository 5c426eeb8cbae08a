"""The tokenizer against ids that the ``tokenizers`` library made once (0.23.3, the published tokenizer.json)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.demo.wordpiece import MAX_TOKENS, WordPiece

CLS, SEP, UNK, PAD = 101, 102, 100, 0

# What stands between [CLS] and [SEP].
GOLDEN = [
    ("", []),
    ("Hello, World!", [7592, 1010, 2088, 999]),
    ("  \t\n\r ", []),
    ("How do I catch an exception?", [2129, 2079, 1045, 4608, 2019, 6453, 1029]),
    ("tokenization", [19204, 3989]),
    ("unaffable", [14477, 20961, 3468]),
    ("MiXeD CaSe", [3816, 2553]),
    ("na\xefve CAF\xc9", [15743, 7668]),
    ("\u0130stanbul", [9960]),
    ("\u0391\u03a3 \u039f\u0394\u03a5\u03a3", [1155, 29733, 1169, 29722, 29735, 29733]),
    ("Stra\xdfe \u1e9e", [2358, 27807, 1096]),
    ("\ufb01ne \u017ft", [1984, 2638, UNK]),
    ("don't\u2014stop\u2026", [2123, 1005, 1056, 1517, 2644, 1529]),
    ("\u201cquoted\u201d it\u2019s", [1523, 9339, 1524, 2009, 1521, 1055]),
    ("a\u0300\u0316b", [11113]),
    ("x\xa0y\u2003z\u2028w", [1060, 1061, 1062, 1059]),
    ("zero\u200bwidth\xadsoft\ufeff", [5717, 9148, 11927, 7898, 15794]),
    ("nul\x00\x01\x7f\x85del", [16371, 17920, 2140]),
    ("bad\ufffdchar", [2919, 7507, 2099]),
    ("\u4e2d\u6587abc\u4e2d\u6587", [1746, 1861, 5925, 1746, 1861]),
    ("\u6771\u4eac", [1879, 1755]),
    ("\ud55c\uad6d\uc5b4", [1469, 30006, 30021, 29991, 30014, 30020, 29999, 30008]),
    ("\u30ab\u30bf\u30ab\u30ca", [1700, 30235, 30226, 30241]),
    ("\u0928\u092e\u0938\u094d\u0924\u0947", [1327, 29867, 29874, 29859]),
    ("\u05e2\u05b4\u05d1\u05b0\u05e8\u05b4\u05d9\u05ea", [1259, 29789, 29811, 29796, 29813]),
    ("\u0e44\u0e17\u0e22", [UNK]),
    ("\U0001f44d thumbs", [UNK, 16784]),
    ("\U0001f469\u200d\U0001f469\u200d\U0001f467", [UNK]),
    ("[MASK] [mask] x[SEP]y", [103, 1031, 7308, 1033, 1060, SEP, 1061]),
    ("[[CLS]]", [1031, CLS, 1033]),
    ("##ing", [1001, 1001, 13749]),
    ("a" * 100, [13360, *[11057] * 48, 2050]),
    ("a" * 101, [UNK]),
    ("\xe9" * 101, [UNK]),
    ("1,000.50 $5 \u20ac7 \xa33", [1015, 1010, 2199, 1012, 2753, 1002, 1019, 1574, 2581, 28182]),
    ("\u0661\u0662\u0663 \uff14\uff15 \u2167 \xbd", [UNK, UNK, UNK, 1092]),
    ("x**2; y_1<y_2", [1060, 1008, 1008, 1016, 1025, 1061, 1035, 1015, 1026, 1061, 1035, 1016]),
    ("\U00020000\U0002b820\U0002b920", [UNK, UNK, UNK]),
    ("a\U0002b820b a\U0002b920b a\u4e00b", [UNK, 1037, UNK, 1038, 1037, 1740, 1038]),
    ("word " * 400, [2773] * 254),
]


@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_ids_are_those_of_the_published_tokenizer(tokenizer, text, ids):
    assert tokenizer.encode(text) == [CLS, *ids, SEP]


def test_the_bundled_vocabulary_is_the_published_one(tokenizer):
    assert len(tokenizer) == 30_522
    assert tokenizer.pad_id == PAD
    assert tokenizer.tokens([CLS, 19204, 3989, SEP]) == ["[CLS]", "token", "##ization", "[SEP]"]


@pytest.mark.parametrize(("limit", "expected"), [(2, [CLS, SEP]), (3, [CLS, 2773, SEP])])
def test_long_text_is_cut_inside_the_markers(tokenizer, limit, expected):
    assert tokenizer.encode("word word", limit) == expected


@given(st.text(max_size=300))
def test_any_text_becomes_ids_between_the_markers(tokenizer, text):
    ids = tokenizer.encode(text)
    assert 2 <= len(ids) <= MAX_TOKENS
    assert (ids[0], ids[-1]) == (CLS, SEP)
    assert all(0 <= number < len(tokenizer) for number in ids)


@given(st.text(max_size=80), st.text(max_size=80))
def test_a_space_ends_a_word(tokenizer, left, right):
    whole = tokenizer.encode(f"{left} {right}")[1:-1]
    assert whole == tokenizer.encode(left)[1:-1] + tokenizer.encode(right)[1:-1]


def test_a_lone_surrogate_is_dropped(tokenizer):
    assert tokenizer.encode("wo\ud800rd") == tokenizer.encode("word")


def test_a_limit_without_room_for_the_markers_is_refused(tokenizer):
    with pytest.raises(ValueError, match="at least 2; got 1"):
        tokenizer.encode("word", 1)


def test_a_vocabulary_without_the_markers_is_refused():
    with pytest.raises(ValueError, match=r"lacks \[MASK\]"):
        WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "word"])


def test_a_vocabulary_with_a_piece_twice_is_refused():
    with pytest.raises(ValueError, match="7 lines has only 6 distinct"):
        WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "word"])


def test_a_vocabulary_file_may_have_windows_line_ends(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes(b"[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\n[MASK]\r\nword\r\n")
    assert WordPiece.from_file(path).encode("word") == [2, 5, 3]
