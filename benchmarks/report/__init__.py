"""What a run leaves: a Markdown page, a JSON file with every sample, and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report.markdown import page
from benchmarks.report.plots import why_no_plots, write_plots

__all__ = ["write"]


def write(run: dict[str, Any], folder: Path) -> str:
    """Write everything; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.json").write_text(json.dumps(run, indent=1) + "\n", "utf-8")
    obstacle = why_no_plots()
    if obstacle is not None:
        run["skipped"]["plots"] = obstacle
    plots = [] if obstacle is not None else write_plots(run, folder)
    text = page(run, plots)
    (folder / "report.md").write_text(text, "utf-8")
    return text
