"""Every result of the layout algebra satisfies its equation, and a refusal means that no Layout does."""

from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strideweave import layout as algebra
from strideweave.layout import (
    Layout,
    broadcast_to,
    coalesce,
    complement,
    compose,
    divide,
    permute,
    row_major,
)

leaves = st.tuples(st.integers(0, 4) | st.sampled_from([1, 2, 2, 3]), st.integers(-12, 12))
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=4)


def part(tree, which):
    return tree[which] if isinstance(tree, tuple) else tuple(part(item, which) for item in tree)


layouts = st.lists(trees, max_size=3).map(lambda tree: Layout(part(tree, 0), part(tree, 1)))
layouts = layouts.filter(lambda layout: layout.size <= 128)


def flat_pairs(shape, stride):
    if isinstance(shape, int):
        return [(shape, stride)]
    return [pair for a, b in zip(shape, stride, strict=True) for pair in flat_pairs(a, b)]


def values_of(pairs):
    values = [0]
    for extent, stride in pairs:
        values = [value + entry * stride for entry in range(extent) for value in values]
    return values


def every_value(layout):
    return values_of(flat_pairs(layout.shape, layout.stride))


def as_array(layout):
    return np.array(every_value(layout), np.int64).reshape(layout.extents, order="F")


def answer(function, *arguments):
    try:
        return function(*arguments)
    except ValueError:
        return None


def extents_up_to(source, limit):
    """Some extents, ones among them, whose product is at most ``limit``."""
    extents = []
    while (
        len(extents) < 6
        and source.random() < 0.85
        and (fitting := [e for e in (1, 2, 2, 3, 4, 6) if e <= limit])
    ):
        extents.append(source.choice(fitting))
        limit //= extents[-1]
    return extents


def nested_layout(source, pairs):
    """A Layout with the given leaves, grouped at random."""

    def group(items):
        grouped = []
        while items:
            count = source.randint(1, 3)
            grouped.append(group(items[:count]) if count > 1 and source.random() < 0.4 else items[0])
            items = items[count:] if isinstance(grouped[-1], list) else items[1:]
        return grouped

    tree = group(pairs)
    return Layout(part(tree, 0), part(tree, 1))


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


# --- coalesce --------------------------------------------------------------------------------------------


@given(layouts)
def test_coalescing_keeps_every_value_in_the_fewest_modes(layout):
    result = coalesce(layout)
    assert every_value(result) == every_value(layout)
    assert all(isinstance(mode, int) for mode in result.shape)
    assert coalesce(result) == result
    if result.rank > 1:
        pairs = list(zip(result.shape, result.stride, strict=True))
        assert all(extent > 1 for extent, _ in pairs)
        assert all(b[1] != a[0] * a[1] for a, b in pairwise(pairs))


@given(layouts, layouts)
def test_equal_functions_coalesce_to_equal_layouts(a, b):
    assert (every_value(a) == every_value(b)) == (coalesce(a) == coalesce(b))


# --- compose ---------------------------------------------------------------------------------------------


