"""Headers of files that somebody else wrote: read at their offsets, parsed with limits, never trusted."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from strideweave.errors import FormatError
from strideweave.io.file_pool import KnownFile

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MOST_HEADER_BYTES", "HeaderFile", "as_extents", "check_density", "parse_json", "plain_integer"]

MOST_HEADER_BYTES = 100_000_000
"""Bytes of a header or an index, at most: the limit of the safetensors format's own library."""

_MOST_AXES = 64

_TENSOR_BYTES = 48
"""Bytes of ``"":{"dtype":"","shape":[],"data_offsets":[0,0]},``, the shortest description: one object and two lists."""

_PIECE_BYTES = 1 << 20


def _as_it_is(_: object) -> None:
    """What is done about an object of a header unless somebody knows better."""


class HeaderFile:
    """A file whose header is being read; a context manager that closes it, since nothing here stays open.

    Args:
        path: a regular file, or what a symbolic link leads to.

    Attributes:
        path: where it was opened.
        known: the file as it is now.

    Raises:
        FileNotFoundError: nothing is there.
        FormatError: something else than a regular file is there.
        OSError: the system refused.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Non-blocking: to open a FIFO must not wait for its writer.
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._number)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._number)
            raise FormatError(
                "a regular file is needed", path=path, wanted="a file", found=_kind(status.st_mode)
            )
        self.known = KnownFile.of(path, status)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.known.size

    def read(self, offset: int, wanted: int, what: str) -> bytes:
        """Read bytes that must be there.

        Raises:
            FormatError: the file ends before; says what was to be read.
        """
        if offset + wanted > self.size:
            self.refuse(
                f"the file ends inside its {what}", offset, f"{wanted} bytes", f"{self.size - offset} bytes"
            )
        pieces, place = [], offset
        while place < offset + wanted:
            piece = os.pread(self._number, offset + wanted - place, place)
            if not piece:
                self.refuse(
                    f"the file ends inside its {what}", offset, f"{wanted} bytes", f"{place - offset} bytes"
                )
            pieces.append(piece)
            place += len(piece)
        return b"".join(pieces)

    def refuse(
        self,
        message: str,
        offset: int | None = None,
        wanted: object = None,
        found: object = None,
        tensor: str | None = None,
    ) -> NoReturn:
        """Raise the FormatError that says what is wrong with this file."""
        raise FormatError(message, path=self.path, tensor=tensor, offset=offset, wanted=wanted, found=found)

    def __enter__(self) -> HeaderFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)


def parse_json(
    text: bytes,
    path: str,
    what: str,
    offset: int = 0,
    *,
    shorten: Callable[[list[tuple[str, Any]]], object] = _as_it_is,
) -> dict[str, Any]:
    """Parse a JSON object in UTF-8 whose keys are distinct.

    Args:
        text: the JSON.
        path: the file that it is from, and
        what: what it is there, and
        offset: where, for errors.
        shorten: is given the fields of each object and gives what is to stand for it; None keeps the object.

    Raises:
        FormatError: it is none, nests too deeply, or names a key twice.
    """

    def refuse(message: str, found: object = None, wanted: object = None) -> NoReturn:
        raise FormatError(f"{what} {message}", path=path, offset=offset, wanted=wanted, found=found)

    def distinct(pairs: list[tuple[str, Any]]) -> object:
        short = shorten(pairs)
        if short is not None:
            return short
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            refuse(f"has the key {twice!r} twice", wanted="distinct keys")
        return made

    def constant(name: str) -> NoReturn:
        refuse(f"holds {name}, which is no JSON")

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=distinct, parse_constant=constant)
    except FormatError:
        raise
    except RecursionError:
        refuse("nests too deeply")
    except ValueError as error:  # no UTF-8, no JSON, or an integer of thousands of digits
        refuse(f"is not valid JSON: {error}")
    if not isinstance(found, dict):
        refuse("is not a JSON object", found=type(found).__name__, wanted="an object")
    return found


def check_density(file: HeaderFile, text: bytes, what: str, offset: int = 0) -> None:
    """Refuse JSON with more objects and lists than descriptions of tensors have: parsed, they would take gigabytes.

    Args:
        file: where it is from.
        text: the JSON.
        what: what it is there.
        offset: its first byte there.

    Raises:
        FormatError: it has more.
    """
    most = 3 * (len(text) // _TENSOR_BYTES) + 5  # and the header itself, its metadata, and a tensor cut short
    if text.count(b"{") + text.count(b"[") <= most:
        return
    found = _count_containers(text)  # those in words of the metadata are none
    if found > most:
        wanted = f"at most {most} objects and lists in {len(text)} bytes"
        file.refuse(f"{what} is not made of descriptions of tensors", offset, wanted, found)


def _count_containers(text: bytes) -> int:
    """How many objects and lists begin in some JSON, outside its strings."""
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # then every quote begins or ends a string
    found, inside = 0, False
    for first in range(0, len(bare), _PIECE_BYTES):
        piece = np.frombuffer(bare, np.uint8, min(_PIECE_BYTES, len(bare) - first), first)
        quoted = np.logical_xor.accumulate(piece == ord('"')) ^ inside
        found += int(np.count_nonzero(~quoted & ((piece == ord("{")) | (piece == ord("[")))))
        inside = bool(quoted[-1])
    return found


def plain_integer(value: object) -> bool:
    """Whether a parsed value of a header is an integer, which a bool is not, that is not negative and fits 63 bits."""
    return type(value) is int and 0 <= value < 2**63


def as_extents(value: object, refuse: Callable[[str], NoReturn]) -> tuple[int, ...]:
    """Take a shape out of a header, or call ``refuse`` with what is wrong with it."""
    if not isinstance(value, list | tuple):
        refuse("a shape must be a list of integers, none negative")
    if len(value) > _MOST_AXES:  # before any of millions is looked at
        refuse(f"a shape has at most {_MOST_AXES} axes")
    size = 1
    for extent in value:
        if not plain_integer(extent):
            refuse("a shape must be a list of integers, none negative")
        size *= extent
    if size >= 2**63:
        refuse("a shape must have less than 2**63 elements")
    return tuple(value)


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    ):
        if test(mode):
            return name
    return "something of an unknown kind"
