"""Views against NumPy, on layouts that NumPy cannot express too."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strideweave as sw
from strideweave import CPU, Layout, Tensor, row_major


@st.composite
def tensors_and_shapes(draw):
    """A permuted, strided or nested tensor, and another shape of as many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), max_size=4))
    shape = tuple(factors)
    total = int(np.prod(shape, dtype=int))
    base = Tensor(CPU.from_numpy(np.arange(total * 2 + 3)), 1, row_major(shape))
    strides = draw(st.permutations(range(len(shape))))
    view = base.permute(strides)
    if draw(st.booleans()) and view.ndim:
        doubled = Layout(view.layout.shape, tuple(2 * stride for stride in view.layout.stride))
        view = Tensor(base.carrier, 1, doubled)
    cuts, rest = [], total
    while rest > 1 and draw(st.booleans()):
        cut = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        cuts.append(cut)
        rest //= cut
    return view, tuple(draw(st.permutations([*cuts, rest])))


@given(tensors_and_shapes())
def test_reshape_gives_c_order_for_any_layout(case):
    tensor, shape = case
    result = tensor.reshape(shape)
    assert result.shape == shape
    assert result.tolist() == tensor.numpy().reshape(shape).tolist()
    again = result.reshape(tensor.shape)
    assert again.tolist() == tensor.tolist()


def test_reshape_merges_axes_across_any_strides_without_a_copy(make):
    tensor = make(np.arange(24).reshape(2, 3, 4)).permute(2, 0, 1)
    merged = tensor.reshape(24)
    assert merged.carrier is tensor.carrier
    assert merged.layout.shape == ((6, 4),)
    assert merged.tolist() == tensor.numpy().reshape(24).tolist()


def test_reshape_copies_where_an_extent_cuts_a_stride_in_two(make):
    tensor = make(np.arange(6).reshape(2, 3)).T
    split = tensor.reshape(2, 3)
    assert split.carrier is not tensor.carrier
    assert type(split.carrier) is type(tensor.carrier)
    assert split.tolist() == tensor.numpy().reshape(2, 3).tolist()
    split[0] = 50
    assert tensor[0] == 0


def test_reshape_of_a_slice_stays_a_view(make):
    base = make(np.arange(24))
    window = Tensor(base.carrier, 4, row_major(3, 4))
    flat = window.reshape(-1)
    assert (flat.carrier, flat.offset, flat.layout) == (base.carrier, 4, row_major(12))


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ((5,), ValueError),
        ((-1, 5), ValueError),
        ((-1, -1), ValueError),
        ((-2, 3), ValueError),
        ((-2, -3), ValueError),
        ((), ValueError),
        ((-1, 0), ValueError),
        ((2.0, 3), TypeError),
        ((True, 6), TypeError),
        (6, TypeError),
        (None, TypeError),
    ],
)
def test_a_shape_has_to_hold_the_elements(make, shape, error):
    with pytest.raises(error, match="reshape"):
        sw.reshape(make(np.arange(6)), shape)


@pytest.mark.parametrize(
    ("axes", "error"),
    [((0,), ValueError), ((0, 0), ValueError), ((0, 2), ValueError), ((0, 1.0), TypeError), (0, TypeError)],
)
def test_axes_name_each_axis_once(make, axes, error):
    with pytest.raises(error, match="permute"):
        sw.permute(make(np.zeros((2, 3))), axes)


@pytest.mark.parametrize(
    ("shape", "target"),
    [((3,), (2, 3)), ((1, 3), (4, 3)), ((), (2, 2)), ((2, 1), (5, 2, 7)), ((1,), (0,)), ((0, 3), (2, 0, 3))],
)
def test_broadcast_to_is_numpys_and_copies_nothing(make, shape, target):
    x = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    tensor = make(x)
    result = sw.broadcast_to(tensor, target)
    assert result.carrier is tensor.carrier
    assert result.tolist() == np.broadcast_to(x, target).tolist()


@pytest.mark.parametrize(
    ("shape", "target"), [((3,), (4,)), ((2, 3), (3,)), ((3,), (-1,)), ((1, 3), (-1, 3))]
)
def test_broadcast_to_refuses_other_shapes(make, shape, target):
    with pytest.raises(ValueError, match="broadcast_to"):
        sw.broadcast_to(make(np.zeros(shape)), target)


@pytest.mark.parametrize(
    ("axis", "expected"), [(None, (2, 3)), (0, (2, 1, 3)), (-2, (1, 2, 3)), ((0, 2), (2, 3))]
)
def test_squeeze_drops_axes_of_extent_one(make, axis, expected):
    assert sw.squeeze(make(np.zeros((1, 2, 1, 3))), axis).shape == expected


@pytest.mark.parametrize(
    ("axis", "error"), [(1, ValueError), (4, ValueError), ((0, 0), ValueError), (0.0, TypeError)]
)
def test_squeeze_refuses_other_axes(make, axis, error):
    with pytest.raises(error, match="squeeze"):
        sw.squeeze(make(np.zeros((1, 2, 1, 3))), axis)


@pytest.mark.parametrize(
    ("axis", "expected"), [(0, (1, 2, 3)), (2, (2, 3, 1)), (-1, (2, 3, 1)), (-3, (1, 2, 3))]
)
def test_unsqueeze_inserts_an_axis(make, axis, expected):
    x = np.arange(6).reshape(2, 3)
    result = sw.unsqueeze(make(x), axis)
    assert result.shape == expected
    assert result.tolist() == x.reshape(expected).tolist()


@pytest.mark.parametrize(("axis", "error"), [(3, ValueError), (-4, ValueError), ("0", TypeError)])
def test_unsqueeze_refuses_other_axes(make, axis, error):
    with pytest.raises(error, match="unsqueeze"):
        sw.unsqueeze(make(np.zeros((2, 3))), axis)


def test_a_view_sees_later_writes_and_writes_through(make):
    tensor = make(np.arange(6).reshape(2, 3))
    view = tensor.T
    tensor[0, 1] = 10
    view[2, 1] = 50
    assert (view[1, 0], tensor[1, 2], tensor.version) == (10, 50, 2)


def test_views_of_nested_modes_keep_them():
    tensor = Tensor(CPU(0).new_like(range(16)), 0, Layout(((2, 2), 4), ((1, 8), 2)))
    for view, expected in (
        (tensor.T, tensor.numpy().T),
        (tensor.unsqueeze(0), tensor.numpy()[None]),
        (tensor.unsqueeze(0).broadcast_to(3, 4, 4), np.broadcast_to(tensor.numpy(), (3, 4, 4))),
        (tensor.reshape(2, 2, 4), tensor.numpy().reshape(2, 2, 4)),
        (tensor.reshape(16), tensor.numpy().reshape(16)),
    ):
        assert view.carrier is tensor.carrier
        assert view.tolist() == expected.tolist()