def composed_by_enumeration(outer, inner):
    """The digits of a Layout with the composition's values, leaf by leaf of ``inner``; None without one.

    The values along one leaf determine its digits: each extends as long as the values grow evenly.
    """
    table = every_value(outer)
    pairs = flat_pairs(inner.shape, inner.stride)
    indices = values_of(pairs)
    if indices and not (min(indices) >= 0 and max(indices) < len(table)):
        return None
    digits = []
    for extent, stride in pairs if indices else []:
        along = [table[entry * stride] for entry in range(extent)]
        unit = 1
        while unit < extent:
            slope = along[unit]
            run = next(
                (n for n in range(1, extent // unit) if along[n * unit] != n * slope),
                extent // unit,
            )
            if extent // unit % run:
                return None
            digits.append((run, slope))
            unit *= run
    return digits if values_of(digits) == [table[index] for index in indices] or not indices else None


def check_composition(outer, inner, *, complete):
    result, expected = answer(compose, outer, inner), composed_by_enumeration(outer, inner)
    if result is None:
        assert expected is None or not complete
        return False
    table = every_value(outer)
    assert expected is not None
    assert every_value(result) == [table[index] for index in every_value(inner)]
    assert result.extents == inner.extents
    for index in range(inner.size):  # inner's coordinates are coordinates of the result
        assert result(inner.shape.decode(index)) == table[inner(index)]
    return True


@given(layouts, layouts)
def test_composing_applies_one_after_the_other(outer, inner):
    check_composition(outer, inner, complete=False)


@pytest.mark.parametrize("seed", range(4))
def test_composing_answers_whenever_a_layout_exists(seed):
    """With unrelated strides in the outer Layout no carry cancels another: every refusal must be right."""
    source = random.Random(seed)
    found = {True: 0, False: 0}
    for _ in range(800):
        outer = nested_layout(
            source,
            [(e, source.choice([-1, 1]) * source.randint(10**6, 10**7)) for e in extents_up_to(source, 96)],
        )
        steps = [0, 1, *divisors(outer.size), *range(outer.size)]
        inner = nested_layout(source, [(e, source.choice(steps)) for e in extents_up_to(source, 12)])
        found[check_composition(outer, inner, complete=True)] += 1
    assert min(found.values()) > 100


def test_a_composition_whose_carries_cancel_is_refused_though_a_layout_exists():
    # Every carry into the second mode goes on into the third, and 5 - 2 * 1 + 7 - 2 * 5 == 0.
    outer, inner = Layout((2, 2, 2), (1, 5, 7)), Layout((2, 2), (1, 3))
    assert composed_by_enumeration(outer, inner) == [(2, 1), (2, 6)]
    with pytest.raises(ValueError, match="add up to 2 in a mode of extent 2"):
        compose(outer, inner)


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (Layout((6, 2), (8, 2)), Layout((4, 3), (3, 1)), Layout(((2, 2), 3), ((24, 2), 8))),
        (Layout(20, 2), Layout((5, 4), (4, 1)), Layout((5, 4), (8, 2))),
        (Layout((10, 2), (16, 4)), Layout((5, 4), (1, 5)), Layout((5, (2, 2)), (16, (80, 4)))),
        (Layout((4, 4), (1, 10)), Layout(3, 5), Layout(3, 11)),
        (Layout((4, 3), (-1, 20)), Layout((2, 0), (99, -5)), Layout((2, 0), (0, 0))),
        (Layout((), ()), Layout((1, 3), (7, 0)), Layout((1, 3), (0, 0))),
        (Layout(12, 5), 4, Layout(4, 5)),
        (Layout((12, (4, 8)), (59, (13, 1))), (Layout(3, 4), 8), Layout((3, (4, 2)), (236, (13, 1)))),
        (row_major(8, 12), (4,), Layout((4, 12), (12, 1))),
    ],
)
def test_known_compositions(outer, inner, expected):
    """The first three are examples of CUTLASS's documentation."""
    assert compose(outer, inner) == outer.compose(inner) == expected


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        (Layout(4, 1), Layout(5, 1), r"values from 0 to 4, the former has the linear indices \[0, 4\)"),
        (Layout(4, 1), Layout(2, -1), "values from -1 to 0"),
        (Layout((4, 0), (1, 1)), Layout(1, 0), "empty"),
        (Layout((4, 3), (1, 7)), Layout(3, 3), "its mode 3:3 crosses a mode boundary every 2 steps"),
        (Layout((4, 3), (1, 7)), Layout((2, 2), (3, 1)), "add up to 4 in a mode of extent 4"),
        (row_major(2, 3), (1, 1, 1), "3 tilers were given for the 2 modes"),
    ],
)
def test_compositions_without_answer(outer, inner, message):
    with pytest.raises(ValueError, match=message):
        compose(outer, inner)


@pytest.mark.parametrize("wrong", [2.0, None, "2", True, (2, None)])
@pytest.mark.parametrize("function", [compose, divide])
def test_tilers_that_are_none(function, wrong):
    with pytest.raises(TypeError, match="tiler"):
        function(row_major(4, 6), wrong)


# --- complement ------------------------------------------------------------------------------------------


def filled_by_enumeration(layout, size):
    """The values that complete those of ``layout`` to ``[0, size)``, each sum once; None without any."""
    pairs = flat_pairs(layout.shape, layout.stride)
    values = values_of([(extent, stride) for extent, stride in pairs if stride or not extent])
    if not values or min(values) < 0 or len(set(values)) < len(values):
        return None
    free, starts = set(range(size)), []
    for start in range(size):
        if start not in free:
            continue
        block = {start + value for value in values}
        if not block <= free:
            return None
        free -= block
        starts.append(start)
    return starts


