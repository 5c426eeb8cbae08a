"""The encoder with its big matrices on disk: layer by layer, the next tiles on their way meanwhile.

The matrices are one tensor over a read-only file; a primary tier under an LRU of a few MiB keeps the tiles
used last. Each step of the work projects the tiles it needs into a compact tensor of its own, and while it
computes the next step's projection runs. What is needed all the time (biases, LayerNorms, position rows) is
small and stays in memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np

from strideweave.autograd import no_grad
from strideweave.carriers.cpu import CPU
from strideweave.carriers.file_backed import FileBacked
from strideweave.carriers.tiled_evictable import LRU, TiledEvictable, TraceRecorder
from strideweave.creation import from_numpy
from strideweave.demo.batches import passage_count
from strideweave.demo.config import EmbeddingNames, layer_names
from strideweave.demo.experts import BLOCKS
from strideweave.demo.tile_file import TILE_ROWS
from strideweave.dtype import DType
from strideweave.layout import row_major
from strideweave.operations.contraction import matmul
from strideweave.operations.elementwise import gelu, rsqrt, softmax
from strideweave.operations.indexing import gather
from strideweave.operations.reduction import reduce_mean, reduce_sum
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from strideweave.carriers.tiled_evictable import TiledStatistics
    from strideweave.demo.batches import Batch
    from strideweave.demo.config import EncoderConfig, LayerNames
    from strideweave.demo.experts import ExpertRouter
    from strideweave.demo.tile_file import TileFile
    from strideweave.demo.weights import ModelWeights

__all__ = ["Sample", "TiledEncoder", "Times"]

_EMBED_PASSAGES = 8  # passages whose words are looked up together; each brings some thirty tiles of the table


@dataclass(frozen=True, slots=True)
class Sample:
    """The primary tier at one moment.

    Attributes:
        seconds: since the work began.
        resident_bytes: bytes of tiles in the primary tier, those being fetched included.
        bytes_read: bytes read from the file so far.
    """

    seconds: float
    resident_bytes: int
    bytes_read: int


@dataclass(slots=True)
class Times:
    """Where the time went.

    Attributes:
        fetching: seconds in which a projection (reading and gathering) was under way.
        computing: seconds in which a step computed.
        both: seconds in which both were the case.
        total: seconds from beginning to end.
        samples: the primary tier over time.
    """

    fetching: float = 0.0
    computing: float = 0.0
    both: float = 0.0
    total: float = 0.0
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """One piece of work: which tiles it needs, and what it does with them.

    Attributes:
        tiles: gives the tile coordinates along axis 0, in the order the compact tensor is to have them.
        work: takes the compact tensor; runs in a worker thread.
        after: the step whose result ``tiles`` depends on, if any.
    """

    tiles: Callable[[], Sequence[int]]
    work: Callable[[Tensor], None]
    after: _Step | None = None
    done: bool = False


@dataclass(slots=True)
class _Layer:
    """The small weights of one layer, as tensors."""

    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor
    attention_output_bias: Tensor
    attention_norm: tuple[Tensor, Tensor]
    up_bias: Tensor
    down_bias: Tensor
    output_norm: tuple[Tensor, Tensor]


class TiledEncoder:
    """The encoder over a tile file, with a bounded amount of its big matrices in memory.

    Args:
        weights: gives the small weights, which are kept.
        tile_file: the big matrices.
        budget: the most bytes of tiles in the primary tier.
        router: chooses the expert blocks; needed to use fewer than all.
        experts: blocks of each feed-forward layer that a passage uses; None for the dense layer.
        trace: where ``save_trace`` writes which tiles were required; None records nothing.

    Raises:
        ValueError: ``experts`` without a router.
        OSError: the file cannot be opened, or the folder of the trace does not exist.
    """

    def __init__(
        self,
        weights: ModelWeights,
        tile_file: TileFile,
        budget: int,
        *,
        router: ExpertRouter | None = None,
        experts: int | None = None,
        trace: Path | None = None,
    ) -> None:
        if experts is not None and router is None:
            raise ValueError(f"experts={experts} needs a router")
        self.config: EncoderConfig = weights.config
        self.routes: dict[tuple[int, int], NDArray[np.int64]] = {}
        self.times = Times()
        self.peak_compact_bytes = 0
        self._file = tile_file
        self._router, self._experts = router, experts
        policy = LRU(max_bytes=budget)
        self._recorder = None if trace is None else TraceRecorder(policy, trace)
        hidden = self.config.hidden
        self._carrier = TiledEvictable(
            CPU(0),
            FileBacked.open(tile_file.path, dtype=DType.Float32),
            (tile_file.rows // TILE_ROWS, 1),
            (TILE_ROWS, hidden),
            residency_policy=policy if self._recorder is None else self._recorder,
        )
        self._table = Tensor(self._carrier, 0, row_major(tile_file.rows, hidden), requires_grad=False)
        self._small_bytes = 0
        bottom = EmbeddingNames()
        self._types, self._positions = (
            self._keep(weights, bottom.types),
            self._keep(weights, bottom.positions),
        )
        self._norm = (self._keep(weights, bottom.norm_weight), self._keep(weights, bottom.norm_bias))
        self._layers = [self._keep_layer(weights, layer) for layer in range(self.config.layers)]

    @property
    def small_bytes(self) -> int:
        """Bytes of the weights that stay in memory all the time."""
        return self._small_bytes

    def statistics(self) -> TiledStatistics:
        """The statistics of the tiled carrier."""
        return self._carrier.statistics()

    def save_trace(self) -> None:
        """Write which tiles were required so far to the trace file, if there is to be one.

        Raises:
            OSError: it cannot be written.
        """
        if self._recorder is not None:
            self._recorder.save()

    def release(self) -> None:
        """Give the primary tier back and close the file."""
        self._carrier.release()

    async def encode(
        self, batches: Sequence[Batch], progress: Callable[[float], None] = lambda _: None
    ) -> NDArray[np.float32]:
        """One unit vector per passage; runs in any anyio event loop.

        Args:
            batches: what ``make_batches`` gave.
            progress: called in the loop with the share of the work done.

        Returns:
            ``(passages, hidden)`` float32; row ``i`` belongs to passage ``i`` as given to ``make_batches``.
        """
        states: dict[int, Tensor] = {}
        self.times = Times()
        steps = list(self._steps(batches, states))
        began = time.perf_counter()
        fetched, fetch = await self._fetch(steps[0])
        self._note(fetch, None)
        for number, step in enumerate(steps):
            later = steps[number + 1] if number + 1 < len(steps) else None
            ready = later is not None and (later.after is None or later.after.done)
            compute = partial(self._compute, step, fetched)
            if later is None or not ready:
                span = await anyio.to_thread.run_sync(compute)
                self._note(None, span)
                if later is not None:
                    fetched, fetch = await self._fetch(later)
                    self._note(fetch, None)
            else:
                fetched, previous = await self._overlap(compute, later), fetched
                self.peak_compact_bytes = max(self.peak_compact_bytes, fetched.nbytes + previous.nbytes)
            progress((number + 1) / len(steps))
            self._sample(began)
        self.times.total = time.perf_counter() - began
        result = np.empty((passage_count(batches), self.config.hidden), np.float32)
        for number, batch in enumerate(batches):
            result[batch.rows] = self._pool(states[number], batch)
        return result

    # The steps

    def _steps(self, batches: Sequence[Batch], states: dict[int, Tensor]) -> Iterable[_Step]:
        for number, batch in enumerate(batches):
            x = np.empty((*batch.ids.shape, self.config.hidden), np.float32)
            states[number] = from_numpy(x)
            for first in range(0, len(batch), _EMBED_PASSAGES):
                lines = slice(first, first + _EMBED_PASSAGES)
                yield self._embedding_step(batch.ids[lines], x[lines])
        for layer in range(self.config.layers):
            for number, batch in enumerate(batches):
                attention = _Step(
                    tiles=partial(_tiles, self._file.attention(layer).tiles),
                    work=partial(self._attend, layer, number, batch, states),
                )
                yield attention
                yield from self._feed_forward_steps(layer, number, batch, states, attention)

    def _embedding_step(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> _Step:
        """Fill ``out``, ``(n, longest, hidden)``, from the tiles that hold the words of ``ids``."""
        tiles = np.unique(ids // TILE_ROWS)
        rows = np.searchsorted(tiles, ids // TILE_ROWS) * TILE_ROWS + ids % TILE_ROWS

        def work(compact: Tensor) -> None:
            x = gather(compact, from_numpy(rows))
            x = x + self._row(self._types, 0) + self._first_rows(self._positions, ids.shape[1])
            out[...] = self._normalise(x, self._norm).numpy()

        return _Step(tiles=partial(_tiles, tiles.tolist()), work=work)

    def _feed_forward_steps(
        self, layer: int, number: int, batch: Batch, states: dict[int, Tensor], attention: _Step
    ) -> Iterable[_Step]:
        inner: list[Tensor] = []

        def go_down_dense(compact: Tensor) -> None:
            states[number] = self._go_down(layer, states[number], inner.pop(), compact)

        if self._experts is None or self._router is None:
            yield _Step(
                tiles=partial(_tiles, self._file.up(layer).tiles),
                work=lambda compact: inner.append(self._go_up(layer, states[number], compact)),
            )
            yield _Step(
                tiles=partial(_tiles, self._file.down(layer).tiles),
                work=go_down_dense,
            )
            return
        router, k = self._router, self._experts
        hidden_units: list[NDArray[np.int64]] = []

        def choose() -> Sequence[int]:
            choice = router.choose(layer, states[number].numpy(), batch.mask, k)
            self.routes[layer, number] = choice
            blocks = np.unique(choice)
            hidden_units[:] = [blocks]
            up = self._file.up(layer)
            return [tile for block in blocks for tile in up.part(int(block), self.config.block).tiles]

        def chosen_down() -> Sequence[int]:
            down = self._file.down(layer)
            return [
                tile for block in hidden_units[0] for tile in down.part(int(block), self.config.block).tiles
            ]

        def go_up(compact: Tensor) -> None:
            choice, blocks = self.routes[layer, number], hidden_units[0]
            used = router.used(choice)[:, blocks].repeat(self.config.block, axis=1).astype(np.float32)
            order = router.permutation(layer).reshape(BLOCKS, -1)[blocks].reshape(-1)
            bias = gather(self._layers[layer].up_bias, from_numpy(order))
            up = self._affine(states[number], compact, bias)
            inner.append(gelu(up) * from_numpy(used[:, None, :]))

        def go_down(compact: Tensor) -> None:
            fill = from_numpy(router.fill(layer, self.routes[layer, number])[:, None, :])
            states[number] = self._go_down(layer, states[number], inner.pop(), compact, fill)

        yield _Step(tiles=choose, work=go_up, after=attention)
        yield _Step(tiles=chosen_down, work=go_down)

    # Computing: worker thread

    def _compute(self, step: _Step, compact: Tensor) -> tuple[float, float]:
        start = time.perf_counter()
        with no_grad():
            step.work(compact)
        step.done = True
        return start, time.perf_counter()

    def _attend(
        self, layer: int, number: int, batch: Batch, states: dict[int, Tensor], compact: Tensor
    ) -> None:
        state, kept = states[number], self._layers[layer]
        count, longest, hidden = state.shape
        matrices = [
            Tensor(compact.carrier, part * hidden * hidden, row_major(hidden, hidden), requires_grad=False)
            for part in range(4)
        ]
        heads = (count, longest, self.config.heads, self.config.head_size)

        def split(matrix: Tensor, bias: Tensor) -> Tensor:
            return self._affine(state, matrix, bias).reshape(heads).permute(0, 2, 1, 3)

        query = split(matrices[0], kept.query_bias)
        key = split(matrices[1], kept.key_bias)
        value = split(matrices[2], kept.value_bias)
        padding = np.where(batch.mask, np.float32(0), np.float32(-np.inf))[:, None, None, :]
        scores = matmul(query, key.permute(0, 1, 3, 2)) * float(self.config.head_size**-0.5)
        mixed = matmul(softmax(scores + from_numpy(padding)), value)
        mixed = mixed.permute(0, 2, 1, 3).reshape(count, longest, hidden)
        mixed = self._affine(mixed, matrices[3], kept.attention_output_bias)
        states[number] = self._normalise(mixed + state, kept.attention_norm)

    def _go_up(self, layer: int, state: Tensor, compact: Tensor) -> Tensor:
        return gelu(self._affine(state, compact, self._layers[layer].up_bias))

    def _go_down(
        self, layer: int, state: Tensor, inner: Tensor, compact: Tensor, fill: Tensor | None = None
    ) -> Tensor:
        kept = self._layers[layer]
        out = self._affine(inner, compact.T, kept.down_bias)
        if fill is not None:
            out = out + fill
        return self._normalise(out + state, kept.output_norm)

    def _affine(self, x: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        flat = matmul(x.reshape(-1, x.shape[-1]), matrix.T) + bias
        return flat.reshape(*x.shape[:-1], matrix.shape[0])

    def _normalise(self, x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        centred = x - reduce_mean(x, axis=-1, keepdims=True)
        variance = reduce_mean(centred * centred, axis=-1, keepdims=True)
        return centred * rsqrt(variance + self.config.epsilon) * norm[0] + norm[1]

    def _pool(self, state: Tensor, batch: Batch) -> NDArray[np.float32]:
        with no_grad():
            own = from_numpy(batch.mask.astype(np.float32)[:, :, None])
            mean = reduce_sum(state * own, axis=1) / from_numpy(batch.lengths.astype(np.float32)[:, None])
            unit = mean * rsqrt(reduce_sum(mean * mean, axis=-1, keepdims=True))
        return unit.numpy()

    # Fetching: event loop

    async def _fetch(self, step: _Step) -> tuple[Tensor, tuple[float, float]]:
        start = time.perf_counter()
        compact = await self._carrier.project(self._table, self._carrier.select({0: step.tiles()}))
        return compact, (start, time.perf_counter())

    async def _overlap(self, compute: Callable[[], tuple[float, float]], later: _Step) -> Tensor:
        """Compute this step in a thread while the next one's tiles are fetched."""
        spans: list[tuple[float, float]] = []

        async def run() -> None:
            spans.append(await anyio.to_thread.run_sync(compute))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            fetched, fetch = await self._fetch(later)
        self._note(fetch, spans[0])
        return fetched

    def _note(self, fetch: tuple[float, float] | None, compute: tuple[float, float] | None) -> None:
        if fetch is not None:
            self.times.fetching += fetch[1] - fetch[0]
        if compute is not None:
            self.times.computing += compute[1] - compute[0]
        if fetch is not None and compute is not None:
            self.times.both += max(0.0, min(fetch[1], compute[1]) - max(fetch[0], compute[0]))

    def _sample(self, began: float) -> None:
        found = self._carrier.statistics()
        self.times.samples.append(Sample(time.perf_counter() - began, found.resident_bytes, found.bytes_read))

    # Small weights

    def _keep(self, weights: ModelWeights, name: str) -> Tensor:
        array = np.ascontiguousarray(weights.read(name), np.float32)
        self._small_bytes += array.nbytes
        return Tensor(CPU.from_numpy(array, mutable=False), 0, row_major(*array.shape), requires_grad=False)

    def _keep_layer(self, weights: ModelWeights, layer: int) -> _Layer:
        names: LayerNames = layer_names(layer)
        keep = partial(self._keep, weights)
        return _Layer(
            query_bias=keep(names.query_bias),
            key_bias=keep(names.key_bias),
            value_bias=keep(names.value_bias),
            attention_output_bias=keep(names.attention_output_bias),
            attention_norm=(keep(names.attention_norm_weight), keep(names.attention_norm_bias)),
            up_bias=keep(names.up_bias),
            down_bias=keep(names.down_bias),
            output_norm=(keep(names.output_norm_weight), keep(names.output_norm_bias)),
        )

    def _row(self, table: Tensor, row: int) -> Tensor:
        hidden = self.config.hidden
        return Tensor(table.carrier, row * hidden, row_major(hidden), requires_grad=False)

    def _first_rows(self, table: Tensor, count: int) -> Tensor:
        return Tensor(table.carrier, 0, row_major(count, self.config.hidden), requires_grad=False)


def _tiles(tiles: Sequence[int]) -> Sequence[int]:
    return tiles
