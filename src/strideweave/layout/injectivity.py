"""Whether a strided map repeats a value, decided exactly and without visiting its values.

``sum(entry[j] * stride[j])`` takes one value twice exactly when some nonzero difference vector ``d`` has
``sum(d[j] * stride[j]) == 0`` and ``abs(d[j]) <= extent[j] - 1``. In general that is a question of subset-sum
kind. Layouts of real tensors are answered by the first loop; the rest is number theory on the digits that are
left, and a lattice search (`strideweave.layout.lattice`) for the few that withstand it. The work depends on
how many digits there are and how long their numbers are, not on how many values the map takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from math import gcd, prod

from strideweave.layout.digits import Digit
from strideweave.layout.lattice import has_kernel_vector

__all__ = ["is_injective"]

_Term = tuple[int, int]
"""``(abs(stride), extent - 1)``: a coefficient of the equation, and the largest magnitude of its unknown."""


def is_injective(digits: Iterable[Digit]) -> bool:
    """Whether ``sum(entry * stride)`` differs at every coordinate; True where there are no coordinates.

    Args:
        digits: the ``(extent, stride)`` pairs, in any order; extents >= 0.
    """
    terms: list[_Term] = []
    for extent, stride in digits:
        if extent == 0:
            return True
        if extent > 1:
            terms.append((abs(stride), extent - 1))
    terms.sort()
    reach, repeats = 0, False
    for stride, bound in terms:
        if stride == 0:
            return False
        repeats |= stride <= reach
        reach += stride * bound
    # Each stride jumps over everything the smaller ones reach: no value can come twice.
    return not repeats or not _collides(terms)


def _collides(terms: list[_Term]) -> bool:
    """Whether the equation has a nonzero solution within the bounds; all coefficients are positive."""
    terms = _shrink(terms)
    split = _independent_prefix(terms)
    if split:
        return _collides(terms[:split]) or _collides(terms[split:])
    if len(terms) < 2:
        return False
    # More coordinates than places between the smallest and the largest value.
    if prod([bound + 1 for _, bound in terms]) > sum([stride * bound for stride, bound in terms]) + 1:
        return True
    if any(_pair_collides(a, b) for a, b in combinations(terms, 2)):
        return True
    return has_kernel_vector([stride for stride, _ in terms], [bound for _, bound in terms])


def _shrink(terms: list[_Term]) -> list[_Term]:
    """Use divisibility: an unknown is a multiple of what divides all other coefficients but not its own.

    Replacing the unknown by that multiple shortens its range; where only zero is left the term goes. The
    result has a nonzero solution exactly when ``terms`` has.
    """
    changed = True
    while changed and terms:
        common = gcd(*[stride for stride, _ in terms])
        terms = sorted([(stride // common, bound) for stride, bound in terms])
        changed = False
        for position, (stride, bound) in enumerate(terms):
            others = terms[:position] + terms[position + 1 :]
            # One term alone is stride * d == 0: gcd() of nothing is 0, and d is a multiple of nothing else.
            step = gcd(*[other for other, _ in others]) or bound + 1
            if step > 1:
                terms = [*others, (stride * step, bound // step)] if step <= bound else others
                changed = True
                break
    return terms


def _independent_prefix(terms: list[_Term]) -> int:
    """Return how many of the smallest terms can be judged apart from the rest, 0 when none can.

    The rest sums to a multiple of its greatest common divisor; where the prefix cannot reach that divisor
    both sums must be zero by themselves.
    """
    reach = 0
    for count, (stride, bound) in enumerate(terms[:-1], start=1):
        reach += stride * bound
        if gcd(*[other for other, _ in terms[count:]]) > reach:
            return count
    return 0


def _pair_collides(a: _Term, b: _Term) -> bool:
    """Decide the equation of two terms alone: its smallest solution is ``(b / g, -a / g)``."""
    divisor = gcd(a[0], b[0])
    return b[0] // divisor <= a[1] and a[0] // divisor <= b[1]
