"""``python -m strideweave`` and the command ``strideweave``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say which extra it needs."""
    try:
        from strideweave.cli import app  # noqa: PLC0415 - an optional library behind it
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        print(
            "strideweave: the command line needs the extra 'cli': pip install 'strideweave[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("strideweave: interrupted", file=sys.stderr)
        sys.exit(130)
    app(prog_name="strideweave")


if __name__ == "__main__":
    main()
