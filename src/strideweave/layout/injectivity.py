"""Whether a strided map repeats a value, decided exactly."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from strideweave.layout.digits import Digit

__all__ = ["is_injective"]


def is_injective(digits: Iterable[Digit]) -> bool:
    """Whether ``sum(entry * stride)`` takes a different value at every coordinate of the digits."""
    sizes = [extent for extent, _ in digits]
    if 0 in sizes:
        return True
    ordered = sorted([(abs(stride), extent - 1) for extent, stride in digits if extent > 1])
    reach = 0
    for stride, bound in ordered:
        if stride <= reach:
            return stride > 0 and not _has_collision(ordered, len(ordered) - 1, 0, zero=True)
        reach += stride * bound
    return ordered[0][0] > 0 if ordered else True


def _has_collision(ordered: list[tuple[int, int]], last: int, rest: int, *, zero: bool) -> bool:
    if last < 0:
        return rest == 0 and not zero
    divisor = gcd(*[stride for stride, _ in ordered[: last + 1]])
    reach = sum([stride * bound for stride, bound in ordered[: last + 1]])
    if abs(rest) > reach or rest % divisor:
        return False
    stride, bound = ordered[last]
    reach -= stride * bound
    low = max(-bound, -((reach + rest) // stride))
    high = min(bound, (reach - rest) // stride)
    return any(
        _has_collision(ordered, last - 1, rest + entry * stride, zero=zero and entry == 0)
        for entry in range(0 if zero else low, high + 1)
    )
