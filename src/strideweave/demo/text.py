"""The real text of the demo: sentences of Python's own help, or of a file.

``pydoc_data.topics`` is what ``help("topics")`` shows; it is in every Python, and differs between versions.
Results that must stay the same from one Python to the next use the pinned sentences (``golden``).
"""

from __future__ import annotations

import re
from pydoc_data.topics import topics as _TOPICS  # noqa: N812
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["help_sentences", "read_passages", "sentences_of", "spread"]

_SHORTEST = 30  # characters; what is shorter says little
_LONGEST = 400  # what is longer is a list or a table that looks like prose

_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_BULLET = re.compile(r"\A(?:[*\u2022-]|\d{1,2}\.|\[\d+\])\s+")
_NOT_PROSE = re.compile(r"^(?:>>>|\.\.\. |[|+]|[=*~^_#-]{3,}$|-\[)|::=", re.MULTILINE)
# A sentence ends at one of .!? and what closes after it, when white space and a capital follow.
_CLOSES = r"[\"\u201d\u2019)]*"
_SENTENCE_END = re.compile(
    rf"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)(?<!\bcf\.){_CLOSES}\s+(?=[A-Z\"\u201c\u2018(])"
)
_ENDS_WELL = re.compile(rf"[.!?]{_CLOSES}$")
_WORD = re.compile(r"[A-Za-z][A-Za-z'\u2019-]*")
_COMMON = re.compile(
    r"\b(?:a|an|and|are|as|at|be|but|by|can|for|from|has|have|if|in|is|its?|may|not|of|on|or|than|that|the|their|then"
    r"|there|these|they|this|to|was|when|which|will|with|you)\b",
    re.IGNORECASE,
)


def help_sentences(topics: Mapping[str, str] | None = None) -> list[str]:
    """The distinct English sentences of Python's help topics, in the order of the sorted topic names.

    Args:
        topics: topic name -> text; ``None`` means those of the running Python.

    Returns:
        Sentences of 30 to 400 characters, headings, grammar, code and tables left out.
    """
    texts = _TOPICS if topics is None else topics
    found = (sentence for name in sorted(texts) for sentence in sentences_of(texts[name]))
    return list(dict.fromkeys(found))


def sentences_of(text: str) -> Iterator[str]:
    """The English sentences of 30 to 400 characters in a hard-wrapped plain text, in their order."""
    for paragraph in _PARAGRAPH.split(text):
        lines = [line.strip() for line in paragraph.splitlines()]
        if _NOT_PROSE.search("\n".join(lines)):
            continue
        prose = _BULLET.sub("", " ".join(" ".join(lines).split()), count=1)
        yield from (sentence for sentence in _split(prose) if _is_english(sentence))


def read_passages(path: Path, unit: Literal["line", "sentence"] = "line") -> list[str]:
    """The passages of a text file, distinct, in their order.

    Args:
        path: a UTF-8 text file; a byte order mark is dropped.
        unit: ``"line"``: every line that is not blank is a passage; ``"sentence"``: as ``sentences_of``.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, it has no passage, or ``unit`` is neither of the two.
    """
    if unit not in {"line", "sentence"}:
        raise ValueError(f"unit must be 'line' or 'sentence', got {unit!r}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}: {error.reason}); convert it first"
        ) from error
    found: Iterable[str] = (
        (line.strip() for line in text.splitlines()) if unit == "line" else sentences_of(text)
    )
    passages = list(dict.fromkeys(passage for passage in found if passage))
    if not passages:
        raise ValueError(f"{path} holds no passage (unit {unit!r}); give a file with at least one {unit}")
    return passages


def spread(sentences: Sequence[str], count: int) -> list[str]:
    """``count`` of the sentences, evenly spaced over all of them, so that every topic is heard; all if fewer.

    Raises:
        ValueError: ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if count >= len(sentences):
        return list(sentences)
    return [sentences[place * len(sentences) // count] for place in range(count)]


def _split(prose: str) -> Iterator[str]:
    start = 0
    for end in _SENTENCE_END.finditer(prose):
        yield prose[start : end.end()].strip()
        start = end.end()
    yield prose[start:].strip()


def _is_english(sentence: str) -> bool:
    """Whether it begins and ends as a sentence, is mostly letters, and uses the small words of English."""
    if not _SHORTEST <= len(sentence) <= _LONGEST:
        return False
    if not (sentence[0].isupper() or sentence[0] in '"“') or not _ENDS_WELL.search(sentence):
        return False
    letters = sum(character.isalpha() or character == " " for character in sentence)
    words, common = len(_WORD.findall(sentence)), len(_COMMON.findall(sentence))
    return words >= 5 and common >= 2 and letters >= 0.8 * len(sentence)
