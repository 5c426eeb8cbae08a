"""One pass over the blocks of an operation: read regions, compute a part of the target, add, write once.

While a worker computes with the windows of one block, those of the next are fetched. The target is a dense tensor or
the gradient of a tiled one; either way each of its regions is written once, when all of its parts are added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from strideweave.autograd.mode import no_grad
from strideweave.carriers.tiled_evictable.filling import start_filling
from strideweave.carriers.tiled_evictable.gradient import gradient_like
from strideweave.carriers.tiled_evictable.regions import covering, region_of, slices
from strideweave.carriers.tiled_evictable.windows import part_of
from strideweave.dtype import DType
from strideweave.layout import row_major
from strideweave.runtime.workers import run_jobs
from strideweave.tensor import Tensor
from strideweave.tiles.selection import TileSelection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence

    import numpy.typing as npt

    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.carrier import TiledEvictable
    from strideweave.carriers.tiled_evictable.regions import Axes, Cut, Region, Step
    from strideweave.carriers.tiled_evictable.windows import TiledSource, Window

    Array = npt.NDArray[Any]
    Compute = Callable[[Region, Sequence[Tensor]], Tensor]

__all__ = ["DenseTarget", "Pass", "Reading", "TiledTarget", "is_narrow", "widened"]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A tensor that a pass reads.

    Attributes:
        axes: the index axes that it runs along.
        tensor: the whole of it.
        source: gives its windows where it is tiled, else None.
    """

    axes: Axes
    tensor: Tensor
    source: TiledSource | None = None


class Target(ABC):
    """What a pass makes."""

    @abstractmethod
    def take(self, region: Region, part: Tensor) -> None:
        """Note the values of a region, in a worker thread; ``part`` is nobody else's to change."""

    def budget(self, most: int) -> int:
        """How many bytes of it may be at hand at once, or one tile."""
        return most

    @abstractmethod
    async def settle(self) -> None:
        """Do what is left to be done in the loop."""


class DenseTarget(Target):
    """A dense tensor, row-major on a fresh carrier.

    Args:
        prototype: a carrier of the class.
        shape: of the tensor.
        dtype: of the tensor, to which parts are rounded.
    """

    def __init__(self, prototype: Carrier, shape: tuple[int, ...], dtype: DType) -> None:
        self._prototype, self._shape, self._dtype = prototype, shape, dtype
        self._tensor: Tensor | None = None
        self._values: Array = np.empty(0)

    def take(self, region: Region, part: Tensor) -> None:
        """Write a region; a part that is all of it, as it should be, is the tensor."""
        if part.shape == self._shape and part.dtype is self._dtype and _fills(part):
            self._tensor = part
            return
        self._allocate()
        index: Any = (*slices(region), ...)  # an array, not a number, where there are no axes
        # Where that rounds, it rounds what was computed in Float32.
        np.copyto(self._values[index], part.numpy(), casting="unsafe")

    async def settle(self) -> None:
        """Nothing is left to be done."""

    def tensor(self, requires_grad: bool) -> Tensor:
        """The tensor, once every region was taken; where there was none it is zero."""
        if self._tensor is None:
            self._allocate()
        carrier: Any = self._tensor.carrier if self._tensor is not None else None
        return Tensor._of(carrier, 0, row_major(self._shape), requires_grad)

    def _allocate(self) -> None:
        if self._tensor is None:
            layout = row_major(self._shape)
            carrier = self._prototype.allocate_like(layout.size, mutable=True, dtype=self._dtype)
            self._values = carrier._bytes().view(self._dtype.numpy).reshape(self._shape)
            self._tensor = Tensor._of(carrier, 0, layout, False)


class TiledTarget(Target):
    """The gradient of a full tiled Tensor, to which whole tiles are written.

    Args:
        template: the Tensor.
        total: the gradient so far, to be added to; None for a fresh one.
    """

    def __init__(self, template: Tensor, total: Tensor | None) -> None:
        self.tensor = gradient_like(template) if total is None else total
        self._carrier: TiledEvictable = self.tensor.carrier  # type: ignore[assignment]
        self._is_fresh = total is None
        self._taken: tuple[TileSelection, Tensor] | None = None

    @property
    def carrier(self) -> TiledEvictable:
        """The carrier of the gradient."""
        return self._carrier

    def budget(self, most: int) -> int:
        """No more than what its own memory limit would have it stage."""
        return self._carrier._traffic.staging_room(most)

    def take(self, region: Region, part: Tensor) -> None:
        """Keep a region, which is of whole tiles, until it is settled."""
        if part.dtype is not self.tensor.dtype:
            values = np.ascontiguousarray(part.numpy().astype(self.tensor.dtype.numpy))
            part = _adopted(part.carrier, values, self.tensor.dtype)
        self._taken = TileSelection(covering(region, self._carrier.tile_shape)), part

    async def settle(self) -> None:
        """Write the tiles of the region that was taken, if one was."""
        if self._taken is not None:
            selection, part = self._taken
            self._taken = None
            reduction: Any = "replace" if self._is_fresh else "add"
            await start_filling(
                self._carrier, self.tensor, selection, part, reduction=reduction, kind="backward"
            )


