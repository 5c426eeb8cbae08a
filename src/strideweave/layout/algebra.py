"""The algebra of Layouts: new Layouts from old ones, or a ValueError where no Layout is the answer.

`compose`, `coalesce`, `complement` and `divide` are the operations of that name in *CuTe* (NVIDIA CUTLASS
documentation, "CuTe layout algebra"; `divide` is its ``logical_divide``). They are exact: a result satisfies
its defining equation at every coordinate, and where CuTe leaves a result undefined these raise. `permute` and
`broadcast_to` rearrange top-level modes as NumPy does.

The cost depends on the number of modes only. Each function is a method of `Layout` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from strideweave.layout.digits import Digit, merge_digits
from strideweave.layout.int_tuple import IntTuple, as_integer, product
from strideweave.layout.shape import Shape

if TYPE_CHECKING:
    from strideweave.layout.layout import Layout

__all__ = ["Tiler", "broadcast_to", "coalesce", "complement", "compose", "divide", "permute"]

Tiler: TypeAlias = "Layout | int | tuple[Tiler, ...]"
"""What a Layout is composed with or divided by: a Layout, ``n`` for ``Layout(n, 1)``, or one per mode."""


def coalesce(layout: Layout) -> Layout:
    """Return the flat Layout with the fewest modes and the same value at every linear index.

    Extents of 1 disappear and neighbours that continue each other become one mode. A Layout of size 1 becomes
    ``Layout(1, 0)``, an empty one ``Layout(0, 0)``.
    """
    return _flat(layout, merge_digits(layout.leaves) if layout.size else ((0, 0),))


def compose(layout: Layout, tiler: Tiler) -> Layout:
    """Return the Layout ``r`` with ``r(c) == layout(tiler(c))`` at every coordinate ``c`` of ``tiler``.

    The result is nested like ``tiler``, save that a mode which crosses modes of ``layout`` becomes a tuple. A
    tuple of tilers composes mode by mode; modes beyond its length stay as they are.

    Args:
        layout: applied second.
        tiler: applied first; its values are linear indices of ``layout``.

    Raises:
        TypeError: ``tiler`` is no Layout, integer or tuple of them.
        ValueError: a value of ``tiler`` is outside ``[0, layout.size)``; or no Layout is the answer: adding
            the strides of ``tiler`` carries from one mode of ``layout`` into the next at a place that is no
            boundary between extents of ``tiler``.
    """
    if isinstance(tiler, (tuple, list)):
        return _by_mode(layout, tiler, compose)
    tiler = _as_layout(layout, tiler)
    if tiler.size and not (tiler.min_index >= 0 and tiler.max_index < max(layout.size, 1)):
        raise ValueError(
            f"cannot compose {layout} with {tiler}: the latter takes values from {tiler.min_index} to "
            f"{tiler.max_index}, the former has the linear indices [0, {layout.size})"
        )
    if tiler.size and not layout.size:
        raise ValueError(f"cannot compose the empty {layout} with {tiler}, which is not empty")
    composition = _Composition(layout, tiler)
    shape, stride = composition.of(tuple(tiler.shape), tuple(tiler.stride))
    composition.check_carries()
    return type(layout)(shape, stride)


def complement(layout: Layout, size: int | None = None) -> Layout:
    """Return the Layout that fills what ``layout`` leaves out.

    Every integer of ``[0, size)`` is in exactly one way a value of ``layout`` plus a value of the result. The
    result is coalesced, injective, and its strides ascend. Modes of ``layout`` with stride 0 repeat values
    and do not count.

    Args:
        layout: not empty, with non-negative strides.
        size: the interval to fill, in slots; None fills the gaps between the values of ``layout`` only.

    Raises:
        TypeError: ``size`` is not an integer.
        ValueError: no Layout is the answer: ``layout`` is empty, has a negative stride or repeats a value by
            overlap, or its gaps or ``size`` are not a whole number of periods.
    """
    if not layout.size:
        raise ValueError(f"the empty {layout} has no complement")
    gaps: list[Digit] = []
    period = 1
    for stride, extent in sorted(
        [(stride, extent) for extent, stride in layout.leaves if extent > 1 and stride]
    ):
        if stride < 0:
            raise ValueError(f"{layout} has no complement: its stride {stride} is negative")
        if stride % period:
            raise ValueError(
                f"{layout} has no complement: its stride {stride} is not a multiple of the {period} slots "
                "that the smaller strides repeat over"
            )
        gaps.append((stride // period, period))
        period = stride * extent
    if size is not None:
        whole = as_integer(size, "the size to complement to")
        if whole < 1 or whole % period:
            raise ValueError(
                f"{layout} has no complement in {whole} slots: it repeats over {period} slots, and the size "
                "must be a positive multiple of that"
            )
        gaps.append((whole // period, period))
    return _flat(layout, merge_digits(gaps))


def divide(layout: Layout, tiler: Tiler) -> Layout:
    """Cut ``layout`` into tiles: return ``(tile, rest)``, where ``rest`` steps from tile to tile.

    This is ``compose(layout, (tiler, complement(tiler, layout.size)))``, CuTe's ``logical_divide``. A tuple
    of tilers divides mode by mode: ``divide(row_major(8, 12), (4, 3))`` has the shape ``((4, 2), (3, 4))``.

    Args:
        layout: not empty.
        tiler: the linear indices of the first tile; ``n`` for ``n`` consecutive ones.

    Raises:
        TypeError: ``tiler`` is no Layout, integer or tuple of them.
        ValueError: tiles of that form do not cover ``layout`` exactly once, or no Layout is the answer.
    """
    if isinstance(tiler, (tuple, list)):
        return _by_mode(layout, tiler, divide)
    tile = _as_layout(layout, tiler)
    rest = complement(tile, layout.size)
    both = type(layout)(
        (_unwrapped(tile.shape), _unwrapped(rest.shape)), (_unwrapped(tile.stride), _unwrapped(rest.stride))
    )
    return compose(layout, both)


def permute(layout: Layout, *axes: object) -> Layout:
    """Return ``layout`` with its top-level modes reordered: mode ``i`` of the result is mode ``axes[i]``.

    Args:
        layout: any Layout.
        *axes: every axis once, as integers or as one tuple; negative ones count from the end.

    Raises:
        TypeError: an axis is not an integer.
        ValueError: ``axes`` does not name every axis exactly once.
    """
    if len(axes) == 1 and isinstance(axes[0], (tuple, list)):
        axes = tuple(axes[0])
    asked = [as_integer(axis, "an axis") for axis in axes]
    order = [axis + layout.rank if axis < 0 else axis for axis in asked]
    if sorted(order) != list(range(layout.rank)):
        raise ValueError(
            f"permute needs each of the {layout.rank} axes of {layout} exactly once, got {asked}"
        )
    return type(layout)([layout.shape[axis] for axis in order], [layout.stride[axis] for axis in order])


def broadcast_to(layout: Layout, *shape: object) -> Layout:
    """Return ``layout`` repeated to the extents of ``shape`` by NumPy's rule.

    Modes are aligned at the last one. A mode of extent 1, and a mode that ``layout`` does not have, is
    repeated with stride 0; a mode that already has the extent keeps its nesting and strides.

    Args:
        layout: any Layout.
        *shape: as for `Shape`.

    Raises:
        TypeError: an extent is not an integer.
        ValueError: ``shape`` has fewer modes, or an extent differs from one that is not 1.
    """
    target = Shape(*shape)
    missing = target.rank - layout.rank
    if missing < 0:
        raise ValueError(
            f"cannot broadcast {layout} with {layout.rank} modes to the {target.rank} of {target}"
        )
    modes = [(mode, _zeros(mode)) for mode in target]
    for axis, extent in enumerate(layout.extents):
        place = axis + missing
        if extent == target.extents[place]:
            modes[place] = (layout.shape[axis], layout.stride[axis])
        elif extent != 1:
            raise ValueError(
                f"cannot broadcast {layout} to {target}: mode {axis} has the extent {extent}, and "
                f"{target.extents[place]} is asked; only an extent of 1 can be repeated"
            )
    return type(layout)([mode for mode, _ in modes], [stride for _, stride in modes])


class _Composition:
    """One composition under way: the canonical digits of the outer Layout, and the parts found so far."""

    def __init__(self, layout: Layout, tiler: Layout) -> None:
        self.layout, self.tiler = layout, tiler
        self.digits = merge_digits(layout.leaves) if layout.size else ()
        self.parts: list[tuple[int, tuple[int, ...]]] = []

    def of(self, shape: IntTuple, stride: IntTuple) -> tuple[IntTuple, IntTuple]:
        """Return the shape and stride that replace a mode of the tiler; the two arguments are congruent."""
        if isinstance(shape, int) or isinstance(stride, int):
            return self._leaf(product(shape), product(stride))
        pairs = [self.of(mode, step) for mode, step in zip(shape, stride, strict=True)]
        return tuple([mode for mode, _ in pairs]), tuple([step for _, step in pairs])

    def _leaf(self, extent: int, step: int) -> tuple[IntTuple, IntTuple]:
        if extent < 2 or step == 0 or not self.tiler.size:
            return extent, 0
        whole = (extent, step)
        extents: list[int] = []
        strides: list[int] = []
        while True:
            entries = self._entries(step)
            run = self._run(entries, extent)
            extents.append(run)
            strides.append(
                sum([entry * stride for entry, (_, stride) in zip(entries, self.digits, strict=True)])
            )
            self.parts.append((run, entries))
            if run == extent:
                break
            if extent % run:
                raise self._refusal(
                    f"its mode {whole[0]}:{whole[1]} crosses a mode boundary every {run} steps"
                )
            extent, step = extent // run, step * run
        return _unwrapped(tuple(extents)), _unwrapped(tuple(strides))

    def _entries(self, index: int) -> tuple[int, ...]:
        """Return the coordinate of a linear index of the outer Layout, one entry per digit."""
        entries = []
        for extent, _ in self.digits:
            index, entry = divmod(index, extent)
            entries.append(entry)
        return tuple(entries)

    def _run(self, entries: tuple[int, ...], extent: int) -> int:
        """Return how many multiples of a step there are before one carries from digit to digit."""
        runs = [-(-limit // entry) for entry, (limit, _) in zip(entries, self.digits, strict=True) if entry]
        return min(extent, *runs)

    def check_carries(self) -> None:
        """Raise unless the parts can be added at every coordinate without a carry."""
        for place, (limit, _) in enumerate(self.digits):
            largest = sum([(extent - 1) * entries[place] for extent, entries in self.parts])
            if largest >= limit:
                raise self._refusal(f"its modes add up to {largest} in a mode of extent {limit}")

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"no Layout is the composition of {self.layout} with {self.tiler}: {reason}; "
            "choose extents that divide the modes they run over"
        )


def _by_mode(
    layout: Layout, tilers: tuple[Tiler, ...] | list[Tiler], function: Callable[[Layout, Tiler], Layout]
) -> Layout:
    if len(tilers) > layout.rank:
        raise ValueError(f"{len(tilers)} tilers were given for the {layout.rank} modes of {layout}")
    shape, stride = list(layout.shape), list(layout.stride)
    for axis, tiler in enumerate(tilers):
        mode = function(type(layout)(shape[axis], stride[axis]), tiler)
        shape[axis], stride[axis] = _unwrapped(mode.shape), _unwrapped(mode.stride)
    return type(layout)(shape, stride)


def _as_layout(layout: Layout, tiler: Layout | int) -> Layout:
    if isinstance(tiler, type(layout)):
        return tiler
    return type(layout)(as_integer(tiler, "a tiler that is no Layout or tuple"), 1)


def _flat(layout: Layout, digits: tuple[Digit, ...]) -> Layout:
    digits = digits or ((1, 0),)
    return type(layout)([extent for extent, _ in digits], [stride for _, stride in digits])


def _unwrapped(value: tuple[IntTuple, ...]) -> IntTuple:
    """Return the only entry of a tuple of one, so that it nests no deeper than it must."""
    return value[0] if len(value) == 1 else tuple(value)


def _zeros(mode: IntTuple) -> IntTuple:
    return 0 if isinstance(mode, int) else tuple([_zeros(item) for item in mode])
