"""The way back of a direct operation: one node, and a pass for each operand that wants its share.

Spec: *A direct tiled operand means the full logical Tensor*; *Projection is an autograd-visible gather*. The share
of a tiled operand is tiled: its tiles are computed block by block and added to the gradient so far, and never exist
as one dense tensor. Each pass is a request that holds the tiles it reads, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from strideweave.autograd.graph import Contribution, Node, attach
from strideweave.carriers.tiled_evictable.blocks import Footprint, cut_operation
from strideweave.carriers.tiled_evictable.direct_pass import Pass, Reading
from strideweave.carriers.tiled_evictable.direct_request import Holding
from strideweave.carriers.tiled_evictable.regions import region_of
from strideweave.carriers.tiled_evictable.targets import DenseTarget, TiledTarget, widened
from strideweave.dtype import DType
from strideweave.layout import Layout
from strideweave.operations.definition import RESULT, Operand, Pullback
from strideweave.operations.pullbacks import fit
from strideweave.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strideweave.autograd.graph import Share
    from strideweave.carriers.base import Carrier
    from strideweave.carriers.tiled_evictable.operands import DirectOperands
    from strideweave.carriers.tiled_evictable.regions import Region

__all__ = ["attach_backward"]


def attach_backward(operands: DirectOperands, result: Tensor, versions: Mapping[Carrier, int]) -> None:
    """Note on the result how it came about.

    Args:
        operands: of the operation.
        result: fresh, and nobody else's yet.
        versions: of the operands' carriers, as the values were read.
    """
    bound = operands.bound
    wanted = tuple([isinstance(operand, Operand) and operand.requires_grad for operand in bound.operands])
    reads = {
        position
        for asked, positions in zip(wanted, bound.definition.saves, strict=False)
        if asked
        for position in positions
    }
    kept = result.detach() if RESULT in reads else None
    saved: list[Any] = [] if kept is None else [kept]
    for position in reads - {RESULT}:
        operand = bound.operands[position]
        if isinstance(operand, Operand):
            saved.append((operand.carrier, versions[cast("Any", operand.carrier)]))
    back = _Backward(operands, wanted, kept)
    tensors = cast("tuple[Tensor, ...]", bound.tensors)
    attach(result, Node(bound.definition.name, tensors, back.pull_back, saved))


@dataclass(frozen=True, slots=True, eq=False)
class _Share(Contribution):
    """The share of one tiled operand, which is computed when it is added."""

    back: _Backward
    position: int
    cotangent: Tensor

    def onto(self, total: Tensor | None) -> Tensor:
        """Compute the share, tile by tile, onto ``total`` or a fresh gradient; waits until that is done."""
        operand = cast("Tensor", self.back.operands.bound.operands[self.position])
        target = TiledTarget(operand, total)
        self.back.run(self.position, self.cotangent, target, target.carrier)
        return target.tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Backward:
    """What backward needs of an operation, and does not refer to its result.

    Attributes:
        operands: of the forward call.
        wanted: for each of them, whether its share is asked for.
        kept: the detached result, where a share is made from it.
    """

    operands: DirectOperands
    wanted: tuple[bool, ...]
    kept: Tensor | None

    def pull_back(self, cotangent: Tensor) -> list[Share]:
        """Give the share of every operand that is a tensor; None for those that want none."""
        shares: list[Share] = []
        for position, operand in enumerate(self.operands.bound.operands):
            if not isinstance(operand, Operand):
                continue
            if not self.wanted[position]:
                shares.append(None)
            elif self.operands.is_tiled(operand):
                shares.append(_Share(self, position, cotangent))
            else:
                shares.append(self._dense_share(position, cotangent))
        return shares

    def run(self, position: int, cotangent: Tensor, target: DenseTarget | TiledTarget, host: Any) -> None:
        """Make the share of one operand, as a request over the tiled operands that it is made from."""
        holding = Holding(self.operands.tiled(self._reads(position)), "backward")
        holding.run(self._pass(position, cotangent, target, holding).run, host=host)

    def _dense_share(self, position: int, cotangent: Tensor) -> Tensor:
        bound = self.operands.bound
        operand = cast("Tensor", bound.operands[position])
        if not any(self.operands.is_tiled(bound.operands[at]) for at in self._reads(position)):
            # No tile is read, so this is what the compute class does anyway.
            return fit(self._vjp(position, bound.operands, None, cotangent), operand)
        target = DenseTarget(cotangent.carrier, operand.shape, operand.dtype)
        self.run(position, cotangent, target, self.operands.host)
        return target.tensor(False)

    def _reads(self, position: int) -> tuple[int, ...]:
        """The positions of the tensors, the result's not among them, whose values a share is made from."""
        saves = self.operands.bound.definition.saves
        positions = saves[position] if position < len(saves) else ()
        operands = self.operands.bound.operands
        return tuple([at for at in positions if at != RESULT and isinstance(operands[at], Operand)])

    def _pass(
        self, position: int, cotangent: Tensor, target: DenseTarget | TiledTarget, holding: Holding
    ) -> Pass:
        operands = self.operands
        bound, space = operands.bound, operands.space
        reads = self._reads(position)
        wide = Footprint(space.result, max(DType.Float32.itemsize, cotangent.dtype.itemsize))
        footprints = [wide, *[operands.footprint(at) for at in reads]]
        budget = target.budget(holding.budget)
        cut = cut_operation(space.extents, operands.footprint(position), footprints, budget)
        readings = [Reading(space.result, cotangent), *[operands.reading(at, holding, cut) for at in reads]]
        if self.kept is not None:
            readings.append(Reading(space.result, self.kept))

        def compute(block: Region, regions: Sequence[Tensor]) -> Tensor:
            # Narrow floats are rounded once, at the end, however many steps and parts there are.
            g, *values = [widened(region) for region in regions]
            result = values.pop() if self.kept is not None else None
            inputs: list[Any] = list(bound.operands)
            for at, axes in enumerate(space.operands):
                if axes is not None:
                    inputs[at] = _stand_in(g.carrier, region_of(axes, block), DType.Float32)
            for at, value in zip(reads, values, strict=True):
                inputs[at] = value
            share = self._vjp(position, tuple(inputs), result, g)
            own = region_of(space.operands[position] or (), block)
            return fit(share, _stand_in(g.carrier, own, share.dtype))

        axes = space.operands[position] or ()
        return Pass(cut, readings, compute, target, axes, overlaps=holding.overlaps)

    def _vjp(
        self, position: int, inputs: tuple[Any, ...], result: Tensor | None, cotangent: Tensor
    ) -> Tensor:
        definition, options = self.operands.bound.definition, self.operands.bound.options
        if definition.vjp is None:
            raise NotImplementedError(f"{definition.name} has no gradient; use it under no_grad()")
        wanted = tuple([at == position for at in range(len(inputs))])
        share = definition.vjp(Pullback(inputs, result, options, wanted), cotangent)[position]
        if share is None:
            raise RuntimeError(f"{definition.name} gives operand {position} no share; this is a defect")
        return share


def _stand_in(prototype: Carrier, region: Region, dtype: DType) -> Tensor:
    """A tensor of a region's shape whose values nobody reads."""
    shape = tuple([stop - start for start, stop in region])
    one = prototype._adopt_like(np.zeros(1, dtype.numpy), dtype)
    return Tensor._of(one, 0, Layout(shape, (0,) * len(shape)), False)
