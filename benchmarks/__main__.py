"""Measure, write the report, and say where it is."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import report
from benchmarks.harness import run
from benchmarks.options import parse

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 where a contender failed or gave a wrong result, whatever the figures are."""
    options = parse(arguments)
    found = run(options)
    print(report.write(found, options.output))
    print(f"report.md, samples.json and the pictures are in {options.output}", file=sys.stderr)
    return 1 if any(result["failures"] for result in found["results"]) else 0


if __name__ == "__main__":
    sys.exit(main())
