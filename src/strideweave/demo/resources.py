"""Where the small files that ship with the demo are."""

from __future__ import annotations

from pathlib import Path

__all__ = ["resource"]


def resource(name: str) -> Path:
    """The path of a file in ``strideweave/demo/data``.

    Args:
        name: the file's name, such as ``"vocab.txt"``.

    Raises:
        FileNotFoundError: the installation lacks the file.
    """
    path = Path(__file__).parent / "data" / name
    if not path.is_file():
        raise FileNotFoundError(f"the demo's data file {name!r} is missing at {path}; reinstall strideweave")
    return path
