"""Shape and Stride are tuples of integers that may nest, and a Shape numbers its coordinates."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strideweave.layout import Shape, Stride

modes = st.recursive(st.integers(0, 4), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
shapes = st.lists(modes, max_size=3).map(Shape)


@pytest.mark.parametrize("kind", [Shape, Stride])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ()),
        ((4,), (4,)),
        ((4, 3), (4, 3)),
        (((4, 3),), (4, 3)),
        (([4, 3],), (4, 3)),
        ((((4, 3),),), ((4, 3),)),
        (((2, 2), 3), ((2, 2), 3)),
        (([2, [2, 5]], 3), ((2, (2, 5)), 3)),
        ((np.int64(4), np.uint8(3)), (4, 3)),
    ],
)
def test_arguments_and_one_tuple_make_the_same_tuple(kind, arguments, expected):
    made = kind(*arguments)
    assert made == expected
    assert hash(made) == hash(expected)
    assert made.rank == len(expected)


@pytest.mark.parametrize("kind", [Shape, Stride])
def test_numpy_integers_become_plain_ones(kind):
    assert [type(entry) for entry in kind(np.int64(4), np.uint8(3))] == [int, int]


@pytest.mark.parametrize("kind", [Shape, Stride])
def test_nested_shapes_become_plain_tuples(kind):
    assert type(kind(kind(2, 2), 3)[0]) is tuple


@pytest.mark.parametrize("kind", [Shape, Stride])
@pytest.mark.parametrize("wrong", [2.0, "2", None, True, np.bool_(True), (2, 1.5), object()])
def test_entries_that_are_no_integers_are_refused(kind, wrong):
    with pytest.raises(TypeError, match="must be an integer"):
        kind(4, wrong)


def test_negative_extents_are_refused_and_negative_strides_are_not():
    with pytest.raises(ValueError, match=r"got -1 in \(4, \(2, -1\)\)"):
        Shape(4, (2, -1))
    assert Stride(4, (2, -1)) == (4, (2, -1))


@pytest.mark.parametrize("kind", [Shape, Stride])
@pytest.mark.parametrize("entries", [(), (4,), ((4, 3),), (((2, 1), 3), 5)])
def test_copies_and_pickles_keep_class_and_nesting(kind, entries):
    made = kind(entries)
    for twin in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(twin) is kind
        assert twin == entries


@pytest.mark.parametrize("kind", [Shape, Stride])
def test_repr_names_the_class_and_the_modes(kind):
    assert repr(kind((2, 2), 3)) == f"{kind.__name__}((2, 2), 3)"
    assert repr(kind()) == f"{kind.__name__}()"


def test_attributes_of_the_size_cannot_be_items():
    shape = Shape(4, 3)
    with pytest.raises(TypeError):
        shape[0] = 5


@pytest.mark.parametrize(
    ("shape", "size", "extents"),
    [
        ((), 1, ()),
        ((4, 3), 12, (4, 3)),
        (((2, (3, 4)), 5), 120, (24, 5)),
        ((4, 0), 0, (4, 0)),
        (((),), 1, (1,)),
    ],
)
def test_size_and_extents(shape, size, extents):
    assert Shape(shape).size == size
    assert Shape(shape).extents == extents


@given(shapes)
def test_decode_counts_with_the_first_mode_fastest_and_encode_undoes_it(shape):
    """Spec: "first-mode-fastest ... the same ordinal authority as Shape.encode and Shape.decode"."""
    coordinates = [()]
    for mode in shape:  # each slower mode repeats all faster coordinates
        inner = (
            range(mode) if isinstance(mode, int) else [Shape(mode).decode(i) for i in range(Shape(mode).size)]
        )
        coordinates = [(*faster, entry) for entry in inner for faster in coordinates]
    assert [shape.decode(i) for i in range(shape.size)] == coordinates
    assert [shape.encode(c) for c in coordinates] == list(range(shape.size))


def test_encode_takes_linear_indices_at_every_level():
    shape = Shape((2, 3), 4)
    assert shape.encode(((1, 2), 3)) == shape.encode((5, 3)) == shape.encode(23) == 23
    assert shape.encode([[1, 2], np.int64(3)]) == 23


@pytest.mark.parametrize(
    ("coordinate", "error"),
    [
        ((2, 0), IndexError),
        ((-1, 0), IndexError),
        ((0, 3), IndexError),
        (6, IndexError),
        (-1, IndexError),
        ((0,), ValueError),
        ((0, 0, 0), ValueError),
        ((0, (0, 0)), ValueError),
        ((0, 1.0), TypeError),
        ((0, True), TypeError),
        ("00", TypeError),
    ],
)
def test_encode_refuses_what_is_no_coordinate(coordinate, error):
    with pytest.raises(error):
        Shape(2, 3).encode(coordinate)


@pytest.mark.parametrize(
    ("index", "error"),
    [(-1, IndexError), (6, IndexError), (1.0, TypeError), (True, TypeError), ((0, 0), TypeError)],
)
def test_decode_refuses_what_is_no_linear_index(index, error):
    with pytest.raises(error):
        Shape(2, 3).decode(index)


@pytest.mark.parametrize("shape", [(0,), (3, 0), ((2, 0), 3)])
def test_an_empty_shape_has_no_coordinate(shape):
    with pytest.raises(IndexError):
        Shape(shape).decode(0)
    with pytest.raises(IndexError):
        Shape(shape).encode(0)
