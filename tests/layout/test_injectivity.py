"""Injectivity is decided exactly, by arithmetic on the digits."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strideweave.layout import Layout
from strideweave.layout.injectivity import is_injective
from strideweave.layout.lattice import has_kernel_vector

digits = st.lists(
    st.tuples(st.integers(0, 6) | st.sampled_from([2, 3]), st.integers(-400, 400) | st.integers(-9, 9)),
    max_size=6,
)


def repeats_no_value(pairs):
    values = [0]
    for extent, stride in pairs:
        values = [value + entry * stride for value in values for entry in range(extent)]
    return len(set(values)) == len(values)


@settings(max_examples=400)
@given(digits)
@example([(2, 0), (0, 5)])
def test_the_decision_agrees_with_visiting_every_value(pairs):
    assert is_injective(pairs) == repeats_no_value(pairs)


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(2, 5), st.integers(1, 300)), min_size=2, max_size=5))
def test_the_lattice_search_alone_agrees_with_visiting_every_difference(pairs):
    coefficients = [stride for _, stride in pairs]
    bounds = [extent - 1 for extent, _ in pairs]
    found = has_kernel_vector(coefficients, bounds)
    assert found == (not repeats_no_value(pairs))


@settings(max_examples=200)
@given(st.lists(st.integers(2, 4), min_size=3, max_size=6), st.integers(1, 6), st.data())
def test_strides_near_the_limit_of_what_fits(extents, slack, data):
    """Strides of about the size where collisions begin: most of the quick answers fail here."""
    size = prod(extents)
    high = max(2, slack * size // sum(extents))
    pairs = [(extent, data.draw(st.integers(max(1, high // 2), high))) for extent in extents]
    assert is_injective(pairs) == repeats_no_value(pairs)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 10**12), min_size=3, max_size=6), st.data())
def test_a_planted_collision_of_huge_digits_is_found(strides, data):
    """Nobody can visit these values; a difference vector that sums to zero is known by construction."""
    difference = [data.draw(st.integers(-(10**6), 10**6)) for _ in strides]
    total = sum(d * s for d, s in zip(difference, strides, strict=True))
    pairs = [(abs(d) + 1, s) for d, s in zip(difference, strides, strict=True)] + [(2, total)]
    assert not is_injective(pairs)


@settings(max_examples=100)
@given(st.lists(st.integers(2, 10**6), min_size=2, max_size=6), st.data())
def test_a_shuffled_chain_of_huge_digits_is_injective(extents, data):
    chain, weight = [], 1
    for extent in extents:
        sign = data.draw(st.sampled_from([1, -1]))
        chain.append((extent, sign * weight))
        weight *= extent * data.draw(st.integers(1, 3))
    assert is_injective(data.draw(st.permutations(chain)))


@pytest.mark.parametrize("bounds", list(product([1, 2, 3, 5], repeat=3)))
def test_three_coprime_strides(bounds):
    strides = (5, 7, 11)
    differences = product(*[range(-bound, bound + 1) for bound in bounds])
    collides = any(
        any(difference) and sum(d * s for d, s in zip(difference, strides, strict=True)) == 0
        for difference in differences
    )
    assert Layout([bound + 1 for bound in bounds], strides).is_injective == (not collides)


@pytest.mark.parametrize(
    ("shape", "stride", "injective"),
    [
        ((), (), True),
        (1, 0, True),
        (2, 0, False),
        ((2, 0), (0, 0), True),
        ((10**6, 10**6), (10**6 + 3, 10**6), True),
        ((10**6 + 1, 10**6 + 4), (10**6 + 3, 10**6), False),
        ((10**6 + 1, 10**6 + 3), (10**6 + 3, 10**6), True),
        ((10**6, 10**6, 10**6), (1, 10**6, 10**12), True),
        ((10**6, 10**6 + 1, 10**6), (1, 10**6, 10**12), False),
        ((10**5, 10**5, 10**5), (1000003, 1000033, 1000037), False),
        ((10, 10, 10), (1000003, 1000033, 1000037), True),
        # 6 * (10**9 + 7) + 1 * (10**9 + 21) == 7 * (10**9 + 9)
        ((7, 8, 2), (10**9 + 7, 10**9 + 9, 10**9 + 21), False),
        ((6, 8, 2), (10**9 + 7, 10**9 + 9, 10**9 + 21), True),
        ((7, 7, 2), (10**9 + 7, 10**9 + 9, 10**9 + 21), True),
    ],
)
def test_known_answers_beyond_enumeration(shape, stride, injective):
    assert Layout(shape, stride).is_injective is injective
