"""Headers that are read many tensors at once, and the same headers read one tensor after the other."""

import json
import random

import pytest

from strideweave import FormatError
from strideweave.formats import safetensors
from strideweave.formats.safetensors import read_safetensors_header

WIDTHS = {"F32": 4, "I8": 1, "BF16": 2, "C64": 8}
SIGNS = '{}[]",:0123456789 \\\n\x00é-+.eTN'


def usual(text):
    return json.dumps(text, separators=(",", ":"), ensure_ascii=False).encode()


def described(count, choices):
    """Tensors that follow each other, and the bytes that they take."""
    header, place = {}, 0
    for number in range(count):
        shape = [choices.choice([0, 1, 2, 7]) for _ in range(choices.randrange(3))]
        dtype = choices.choice(list(WIDTHS))
        nbytes = WIDTHS[dtype]
        for extent in shape:
            nbytes *= extent
        header[f"é.{number}.w"] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + nbytes]}
        place += nbytes
    return header, place


def outcome(path):
    """What comes of reading a header: every tensor and the metadata, or the error's words."""
    try:
        found = read_safetensors_header(str(path))
    except FormatError as error:
        return str(error)
    return list(found.entries.items()), dict(found.metadata)


def both_outcomes(path, monkeypatch):
    """What comes of it, the same where no header is read at once, and whether this one was."""
    was_usual = []

    def watched(file, text):
        found = read_usual(file, text)
        was_usual.append(found is not None)
        return found

    read_usual = safetensors._read_usual
    with monkeypatch.context() as patch:
        patch.setattr(safetensors, "_read_usual", watched)
        found = outcome(path)
        patch.setattr(safetensors, "_read_usual", lambda *_: None)
        return found, outcome(path), any(was_usual)


def spoil_value(header, choices):
    """Say something else about one tensor."""
    names = [name for name in header if name != "__metadata__"]
    name = choices.choice(names)
    field = header[name]
    match choices.randrange(8):
        case 0:
            field["data_offsets"][choices.randrange(2)] += choices.choice([-1, 1, 8, 2**62, 10**18, 10**19])
        case 1:
            field["shape"] = choices.choice([[2**40, 2**40], [2**63], [1] * 65, [3], [], [-1], [2.0]])
        case 2:
            field["dtype"] = choices.choice(["F64", "", "F7", 'q"', "\n", 7])
        case 3:
            field["data_offsets"].append(8)
        case 4:
            header["__metadata__"] = choices.choice([{"k": "v"}, {"k": 7}, {}, field, "word"])
        case 5:
            header[choices.choice(["\\", '"', "\x1f", "", "]},{", "a\nb"])] = header.pop(name)
        case 6:
            header[name] = dict(reversed(field.items()))
        case 7:
            first = choices.choice(names)
            header[name], header[first] = header[first], header[name]


def spoil_text(text, choices):
    """Another character, one too many or too few, or a part of the text once more."""
    place = choices.randrange(1, len(text))
    match choices.randrange(4):
        case 0:
            return text[:place] + choices.choice(SIGNS).encode() + text[place:]
        case 1:
            return text[:place] + text[place + 1 :]
        case 2:
            return text[:place] + choices.choice(SIGNS).encode() + text[place + 1 :]
        case _:
            other = choices.randrange(1, len(text))
            return text[:place] + text[min(place, other) : max(place, other)] + text[place:]


@pytest.mark.parametrize("seed", range(8))
def test_both_ways_to_read_a_header_find_the_same(seed, files, monkeypatch):
    choices = random.Random(seed)
    monkeypatch.setattr(safetensors, "_PIECE", 200)  # several pieces a header
    read_usually = 0
    for _ in range(80):
        header, nbytes = described(choices.randrange(1, 9), choices)
        if choices.random() < 0.3:
            header = {"__metadata__": {"format": "pt", "words": '{"a":{"dtype":"F32"}}'}} | header
        for _ in range(choices.randrange(2)):
            spoil_value(header, choices)
        text = usual(header) + b" " * choices.randrange(3)
        for _ in range(choices.randrange(2)):
            text = spoil_text(text, choices)
        path = files.raw_safetensors("m.safetensors", text, bytes(nbytes))
        found, carefully, was_usual = both_outcomes(path, monkeypatch)
        assert found == carefully
        read_usually += was_usual
    assert 10 <= read_usually <= 70


def test_a_header_of_the_usual_form_is_read_at_once(files, monkeypatch):
    header, nbytes = described(200, random.Random(1))
    for one in (header, {"__metadata__": {"a": '\\"'}} | header):
        path = files.raw_safetensors("m.safetensors", usual(one) + b"   ", bytes(nbytes))
        found, carefully, was_usual = both_outcomes(path, monkeypatch)
        assert was_usual
        assert found == carefully


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},',
        b'{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}}',
        b'{"a":{"dtype":"I8","shape":[02],"data_offsets":[0,2]}}',
        b'{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,02]}}',
        b'{"a":{"dtype":"I8","shape":[2,],"data_offsets":[0,2]}}',
        b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}},"b":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}}',
        b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},,"b":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}}',
        b'{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}',
        b'{,"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}',
        b'{"__metadata__":{"a":"b"}"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}',
        b'{"__metadata__":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}',
        b'{"__metadata__":{},"__metadata__":{},"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}',
    ],
)
def test_what_is_no_header_is_not_taken_for_one(text, files, monkeypatch):
    found, carefully, was_usual = both_outcomes(
        files.raw_safetensors("m.safetensors", text, bytes(2)), monkeypatch
    )
    assert isinstance(found, str)
    assert found == carefully
    assert not was_usual
