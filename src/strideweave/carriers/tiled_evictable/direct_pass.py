"""One pass over the blocks of an operation: read regions, compute a part of the target, add, write once.

While a worker computes with the windows of one block, those of the next are fetched. The target is a dense tensor or
the gradient of a tiled one; either way each of its regions is written once, when all of its parts are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from strideweave.autograd.mode import no_grad
from strideweave.carriers.tiled_evictable.computations import Computations
from strideweave.carriers.tiled_evictable.regions import region_of
from strideweave.carriers.tiled_evictable.targets import adopted
from strideweave.carriers.tiled_evictable.windows import part_of
from strideweave.runtime.event_loop import current_runtime
from strideweave.runtime.workers import run_jobs
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence

    import numpy.typing as npt

    from strideweave.carriers.tiled_evictable.blocks import Cut, Step
    from strideweave.carriers.tiled_evictable.regions import Axes, Region
    from strideweave.carriers.tiled_evictable.targets import Target
    from strideweave.carriers.tiled_evictable.windows import TiledSource, Window

    Array = npt.NDArray[Any]
    Compute = Callable[[Region, Sequence[Tensor]], Tensor]

__all__ = ["Pass", "Reading"]


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
        computing = current_runtime().service(Computations)
        with computing, no_grad(), np.errstate(**self._errors):
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
                self._target.take(region, adopted(part.carrier, self._total, part.dtype))
                self._total = None

    def _region(self, reading: Reading, block: Region) -> Tensor:
        region = region_of(reading.axes, block)
        if reading.source is None:
            return part_of(reading.tensor, region)
        return self._windows[reading.source, reading.source.key(region)].region(region)


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
        try:
            raise first
        finally:
            errors.clear()  # no cycle: the error's traceback holds this frame
            del first, others
