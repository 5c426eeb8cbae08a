"""The command line: options reach the job, and the exit status says how it ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

typer = pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("threadpoolctl")

from typer.testing import CliRunner  # noqa: E402

import strideweave  # noqa: E402
from strideweave import cli  # noqa: E402
from strideweave.cli import demonstrating  # noqa: E402
from strideweave.cli.values import parse_bytes  # noqa: E402
from strideweave.demo.checks import Check  # noqa: E402
from strideweave.demo.run import DEFAULT_QUERY, DemoReport, Match  # noqa: E402
from strideweave.demo.tiled import Sample, Times  # noqa: E402


def report(*checks: Check) -> DemoReport:
    return DemoReport(
        model="a model",
        tokens=1234,
        distinct_tokens=99,
        model_bytes=90 << 20,
        small_bytes=1 << 20,
        budget_bytes=8 << 20,
        peak_resident_bytes=7 << 20,
        peak_staging_bytes=0,
        peak_compact_bytes=4 << 20,
        tiles=3636,
        tiles_gathered=30,
        hits=20,
        misses=10,
        evictions=5,
        bytes_read=10 << 20,
        times=Times(1.0, 2.0, 0.5, 3.0, [Sample(0.5, 1 << 20, 1 << 20), Sample(1.5, 2 << 20, 3 << 20)]),
        disk_bytes=85 << 20,
        passages=256,
        matches=[Match("why?", 0.5, "because")],
        checks=list(checks),
    )


@pytest.fixture
def demo(monkeypatch):
    """Run ``strideweave demo`` with a stand-in for the job; gives the result and the options it got."""
    given = []

    def run(*arguments: str, outcome=None):
        def job(options, progress):
            given.append(options)
            progress("encoding", 0.5)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome or report(Check("all well", True, "yes"))

        monkeypatch.setattr(demonstrating, "run_demo", job)
        return CliRunner().invoke(cli.app, ["demo", *arguments]), given

    return run


def test_defaults(demo):
    result, (options,) = demo()
    assert result.exit_code == 0, result.output
    assert options.queries == (DEFAULT_QUERY,)
    assert options.budget == 8 << 20
    assert options.experts is None
    assert (options.text, options.model, options.trace) == (None, None, None)


def test_options_reach_the_job(demo, tmp_path):
    result, (options,) = demo(
        *("--query", "a", "--query", "b", "--budget", "1.5MiB", "--experts", "8", "--top", "1"),
        *("--sentences", "9", "--batch-size", "4", "--model", str(tmp_path), "--text", str(tmp_path / "t")),
        *("--save-trace", str(tmp_path / "run.trace")),
    )
    assert result.exit_code == 0, result.output
    assert (options.queries, options.budget, options.experts) == (("a", "b"), 3 << 19, 8)
    assert (options.sentences, options.batch_size, options.top) == (9, 4, 1)
    assert (options.model, options.text) == (tmp_path, tmp_path / "t")
    assert options.trace == tmp_path / "run.trace"


def test_everything_asked_for_is_printed(demo):
    result, _ = demo()
    for said in (
        "why?",
        "because",
        "85.00 MiB",
        "budget     8.00 MiB, peak resident 7.00 MiB",
        "30 gathered: 20 hits, 10 misses, 5 evictions",
        "read       10.00 MiB, 12%",
        "2.0 s computing, 1.0 s reading",
        "0.5 s of it both at once",
        "ok   all well: yes",
    ):
        assert said in result.stdout
    assert "encoding ..." in result.stderr


def test_a_miss_is_a_non_zero_exit(demo):
    result, _ = demo(outcome=report(Check("one", True, "yes"), Check("two", False, "no")))
    assert result.exit_code == 1
    assert "FAIL two: no" in result.stdout


@pytest.mark.parametrize("error", [FileNotFoundError("no model"), ValueError("odd"), ImportError("extra")])
def test_what_cannot_be_used_is_said_in_one_line(demo, error):
    result, _ = demo(outcome=error)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"strideweave demo: {error}"


def test_json_is_the_whole_report_and_nothing_else(demo):
    result, _ = demo("--json")
    found = json.loads(result.stdout)
    assert found["passed"] is True
    assert found["peak_resident_bytes"] == 7 << 20
    assert found["matches"] == [{"query": "why?", "score": 0.5, "passage": "because"}]
    assert result.stderr == ""


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_plot_is_a_picture(demo, tmp_path, kind):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"resident.{kind}"
    result, _ = demo("--save-plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"<?xml" if kind == "svg" else b"\x89PNG")


def test_a_picture_that_nothing_can_draw_is_refused_before_the_work(demo, monkeypatch, tmp_path):
    monkeypatch.setattr("strideweave.demo.plot.find_spec", lambda name: None)
    result, given = demo("--save-plot", str(tmp_path / "resident.svg"))
    assert result.exit_code == 2
    assert "strideweave[plot]" in result.stderr
    assert given == []


def test_help_names_the_default_question():
    shown = CliRunner().invoke(cli.app, ["demo", "--help"]).stdout
    plain = re.sub(r"\x1b\[[0-9;]*m|│", " ", shown)  # without colours and frames
    assert DEFAULT_QUERY in " ".join(plain.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8MiB", 8 << 20),
        ("4096", 4096),
        ("500kB", 500_000),
        ("1 GiB", 1 << 30),
        ("0.5mib", 1 << 19),
        ("0", 0),
    ],
)
def test_numbers_of_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1", "8 MiBs", "1e9", "eight"])
def test_what_is_no_number_of_bytes(demo, text):
    result, given = demo("--budget", text)
    assert result.exit_code == 2
    assert given == []


@pytest.mark.parametrize(
    "arguments", [("--experts", "4"), ("--experts", "17"), ("--sentences", "0"), ("--what",), ("extra",)]
)
def test_arguments_out_of_range(demo, arguments):
    result, given = demo(*arguments)
    assert result.exit_code == 2
    assert given == []


def test_module_and_version():
    ended = subprocess.run(
        [sys.executable, "-m", "strideweave", "--version"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == strideweave.__version__ == version("strideweave")


def test_without_the_extra_the_command_names_it():
    code = "import sys; sys.modules['typer'] = None\nfrom strideweave.__main__ import main\nmain()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "strideweave[cli]" in ended.stderr
