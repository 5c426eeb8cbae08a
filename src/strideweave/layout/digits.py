"""Digits: the ``(extent, stride)`` pairs that a Layout is the sum of, in a canonical form.

A digit contributes ``entry * stride`` for ``0 <= entry < extent``. *CuTe* (NVIDIA CUTLASS documentation,
"CuTe layout algebra") calls the canonical form coalesced.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Digit", "merge_digits"]

Digit = tuple[int, int]
"""``(extent, stride)``, extent without a unit, stride in slots."""


def merge_digits(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    """Return the shortest list of digits that computes the same function of the linear index.

    Extents of 1 are left out; a digit that continues its left neighbour (``stride == neighbour's extent *
    neighbour's stride``) is merged into it. All extents are positive.

    Args:
        digits: fastest first.
    """
    merged: list[Digit] = []
    for extent, stride in digits:
        if extent == 1:
            continue
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * extent, merged[-1][1])
        else:
            merged.append((extent, stride))
    return tuple(merged)
