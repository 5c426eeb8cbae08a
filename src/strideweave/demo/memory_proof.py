"""Proof by the kernel: under one limit on memory the tiled program ends well and the dense one dies.

Three children encode the same passages: the tiled program and the dense one under ``RLIMIT_DATA``, which
bounds all private writable memory, and the dense one without a limit, which shows that nothing else was wrong
with it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from strideweave.demo.batches import make_batches
from strideweave.demo.checks import TOLERANCE, Check
from strideweave.demo.dense import DenseEncoder
from strideweave.demo.text import help_sentences, spread
from strideweave.demo.tile_file import write_tile_file
from strideweave.demo.tiled import TiledEncoder
from strideweave.demo.weights import open_weights
from strideweave.demo.wordpiece import WordPiece

__all__ = ["LIMIT_BYTES", "prove_memory"]

LIMIT_BYTES = 160 << 20
"""Enough for the interpreter, NumPy and the tiled program; not for the model's 87 MiB of float32 beside them."""

_SENTENCES = 128
_BATCH_SIZE = 8  # small, so that weights and not activations decide
_STACK_BYTES = (
    512 << 10
)  # a thread's stack counts in full, and the usual 8 MiB would count for nothing useful


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How one child ended."""

    code: int
    errors: str
    found: dict[str, Any] | None


def prove_memory(model: Path | None, budget: int, limit: int = LIMIT_BYTES) -> list[Check]:
    """Run the three children and say what became of them.

    Args:
        model: a folder with the model; None looks for the installed packages.
        budget: bytes of the tiled program's primary tier.
        limit: ``RLIMIT_DATA`` of the limited children, in bytes.
    """
    tiled = _run("tiled", model, budget, limit)
    dense = _run("dense", model, budget, limit)
    free = _run("dense", model, budget, None)
    checks = [
        Check(f"tiled program under a limit of {limit >> 20} MiB", tiled.code == 0, _say(tiled)),
        Check(f"dense program dies under {limit >> 20} MiB", dense.code != 0, _say(dense)),
        Check("dense program without the limit", free.code == 0, _say(free)),
    ]
    if tiled.found is not None and free.found is not None:
        deviation = float(np.abs(np.array(tiled.found["vectors"]) - np.array(free.found["vectors"])).max())
        checks.append(Check("both found the same vectors", deviation <= TOLERANCE, f"{deviation:.1e}"))
    return checks


def _run(program: str, model: Path | None, budget: int, limit: int | None) -> _Outcome:
    command = [sys.executable, "-m", "strideweave.demo.memory_proof", program, "--budget", str(budget)]
    if model is not None:
        command += ["--model", str(model)]
    if limit is not None:
        command += ["--limit", str(limit)]
    one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # One allocation arena: each further one reserves address space that would count against nobody's weights.
    environment = os.environ | one | {"MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return _Outcome(
        ended.returncode, ended.stderr, json.loads(ended.stdout) if not ended.returncode else None
    )


def _say(outcome: _Outcome) -> str:
    if outcome.found is not None:
        used = outcome.found["anonymous_bytes"] / (1 << 20)
        return f"ended well, {used:.0f} MiB of anonymous memory in use at its end"
    last = outcome.errors.strip().splitlines()[-1:] or ["no message"]
    return f"exit status {outcome.code}: {last[0]}"


def _anonymous_bytes() -> int:
    """Anonymous memory of this process that is in use now, in bytes; mapped files do not count."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def _child(arguments: argparse.Namespace) -> None:
    threading.stack_size(_STACK_BYTES)
    with open_weights(arguments.model) as weights, tempfile.TemporaryDirectory() as folder:
        tokenizer = WordPiece.from_file(weights.vocabulary)
        sentences = spread(help_sentences(), _SENTENCES)
        batches = make_batches(sentences, tokenizer, _BATCH_SIZE, max_tokens=weights.config.max_tokens)
        tile_file = write_tile_file(weights, Path(folder) / "weights.tiles")
        if arguments.limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (arguments.limit, arguments.limit))
        if arguments.program == "tiled":
            encoder = TiledEncoder(weights, tile_file, arguments.budget)
            vectors = anyio.run(encoder.encode, batches)
            used = _anonymous_bytes()
            encoder.release()
        else:
            dense = DenseEncoder(weights)
            vectors = dense.encode(batches)
            used = _anonymous_bytes()
        print(json.dumps({"anonymous_bytes": used, "vectors": vectors.tolist()}))


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m strideweave.demo.memory_proof", description=__doc__)
    parser.add_argument("program", choices=["tiled", "dense"])
    parser.add_argument("--budget", type=int, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--model", type=Path)
    _child(parser.parse_args())


if __name__ == "__main__":
    _main()