class Pass:
    """Makes a target from what some tensors hold; ``run`` is to be awaited in the runtime's loop, once.

    Args:
        cut: the blocks.
        readings: what is read.
        compute: makes the part of a block from the regions of ``readings``, in a worker thread and without
            gradients. What it gives has Float32 at least where it is to be added up.
        target: takes the regions.
        axes: the index axes that the target runs along.
        overlaps: whether the windows of the next block are fetched while one is computed.
    """

    def __init__(
        self,
        cut: Cut,
        readings: Sequence[Reading],
        compute: Compute,
        target: Target,
        axes: Axes,
        *,
        overlaps: bool,
    ) -> None:
        self._cut, self._readings, self._compute = cut, readings, compute
        self._target, self._axes, self._overlaps = target, axes, overlaps
        self._errors: Any = np.geterr()  # the caller's: a worker thread has its own
        self._windows: dict[tuple[TiledSource, Hashable], Window] = {}
        self._total: Array | None = None

    async def run(self) -> None:
        """Make the target.

        Raises:
            BaseException: a transfer's own error, or that of a computation.
        """
        steps = self._cut.steps()
        step = next(steps, None)
        try:
            if step is not None:
                await self._load(step)
            while step is not None:
                following = next(steps, None)
                await self._step(step, following)
                await self._target.settle()
                step = following
        finally:
            self._let_go(None)

    async def _step(self, step: Step, following: Step | None) -> None:
        """Compute a block, whose windows are there, and fetch those of the next."""
        jobs = [partial(run_jobs, [partial(self._work, step)])]
        if following is not None and self._overlaps:
            jobs.append(partial(self._load, following))
        await _together(jobs)
        self._let_go(following)
        if following is not None and not self._overlaps:
            await self._load(following)

    def _wanted(self, step: Step) -> Iterator[tuple[TiledSource, Region]]:
        for reading in self._readings:
            if reading.source is not None:
                yield reading.source, region_of(reading.axes, step.block)

    async def _load(self, step: Step) -> None:
        for source, region in self._wanted(step):
            key = (source, source.key(region))
            if key not in self._windows:
                self._windows[key] = await source.load(region)

    def _let_go(self, following: Step | None) -> None:
        kept = set()
        if following is not None:
            kept = {(source, source.key(region)) for source, region in self._wanted(following)}
        for key in [key for key in self._windows if key not in kept]:
            key[0].free(self._windows.pop(key))

    def _work(self, step: Step) -> None:
        """Compute a block; in a worker thread."""
        with no_grad(), np.errstate(**self._errors):
            regions = [self._region(reading, step.block) for reading in self._readings]
            part = self._compute(step.block, regions)
            region = region_of(self._axes, step.block)
            if step.first and step.last:
                self._target.take(region, part)
                return
            values = part.numpy()
            if self._total is None:
                self._total = np.array(values)  # a copy: the part may be a view of a region
            else:
                np.add(self._total, values, out=self._total)
            if step.last:
                self._target.take(region, _adopted(part.carrier, self._total, part.dtype))
                self._total = None

    def _region(self, reading: Reading, block: Region) -> Tensor:
        region = region_of(reading.axes, block)
        if reading.source is None:
            return part_of(reading.tensor, region)
        return self._windows[reading.source, reading.source.key(region)].region(region)


def is_narrow(dtype: DType) -> bool:
    """Whether the dtype is a float that is computed in Float32 and rounded once."""
    return dtype.is_differentiable and dtype.itemsize < DType.Float32.itemsize


def widened(tensor: Tensor) -> Tensor:
    """A narrow float in Float32, every value exactly; anything else as it is."""
    if not is_narrow(tensor.dtype):
        return tensor
    values = tensor.numpy().astype(DType.Float32.numpy, order="C")
    return _adopted(tensor.carrier, values, DType.Float32)


def _adopted(prototype: Carrier, values: Array, dtype: DType) -> Tensor:
    carrier = prototype._adopt_like(values.reshape(-1), dtype)
    return Tensor._of(carrier, 0, row_major(values.shape), False)


def _fills(part: Tensor) -> bool:
    """Whether a tensor is all of its carrier, row-major."""
    return (
        part.offset == 0 and part.layout == row_major(part.shape) and part.carrier.size() == part.layout.size
    )


async def _together(jobs: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run jobs at once; when all have ended, raise the first error as it is."""
    if len(jobs) == 1:
        await jobs[0]()
        return
    errors: list[BaseException] = []

    async def run(job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except BaseException as error:  # a task group would wrap it
            errors.append(error)

    async with anyio.create_task_group() as group:
        for job in jobs:
            group.start_soon(run, job)
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"the next block failed too: {other!r}")
        errors.clear()  # no cycle: the error's traceback holds this frame
        raise first
