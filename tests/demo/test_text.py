"""Sentences out of help texts and files."""

import pytest

from strideweave.demo.text import help_sentences, read_passages, sentences_of, spread

PAGE = """The "with" statement
********************

The "with" statement is used to wrap the execution of a block.  It was
added a long time ago (see the history, e.g. PEP 343 in the index).  Short one.

   with_stmt ::= "with" ( with_item ) ":" suite

The following code shows what it is for and why it is good:

   >>> with open("a file") as it:
   ...     the_value = it.read()

+------------------+--------------------------------+
| Operator         | Description of the operator.   |
+------------------+--------------------------------+

* A bullet is a sentence too, and its marker is not a part of it.

[1] This is a footnote of the page, and it is printed at the end.

Note:

  An indented remark is prose as well, so that it is found in the text.
"""

SENTENCES = [
    'The "with" statement is used to wrap the execution of a block.',
    "It was added a long time ago (see the history, e.g. PEP 343 in the index).",
    "A bullet is a sentence too, and its marker is not a part of it.",
    "This is a footnote of the page, and it is printed at the end.",
    "An indented remark is prose as well, so that it is found in the text.",
]


def test_prose_is_found_and_headings_grammar_code_and_tables_are_not():
    assert list(sentences_of(PAGE)) == SENTENCES


@pytest.mark.parametrize(
    "text",
    [
        "This one is too short, is it.",
        "This sentence is " + "very " * 80 + "long, too long to be a good passage for the demo.",
        "this one does not begin as a sentence of the English language does.",
        "This one is of the kind that does not end as the others do",
        "The x = {1: [2, 3], 4: (5, 6)}; y = x[1][0] ** 2 // 7 % 8 is not prose.",
        "Ein Satz, der keine englischen Funktionsworte kennt, bleibt draussen.",
    ],
)
def test_what_is_no_english_sentence_of_30_to_400_characters_is_left_out(text):
    assert list(sentences_of(text)) == []


def test_topics_are_read_in_the_order_of_their_names_and_sentences_once():
    topics = {"b": "The second topic comes after the first one.", "a": PAGE, "c": PAGE}
    assert help_sentences(topics) == [*SENTENCES, "The second topic comes after the first one."]


def test_the_help_of_this_python_has_enough_sentences():
    found = help_sentences()
    assert len(found) > 1500
    assert len(set(found)) == len(found)
    assert all(30 <= len(sentence) <= 400 and "\n" not in sentence for sentence in found)
    assert found == help_sentences()


def test_a_file_is_one_passage_per_line(tmp_path):
    path = tmp_path / "passages.txt"
    path.write_bytes("\ufeffone\r\n\r\n  two words \nthree\none\n".encode())
    assert read_passages(path) == ["one", "two words", "three"]


def test_a_file_may_be_read_sentence_by_sentence(tmp_path):
    path = tmp_path / "page.txt"
    path.write_text(PAGE, "utf-8")
    assert read_passages(path, "sentence") == SENTENCES


@pytest.mark.parametrize(
    ("content", "unit", "message"),
    [
        (b"\n \n", "line", "holds no passage"),
        (b"no sentence", "sentence", "holds no passage"),
        (b"caf\xe9", "line", "not UTF-8 text .byte 3"),
        (b"x", "word", "must be 'line' or 'sentence', got 'word'"),
    ],
)
def test_a_file_without_passages_is_refused(tmp_path, content, unit, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_passages(path, unit)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_passages(tmp_path / "absent.txt")


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, "a"), (2, "ad"), (3, "ace"), (6, "abcdef"), (9, "abcdef")],
)
def test_a_choice_is_spread_evenly(count, expected):
    assert spread(list("abcdef"), count) == list(expected)


def test_a_choice_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        spread(["a"], 0)
