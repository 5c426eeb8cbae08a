"""The main job, from weights to a checked answer: what ``strideweave demo`` does, without its printing."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import numpy as np

from strideweave.demo.batches import make_batches
from strideweave.demo.checks import Check, Reference, check_budget, check_digests, check_golden
from strideweave.demo.dense import DenseEncoder
from strideweave.demo.experts import ExpertRouter
from strideweave.demo.golden import load_golden
from strideweave.demo.text import help_sentences, read_passages, spread
from strideweave.demo.tile_file import write_tile_file
from strideweave.demo.tiled import Sample, TiledEncoder, Times
from strideweave.demo.weights import open_weights
from strideweave.demo.wordpiece import WordPiece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from strideweave.carriers.tiled_evictable import TiledStatistics
    from strideweave.demo.batches import Batch
    from strideweave.demo.weights import ModelWeights

    Floats = NDArray[np.float32]

__all__ = ["DEFAULT_QUERY", "DemoOptions", "DemoReport", "Match", "run_demo"]

DEFAULT_QUERY = "How is a class created?"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to do.

    Attributes:
        queries: questions to answer.
        text: a file of passages, one a line; None takes the sentences of Python's own help.
        sentences: how many passages at the most.
        model: a folder with the model; None looks for the installed packages.
        budget: bytes of the primary tier.
        batch_size: passages computed together.
        experts: feed-forward blocks a passage uses; None for the dense layer.
        top: how many passages to show for each query.
        trace: where to write which tiles the encoding required; None writes nothing.
    """

    queries: tuple[str, ...] = (DEFAULT_QUERY,)
    text: Path | None = None
    sentences: int = 256
    model: Path | None = None
    budget: int = 8 << 20
    batch_size: int = 32
    experts: int | None = None
    top: int = 3
    trace: Path | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """A passage found for a query.

    Attributes:
        query: the question.
        score: the cosine of question and passage.
        passage: the text.
    """

    query: str
    score: float
    passage: str


@dataclass(slots=True)
class DemoReport:
    """What came out, and every figure the demo prints. Bytes are bytes, times are seconds."""

    model: str
    tokens: int
    distinct_tokens: int
    model_bytes: int
    small_bytes: int
    budget_bytes: int
    peak_resident_bytes: int
    peak_staging_bytes: int
    peak_compact_bytes: int
    tiles: int
    tiles_gathered: int
    hits: int
    misses: int
    evictions: int
    bytes_read: int
    times: Times
    disk_bytes: int = 0
    passages: int = 0
    total_seconds: float = 0.0
    matches: list[Match] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    experts: int | None = None
    cosine_mean: float | None = None
    cosine_min: float | None = None

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(check.passed for check in self.checks)

    @property
    def samples(self) -> list[Sample]:
        """The primary tier over time."""
        return self.times.samples


def run_demo(
    options: DemoOptions, progress: Callable[[str, float], None] = lambda _stage, _share: None
) -> DemoReport:
    """Encode passages and queries with the model on disk, find the best passages, and check everything.

    Args:
        options: what to do.
        progress: called with a stage and the share of it that is done.

    Raises:
        FileNotFoundError: no model, or no text file, is where it should be.
        OSError: the trace cannot be written.
        ImportError: the library that reads the model is missing; the message names the extra.
        ValueError: the model or the text is unusable.
    """
    began = time.perf_counter()
    with open_weights(options.model) as weights, tempfile.TemporaryDirectory(prefix="strideweave-") as folder:
        passages = _passages(options)
        tokenizer = WordPiece.from_file(weights.vocabulary)
        texts = [*passages, *options.queries]
        batches = make_batches(texts, tokenizer, options.batch_size, max_tokens=weights.config.max_tokens)
        router = None if options.experts is None else _router(weights)
        progress("writing the tile file", 0.0)
        tile_file = write_tile_file(weights, Path(folder) / "weights.tiles", router)
        progress("writing the tile file", 1.0)
        encoder = TiledEncoder(
            weights,
            tile_file,
            options.budget,
            router=router,
            experts=options.experts,
            trace=options.trace,
        )
        try:
            vectors = anyio.run(encoder.encode, batches, lambda share: progress("encoding", share))
            encoder.save_trace()
            report = _report(options, weights, encoder, batches)
            report.disk_bytes, report.passages = tile_file.nbytes, len(passages)
            report.matches = _best(vectors, passages, options)
            golden = None if options.experts is not None else _encode_golden(encoder, tokenizer, options)
        finally:
            encoder.release()
        progress("checking against the dense model", 0.0)
        reference = Reference(DenseEncoder(weights), batches, router, options.experts, encoder.routes)
        report.checks = [
            *check_digests(weights),
            check_budget(report.peak_resident_bytes, options.budget),
            reference.check(vectors),
        ]
        if golden is not None:
            report.checks.append(check_golden(golden, weights))
        if options.experts is not None:
            report.cosine_mean, report.cosine_min = reference.cosine_to_dense(vectors)
        progress("checking against the dense model", 1.0)
    report.total_seconds = time.perf_counter() - began
    return report


def _passages(options: DemoOptions) -> list[str]:
    found = help_sentences() if options.text is None else read_passages(options.text)
    return spread(found, options.sentences)


def _router(weights: ModelWeights) -> ExpertRouter:
    router = ExpertRouter.load()
    router.check(weights.config)
    return router


def _encode_golden(encoder: TiledEncoder, tokenizer: WordPiece, options: DemoOptions) -> Floats:
    golden = load_golden()
    batches = make_batches(golden.sentences, tokenizer, options.batch_size)
    return anyio.run(encoder.encode, batches)


def _report(
    options: DemoOptions,
    weights: ModelWeights,
    encoder: TiledEncoder,
    batches: Sequence[Batch],
) -> DemoReport:
    found: TiledStatistics = encoder.statistics()
    ids = np.concatenate([batch.ids[batch.mask] for batch in batches])
    return DemoReport(
        model=weights.description,
        tokens=len(ids),
        distinct_tokens=len(np.unique(ids)),
        model_bytes=weights.total_bytes,
        small_bytes=encoder.small_bytes,
        budget_bytes=options.budget,
        peak_resident_bytes=found.peak_resident_bytes,
        peak_staging_bytes=found.peak_staging_bytes,
        peak_compact_bytes=encoder.peak_compact_bytes,
        tiles=found.tile_count,
        tiles_gathered=found.hits + found.misses,
        hits=found.hits,
        misses=found.misses,
        evictions=found.evictions,
        bytes_read=found.bytes_read,
        times=encoder.times,
        experts=options.experts,
    )


def _best(vectors: Floats, passages: Sequence[str], options: DemoOptions) -> list[Match]:
    matches: list[Match] = []
    for query, vector in zip(options.queries, vectors[len(passages) :], strict=True):
        scores = vectors[: len(passages)] @ vector
        best = np.argsort(-scores, kind="stable")[: options.top].tolist()
        matches += [Match(query, float(scores[row]), passages[row]) for row in best]
    return matches