@settings(max_examples=300)
@given(layouts, st.integers(-1, 60))
def test_complements_fill_an_interval_and_exist_whenever_one_can(layout, size):
    result = answer(complement, layout, size)
    expected = filled_by_enumeration(layout, size) if size > 0 else None
    assert (result and every_value(result)) == expected
    if result:
        assert result == coalesce(result)
        assert result.is_injective
        assert list(result.stride) == sorted(result.stride)


@pytest.mark.parametrize("seed", range(2))
def test_complements_of_shuffled_radix_digits(seed):
    source = random.Random(seed)
    for _ in range(200):
        pairs, weight = [], 1
        for extent in extents_up_to(source, 24):
            weight *= source.choice([1, 1, 2, 3])
            pairs.append((extent, weight))
            weight *= extent
        layout = nested_layout(source, source.sample(pairs, len(pairs)))
        for size in (weight, weight * 2, weight * 3):
            assert every_value(complement(layout, size)) == filled_by_enumeration(layout, size)
        gaps = complement(layout)
        assert gaps == complement(layout, layout.size * gaps.size)
        assert layout.max_index + gaps.max_index == layout.size * gaps.size - 1


@pytest.mark.parametrize(
    ("layout", "size", "expected"),
    [
        (Layout(4, 1), 24, Layout(6, 4)),
        (Layout(6, 4), 24, Layout(4, 1)),
        (Layout((4, 6), (1, 4)), 24, Layout(1, 0)),
        (Layout(4, 2), 24, Layout((2, 3), (1, 8))),
        (Layout((2, 4), (1, 6)), 24, Layout(3, 2)),
        (Layout((2, 2), (1, 6)), 24, Layout((3, 2), (2, 12))),
        (Layout(4, 2), None, Layout(2, 1)),
        (Layout((2, 3), (1, 0)), 6, Layout(3, 2)),
        (Layout((), ()), 5, Layout(5, 1)),
    ],
)
def test_known_complements(layout, size, expected):
    """The first six are examples of CUTLASS's documentation."""
    assert complement(layout, size) == layout.complement(size) == expected


@pytest.mark.parametrize(
    ("layout", "size", "message"),
    [
        (Layout(4, 1), 22, "no complement in 22 slots: it repeats over 4 slots"),
        (Layout(4, 1), 0, "no complement in 0 slots"),
        (Layout(4, -1), 8, "stride -1 is negative"),
        (Layout((2, 2), (1, 1)), 8, "stride 1 is not a multiple of the 2 slots"),
        (Layout((2, 2), (2, 3)), 12, "stride 3 is not a multiple of the 4 slots"),
        (Layout((2, 0), (1, 2)), 8, "the empty"),
    ],
)
def test_complements_that_do_not_exist(layout, size, message):
    with pytest.raises(ValueError, match=message):
        complement(layout, size)


def test_the_size_of_a_complement_is_an_integer():
    with pytest.raises(TypeError, match="size"):
        complement(Layout(4, 1), 8.0)


# --- divide ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_dividing_separates_tile_and_rest(seed):
    source = random.Random(seed)
    divided = 0
    for _ in range(400):
        extents = extents_up_to(source, 96)
        layout = nested_layout(source, [(e, source.randint(-(10**6), 10**6)) for e in extents])
        tiler = nested_layout(
            source, [(e, source.choice(divisors(layout.size))) for e in extents_up_to(source, 12)]
        )
        result = answer(divide, layout, tiler)
        starts = filled_by_enumeration(tiler, layout.size)
        repeats = len(set(every_value(tiler))) < tiler.size
        if starts is None:
            assert result is None
            continue
        indices = [index + start for start in starts for index in every_value(tiler)]
        assert repeats or sorted(indices) == list(range(layout.size))
        rest = complement(tiler, layout.size)
        if result is None:
            inner = Layout((tiler.shape, rest.shape), (tiler.stride, rest.stride))
            assert composed_by_enumeration(layout, inner) is None
            continue
        assert result.extents == (tiler.size, rest.size)
        table = every_value(layout)
        assert every_value(result) == [table[index] for index in indices]
        divided += 1
    assert divided > 50


