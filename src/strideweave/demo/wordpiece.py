"""BERT's uncased WordPiece in plain Python: text in, row numbers of the embedding table out.

The steps are those of the Hugging Face ``tokenizers`` pipeline that the model was published with (special
tokens, ``BertNormalizer``, ``BertPreTokenizer``, ``WordPiece``), so that the ids are the same ones without
its many dependencies. Characters are judged by the running Python's Unicode tables, and by that pipeline's
of about Unicode 8: the two differ on some 500 marks of rare scripts that came later.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING

from strideweave.demo.resources import resource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["MAX_TOKENS", "WordPiece"]

MAX_TOKENS = 256
"""Tokens per passage, the two markers counted; what the model was trained for."""

_LONGEST_WORD = 100  # characters; a longer word is unknown as a whole
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SPLIT_SPECIAL = re.compile("(" + "|".join(re.escape(token) for token in _SPECIAL) + ")")
_ASCII_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")

# The blocks of ideographs that become words of their own. The sixth starts at 2B920 and not at 2B820: so does
# the pipeline that the model was published with.
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPiece:
    """Splits lower-cased text without accents into the longest word pieces, from the left.

    Args:
        vocabulary: the pieces in id order; pieces inside a word start with ``##``.

    Raises:
        ValueError: a special token is missing, or a piece occurs twice.
    """

    def __init__(self, vocabulary: Iterable[str]) -> None:
        self._pieces = list(vocabulary)
        self._ids = {piece: number for number, piece in enumerate(self._pieces)}
        if len(self._ids) != len(self._pieces):
            raise ValueError(
                f"a vocabulary of {len(self._pieces)} lines has only {len(self._ids)} distinct pieces"
            )
        missing = [token for token in _SPECIAL if token not in self._ids]
        if missing:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}; it is not that of a BERT model")
        self.pad_id = self._ids["[PAD]"]
        self._unknown = [self._ids["[UNK]"]]
        self._first = self._ids["[CLS]"]
        self._last = self._ids["[SEP]"]
        # Real text repeats its words; the bound keeps a hostile text from growing the memo without end.
        self._word = lru_cache(maxsize=1 << 15)(self._split_word)

    @classmethod
    def from_file(cls, path: Path) -> WordPiece:
        """Reads a ``vocab.txt``: UTF-8, one piece per line, the line number is the id."""
        with path.open(encoding="utf-8", newline="\n") as lines:
            return cls(line.rstrip("\r\n") for line in lines)

    @classmethod
    def bundled(cls) -> WordPiece:
        """The vocabulary in the demo's data (30,522 pieces, of sentence-transformers/all-MiniLM-L6-v2)."""
        return cls.from_file(resource("vocab.txt"))

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, text: str, max_tokens: int = MAX_TOKENS) -> list[int]:
        """The ids of ``text`` between ``[CLS]`` and ``[SEP]``, cut to ``max_tokens`` in all.

        A special token written out in the text, such as ``[MASK]``, is that token, as in ``tokenizers``.

        Args:
            text: any string; unknown words become ``[UNK]``.
            max_tokens: at least 2, the markers.

        Raises:
            ValueError: ``max_tokens`` is below 2.
        """
        if max_tokens < 2:
            raise ValueError(
                f"max_tokens must leave room for [CLS] and [SEP], so at least 2; got {max_tokens}"
            )
        room = max_tokens - 2
        ids: list[int] = []
        for pieces in self._word_ids(text):
            ids += pieces
            if len(ids) >= room:
                break
        return [self._first, *ids[:room], self._last]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The pieces that ``ids`` name, for people who look at them."""
        return [self._pieces[number] for number in ids]

    def _word_ids(self, text: str) -> Iterator[list[int]]:
        for position, part in enumerate(_SPLIT_SPECIAL.split(text)):
            if position % 2:  # the odd parts are what the pattern's group caught
                yield [self._ids[part]]
            else:
                for word in _words(_normalise(part)):
                    yield self._word(word)

    def _split_word(self, word: str) -> list[int]:
        if len(word) > _LONGEST_WORD:
            return self._unknown
        ids: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            for stop in range(len(word), start, -1):
                number = self._ids.get(prefix + word[start:stop])
                if number is not None:
                    break
            else:
                return self._unknown  # one piece that is not in the vocabulary makes the whole word unknown
            ids.append(number)
            start = stop
        return ids


def _normalise(text: str) -> str:
    """Drops control characters, sets ideographs apart, strips accents, lower-cases."""
    clean = "".join(_clean(character) for character in text)
    if clean.isascii():
        return clean.lower()
    bare = (
        character
        for character in unicodedata.normalize("NFD", clean)
        if unicodedata.category(character) != "Mn"
    )
    # Character by character: str.lower() of a whole word would make a final sigma of a capital one.
    return "".join(character.lower() for character in bare)


def _clean(character: str) -> str:
    code = ord(character)
    if code < 0x80:
        if character in "\t\n\r":
            return " "
        return character if 0x20 <= code < 0x7F else ""
    if character == "\ufffd" or unicodedata.category(character) in {"Cc", "Cf", "Co", "Cs"}:
        return ""
    if character.isspace():
        return " "
    if any(first <= code <= last for first, last in _IDEOGRAPHS):
        return f" {character} "
    return character


def _words(text: str) -> Iterator[str]:
    """Words between white space, each punctuation mark a word of its own."""
    for chunk in text.split():
        start = 0
        for position, character in enumerate(chunk):
            if _is_punctuation(character):
                if start < position:
                    yield chunk[start:position]
                yield character
                start = position + 1
        if start < len(chunk):
            yield chunk[start:]


def _is_punctuation(character: str) -> bool:
    if character.isascii():
        return character in _ASCII_PUNCTUATION
    return unicodedata.category(character).startswith("P")
