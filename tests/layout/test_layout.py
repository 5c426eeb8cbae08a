"""Layout answers from its modes what visiting every coordinate would answer."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strideweave.layout import Layout, Shape, Stride, column_major, row_major

extents = st.integers(0, 4) | st.sampled_from([1, 2, 2, 3])
leaves = st.tuples(extents, st.integers(-12, 12))
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=3)


def part(tree, which):
    return tree[which] if isinstance(tree, tuple) else tuple(part(item, which) for item in tree)


layouts = st.lists(trees, max_size=3).map(lambda tree: Layout(part(tree, 0), part(tree, 1)))
layouts = layouts.filter(lambda layout: layout.size <= 256)


def pairs_of(shape, stride):
    if isinstance(shape, int):
        return [(shape, stride)]
    return [pair for a, b in zip(shape, stride, strict=True) for pair in pairs_of(a, b)]


def values_of(pairs):
    """The values at the linear indices 0, 1, …, from the definition of a Layout."""
    entries = product(*[range(extent) for extent, _ in reversed(pairs)])
    strides = [stride for _, stride in reversed(pairs)]
    return [sum(e * s for e, s in zip(entry, strides, strict=True)) for entry in entries]


def every_value(layout):
    return values_of(pairs_of(layout.shape, layout.stride))


@given(layouts)
def test_calls_follow_the_definition(layout):
    values = every_value(layout)
    assert layout.size == len(values)
    assert [layout(i) for i in range(layout.size)] == values
    coordinates = [layout.shape.decode(i) for i in range(layout.size)]
    assert [layout(c) for c in coordinates] == values
    if layout.rank != 1:  # one argument is a whole coordinate
        assert [layout(*c) for c in coordinates] == values


@given(layouts)
def test_bounds_and_cosize_are_those_of_the_values(layout):
    values = every_value(layout) or [0]
    assert (layout.min_index, layout.max_index) == (min(values), max(values))
    span = max(values) - min(values) + 1 if layout.size else 0
    assert layout.cosize == span


@given(layouts)
def test_injective_means_no_value_twice(layout):
    values = every_value(layout)
    assert layout.is_injective == (len(set(values)) == len(values))


@given(layouts)
def test_digits_compute_each_mode_in_the_shortest_form(layout):
    assert layout.digits() == tuple(layout.mode_digits(i) for i in range(layout.rank))
    for shape, stride, digits in zip(layout.shape, layout.stride, layout.digits(), strict=True):
        assert values_of(list(digits)) == values_of(pairs_of(shape, stride))
        if digits != ((0, 0),):
            assert all(extent > 1 for extent, _ in digits)
            assert all(b[1] != a[0] * a[1] for a, b in pairwise(digits))


@given(trees, trees)
def test_modes_with_the_same_function_have_the_same_digits(a, b):
    a, b = Layout((part(a, 0),), (part(a, 1),)), Layout((part(b, 0),), (part(b, 1),))
    assert (every_value(a) == every_value(b)) == (a.mode_digits(0) == b.mode_digits(0))


@given(layouts)
def test_extents_are_the_sizes_of_the_modes(layout):
    assert layout.extents == tuple(len(values_of([(e, 0) for e, _ in pairs_of(s, s)])) for s in layout.shape)
    assert layout.rank == len(layout.shape)


@given(layouts)
def test_equality_is_structural_and_survives_copies(layout):
    twin = Layout(tuple(layout.shape), tuple(layout.stride))
    for other in (twin, copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert other == layout
        assert hash(other) == hash(layout)
    assert eval(repr(layout)) == layout


def test_layouts_of_one_function_but_two_structures_differ():
    assert Layout((2, 3), (1, 2)) != Layout(6, 1)
    assert Layout((2, 3), (1, 2)) != Layout(((2, 3),), ((1, 2),))
    assert Layout(6, 1) != (6, 1)


def test_shape_and_stride_are_what_was_given():
    layout = Layout(((2, 3), 4), ((1, 2), 6))
    assert isinstance(layout.shape, Shape)
    assert isinstance(layout.stride, Stride)
    assert (layout.shape, layout.stride) == (((2, 3), 4), ((1, 2), 6))
    assert layout == Layout(Shape((2, 3), 4), Stride((1, 2), 6)) == Layout([[2, 3], 4], [[1, 2], 6])


def test_a_layout_cannot_be_changed():
    layout = Layout(4, 1)
    with pytest.raises(AttributeError, match="immutable"):
        layout.shape = Shape(5)
    with pytest.raises(AttributeError, match="immutable"):
        layout.anything = 1
    with pytest.raises(AttributeError, match="immutable"):
        del layout.stride
    assert layout == Layout(4, 1)


@pytest.mark.parametrize(
    ("shape", "stride", "error"),
    [
        ((4, 3), (1,), ValueError),
        ((4, 3), ((1, 4),), ValueError),
        (((2, 2), 3), (1, 4), ValueError),
        ((4, 3), ((1,), 4), ValueError),
        ((4, -3), (1, 4), ValueError),
        ((4, 3.0), (1, 4), TypeError),
        ((4, 3), (1, "4"), TypeError),
        ((4, True), (1, 4), TypeError),
        (None, 1, TypeError),
    ],
)
def test_pairs_that_are_no_layout_are_refused(shape, stride, error):
    with pytest.raises(error):
        Layout(shape, stride)


@pytest.mark.parametrize(
    ("coordinate", "error"),
    [
        ((12,), IndexError),
        ((-1,), IndexError),
        ((4, 0), IndexError),
        ((0, 0, 0), ValueError),
        ((), ValueError),
        ((1.0,), TypeError),
        ((0, True), TypeError),
    ],
)
def test_calls_outside_the_domain_are_refused(coordinate, error):
    with pytest.raises(error):
        Layout((4, 3), (3, 1))(*coordinate)


def test_a_scalar_has_one_coordinate():
    layout = Layout((), ())
    assert (layout.size, layout.cosize, layout.rank, layout.is_injective) == (1, 1, 0, True)
    assert layout() == layout(()) == layout(0) == 0


@pytest.mark.parametrize("index", [2, -3])
def test_digits_of_a_mode_that_is_not_there(index):
    with pytest.raises(IndexError):
        row_major(2, 3).mode_digits(index)


@given(st.lists(st.integers(0, 5), max_size=4))
def test_row_and_column_major_are_the_orders_of_numpy(shape):
    array = np.arange(int(np.prod(shape))).reshape(shape)
    row, column = row_major(*shape), column_major(*shape)
    assert row == row_major(tuple(shape))
    assert column == column_major(tuple(shape))
    for coordinate in np.ndindex(*shape):
        assert row(coordinate) == array[coordinate]
        assert column(coordinate) == array.ravel(order="C").reshape(shape, order="F")[coordinate]


@pytest.mark.parametrize(
    ("make", "stride"),
    [(column_major, ((1, 2), 6)), (row_major, ((12, 4), 1))],
)
def test_nested_shapes_run_over_their_leaves(make, stride):
    """CuTe's LayoutLeft and LayoutRight."""
    assert make((2, 3), 4) == make(((2, 3), 4)) == Layout(((2, 3), 4), stride)


@given(layouts)
def test_dense_layouts_are_bijections(layout):
    assume(layout.size)
    for make in (row_major, column_major):
        dense = make(layout.shape)
        assert dense.is_injective
        assert dense.cosize == dense.size == layout.size


def test_a_layout_of_a_billion_slots_answers_from_its_modes():
    # Any query that visited coordinates would need minutes here.
    layout = Layout(((1000, 1000), 1000), ((-1, 10**6), 1000))
    assert layout.size == layout.cosize == 10**9
    assert layout.is_injective
    assert (layout.min_index, layout.max_index) == (-999, 10**9 - 1000)
    assert layout.mode_digits(0) == ((1000, -1), (1000, 10**6))
    assert layout(10**9 - 1) == -999 + 999 * 10**6 + 999 * 1000