def test_dividing_by_mode_is_what_numpy_cuts():
    array = np.arange(8 * 12).reshape(8, 12)
    result = row_major(8, 12).divide((4, 3))
    assert result == Layout(((4, 2), (3, 4)), ((12, 48), (1, 3)))
    for (row, band), (column, block) in product(product(range(4), range(2)), product(range(3), range(4))):
        assert result((row, band), (column, block)) == array[band * 4 + row, block * 3 + column]


@pytest.mark.parametrize(
    ("layout", "tiler", "expected"),
    [
        (Layout((4, 2, 3), (2, 1, 8)), Layout(4, 2), Layout(((2, 2), (2, 3)), ((4, 1), (2, 8)))),
        (
            Layout((9, (4, 8)), (59, (13, 1))),
            (Layout(3, 3), Layout((2, 4), (1, 8))),
            Layout(((3, 3), ((2, 4), (2, 2))), ((177, 59), ((13, 2), (26, 1)))),
        ),
        (Layout(12, 1), 4, Layout((4, 3), (1, 4))),
        (row_major(6, 4), (2,), Layout(((2, 3), 4), ((4, 8), 1))),
    ],
)
def test_known_divisions(layout, tiler, expected):
    """The first two are examples of CUTLASS's documentation."""
    assert divide(layout, tiler) == layout.divide(tiler) == expected


@pytest.mark.parametrize(
    ("layout", "tiler"),
    [(Layout(10, 1), 4), (row_major(8, 10), (4, 4)), (Layout((2, 0), (1, 2)), 1), (Layout(4, 1), 0)],
)
def test_tiles_that_do_not_divide(layout, tiler):
    with pytest.raises(ValueError, match="complement"):
        divide(layout, tiler)


# --- permute, broadcast_to -------------------------------------------------------------------------------


@given(layouts, st.data())
def test_permuting_is_numpys_transpose(layout, data):
    axes = data.draw(st.permutations(range(layout.rank)))
    signed = [axis - layout.rank * data.draw(st.booleans()) for axis in axes]
    result = permute(layout, *signed)
    assert result == layout.permute(tuple(signed))
    assert np.array_equal(as_array(result), as_array(layout).transpose(axes))


@pytest.mark.parametrize(
    ("axes", "error"),
    [
        ((0,), ValueError),
        ((0, 0), ValueError),
        ((0, 2), ValueError),
        ((0, -3), ValueError),
        ((0, 1.0), TypeError),
    ],
)
def test_axes_that_are_no_permutation(axes, error):
    with pytest.raises(error):
        permute(row_major(2, 3), *axes)


@given(layouts, st.lists(st.integers(0, 4), max_size=4), st.data())
def test_broadcasting_is_numpys(layout, asked, data):
    if data.draw(st.booleans()):  # mostly such as fit
        asked = [*asked[:2], *[e if e != 1 else data.draw(st.integers(0, 3)) for e in layout.extents]]
    array = as_array(layout)
    try:
        expected = np.broadcast_to(array, asked)
    except ValueError:
        with pytest.raises(ValueError, match="cannot broadcast"):
            broadcast_to(layout, asked)
        return
    assume(expected.size <= 2000)
    result = broadcast_to(layout, *asked)
    if len(asked) != 1:
        assert result == layout.broadcast_to(tuple(asked))
    assert np.array_equal(as_array(result), expected)


def test_broadcasting_keeps_the_nesting_of_modes_that_fit():
    layout = Layout(((2, 3), 1), ((1, 8), 5))
    assert broadcast_to(layout, 4, 6, (2, 2)) == Layout((4, (2, 3), (2, 2)), (0, (1, 8), (0, 0)))


# --- all of them -----------------------------------------------------------------------------------------


def test_layouts_of_a_billion_slots_are_as_quick_as_small_ones():
    # Any function that visited coordinates would need minutes here.
    layout = row_major(1000, 1000, 1000)
    assert compose(layout, layout).size == 10**9
    assert coalesce(permute(layout, 2, 1, 0)) == Layout(10**9, 1)
    assert complement(Layout(1000, 10**6), 10**9) == Layout(10**6, 1)
    assert divide(layout, (1, 10, 100)).extents == layout.extents
    assert divide(layout, (1, 10, 100)).is_injective
    assert broadcast_to(layout, 10**9, 1000, 1000, 1000).size == 10**18


def test_the_algebra_is_public():
    names = {"broadcast_to", "coalesce", "complement", "compose", "divide", "permute"}
    assert names <= set(algebra.__all__)
    assert all(hasattr(Layout, name) for name in names)
